"""Restore of a step that stock Orbax saved, without verification."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, first_line, unreadable
from adacheck_jax.store.storage.location import AnyPath


def restore(directory: AnyPath, args: RestoreArgs) -> PyTree:
    """Restore a step that stock Orbax saved; nothing can verify it.

    Raises:
        IntegrityError: exact bits are wanted; or, where a fallback is, the step cannot be read.
        ValueError: the abstract state does not fit; or another error of stock Orbax.
    """
    if args.require_exact:
        raise IntegrityError(
            f"{directory}: expected exact bits, found a step that stock Orbax saved, without "
            "fingerprints to compare them with. Nothing was returned; do not ask for "
            "require_exact=True."
        )
    try:
        return _read(epath.Path(str(directory)), args)
    except Exception as error:
        if refused := unreadable(directory, error):
            raise refused from error
        if not args.skip_damaged:
            raise
        raise IntegrityError(
            f"{directory}: stock Orbax cannot restore this step, which it saved "
            f"({type(error).__name__}: {first_line(error)}). Restore another step."
        ) from error


def _read(directory: epath.Path, args: RestoreArgs) -> PyTree:
    state = args.abstract_state
    leaves = jax.tree.leaves(state)
    if not (args.partial_restore or any(leaf is ocp.PLACEHOLDER for leaf in leaves)):
        wanted = ocp.args.StandardRestore(
            state,
            strict=args.strict,
            support_layout=args.support_layout,
            fallback_sharding=args.fallback_sharding,
        )
        return ocp.StandardCheckpointHandler().restore(directory, args=wanted)

    def sharding(leaf: Any) -> Any:
        return getattr(leaf, "sharding", None) or args.fallback_sharding

    def checked(each: ocp.RestoreArgs) -> ocp.RestoreArgs:
        is_array = isinstance(each, ocp.ArrayRestoreArgs)
        return dataclasses.replace(each, strict=args.strict) if is_array else each

    restore_args = ocp.checkpoint_utils.construct_restore_args(
        state, jax.tree.map(sharding, state), support_layout=args.support_layout
    )
    wanted = ocp.args.PyTreeRestore(
        state, jax.tree.map(checked, restore_args), partial_restore=args.partial_restore
    )
    return ocp.PyTreeCheckpointHandler().restore(directory, args=wanted)
