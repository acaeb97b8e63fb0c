"""Arguments of a save and of a restore, and the report of a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Final, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from adacheck_jax.device import transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.layout.rules import Rule

HANDLER_NAME = "adacheck_jax.handler.AdaCheckHandler"
"""Name that Orbax writes beside every step, and finds the handler by: it never changes."""


@dataclass
class SaveArgs(ocp.args.CheckpointArgs):
    """Arguments of a save.

    Attributes:
        state: the whole train state, optimizer state included.
        step: step number; None takes it from the step directory's name.
        save_args: tree of ``ocp.SaveArgs`` (or None) like the state. A cast of a leaf that the
            update consumes or computes makes the save a base.
        custom_metadata: JSON that ``metadata()`` returns.
        ocdbt_target_data_file_size: size in bytes at which a data file of a base is full; 0 for no
            limit, None for 2 GiB. A chunk is not cut. A delta's files are full at 64 MiB.
        item: another name for ``state``.

    ``save_args``, ``ocdbt_target_data_file_size`` and ``item`` are for code written for stock
    Orbax, as for ``StandardSave`` and ``PyTreeSave``.

    Raises:
        ValueError: both ``state`` and ``item`` are given.
    """

    state: PyTree | None = None
    step: int | None = None
    _: KW_ONLY
    save_args: PyTree | None = None
    custom_metadata: Any = None
    ocdbt_target_data_file_size: int | None = None
    item: InitVar[PyTree | None] = None

    def __post_init__(self, item: PyTree | None) -> None:
        self.state = _one_of("state", self.state, item)


KEPT: Final = object()
"""State of a save that a manager begins by itself: what storage refused, and recorded steps."""


@dataclass
class RestoreArgs(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Attributes:
        abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays: the form in
            which the state is returned. ``ocp.PLACEHOLDER`` leaves out a leaf, or all leaves below
            its place, and so does None or an empty node (a ``MaskedNode`` of optax). A leaf of
            another data type of the same kind (float32 for bfloat16) is cast, after it was
            verified. None restores everything onto the shardings that it was saved with.
        partial_restore: True leaves out what the abstract state does not have: ``{"params": ...}``
            restores the params alone. A leaf that was not saved stays an error. What is left out is
            read only where a replayed update needs it.
        read_once: True has one process read each box that several processes need; they exchange
            what they read over their devices, so that storage is read once. False has each process
            read all that its devices need, and so does None, but for object stores and many bytes.
            The same in all processes, and without effect in a single one.
        step: number of an earlier step that the restored directory holds: one that was recorded
            (:meth:`AdaCheckHandler.record_step`) and saved with it, or one that it builds on, also
            if the directory's own step is damaged. The next save is then a base.
        skip_damaged: True restores the newest step before this one if this one cannot be restored,
            and logs each skipped step and the reason; ``handler.restored.step`` is the restored
            one. It may be a step without a directory of its own, held by the bad step's directory.
            In the place of a step that was deleted, before or while it was read, it restores the
            newest of all others: retention deletes the oldest first. A step of other items stays an
            error.
            Steps that stock Orbax saved are not among the older ones: nothing can verify them.
            False makes a bad step an error, because training should not restart from an older step
            unasked.
        require_exact: True refuses a step of which some bits can only be restored to rounding here,
            because the update adds up elements and the devices that it was saved from do not exist;
            one whose ephemeral leaves have an earlier step's bits; and a step that stock Orbax
            saved.
        rules: rules of :mod:`adacheck_jax.layout` that give the saved leaves the paths and shapes
            of the abstract state: scanned layers for unrolled ones, fused matrices, a padded
            vocabulary. They are applied to the params and to all that the optimizer keeps for
            them, after every leaf was verified. The next save is then a base.

        strict: False truncates or pads leaves whose shape differs.
        support_layout: True restores with the layouts in the abstract state.
        fallback_sharding: sharding of each leaf that is given none and whose saved sharding needs
            devices that do not exist here.
        item: another name for ``abstract_state``.
        restore_args: tree of ``ocp.RestoreArgs`` (or None) like the abstract state. What they say
            of a leaf (its sharding, data type, shape, or to be a host array) comes before what the
            abstract state says. ``SingleReplicaArrayRestoreArgs`` ask for ``read_once``.
        transforms: ``{}`` asks for ``partial_restore``. Others are refused: use ``rules``.

    Those from ``strict`` on are for code written for stock Orbax, as for ``StandardRestore`` and
    ``PyTreeRestore``.

    Raises:
        ValueError: both ``abstract_state`` and ``item`` are given, ``restore_args`` are no tree
            like them, there are ``transforms``, or ``rules`` or ``fallback_sharding`` are of
            another kind.
    """

    abstract_state: PyTree | None = None
    step: int | None = None
    skip_damaged: bool = False
    require_exact: bool = False
    rules: Sequence[Rule] | None = None
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
        rules: Any = self.rules
        if rules is not None and not (
            isinstance(rules, Sequence) and all(isinstance(each, Rule) for each in rules)
        ):
            raise ValueError(
                "rules: expected a list of rules of adacheck_jax.layout, such as "
                f"[layout.rename(...)], found {rules!r}. Nothing was restored."
            )
        fallback: Any = self.fallback_sharding
        if not isinstance(fallback, jax.sharding.Sharding | None):
            raise ValueError(
                "fallback_sharding: expected a jax.sharding.Sharding, found "
                f"{fallback!r}. Nothing was restored."
            )
        if transforms:
            raise ValueError(
                f"transforms: expected {{}} or None, found {transforms!r}. Nothing was restored; "
                "use rules=, with rules of adacheck_jax.layout."
            )
        self.partial_restore |= transforms is not None
        if restore_args is None:
            return
        self.abstract_state, args = _merged(self.abstract_state, restore_args)
        self.support_layout |= any(isinstance(getattr(a, "sharding", None), Format) for a in args)
        single = ocp.type_handlers.SingleReplicaArrayRestoreArgs
        if self.read_once is None and any(isinstance(arg, single) for arg in args):
            self.read_once = True


