"""The jobs that are measured: they do nothing, with one small argument."""

from django_durable_jobs import JobContext, job


@job("bench.noop")
def noop(ctx: JobContext, payload: int) -> None:
    pass


@job("bench.limited", concurrency=1, concurrency_key=lambda payload: f"key-{payload}")
def limited(ctx: JobContext, payload: int) -> None:
    """Each job of another key, so that a claim finds a free place for each."""
