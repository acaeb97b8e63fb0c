"""Contexts and registries of Orbax v1 that know the handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from orbax.checkpoint import v1 as ocp

from adacheck_jax.adapter.observe.reports import OnSave
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.adapter.v1.handler import StateHandler, handler_class
from adacheck_jax.device import replicas
from adacheck_jax.plan.options import Delta, Options, Shadow
from adacheck_jax.schedule.line import MaxDeltas
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.zarr import Compression
from adacheck_jax.update.binding import RecorderArgument

STATE = "state"
"""Name that Orbax gives to the pytree of ``save`` and ``load``."""


class RunOptions(TypedDict, total=False):
    """Options of a training run's saves: those of :class:`~adacheck_jax.AdaCheckHandler`."""

    max_deltas: MaxDeltas
    params_path: str | Mapping[str, str] | None
    keep_lineage: KeepLineage | None
    delta: Delta
    compression: Compression
    check_replicas: replicas.Mode
    shadow: Shadow | None
    ephemeral: Sequence[str]


def context(
    recorder: RecorderArgument = None,
    *,
    parent: ocp.Context | None = None,
    checkpointable_name: str = STATE,
    on_save: OnSave | None = None,
    **options: Unpack[RunOptions],
) -> ocp.Context:
    """An Orbax context in which states are saved as bases and deltas, and restored bit-exact.

    Use it wherever Orbax v1 takes a context::

        with adacheck.context(recorder):
            with ocp.training.Checkpointer(root) as checkpointer:
                checkpointer.save(step, state)
                state = checkpointer.load(step, abstract_state)

    One context follows one training run: it remembers the step that it saved or loaded last, which
    the next delta builds on. Other checkpointables go to the handlers that they went to before.

    Args:
        recorder: the :class:`Recorder` in the optimizer chain, as for
            :class:`~adacheck_jax.AdaCheckHandler`. Without one every save is a base, and every
            load still works.
        parent: a context whose options and handlers the new one has too.
        checkpointable_name: name of the checkpointable that is the train state.
        on_save: called with the :class:`SaveReport` of each save, as by
            :class:`~adacheck_jax.AdaCheckHandler`.
        **options: options of :class:`~adacheck_jax.AdaCheckHandler`.

    Returns:
        The context.

    Raises:
        ValueError: an option has a value that it cannot have.
        RecorderError: there is no recorder in what was given as one.
    """
    made = ocp.Context(parent)
    known = made.checkpointables.registry
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for handler, name in known.get_all_entries():
        if name != checkpointable_name:
            others = known.get_secondary_typestrs(handler)
            registry.add(handler, checkpointable_name=name, secondary_typestrs=others)
    register(
        registry, recorder, checkpointable_name=checkpointable_name, on_save=on_save, **options
    )
    made.checkpointables.registry = registry
    return made


def register(
    registry: ocp.handlers.CheckpointableHandlerRegistry,
    recorder: RecorderArgument = None,
    *,
    checkpointable_name: str = STATE,
    on_save: OnSave | None = None,
    **options: Unpack[RunOptions],
) -> TrainingRun:
    """Add the handler to a registry, for a framework that has one of its own.

    Args:
        registry: a registry that has no handler for the name yet, such as
            ``ocp.handlers.local_registry(include_global_registry=False)``.
        recorder: the :class:`Recorder`, as for :func:`context`.
        checkpointable_name: name of the checkpointable that is the train state.
        on_save: called with the :class:`SaveReport` of each save, as by
            :class:`~adacheck_jax.AdaCheckHandler`.
        **options: options of :class:`~adacheck_jax.AdaCheckHandler`.

    Returns:
        The training run; see :func:`run_of`.

    Raises:
        ValueError: the name has a handler already, or an option has a value that it cannot have.
        RecorderError: there is no recorder in what was given as one.
    """
    if registry.has(checkpointable_name):
        raise ValueError(
            f"expected a registry without a handler for {checkpointable_name!r}, found "
            f"{registry.get(checkpointable_name).__name__}, and no registry lets go of one. "
            "Nothing was registered; build the registry with "
            "ocp.handlers.local_registry(include_global_registry=False), or use "
            "adacheck_jax.v1.context(), which puts this handler in the place of that one."
        )
    run = TrainingRun(recorder, Options(**options), on_save=on_save)
    registry.add(handler_class(run), checkpointable_name=checkpointable_name)
    return run


def run_of(context: ocp.Context, checkpointable_name: str = STATE) -> TrainingRun:
    """The training run that a context follows.

    Its ``restored`` is the report of the last load, ``last_save`` that of the last save, and
    ``record_step(state, step)`` takes hold of a step that the next save writes together with its
    own (:meth:`~adacheck_jax.AdaCheckHandler.record_step`); ``recover(root, abstract_state)`` gives
    the state that a process which was killed has left in memory
    (:meth:`~adacheck_jax.AdaCheckHandler.recover`).

    Args:
        context: a context from :func:`context`, or one whose registry :func:`register` was given.
        checkpointable_name: name of the checkpointable that is the train state.

    Raises:
        ValueError: the context has no handler of this library under that name.
    """
    registry = context.checkpointables.registry
    handler = registry.get(checkpointable_name) if registry.has(checkpointable_name) else None
    if handler is None or not issubclass(handler, StateHandler):
        raise ValueError(
            f"expected a context in which {checkpointable_name!r} has the handler of adacheck_jax, "
            f"found {handler.__name__ if handler else 'no handler'}. Make the context with "
            "adacheck_jax.v1.context()."
        )
    return handler.run