def _one_of(name: str, state: PyTree | None, item: PyTree | None) -> PyTree | None:
    """The state, of whose two names one may be used."""
    if state is not None and item is not None:
        raise ValueError(f"expected {name} or item, which are the same, found both.")
    return item if state is None else state


def _merged(state: PyTree | None, restore_args: PyTree) -> tuple[PyTree, Sequence[Any]]:
    """An abstract state with what the arguments of its leaves say, which win; and those of each."""
    if state is None:
        raise ValueError(
            "expected an abstract state beside restore_args, found none. Nothing was restored; "
            "pass the result of metadata(), or no restore_args."
        )
    leaves, treedef = jax.tree.flatten(_tree(state))
    args = treedef.flatten_up_to(_tree(restore_args))
    return treedef.unflatten(map(_wanted, leaves, args)), args


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
    is_key = transfer.is_key(leaf)  # of which Orbax tells type and shape of the elements
    dtype = getattr(leaf, "dtype", None) if arg.dtype is None or is_key else arg.dtype
    if dtype is None or kind not in (jax.Array, np.ndarray):
        return leaf
    if kind is np.ndarray:
        return leaf if is_key else np.broadcast_to(np.zeros((), dtype), np.shape(leaf))
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=getattr(leaf, "sharding", None))
    if not arg.strict:
        raise ValueError(
            "restore_args: expected strict=True, found ArrayRestoreArgs(strict=False). Nothing was "
            "restored; truncate and pad with RestoreArgs(strict=False), for all leaves."
        )
    shape = np.shape(leaf) if arg.global_shape is None or is_key else arg.global_shape
    wanted = jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(leaf, arg))
    described = [getattr(leaf, name, None) for name in ("shape", "dtype", "sharding")]
    return leaf if described == [wanted.shape, wanted.dtype, wanted.sharding] else wanted


def _sharding(leaf: Any, arg: ocp.ArrayRestoreArgs) -> Any:
    found: Any = arg.sharding
    if found is None and arg.mesh is not None and arg.mesh_axes is not None:
        return jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    if found is None:
        return getattr(leaf, "sharding", None)
    return found.to_jax_sharding() if hasattr(found, "to_jax_sharding") else found


def expect_args(args: Any, wanted: type[SaveArgs] | type[RestoreArgs], item: str | None) -> None:
    """Raises ValueError unless a manager is given arguments of this library for the state.

    The state is the ``item`` among others; None if it is saved alone. Without arguments, and
    without the item among them, there is nothing to look at.
    """
    if args is None:
        return
    example, found = f"adacheck.{wanted.__name__}(state)", args
    is_composite = isinstance(args, ocp.args.Composite)
    if item is not None:
        example = f"ocp.args.Composite({item}={example}, ...)"
        if is_composite and (found := args.get(item)) is None:
            return
    if is_composite != (item is not None) or not isinstance(found, wanted):
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        done = "saved" if wanted is SaveArgs else "restored"
        raise ValueError(f"expected args={example}, found {name}. Nothing was {done}.")


def in_item(args: SaveArgs | RestoreArgs, item: str | None) -> Any:
    """Arguments of a save or restore of the state alone; None for an item without a name."""
    return args if item is None else ocp.args.Composite(**{item: args})


Source = Literal["storage", "memory", "memory of others"]
"""Places that a state is taken from."""


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """Report of a restore: the step, where it was, and how exact it is.

    Attributes:
        step: step number; -1 if stock Orbax saved the step in a directory without a number.
        replayed_count: number of updates that were replayed; in memory those of records there.
        rounded: leaf paths of the leaves that are within rounding of the saved bits; empty if
            every leaf is exact.
        tolerance: largest expected error of those leaves, relative to each leaf's largest value:
            1e-6 for every replayed update and one rounding to the leaf's data type. An estimate
            for continuous updates; 0 if every leaf is exact.
        verified: False if stock Orbax saved the step, which keeps no fingerprints: its leaves are
            as they were read, and the next save is a base.
        stale: ephemeral leaves that have an earlier step's bits, by leaf path, and the number of
            that step. All others are as ``rounded`` says.
        replica: device whose replica was saved, such as ``"gpu:3"``, where replicas that are
            declared equal were not; empty where they were equal, or were not compared.
        converted: data types that leaves were saved in and were asked for, by leaf path, where
            they differ: all were verified as saved, and then cast. Integers keep their values.
        source: ``"storage"``; or by ``restore_newest`` and ``recover`` ``"memory"``, where all that
            this process needs lay in files that it found itself, else ``"memory of others"``.
    """

    step: int
    replayed_count: int
    rounded: tuple[str, ...]
    tolerance: float
    verified: bool = True
    stale: Mapping[str, int] = field(default_factory=dict)
    replica: str = ""
    converted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    source: Source = "storage"

    @property
    def exact(self) -> bool:
        """True if every bit is known to be as trained, before ``converted`` leaves are cast."""
        return self.verified and not self.rounded and not self.stale
