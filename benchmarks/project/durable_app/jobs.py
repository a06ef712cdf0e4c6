"""The job that is measured: it does nothing, with one small argument."""

from django_durable_jobs import JobContext, job


@job("bench.noop")
def noop(ctx: JobContext, payload: int) -> None:
    pass
