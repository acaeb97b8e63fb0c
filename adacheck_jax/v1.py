"""The public names for Orbax v1: contexts and registries that save every step.

::

    import adacheck_jax as adacheck
    from orbax.checkpoint import v1 as ocp

    handler = adacheck.AdaCheckHandler(adacheck.Recorder(optax.adamw(3e-4)))
    with adacheck.v1.context(handler):
        with ocp.training.Checkpointer(root) as checkpointer:
            checkpointer.save(step, state)
            state = checkpointer.load(step, abstract_state)
"""

from adacheck_jax.adapter.v1.registration import context, register

__all__ = ["context", "register"]
