"""Arrays in databases, and steps made of them, in a storage.

Packs of deltas and volumes of bases, their codecs, lineages of steps, hard links between them, and
claims on a directory. Knows tensorstore and :mod:`~adacheck_jax.format`, no JAX array: callers pass
host memory. Begin with :mod:`~adacheck_jax.store.packs`, the files of a delta.
"""
