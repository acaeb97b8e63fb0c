"""Contexts and registries of Orbax v1 that know the handler."""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp

from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.adapter.v1.handler import handler_class

STATE = "state"
"""Name that Orbax gives to the pytree of ``save`` and ``load``."""


def context(
    handler: AdaCheckHandler | None = None,
    *,
    parent: ocp.Context | None = None,
    checkpointable_name: str = STATE,
) -> ocp.Context:
    """An Orbax context in which states are saved as bases and deltas, and restored bit-exact.

    Use it wherever Orbax v1 takes a context::

        handler = adacheck.AdaCheckHandler(recorder)
        with adacheck.v1.context(handler):
            with ocp.training.Checkpointer(root) as checkpointer:
                checkpointer.save(step, state)
                state = checkpointer.load(step, abstract_state)

    The handler follows one training run, as with the older API: ``handler.restored`` reports the
    last load, ``handler.last_save`` the last save, and ``handler.record_step`` and
    ``handler.recover`` are as they were. Other checkpointables go to the handlers that they went to
    before.

    Args:
        handler: the handler; None for one without a Recorder, with which every load works.
        parent: a context whose options and handlers the new one has too.
        checkpointable_name: name of the checkpointable that is the train state.

    Returns:
        The context.

    Raises:
        TypeError: it is no handler.
    """
    made = ocp.Context(parent)
    known = made.checkpointables.registry
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for other, name in known.get_all_entries():
        if name != checkpointable_name:
            others = known.get_secondary_typestrs(other)
            registry.add(other, checkpointable_name=name, secondary_typestrs=others)
    register(registry, handler or AdaCheckHandler(), checkpointable_name=checkpointable_name)
    made.checkpointables.registry = registry
    return made


def register(
    registry: ocp.handlers.CheckpointableHandlerRegistry,
    handler: AdaCheckHandler,
    *,
    checkpointable_name: str = STATE,
) -> None:
    """Add the handler to a registry, for a framework that has one of its own.

    Args:
        registry: a registry that has no handler for the name yet, such as
            ``ocp.handlers.local_registry(include_global_registry=False)``.
        handler: the handler, as for :func:`context`.
        checkpointable_name: name of the checkpointable that is the train state.

    Raises:
        TypeError: it is no handler.
        ValueError: the name has a handler already.
    """
    if not isinstance(handler, AdaCheckHandler):
        raise TypeError(
            f"expected an AdaCheckHandler, found {type(handler).__name__}. Write "
            "adacheck_jax.v1.context(adacheck_jax.AdaCheckHandler(recorder))."
        )
    if registry.has(checkpointable_name):
        raise ValueError(
            f"expected a registry without a handler for {checkpointable_name!r}, found "
            f"{registry.get(checkpointable_name).__name__}, and no registry lets go of one. "
            "Nothing was registered; build the registry with "
            "ocp.handlers.local_registry(include_global_registry=False), or use "
            "adacheck_jax.v1.context(), which puts this handler in the place of that one."
        )
    registry.add(handler_class(handler.run), checkpointable_name=checkpointable_name)
