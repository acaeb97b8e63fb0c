"""Compiling: an exported update in parts, of which equal ones are compiled once.

Knows JAX and nothing else of this library but its errors. Begin with
:mod:`~adacheck_jax.update.compiling.parts`, the plan of the cut.
"""
