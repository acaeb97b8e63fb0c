"""Plans of saves: all is decided before anything is written.

The planner gathers the facts: looks at the disk, waits for counters, replays for a check. The plan
follows from them by pure functions. Begin with :mod:`~adacheck_jax.save.planning.planner`.
"""
