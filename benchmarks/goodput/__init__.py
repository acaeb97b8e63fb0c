"""Goodput: what checkpointing systems make of the time of a cluster that fails.

``figures.toml`` has every figure with its source, ``figures`` reads it, ``systems`` says what each
system does, and ``simulation`` replays failures against it. ``python -m benchmarks.goodput`` prints
the tables of ``docs/reference/goodput.md``.
"""
