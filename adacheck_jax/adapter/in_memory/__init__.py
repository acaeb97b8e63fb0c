"""Recovery from the memory of all processes: how they agree, and how boxes go from one to another.

What a process holds, and what all agree on, is decided in :mod:`~adacheck_jax.memory.holdings` and
:mod:`~adacheck_jax.memory.agreement`. Begin with :mod:`~adacheck_jax.adapter.in_memory.recovery`.
"""
