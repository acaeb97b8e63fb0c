"""Steps as they are stored: their manifests, lineages and roots.

Finds, reads and checks what :mod:`~adacheck_jax.format` defines. Knows storages, and neither
tensorstore nor JAX. Begin with :mod:`~adacheck_jax.store.steps.lookup`, the way from a step to its
base.
"""
