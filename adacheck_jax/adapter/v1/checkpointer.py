"""A stock Checkpointer of Orbax v1 in one call: handler, retention and protocol fit each other."""

from __future__ import annotations

import threading
from typing import Any, Unpack, cast

from orbax.checkpoint import v1 as ocp

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.away import outage, restores
from adacheck_jax.adapter.away.ending import goes_on
from adacheck_jax.adapter.handler import AdaCheckHandler, HandlerOptions
from adacheck_jax.adapter.manager import NEWEST, shared_policy, with_adaptive_policy
from adacheck_jax.adapter.v1.handler import handler_class
from adacheck_jax.device.loops import xla_call
from adacheck_jax.errors import Closing
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update.binding import RecorderArgument

STATE = "state"
"""Name that Orbax gives to the pytree of ``save`` and ``load``."""
_EVERY = ocp.training.save_decision_policies.FixedIntervalPolicy(1)


class CheckpointerOptions(HandlerOptions, total=False):
    """Options of the handler, and of Orbax's Checkpointer."""

    step_name_format: Any
    custom_metadata: Any
    cleanup_tmp_directories: bool
    lightweight_initialize: bool
    logger: Any


class StateCheckpointer(
    Closing,
    ocp.training.Checkpointer,  # pyright: ignore[reportGeneralTypeIssues]
):
    """A stock Checkpointer that tells its handler; :func:`checkpointer` makes one.

    Of Orbax's class, which is marked as final, its end is overridden, and the errors of calls that
    read a step: of one that was deleted they tell so.

    Attributes:
        handler: the handler, for ``record_step``, ``recover``, ``restored`` and ``last_save``.
    """

    handler: AdaCheckHandler

    def close(self) -> None:
        """As Orbax's; an error under way stays visible, and waits for no storage that hangs."""
        with self.closing() as in_haste:
            thread = self._manager._finalize_thread.get()
            if in_haste and thread is not None:
                threading.Thread.join(thread, outage.PATIENCE_S)  # without its error
                if thread.is_alive():
                    raise goes_on(self._manager)
            ocp.training.Checkpointer.close(self)


for _name in ("load_checkpointables", "metadata", "checkpointables_metadata"):
    _method = getattr(ocp.training.Checkpointer, _name)
    setattr(StateCheckpointer, _name, restores.detecting_deletions(_method))


def checkpointer(
    root: AnyPath | str,
    recorder: RecorderArgument = None,
    *,
    max_to_keep: int | None = NEWEST,
    save_decision_policy: ocp.training.save_decision_policies.SaveDecisionPolicy | None = None,
    preservation_policy: ocp.training.preservation_policies.PreservationPolicy | None = None,
    parent: ocp.Context | None = None,
    checkpointable_name: str = STATE,
    **options: Unpack[CheckpointerOptions],
) -> StateCheckpointer:
    """A stock Checkpointer that saves every step, on a local disk or in a bucket.

    ::

        with adacheck.v1.checkpointer("checkpoints", recorder) as checkpointer:
            checkpointer.save_async(step, state)
            state = checkpointer.load(step, abstract_state)

    It has a context of its own, so that none has to be active. See
    :func:`adacheck_jax.checkpoint_manager` for what is kept.

    Args:
        root: directory or URL of the steps.
        recorder: as for ``AdaCheckHandler``.
        max_to_keep: number of the newest steps to keep without a ``preservation_policy``; None for
            all.
        save_decision_policy: Orbax's, or an ``AdaptivePolicy``, which is ``max_deltas`` too; None
            for each step that is given. Orbax's own default leaves steps out.
        preservation_policy: Orbax's.
        parent: a context whose options and handlers its own has too.
        checkpointable_name: name of the checkpointable that is the train state.
        **options: those of ``AdaCheckHandler``, and of Orbax's ``Checkpointer``.

    Raises:
        ValueError: options that contradict each other; the message names them.
        StorageError: a URL of another kind, or one that a ``pathlib.Path`` has mangled; a path that
            is read otherwise in some places; or no directory can be there.
    """
    place, training = directories.root_path(root), ocp.training
    format_ = options.get("step_name_format")
    directories.expect_names(place, format_.build_name(0) if format_ else "", [checkpointable_name])
    usual = training.preservation_policies.LatestN
    keep = shared_policy(preservation_policy, max_to_keep, lambda: usual(max_to_keep))
    stock: Any = dict(options)
    own: Any = {k: stock.pop(k) for k in HandlerOptions.__annotations__ if k in stock}
    handler = AdaCheckHandler(
        recorder, keep_lineage=keep, **with_adaptive_policy(save_decision_policy, own)
    )
    made = context(handler, parent=parent, checkpointable_name=checkpointable_name)
    if directories.needs_commit_file(place):
        made.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    stock["save_decision_policy"] = save_decision_policy or _EVERY
    found = StateCheckpointer(place, context=made, preservation_policy=cast(Any, keep), **stock)
    found.handler = handler
    if found.latest is None:  # else a restore comes first, and this would be in its way
        xla_call.begin()
    return found


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
