"""A checkpoint, byte for byte.

Boxes, manifests, lineages, fingerprints, the planes that bytes are split into, and the place of
every box in a pack: definitions on which writers and readers agree. Knows neither JAX nor Orbax nor
tensorstore. Begin with :mod:`~adacheck_jax.format.manifest`, the records that make a saved step
exist.
"""
