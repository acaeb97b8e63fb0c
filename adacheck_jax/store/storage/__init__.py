"""Storages: the doors to the bytes of checkpoints.

An interface of values by key, the file system behind it, and tensorstore's key-value stores. Knows
no manifest and no array. Begin with :mod:`~adacheck_jax.store.storage.interface`.
"""
