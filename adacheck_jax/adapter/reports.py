"""Reports of saves and restores, and whom they are told: the log, ``jax.monitoring``, a callback.

Nothing that a listener or a callback raises reaches the save or the restore that it is told of.
"""

# Threads: saves are told on the thread that commits, restores on the caller's. ``_failed`` only
# grows, and a name added twice is logged twice at worst, so there is no lock.

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jax import monitoring

from adacheck_jax.adapter.arguments import RestoreInfo
from adacheck_jax.errors import AdaCheckError, IntegrityError, expect_callable, listed
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.restore import check
from adacheck_jax.save.one_save import Save
from adacheck_jax.store.steps import folders, roots
from adacheck_jax.store.steps.lineage import Lineage, shown_steps
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)

_TELLING = 5
"""Deltas from which on their restore tells what each of them takes."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save that was committed.

    Attributes:
        step: step number.
        kind: ``"base"`` or ``"delta"``.
        reason: the reason why it is one, such as ``"the lineage has 20 deltas"``.
        parent: number of the step that a delta builds on; None for a base.
        deferred: numbers of the deferred steps that were saved with it, oldest first.
        new_bytes: bytes of the files that it added, in all processes, without links; None in an
            object store, which does not tell sizes.
        checked: comparison of the delta's replay with its state: ``"full"``, ``"sample"``,
            ``"identity"``, ``"stored"`` if nothing of it is replayed, or ``""`` for none. None for
            a base, which is not replayed.
        blocking_s: seconds for which this library kept the caller. A manager adds its own.
        check_s: seconds for which the save waited for the check, in the background.
        durable_s: seconds from its beginning until it was committed.
    """

    step: int
    kind: Literal["base", "delta"]
    reason: str
    parent: int | None
    deferred: tuple[int, ...]
    new_bytes: int | None
    checked: str | None
    blocking_s: float
    check_s: float
    durable_s: float


OnSave = Callable[[SaveReport], None]
"""The caller's callback."""


@dataclass(frozen=True, slots=True)
class RestoreTimes:
    """Seconds of a restore.

    Attributes:
        total_s: all of it, from its beginning to the verified state.
        look_up_s: looking for the base and the deltas.
        base_s: reading the base.
        replay_s: reading and replaying the deltas.
        compile_wait_s: waiting for the compiler, which begins while the base is read.
    """

    total_s: float
    look_up_s: float
    base_s: float
    replay_s: float
    compile_wait_s: float

    def costs(self, deltas: int) -> dict[str, float]:
        """The costs that one restore tells; of few deltas not how long one more would take."""
        deltas_s = self.look_up_s + self.replay_s  # to look for a lineage is to read each manifest
        open_s = max(self.total_s - self.base_s - deltas_s, 0.0)
        measured = {"open_s": open_s, "base_restore_s": self.base_s}
        if deltas >= _TELLING:
            measured["replay_s"] = max(deltas_s, 0.0) / deltas
        return measured


def report_of(save: Save, directory: AnyPath, begin_s: float, returned_s: float) -> SaveReport:
    """The report of a save that this process has just committed."""
    if (committed := save.committed) is None or save.durable_s is None:
        raise AdaCheckError(f"step {save.own.step}: expected a save that was committed")
    manifest = committed.manifest
    return SaveReport(
        step=manifest.step,
        kind=manifest.kind,
        reason=save.plan.decision.reason,
        parent=manifest.parent and manifest.parent.step,
        deferred=manifest.steps[:-1],
        new_bytes=folders.new_bytes(directory),
        checked=manifest.checked if isinstance(manifest, DeltaManifest) else None,
        blocking_s=returned_s - begin_s,
        check_s=save.check_s,
        durable_s=save.durable_s - begin_s,
    )


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


class Announcer:
    """Tells of the saves and restores of one training run."""

    def __init__(self, on_save: OnSave | None = None) -> None:
        if on_save is not None:
            expect_callable(on_save, "on_save to be a function of a SaveReport")
        self._on_save = on_save
        self._failed: set[str] = set()

    def tell_saved(self, report: SaveReport) -> None:
        """Tells of a save that was committed."""
        _log.info("%s", _line(report))
        self._call("a listener of jax.monitoring", lambda: _record_saved(report))
        if (on_save := self._on_save) is not None:
            self._call("on_save", lambda: on_save(report))

    def tell_restored(self, info: RestoreInfo, times: RestoreTimes) -> None:
        """Tells of a step that was restored and verified."""
        _log.info(
            "step %d: restored in %.3g s (base %.3g s, %d updates replayed in %.3g s, waited %.3g "
            "s for the compiler)",
            *(info.step, times.total_s, times.base_s),
            *(info.replayed_count, times.replay_s, times.compile_wait_s),
        )
        self._call("a listener of jax.monitoring", lambda: _record_restored(info, times))

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Calls the user's code; its first error is logged, and none is raised."""
        _calling.by = name
        try:
            call()
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                _log.exception(
                    "%s raised an error. What it was told of is saved or restored nonetheless; "
                    "further errors from it are not logged.",
                    name,
                )
        finally:
            _calling.by = ""


_calling = threading.local()


def expect_outside_callback(call: str) -> None:
    """Refuses a call of a manager by what is told of a save, whose end that call would wait for.

    Raises:
        AdaCheckError: this thread is in ``on_save``, or a listener.
    """
    if by := getattr(_calling, "by", ""):
        raise AdaCheckError(
            f"expected {call} outside {by}, found it inside: the save ends when {by} returns, so "
            "it would wait for itself. Nothing was done; let the training loop call it."
        )


def _line(report: SaveReport) -> str:
    deferred = f" with {shown_steps(report.deferred)}" if report.deferred else ""
    new = "" if report.new_bytes is None else f"{report.new_bytes:,} bytes, "
    check = "" if report.checked is None else f", checked: {report.checked or 'no'}"
    return (
        f"step {report.step}{deferred}: {report.kind} ({report.reason}), {new}"
        f"blocked {1e3 * report.blocking_s:.1f} ms, durable after {1e3 * report.durable_s:.0f} ms"
        f"{check}"
    )


def _record_saved(report: SaveReport) -> None:
    kind = {"kind": report.kind}
    monitoring.record_event("/adacheck/save/committed", **kind)
    for name, seconds in (
        ("blocking", report.blocking_s),
        ("check", report.check_s),
        ("durable", report.durable_s),
    ):
        monitoring.record_event_duration_secs(
            f"/adacheck/save/{name}_duration_secs", seconds, **kind
        )
    monitoring.record_scalar("/adacheck/save/steps", 1 + len(report.deferred), **kind)
    if report.new_bytes is not None:
        monitoring.record_scalar("/adacheck/save/new_bytes", report.new_bytes, **kind)


def _record_restored(info: RestoreInfo, times: RestoreTimes) -> None:
    for name, seconds in (
        ("duration_secs", times.total_s),
        ("base_duration_secs", times.base_s),
        ("replay_duration_secs", times.replay_s),
        ("compile_wait_duration_secs", times.compile_wait_s),
    ):
        monitoring.record_event_duration_secs(f"/adacheck/restore/{name}", seconds)
    monitoring.record_scalar("/adacheck/restore/replayed_count", info.replayed_count)
