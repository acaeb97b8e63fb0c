"""A stock Orbax manager in one call: handler, retention and protocol agree with each other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Unpack

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
)

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.arguments import SaveArgs, in_item
from adacheck_jax.adapter.away.orbax_manager import AdaCheckManager
from adacheck_jax.adapter.handler import AdaCheckHandler, HandlerOptions
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import expect_callable
from adacheck_jax.plan.options import Shadow
from adacheck_jax.schedule.adaptive import AdaptivePolicy
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.update.binding import RecorderArgument


class _Unsaid(int):
    """A default, told from the same number of a caller."""


NEWEST: Final[int] = _Unsaid(3)
"""Newest steps that are kept if nothing is said."""
_RULES = ("max_to_keep", "keep_time_interval", "keep_period")
"""Options of Orbax's manager in whose place a policy may stand."""


def checkpoint_manager(
    root: AnyPath | str,
    recorder: RecorderArgument = None,
    *,
    max_to_keep: int | None = NEWEST,
    options: ocp.CheckpointManagerOptions | None = None,
    items: Mapping[str, ocp.CheckpointHandler] | None = None,
    item: str = "state",
    metadata: Mapping[str, Any] | None = None,
    **handler: Unpack[HandlerOptions],
) -> AdaCheckManager:
    """A stock Orbax manager that saves every step, on a local disk or in a bucket.

    ::

        with adacheck.checkpoint_manager("checkpoints", recorder) as manager:
            manager.save(step, args=adacheck.SaveArgs(state))
            state = manager.restore(step, args=adacheck.RestoreArgs(state))

    Steps that are kept are kept with all that they build on, and so is the newest one, on which the
    next delta builds. On a disk with hard links each step has that in its own directory; elsewhere
    the steps themselves stay.

    Args:
        root: directory or URL of the steps. A relative one is taken from the working directory,
            and ``~`` is the user's home.
        recorder: as for :class:`AdaCheckHandler`.
        max_to_keep: number of the newest steps to keep, where ``options`` do not say it; None for
            all. With ``options`` that say nothing of what to keep it is None, as in Orbax.
        options: Orbax's. Any ``preservation_policy``, or ``max_to_keep`` and the like, may be among
            them; an :class:`AdaptivePolicy` as ``save_decision_policy`` is ``max_deltas`` too; with
            ``enable_background_delete`` no bases are made in the background.
        items: Orbax's handlers of what is saved beside the state, by name: a data iterator, JSON.
            Saves and restores then take an ``ocp.args.Composite``. Metrics need no handler.
        item: name of the state among them.
        metadata: JSON about the run, as Orbax's manager takes it.
        **handler: options of :class:`AdaCheckHandler`, by which steps are saved.

    Raises:
        TypeError: an option that nobody knows; the message names it.
        ValueError: options that contradict each other, or cannot be kept; the message names them.
        StorageError: a URL of another kind, or one that a ``pathlib.Path`` has mangled; a path that
            is read otherwise in some places, as one with a backslash is; or no directory can be
            there.
    """
    expect_options("checkpoint_manager", handler)
    place, usual = directories.root_path(root), NEWEST if options is None else None
    options = options or ocp.CheckpointManagerOptions()
    own, found = handler_and_options(place, recorder, options, handler, max_to_keep, usual)
    _expect_items(place, options, item, items or {})
    handlers = own if items is None else {item: own, **items}
    return AdaCheckManager(own, place, item_handlers=handlers, options=found, metadata=metadata)


def save_base(root: str, step: int, state: PyTree, item: str) -> None:
    """Save a state as a base in a root of its own, without an update.

    An item named ``default`` is saved alone, as by a manager of one item.

    Raises:
        AdaCheckError: it cannot be saved.
    """
    is_alone = item == "default"
    with checkpoint_manager(
        root, delta="bits", items=None if is_alone else {}, item=item
    ) as manager:
        manager.save(step, args=in_item(SaveArgs(state), None if is_alone else item))


def _expect_items(
    place: epath.Path,
    options: ocp.CheckpointManagerOptions,
    item: str,
    beside: Mapping[str, ocp.CheckpointHandler],
) -> None:
    """Raises a ValueError where items have names that are taken, or that no directory can have."""
    wanted = """Orbax's handlers by names, such as items={"data": ocp.JsonCheckpointHandler()}"""
    for each in beside.values() if isinstance(beside, Mapping) else [beside]:
        expect_callable(each, wanted, "save")
    if twice := {item, "metrics"} & {*beside}:
        raise ValueError(
            f"expected items beside {item!r}, which is the state, and the metrics, found "
            f"{sorted(twice)}. Leave them out: metrics go to manager.save(..., metrics=...)."
        )
    format_ = options.step_name_format
    step = format_.build_name(0) if format_ else options.step_prefix or ""
    directories.expect_names(place, step, [item, *beside])


def handler_and_options(
    place: epath.Path,
    recorder: RecorderArgument,
    options: ocp.CheckpointManagerOptions,
    handler: HandlerOptions,
    max_to_keep: int | None = NEWEST,
    usual: int | None = None,
) -> tuple[AdaCheckHandler, ocp.CheckpointManagerOptions]:
    """A handler, and the options of a manager that agrees with it.

    Args:
        place: the root.
        recorder: as for :class:`AdaCheckHandler`.
        options: the caller's.
        handler: options of the handler.
        max_to_keep: as a caller gave it, beside the options.
        usual: number of the newest steps to keep where nothing is said; None for all.

    Raises:
        ValueError: options that contradict each other, or cannot be kept; the message names them.
    """
    _refuse(options)
    rules = {name: each for name in _RULES if (each := getattr(options, name)) is not None}
    newest = rules.get("max_to_keep", usual) if isinstance(max_to_keep, _Unsaid) else max_to_keep
    keep = shared_policy(
        options.preservation_policy, max_to_keep, lambda: _policy(options, newest), rules
    )
    shadow = handler.get("shadow", Shadow())
    if options.enable_background_delete and shadow is not None:
        handler["shadow"] = dataclasses.replace(shadow, background_bases=False)
    agreed = with_adaptive_policy(options.save_decision_policy, handler)
    own = AdaCheckHandler(recorder, keep_lineage=keep, **agreed)
    return own, _keeping_by(keep, options, place)


