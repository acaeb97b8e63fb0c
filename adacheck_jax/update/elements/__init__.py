"""Updates that leave elements in their places, computed on any elements of a state.

On samples of all leaves, to compare them with the state; and over host memory, to follow it. Begin
with :mod:`~adacheck_jax.update.elements.pieces`.
"""
