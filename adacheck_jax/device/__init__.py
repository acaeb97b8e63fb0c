"""Boxes on devices, and off them.

Leaf paths, shardings, the owner of each box, transfers to the host and back, fingerprints and
replicas. Knows JAX and :mod:`~adacheck_jax.format`, no file and no optimizer. Begin with
:mod:`~adacheck_jax.device.sharding`, which reduces a JAX sharding to boxes.
"""
