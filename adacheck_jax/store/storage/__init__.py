"""Storages: the doors to the bytes of checkpoints.

Locations of values by key, and behind them the file system and tensorstore's key-value stores.
Knows no manifest and no array. Begin with :mod:`~adacheck_jax.store.storage.location`.
"""
