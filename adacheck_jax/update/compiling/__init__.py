"""Compiling: an exported update in components, of which equal ones are compiled once.

The plan of the cut, the programs that it describes, and what is kept for the next restore. Knows
JAX and nothing else of this library but its errors. Begin with
:mod:`~adacheck_jax.update.compiling.components`.
"""
