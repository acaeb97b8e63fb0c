"""The public names for Orbax v1: contexts and registries that save every step.

::

    from orbax.checkpoint import v1 as ocp
    from adacheck_jax import v1 as adacheck

    recorder = adacheck.Recorder(optax.adamw(3e-4))
    with adacheck.context(recorder):
        with ocp.training.Checkpointer(root) as checkpointer:
            checkpointer.save(step, state)
            state = checkpointer.load(step, abstract_state)

What is not about Orbax is the same as in :mod:`adacheck_jax`.
"""

from adacheck_jax import (
    AdaCheckError,
    AdaptivePolicy,
    KeepLineage,
    Recorder,
    RestoreArgs,
    RestoreInfo,
    SaveArgs,
    SaveReport,
    Shadow,
    errors,
    latest_restorable,
    separate_update,
)
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.adapter.v1.registration import RunOptions, context, register, run_of

__all__ = [
    "AdaCheckError",
    "AdaptivePolicy",
    "KeepLineage",
    "Recorder",
    "RestoreArgs",
    "RestoreInfo",
    "RunOptions",
    "SaveArgs",
    "SaveReport",
    "Shadow",
    "TrainingRun",
    "context",
    "errors",
    "latest_restorable",
    "register",
    "run_of",
    "separate_update",
]
