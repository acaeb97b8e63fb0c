"""Compaction: a saved delta becomes a base, in its own directory, at one moment.

Takes the values of the step from its caller, and knows neither how they were made nor JAX. Begin
with :mod:`~adacheck_jax.store.compaction.in_place`, which has the order of all that changes.
"""
