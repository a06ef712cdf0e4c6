"""The worker: small supervised parts around an execution pipeline that holds no SQL."""
