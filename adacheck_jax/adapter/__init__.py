"""The only room that knows Orbax.

The checkpoint handler and its arguments, bases as stock Orbax checkpoints, and what a caller
wants restored. Holds no decision of its own. Begin with :mod:`~adacheck_jax.adapter.handler`.
"""
