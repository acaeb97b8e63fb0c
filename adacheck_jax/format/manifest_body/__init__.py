"""JSON bodies of manifests, read: values of fields, records, and bodies of older versions.

Whatever is returned is bounded in size and consistent in itself, since a body is untrusted input.
Knows no file. Begin with :mod:`~adacheck_jax.format.manifest_body.records`.
"""