def shared_policy(
    policy: Any,
    max_to_keep: int | None,
    usual: Callable[[], Any],
    rules: Mapping[str, Any] = MappingProxyType({}),
) -> KeepLineage:
    """The policy that manager and handler share.

    Args:
        policy: the caller's; None for the usual one.
        max_to_keep: as a caller gave it.
        usual: makes the policy of who gives none.
        rules: what else says which steps to keep, by name of the option.

    Raises:
        ValueError: two of them say it, or it is no number of steps.
    """
    if max_to_keep is not None and not (
        isinstance(max_to_keep, int | np.integer) and max_to_keep >= 0
    ):
        raise ValueError(
            f"expected max_to_keep to be an int >= 0, or None for all steps, found {max_to_keep!r}"
        )
    said = [f"options.{name}" for name in rules]
    said += [] if isinstance(max_to_keep, _Unsaid) else ["max_to_keep"]
    if {"max_to_keep", "options.max_to_keep"} <= {*said} or (policy is not None and said):
        names = [*said, *([] if policy is None else ["preservation_policy"])]
        raise ValueError(
            f"expected to be told once which steps to keep, found {' and '.join(names)}. Put all "
            "of it into one preservation_policy, AnyPreservationPolicy([...]), or leave one out."
        )
    policy = usual() if policy is None else policy
    return policy if isinstance(policy, KeepLineage) else KeepLineage(policy)


def with_adaptive_policy(policy: Any, handler: HandlerOptions) -> HandlerOptions:
    """Options of a handler that follows the policy by which its manager decides when to save.

    Raises:
        ValueError: it is an :class:`AdaptivePolicy`, and ``max_deltas`` is another one.
    """
    if policy is not None:
        expect_callable(policy, "a policy of saves, such as AdaptivePolicy()", "should_save")
    if not isinstance(policy, AdaptivePolicy):
        return handler
    if (most := handler.get("max_deltas", policy)) is not policy:
        raise ValueError(
            "expected the AdaptivePolicy that is the save_decision_policy as max_deltas too, found "
            f"max_deltas={most!r}. Leave max_deltas out."
        )
    return {**handler, "max_deltas": policy}


def _keeping_by(
    keep: KeepLineage, options: ocp.CheckpointManagerOptions, root: epath.Path
) -> ocp.CheckpointManagerOptions:
    """Options that keep steps by a policy, and commit and meet as the root needs it."""
    found = dataclasses.replace(options, **dict.fromkeys(_RULES))
    found.preservation_policy = keep
    among = options.multiprocessing_options
    if among.barrier_sync_key_prefix is None:  # else barriers of two managers are taken for one
        prefix = hashlib.sha256(str(root).encode()).hexdigest()[:16]
        among = dataclasses.replace(among, barrier_sync_key_prefix=prefix)
    if (count := jax.process_count()) > 1:
        # Else Orbax's barriers are programs on the devices, behind the training steps there.
        among = dataclasses.replace(among, active_processes={*range(count)})
    found.multiprocessing_options = among
    files = options.file_options
    if not at(located(str(root))).on_file_system and not files.skip_sync_file_validations:
        # A store that hangs would hold up the loop: what a crash left is removed behind it.
        found.file_options = dataclasses.replace(files, skip_sync_file_validations=True)
    if directories.needs_commit_file(root) and found.atomicity_options is None:
        mode = ocp.options.AtomicityMode.COMMIT_FILE
        found.atomicity_options = ocp.options.AtomicityOptions(mode=mode)
    return found


def expect_options(call: str, handler: Mapping[str, Any]) -> None:
    """Refuses options that a handler does not have.

    Raises:
        TypeError: the message names them, and those that there are.
    """
    known = HandlerOptions.__annotations__
    if unknown := sorted(handler.keys() - known):
        raise TypeError(
            f"{call}: expected options of AdaCheckHandler, found {unknown}; those are "
            f"{', '.join(sorted(known))}."
        )


def _refuse(options: Any) -> None:
    if not isinstance(options, ocp.CheckpointManagerOptions):
        raise ValueError(
            "expected options=ocp.CheckpointManagerOptions(...), found "
            f"{type(options).__name__}. Options of the handler are arguments of their own."
        )
    parts = options.multiprocessing_options
    is_part = parts.primary_host != 0 or parts.active_processes is not None
    if is_part and jax.process_count() > 1:
        raise ValueError(
            "expected options for all processes of the job, found MultiprocessingOptions("
            f"primary_host={parts.primary_host}, active_processes={parts.active_processes}): "
            "a step is saved by all, and committed by the first. Leave these options out."
        )


def _policy(options: ocp.CheckpointManagerOptions, newest: int | None) -> AnyPreservationPolicy:
    """The policy that Orbax would follow with these options."""
    policies: list[Any] = [LatestN(newest)]
    if options.best_fn is not None:
        policies = [
            BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=newest,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        ]
    if options.keep_period is not None:
        policies.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    return AnyPreservationPolicy(policies)
