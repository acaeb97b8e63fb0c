"""Restores by a manager: of a step that memory or a later one holds, and of one that goes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME, METRIC_ITEM_NAME

from adacheck_jax.adapter import inputs
from adacheck_jax.adapter.arguments import HANDLER_NAME, RestoreArgs, expect_args
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import deletion, roots
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.store.steps.marks import STEP_METADATA
from adacheck_jax.store.storage.location import AnyPath, located

_log = logging.getLogger(__name__)


_MISSING = (FileNotFoundError, KeyError, ValueError)
"""Errors of Orbax where a step, or a part of it, is not there."""


@contextlib.contextmanager
def deletion_detected(manager: Any, step: Any) -> Iterator[None]:
    """Tell Orbax's errors about a step that was deleted as its deletion.

    Args:
        manager: Orbax's manager.
        step: what a caller names a step by; None for the newest.

    Raises:
        StepDeletedError: in place of the error of a step that is gone, or goes while this looks.
            One that the manager does not know may never have been there.
    """
    try:
        yield
    except AdaCheckError:
        raise
    except _MISSING:
        known = manager.all_steps()
        number = getattr(step, "step", max(known, default=None) if step is None else step)
        if number not in known:
            raise
        name = manager._step_name_format.build_name(number)
        with deletion.detected(located(f"{manager.directory}/{name}"), *_MISSING):
            raise


def detecting_deletions(reads: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Orbax's that reads a step, behind :func:`deletion_detected`."""

    @functools.wraps(reads)
    def guarded(self: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        with deletion_detected(getattr(self, "_manager", self), step):
            return reads(self, step, *args, **kwargs)

    return guarded


def without_item(
    manager: Any, step: int | None, args: Any, item: str | None, error: KeyError
) -> Any:
    """The step before one that lacks its item, as a deletion or a copy that was cut off leaves it.

    Args:
        manager: Orbax's manager.
        step: the step; None for the newest.
        args: what was asked for.
        item: name of the state's item; None where it is the only one.
        error: Orbax's, of an item that it missed.

    Raises:
        KeyError: ``error``, if the state's item is there.
        ValueError: the step was saved with items of other names.
        StepDeletedError: no older step is asked for in its place (``skip_damaged``), or other items
            are asked for with it.
    """
    number = manager.latest_step() if step is None else step
    name = manager._step_name_format.build_name(number)
    wanted = item or DEFAULT_ITEM_NAME
    directory = manager.directory / name / wanted
    if directory.exists():
        raise error
    if (saved := _items_of(manager.directory / name)) and wanted not in saved:
        own = next((each for each in saved if saved[each] == HANDLER_NAME), "...")
        given = f"checkpoint_manager(..., items={{...}}, item={own!r})"
        given = "checkpoint_manager(...) without items" if own == DEFAULT_ITEM_NAME else given
        raise ValueError(
            f"{manager.directory}: expected step {number} with an item {wanted!r}, found that it "
            f"was saved with {' and '.join(map(repr, saved))}. Make the manager as it was then: "
            f"{given}."
        ) from error
    if isinstance(args, RestoreArgs) and args.skip_damaged:
        return manager.handler.restore(directory, args=args)
    raise deletion.error_of(located(str(directory))) from error


def _items_of(step: epath.Path) -> Mapping[str, str]:
    """The items that a step was saved with, and their handlers; none if it does not tell."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        told = json.loads((step / STEP_METADATA).read_text())["item_handlers"]
        return {name: told[name] for name in sorted(told.keys() - {METRIC_ITEM_NAME})}
    return {}


def described(args: ocp.args.CheckpointArgs | None, item: str | None) -> Mapping[str, str]:
    """The state that a caller asks for, for a comparison with those of other processes.

    Raises:
        ValueError: ``args`` are none of this library.
    """
    expect_args(args, RestoreArgs, item)
    own: Any = args
    if own is not None and item is not None:
        own = own.get(item)
    if own is None or jax.process_count() == 1:
        return {}
    return inputs.described(own.abstract_state)


def in_holder(
    step: int | None,
    root: AnyPath,
    known: Sequence[int] | None,
    args: ocp.args.CheckpointArgs | None,
    error: Exception,
) -> tuple[int, RestoreArgs]:
    """The later step that holds a step which has no directory, and arguments to restore it there.

    Args:
        step: number of the step; None for the newest.
        root: the root.
        known: steps that have directories; None if the manager does not list those of this root.
        args: what was asked for.
        error: Orbax's.

    Raises:
        Exception: ``error``, if no step holds it and there should be a directory of it.
        FileNotFoundError: there is no such step; or other items than the state are asked for, of
            which there are none.
    """
    holder = None if step is None else roots.holder_of(step, root)
    is_missing = isinstance(error, FileNotFoundError) and holder is None  # else Orbax names it well
    if is_missing and step is not None and known is not None and step not in known:
        raise FileNotFoundError(
            f"{root}: step {step} not found; there: {shown_steps(sorted(known))}. Restore one of "
            f"manager.all_steps(). Where a later one builds on step {step} (adacheck log tells), "
            f"restore that with RestoreArgs(state, step={step})."
        ) from error
    if holder is None or holder == step:
        raise error
    if isinstance(args, RestoreArgs) and args.step is None:
        return holder, dataclasses.replace(args, step=step)
    raise FileNotFoundError(
        f"{root}: expected step {step} with all that is asked for, found its state alone, "
        f"recorded in step {holder}. Restore that: manager.restore({holder}, "
        f"args=ocp.args.Composite(state=adacheck.RestoreArgs(state, step={step})))."
    ) from error


def tell_behind(root: object, recovered: int, newest: int | None) -> None:
    """Warns of other items than the state, which storage has of an earlier step than memory."""
    if newest is not None and newest < recovered:
        _log.warning(
            "%s: the state of step %d was in memory, and the other items are in storage, of "
            "step %d: %d behind. Restore them with restore(%d, args=...), and move a data "
            "iterator on by as many batches as the steps between took.",
            *(root, recovered, newest, recovered - newest, newest),
        )
