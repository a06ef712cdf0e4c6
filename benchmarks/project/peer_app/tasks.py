"""The task that is measured: it does nothing, with one small argument."""

from django_tasks import task


@task()
def noop(number: int) -> None:
    pass
