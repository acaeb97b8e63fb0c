"""Memory that outlives several processes: the gate that each step passes, and recovery.

What a process holds, and what all agree on, is decided in :mod:`~adacheck_jax.memory.holdings` and
:mod:`~adacheck_jax.memory.agreement`; here is how processes hear of each other, and how boxes go
from one to the other. Begin with :mod:`~adacheck_jax.adapter.in_memory.gate`.
"""
