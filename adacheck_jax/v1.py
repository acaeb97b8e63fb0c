"""The public names for Orbax v1: checkpointers, contexts and registries that save every step.

::

    import adacheck_jax as adacheck

    recorder = adacheck.Recorder(optax.adamw(3e-4))
    with adacheck.v1.checkpointer("checkpoints", recorder) as checkpointer:
        checkpointer.save_async(step, state)
        state = checkpointer.load(step, abstract_state)
"""

from adacheck_jax.adapter.v1.checkpointer import checkpointer, context, register

__all__ = ["checkpointer", "context", "register"]
