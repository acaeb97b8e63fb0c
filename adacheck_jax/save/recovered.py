"""A state that another process has left in the shadow's file, taken and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.device.trees import PyTree
from adacheck_jax.proof import rebuilt
from adacheck_jax.proof.journal import Found
from adacheck_jax.proof.shadow import ShadowThread
from adacheck_jax.proof.shadow_file import ShadowFileError
from adacheck_jax.save.line.planner import Planner
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step of a line in storage.

    Attributes:
        step: its number.
        number: the number in the name of its directory.
        lineage: its lineage; None if it cannot be built on.
    """

    step: int
    number: int
    lineage: Lineage | None


def state_from(
    shadow: ShadowThread, planner: Planner, abstract_state: PyTree, newest: Newest | None
) -> tuple[Lineage | None, int, PyTree, Sequence[Any]]:
    """Takes the state in the shadow's file, and compares all its fingerprints.

    Args:
        shadow: the shadow; to be closed where this fails.
        planner: the planner of the run's saves.
        abstract_state: arrays, or their ``jax.ShapeDtypeStruct``.
        newest: the newest step in storage; None if there is none.

    Returns:
        The lineage of the same step in storage, None if storage has an older one; the step's
        number; the state that the caller gets; and its leaves as they are trained.

    Raises:
        ShadowFileError: there is none that can be taken; the message says why.
        RecorderError: the recorder cannot be tied to the state.
    """
    structure, found = _found_like(shadow, planner, abstract_state)
    if newest is not None and newest.step > found.step:
        raise ShadowFileError(f"it is of step {found.step}, and storage has step {newest.step}")
    state = rebuilt.state_of(abstract_state, found)
    leaves = rebuilt.trained(jax.tree.leaves(state), found)
    if wrong := rebuilt.differing(leaves, found):
        raise ShadowFileError(
            f"step {found.step} does not have the bits that were trained, in "
            f"{structure.leaves[wrong[0]].path} and {len(wrong) - 1} more"
        )
    lineage = newest.lineage if newest and newest.step == found.step else None
    if lineage is not None and [*lineage.manifest.fingerprints] != [*found.sums]:
        raise ShadowFileError(f"storage has another state as step {found.step}")
    return lineage, found.step, state, leaves


def _found_like(
    shadow: ShadowThread, planner: Planner, abstract_state: PyTree
) -> tuple[Structure, Found]:
    """State in the shadow's file that is like an abstract one, and its structure."""
    refused = ShadowFileError()
    for example in rebuilt.examples_of(abstract_state):
        structure = planner.snapshots.take(example).structure
        try:
            return structure, shadow.recover(structure, planner.update_of(structure))
        except ShadowFileError as error:
            refused = error
    raise refused
