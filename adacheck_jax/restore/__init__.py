"""One restore: read the base, replay the deltas, compare every fingerprint.

Reads straight onto the target shardings. Knows the rooms of data, devices and updates, and no
Orbax. Begin with :mod:`~adacheck_jax.restore.replay`.
"""
