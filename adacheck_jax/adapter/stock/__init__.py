"""What stock Orbax writes, reads, and is called with.

Plain checkpoints written for others, steps that it saved, and the arguments of code written for it.
Begin with :mod:`~adacheck_jax.adapter.stock.arguments`. No module knows a step of this library.
"""
