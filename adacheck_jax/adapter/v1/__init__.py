"""The handler for Orbax v1, over the same training runs and the same steps on disk as for v0.

Orbax v1 constructs a handler from its class for each operation, and has no call to commit. So the
class closes over a training run, and the end of a save synchronizes the processes and commits.
Begin with :mod:`~adacheck_jax.adapter.v1.handler`.
"""
