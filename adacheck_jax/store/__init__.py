"""Arrays in databases on a disk.

Packs of deltas and volumes of bases, their codecs, hard links between steps, and claims on a
directory. Knows tensorstore and :mod:`~adacheck_jax.format`, no JAX array: callers pass host
memory. Begin with :mod:`~adacheck_jax.store.packs`, the files of a delta.
"""
