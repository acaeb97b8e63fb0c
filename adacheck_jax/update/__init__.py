"""The optimizer update, so that it can be replayed bit by bit.

The recorder, the pinning of every rounding, the export of the update as a program, its
classification, and its evaluation on samples. Knows JAX, optax, :mod:`~adacheck_jax.format` and
:mod:`~adacheck_jax.device`, and no file of a checkpoint. Begin with
:mod:`~adacheck_jax.update.recorder`.
"""
