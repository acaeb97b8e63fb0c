"""The coordination service of JAX, and what each process tells the others there unasked.

Begin with :mod:`~adacheck_jax.adapter.coordination.service`.
"""
