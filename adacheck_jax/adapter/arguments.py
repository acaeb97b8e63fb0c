"""Arguments of a save and of a restore, and the report of a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp

from adacheck_jax.device.trees import PyTree

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
    """

    state: PyTree
    step: int | None = None
    save_args: PyTree | None = None
    custom_metadata: Any = None


@dataclass
class RestoreArgs(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Attributes:
        abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays: the form in
            which the state is returned. ``ocp.PLACEHOLDER`` leaves a leaf out, and so does None or
            an empty node in its place (a ``MaskedNode`` of optax). A leaf of another data type of
            the same kind (float32 for bfloat16) is cast, after it was verified. None restores
            everything onto the shardings that it was saved with.
        strict: False truncates or pads leaves whose shape differs, as for ``StandardRestore``.
        support_layout: True restores with the layouts in the abstract state, as for
            ``StandardRestore``.
        fallback_sharding: sharding of each leaf that is given none and whose saved sharding needs
            devices that do not exist here, as for ``StandardRestore``.
        fallback: True restores the newest step before this one if this one cannot be restored, and
            logs each skipped step and the reason; ``handler.restored.step`` is the restored one.
            It may be a step without a directory of its own, held by the bad step's directory.
            False makes a bad step an error, because training should not restart from an older step
            unasked.
        step: number of an earlier step that the restored directory holds: one that was recorded
            (:meth:`AdaCheckHandler.record_step`) and saved with it, or one that it builds on, also
            if the directory's own step is damaged. The next save is then a base.
        exact: True refuses a step of which some bits can only be restored to rounding here, because
            the update adds up elements and the devices that it was saved from do not exist.
        item: another name for ``abstract_state``, as for ``StandardRestore``.

    Raises:
        ValueError: both ``abstract_state`` and ``item`` are given.
    """

    abstract_state: PyTree | None = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    fallback: bool = False
    step: int | None = None
    exact: bool = False
    item: PyTree | None = None

    def __post_init__(self) -> None:
        if self.item is None:
            return
        if self.abstract_state is not None:
            raise ValueError("expected abstract_state or item, which are the same, found both.")
        self.abstract_state, self.item = self.item, None


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """Report of a restore: the step, and how exact it is.

    Attributes:
        step: step number.
        replayed_count: number of updates that were replayed.
        rounded: leaf paths of the leaves that are within rounding of the saved bits; empty if
            every leaf is exact.
        tolerance: largest expected error of those leaves, relative to each leaf's largest value:
            1e-6 for every replayed update and one rounding to the leaf's data type. An estimate
            for continuous updates; 0 if every leaf is exact.
    """

    step: int
    replayed_count: int
    rounded: tuple[str, ...]
    tolerance: float

    @property
    def exact(self) -> bool:
        """True if every bit is the saved one."""
        return not self.rounded
