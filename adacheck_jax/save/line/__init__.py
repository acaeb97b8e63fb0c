"""The line of a run: the steps that the next save may follow, on the disk and in memory.

The planner gathers the facts: it looks at the disk, waits for counters, and replays for a check.
Begin with :mod:`~adacheck_jax.save.line.planner`.
"""
