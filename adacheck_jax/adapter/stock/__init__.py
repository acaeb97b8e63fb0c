"""Plain checkpoints of stock Orbax: written for others, and read to go on from.

Begin with :mod:`~adacheck_jax.adapter.stock.plain`. Neither module knows a step of this library.
"""
