"""Checkpoints in the form of stock Orbax: bases, and plain ones that others write and read.

Begin with :mod:`~adacheck_jax.adapter.stock.base_checkpoint`.
"""
