"""Concurrency limits from outside: what attempts and running rows say (CONTRACT 3.12)."""
