"""A manager whose training loop goes on while storage is away.

Begin with :mod:`~adacheck_jax.adapter.away.keeping`.
"""
