"""The corridor: every move of a job's status after its submission is made here.

``claims`` and ``leases`` and ``outcomes`` are the worker's, ``control`` is the operator's,
``recovery`` serves both, ``maintenance`` holds the bounded passes. ``states.MOVES`` lists
what is legal.
"""
