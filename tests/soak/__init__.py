"""Workers under siege: ``python -m tests.soak``, and the checker of what they leave behind."""
