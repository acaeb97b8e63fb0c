"""The outcome of a restore: how exact its leaves are, and what it has cost."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.adapter.arguments import RestoreInfo
from adacheck_jax.adapter.reports import RestoreTimes
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, listed
from adacheck_jax.restore import check
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)

_TELLING = 5
"""Deltas from which on their restore tells what each of them takes."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step.

    Attributes:
        state: the tree that the caller gets.
        info: the step's number, and how exact its leaves are.
        directory: item directory that the step was read from.
        lineage: base and deltas that were read; None if stock Orbax saved the step.
        leaves: verified leaves in the base's order, on the devices of the replay.
        is_own: True if the step is the directory's own, so that a delta may build on it; False for
            an earlier step that the directory also holds.
        measured: seconds that the restore took, by the names of costs.
        times: the same for whoever watches; None if stock Orbax saved the step.
    """

    state: PyTree
    info: RestoreInfo
    directory: AnyPath
    lineage: Lineage | None
    leaves: list[Any]
    is_own: bool
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    times: RestoreTimes | None = None


def measured(times: RestoreTimes, look_up_s: float, deltas: int) -> dict[str, float]:
    """The costs that one restore tells; of few deltas not how long one more would take."""
    deltas_s = look_up_s + times.replay_s  # to look for a lineage is to read each manifest
    open_s = max(times.total_s - times.base_s - deltas_s, 0.0)
    measured = {"open_s": open_s, "base_restore_s": times.base_s}
    if deltas >= _TELLING:
        measured["replay_s"] = max(deltas_s, 0.0) / deltas
    return measured


def stock_info(path: AnyPath) -> RestoreInfo:
    """Report of the restore of a step that stock Orbax saved; its number is -1 if it has none."""
    step = roots.place_of(path).step
    return RestoreInfo(-1 if step is None else step, 0, (), 0.0, verified=False)


def info_of(
    lineage: Lineage, rounded: Sequence[int], path: AnyPath, wants_exact: bool
) -> RestoreInfo:
    """Report of a restore; warns about rounded and stale leaves, or refuses them.

    Raises:
        IntegrityError: the caller wants exact bits, and some leaves are rounded or stale.
    """
    leaves, end, count = lineage.base.leaves, lineage.end, lineage.replayed_count
    paths = tuple(leaves[i].path for i in rounded)
    tolerance = check.tolerance(lineage, rounded) if rounded else 0.0
    stale = {leaves[i].path: step for i, step in end.stale}
    remedies = dict[str, str]()
    if stale:
        remedies[
            f"{path}: the ephemeral leaves of step {end.step} have the bits of step "
            f"{min(stale.values())} or of one after it ({listed(stale, 5)}): they are saved with "
            "bases alone. All other leaves are as they were trained."
        ] = "restore a base step"
    if paths:
        remedies[
            f"{path}: {len(paths)} leaves of step {end.step} are within rounding of what was "
            f"saved, not the exact bits ({listed(paths, 5)}; each within about {tolerance:.0e} of "
            "its leaf's largest value): they come out of sums, and the devices that they were "
            "saved from do not exist here."
        ] = "restore where as many devices exist as when it was saved, restore a base step"
    for message, remedy in remedies.items():
        if wants_exact:
            raise IntegrityError(
                f"{message} Nothing was returned; {remedy}, or do not ask for require_exact=True."
            )
        _log.warning("%s", message)
    return RestoreInfo(end.step, count, paths, tolerance, stale=stale, replica=end.replica)
