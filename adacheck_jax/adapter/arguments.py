"""Arguments of a save and of a restore, and the report of a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import orbax.checkpoint as ocp

from adacheck_jax.adapter.wanted import leaf_wishes
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
        save_args: tree of ``ocp.SaveArgs`` (or None) like the state, as for ``StandardSave``.
            A cast of a leaf that the update consumes or computes makes the save a base.
        custom_metadata: JSON that ``metadata()`` returns, as for ``StandardSave``.
        ocdbt_target_data_file_size: size in bytes at which a data file of a base is full, as for
            ``PyTreeSave``; 0 for no limit, None for 2 GiB. A chunk is not cut. A delta's files are
            full at 64 MiB.
        item: another name for ``state``, as for ``StandardSave``.

    Raises:
        ValueError: both ``state`` and ``item`` are given.
    """

    state: PyTree | None = None
    step: int | None = None
    save_args: PyTree | None = None
    custom_metadata: Any = None
    ocdbt_target_data_file_size: int | None = None
    item: PyTree | None = None

    def __post_init__(self) -> None:
        if self.item is None:
            return
        if self.state is not None:
            raise ValueError("expected state or item, which are the same, found both.")
        self.state, self.item = self.item, None


@dataclass
class RestoreArgs(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Attributes:
        abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays: the form in
            which the state is returned. ``ocp.PLACEHOLDER`` leaves out a leaf, or all leaves below
            its place, and so does None or an empty node (a ``MaskedNode`` of optax). A leaf of
            another data type of the same kind (float32 for bfloat16) is cast, after it was
            verified. None restores everything onto the shardings that it was saved with.
        partial_restore: True leaves out what the abstract state does not have, as for
            ``PyTreeRestore``: ``{"params": ...}`` restores the params alone. A leaf that was not
            saved stays an error. What is left out is read only where a replayed update needs it.
        strict: False truncates or pads leaves whose shape differs, as for ``StandardRestore``.
        support_layout: True restores with the layouts in the abstract state, as for
            ``StandardRestore``.
        fallback_sharding: sharding of each leaf that is given none and whose saved sharding needs
            devices that do not exist here, as for ``StandardRestore``.
        fallback: True restores the newest step before this one if this one cannot be restored, and
            logs each skipped step and the reason; ``handler.restored.step`` is the restored one.
            It may be a step without a directory of its own, held by the bad step's directory. In
            the place of a step that was deleted, before or while it was read, it restores the
            newest of all others: retention deletes the oldest first.
            Steps that stock Orbax saved are not among the older ones: nothing can verify them.
            False makes a bad step an error, because training should not restart from an older step
            unasked.
        step: number of an earlier step that the restored directory holds: one that was recorded
            (:meth:`AdaCheckHandler.record_step`) and saved with it, or one that it builds on, also
            if the directory's own step is damaged. The next save is then a base.
        exact: True refuses a step of which some bits can only be restored to rounding here, because
            the update adds up elements and the devices that it was saved from do not exist; one
            whose ephemeral leaves have an earlier step's bits; and a step that stock Orbax saved.
        read_once: True has one process read each box that several processes need; they exchange
            what they read over their devices, so that storage is read once. False has each process
            read all that its devices need, and so does None, but for object stores and many bytes.
            The same in all processes, and without effect in a single one.
        transform: rules of :mod:`adacheck_jax.layout` that give the saved leaves the paths and
            shapes of the abstract state: scanned layers for unrolled ones, fused matrices, a padded
            vocabulary. They are applied to the params and to all that the optimizer keeps for
            them, after every leaf was verified. The next save is then a base.
        item: another name for ``abstract_state``, as for ``StandardRestore``.
        restore_args: tree of ``ocp.RestoreArgs`` (or None) like the abstract state, as for
            ``PyTreeRestore``. What they say of a leaf (its sharding, data type, shape, or to be a
            host array) comes before what the abstract state says.
            ``SingleReplicaArrayRestoreArgs`` ask for ``read_once``.
        transforms: ``{}`` asks for ``partial_restore``, as for ``PyTreeRestore``. Others are
            refused: use ``transform``.

    Raises:
        ValueError: both ``abstract_state`` and ``item`` are given, ``restore_args`` are no tree
            like them, or there are ``transforms``.
    """

    abstract_state: PyTree | None = None
    partial_restore: bool = False
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    fallback: bool = False
    step: int | None = None
    exact: bool = False
    read_once: bool | None = None
    transform: Sequence[Rule] | None = None
    item: PyTree | None = None
    restore_args: PyTree | None = None
    transforms: PyTree | None = None

    def __post_init__(self) -> None:
        if self.item is not None:
            if self.abstract_state is not None:
                raise ValueError("expected abstract_state or item, which are the same, found both.")
            self.abstract_state, self.item = self.item, None
        if self.transforms is not None:
            if self.transforms:
                raise ValueError(
                    f"transforms: expected {{}} or None, found {self.transforms!r}. Nothing was "
                    "restored; use transform=, with rules of adacheck_jax.layout."
                )
            self.partial_restore, self.transforms = True, None
        if self.restore_args is not None:
            self._merge_restore_args()

    def _merge_restore_args(self) -> None:
        if self.abstract_state is None:
            raise ValueError(
                "expected an abstract state beside restore_args, found none. Nothing was restored; "
                "pass the result of metadata(), or no restore_args."
            )
        args = leaf_wishes.leaf_arguments(self.restore_args)
        self.support_layout |= any(map(leaf_wishes.has_layout, args))
        if self.read_once is None:
            single = ocp.type_handlers.SingleReplicaArrayRestoreArgs
            self.read_once = True if any(isinstance(arg, single) for arg in args) else None
        self.abstract_state = leaf_wishes.merged(self.abstract_state, self.restore_args)
        self.restore_args = None


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """Report of a restore: the step, and how exact it is.

    Attributes:
        step: step number; -1 if stock Orbax saved the step in a directory without a number.
        replayed_count: number of updates that were replayed.
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
    """

    step: int
    replayed_count: int
    rounded: tuple[str, ...]
    tolerance: float
    verified: bool = True
    stale: Mapping[str, int] = field(default_factory=dict)
    replica: str = ""

    @property
    def exact(self) -> bool:
        """True if every bit is known to be the one that was trained."""
        return self.verified and not self.rounded and not self.stale
