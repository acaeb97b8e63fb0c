"""A manager whose training loop goes on while storage is away.

Begin with :mod:`~adacheck_jax.adapter.away.orbax_manager`, which is Orbax's with three parts: the
thread on which saves begin, their end, and what is kept in memory.
"""
