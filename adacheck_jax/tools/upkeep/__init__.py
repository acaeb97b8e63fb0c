"""Keeping a root sound and small: what cannot be restored goes, what is too old goes, pins stay.

Begin with :mod:`~adacheck_jax.tools.upkeep.pruning`.
"""
