"""A payment provider that knows idempotency keys, as they do: one key, one charge."""

charges: dict[str, int] = {}
calls: list[str] = []


def charge(cents: int, *, key: str) -> str:
    calls.append(key)
    charges.setdefault(key, cents)
    return f"receipt of {key}"
