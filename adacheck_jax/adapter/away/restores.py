"""Restores by a manager: of what memory holds, and of a step that a later one holds."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from adacheck_jax.adapter import inputs
from adacheck_jax.adapter.arguments import RestoreArgs, expect_args
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)


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
    step: int | None, root: AnyPath, args: ocp.args.CheckpointArgs | None, error: Exception
) -> tuple[int, RestoreArgs]:
    """The later step that holds a step which has no directory, and arguments to restore it there.

    Raises:
        Exception: ``error``, if no step holds it.
        FileNotFoundError: other items than the state are asked for, of which there are none.
    """
    holder = None if step is None else roots.holder_of(step, root)
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
