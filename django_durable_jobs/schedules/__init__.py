"""Cron that fires exactly the right minutes (CONTRACT 5).

``expression`` and ``stepping`` are pure; ``declaration`` holds what a project declares;
``cursors`` and ``passes`` advance the rows; ``operations`` are an operator's moves.
"""
