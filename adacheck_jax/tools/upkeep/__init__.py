"""Keeping a root sound: what cannot be restored goes, and what interrupted saves left.

Retention of sound steps is Orbax's. Begin with :mod:`~adacheck_jax.tools.upkeep.repair`.
"""
