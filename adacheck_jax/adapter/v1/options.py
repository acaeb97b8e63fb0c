"""Options of the active Orbax context: applied to saves and loads, or refused by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import orbax.checkpoint as ocp_v0
from orbax.checkpoint.experimental.v1._src.context.context import get_context

from adacheck_jax.adapter.arguments import RestoreArgs, SaveArgs
from adacheck_jax.device.trees import PyTree

_log = logging.getLogger(__name__)

_HEEDED = {
    *("storage_options", "scoped_storage_options_creator", "ocdbt_target_data_file_size"),
    "array_metadata_store",  # a base has the metadata that Orbax's own store writes
}
_ALREADY_SO = {"use_compression": (True, False), "use_replica_parallel": (True, None)}
"""Values that ask for what is done anyway, or that an option of this library decides."""
_LIMITS = (
    *("write_concurrent_bytes", "read_concurrent_bytes", "transfer_concurrent_bytes"),
    *("regulator_options", "is_prioritized_key_fn", "serialization_status_callback"),
)


def saving(args: SaveArgs) -> SaveArgs:
    """Arguments of a save, with what the active context says of storing arrays.

    Raises:
        ValueError: the context wants arrays stored in a form that this library does not write.
    """
    options = get_context().array_options.saving
    _refuse("array.saving", options, _HEEDED)
    _tell_limits()
    found: dict[str, Any] = {}
    if args.save_args is None:
        found["save_args"] = _storage(options, args.state)
    if args.ocdbt_target_data_file_size is None:
        found["ocdbt_target_data_file_size"] = options.ocdbt_target_data_file_size
    return dataclasses.replace(args, **found)


def loading(args: RestoreArgs) -> RestoreArgs:
    """Arguments of a restore, with what the active context says of loading.

    Raises:
        ValueError: the context wants a way of loading that this library does not have.
    """
    context = get_context()
    options = context.array_options.loading
    heeded = {"enable_padding_and_truncation", "use_load_and_broadcast"}
    _refuse("array.loading", options, heeded)
    _tell_limits()
    return dataclasses.replace(
        args,
        partial_restore=args.partial_restore or context.pytree_options.loading.partial_load,
        strict=args.strict and not options.enable_padding_and_truncation,
        read_once=True if options.use_load_and_broadcast else args.read_once,
    )


def _storage(options: Any, state: PyTree) -> PyTree | None:
    """Orbax's arguments for each leaf; None if the context says nothing of any."""
    common, choose = options.storage_options, options.scoped_storage_options_creator
    if choose is None and common == type(common)():
        return None

    def merged(key_path: Any, leaf: Any) -> ocp_v0.SaveArgs:
        own = choose(key_path, leaf) if choose is not None else None
        found = {}
        for name in ("dtype", "chunk_byte_size", "shard_axes"):
            value = getattr(own, name, None)
            value = getattr(common, name) if value is None else value
            if value is not None:
                found[name] = value
        return ocp_v0.SaveArgs(**found)

    return jax.tree_util.tree_map_with_path(merged, state)


def _refuse(where: str, options: Any, heeded: set[str]) -> None:
    usual = type(options)()
    refused = [
        f"{where}.{name}={value!r}"
        for name in (field.name for field in dataclasses.fields(options))
        if name not in heeded
        and (value := getattr(options, name)) != getattr(usual, name)
        and value not in _ALREADY_SO.get(name, ())
    ]
    if refused:
        raise ValueError(
            f"expected an Orbax context with options that adacheck_jax honours, found "
            f"{', '.join(refused)}: states are stored as zarr3 in OCDBT, each box once. Nothing "
            "was saved or loaded; leave these options as they are, in a context of their own for "
            "the state."
        )


def _tell_limits() -> None:
    """Log which limits of memory are not kept."""
    options = get_context().memory_options
    usual = type(options)()
    names = [n for n in _LIMITS if getattr(options, n, None) != getattr(usual, n, None)]
    if names:
        _log.warning(
            "Not kept for the state: %s. Saves copy what a step changed, and restores read a few "
            "batches of 64 MiB ahead.",
            ", ".join(f"memory.{name}" for name in names),
        )
