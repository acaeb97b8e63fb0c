"""The only room that knows Orbax.

The checkpoint handler and its arguments, bases as stock Orbax checkpoints, and the caller's
abstract state. Decides nothing about a save. Begin with :mod:`~adacheck_jax.adapter.handler`, which
Orbax v0 calls. :mod:`~adacheck_jax.adapter.training_run` is what the handlers of both APIs share.
"""
