"""Arguments for code written for stock Orbax, which runs unchanged but for the names of classes.

``StandardSave``, ``PyTreeSave``, ``StandardRestore`` and ``PyTreeRestore`` have these arguments, so
:class:`~adacheck_jax.SaveArgs` and :class:`~adacheck_jax.RestoreArgs` have them too. New code needs
few of them: docs/guide/migrating.md says what to write.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from adacheck_jax.device.trees import PyTree


@dataclass
class StockSaveArgs(ocp.args.CheckpointArgs):
    """The state, and arguments of stock Orbax's saves.

    Attributes:
        state: the whole train state, optimizer state included.
        save_args: tree of ``ocp.SaveArgs`` (or None) like the state. A cast of a leaf that the
            update consumes or computes makes the save a base.
        custom_metadata: JSON that ``metadata()`` returns.
        ocdbt_target_data_file_size: size in bytes at which a data file of a base is full; 0 for no
            limit, None for 2 GiB. A chunk is not cut. A delta's files are full at 64 MiB.
        item: another name for ``state``.

    Raises:
        ValueError: both ``state`` and ``item`` are given.
    """

    state: PyTree | None = None
    _: KW_ONLY
    save_args: PyTree | None = None
    custom_metadata: Any = None
    ocdbt_target_data_file_size: int | None = None
    item: InitVar[PyTree | None] = None

    def __post_init__(self, item: PyTree | None) -> None:
        self.state = _one_of("state", self.state, item)


@dataclass
class StockRestoreArgs(ocp.args.CheckpointArgs):
    """The abstract state, and arguments of stock Orbax's restores.

    Attributes:
        abstract_state: the form in which the state is returned.
        partial_restore: True leaves out what the abstract state does not have.
        read_once: True has one process read each box that several processes need.
        strict: False truncates or pads leaves whose shape differs.
        support_layout: True restores with the layouts in the abstract state.
        fallback_sharding: sharding of each leaf that is given none and whose saved sharding needs
            devices that do not exist here.
        item: another name for ``abstract_state``.
        restore_args: tree of ``ocp.RestoreArgs`` (or None) like the abstract state. What they say
            of a leaf (its sharding, data type, shape, or to be a host array) comes before what the
            abstract state says. ``SingleReplicaArrayRestoreArgs`` ask for ``read_once``.
        transforms: ``{}`` asks for ``partial_restore``. Others are refused: use ``rules``.

    Raises:
        ValueError: both ``abstract_state`` and ``item`` are given, ``restore_args`` are no tree
            like them, or there are ``transforms``.
    """

    abstract_state: PyTree | None = None
    _: KW_ONLY
    partial_restore: bool = False
    read_once: bool | None = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    item: InitVar[PyTree | None] = None
    restore_args: InitVar[PyTree | None] = None
    transforms: InitVar[PyTree | None] = None

    def __post_init__(
        self, item: PyTree | None, restore_args: PyTree | None, transforms: PyTree | None
    ) -> None:
        self.abstract_state = _one_of("abstract_state", self.abstract_state, item)
        if transforms:
            raise ValueError(
                f"transforms: expected {{}} or None, found {transforms!r}. Nothing was restored; "
                "use rules=, with rules of adacheck_jax.layout."
            )
        self.partial_restore |= transforms is not None
        if restore_args is not None:
            self._merge(restore_args)

    def _merge(self, restore_args: PyTree) -> None:
        """Make the restore arguments of leaves a part of the abstract state, in which they win."""
        if self.abstract_state is None:
            raise ValueError(
                "expected an abstract state beside restore_args, found none. Nothing was restored; "
                "pass the result of metadata(), or no restore_args."
            )
        leaves, treedef = jax.tree.flatten(_tree(self.abstract_state))
        args = treedef.flatten_up_to(_tree(restore_args))
        self.abstract_state = treedef.unflatten(map(_wanted, leaves, args))
        self.support_layout |= any(isinstance(getattr(a, "sharding", None), Format) for a in args)
        single = ocp.type_handlers.SingleReplicaArrayRestoreArgs
        if self.read_once is None and any(isinstance(arg, single) for arg in args):
            self.read_once = True


def _one_of(name: str, state: PyTree | None, item: PyTree | None) -> PyTree | None:
    if state is not None and item is not None:
        raise ValueError(f"expected {name} or item, which are the same, found both.")
    return item if state is None else state


def _tree(described: PyTree) -> PyTree:
    """The tree itself, of which ``metadata()`` gives a description."""
    return described.tree if hasattr(described, "custom_metadata") else described


def _wanted(leaf: Any, arg: ocp.RestoreArgs | None) -> Any:
    """The abstract leaf that says what a leaf and its restore arguments say together."""
    if leaf is ocp.PLACEHOLDER or not isinstance(arg, ocp.RestoreArgs):
        return leaf
    kind = arg.restore_type
    if kind in (int, float) and not np.shape(leaf):
        return kind(0)
    dtype = arg.dtype if arg.dtype is not None else getattr(leaf, "dtype", None)
    if dtype is None or kind not in (jax.Array, np.ndarray):
        return leaf
    if kind is np.ndarray:
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        return leaf if is_key else np.broadcast_to(np.zeros((), dtype), np.shape(leaf))
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=getattr(leaf, "sharding", None))
    if not arg.strict:
        raise ValueError(
            "restore_args: expected strict=True, found ArrayRestoreArgs(strict=False). Nothing was "
            "restored; truncate and pad with RestoreArgs(strict=False), for all leaves."
        )
    shape = np.shape(leaf) if arg.global_shape is None else arg.global_shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(leaf, arg))


def _sharding(leaf: Any, arg: ocp.ArrayRestoreArgs) -> Any:
    found: Any = arg.sharding
    if found is None and arg.mesh is not None and arg.mesh_axes is not None:
        return jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    if found is None:
        return getattr(leaf, "sharding", None)
    return found.to_jax_sharding() if hasattr(found, "to_jax_sharding") else found
