"""Announcements of saves and restores: a line in the log, events of ``jax.monitoring``, a callback.

Nothing that a listener or a callback raises reaches the save or the restore that it is told of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jax import monitoring

from adacheck_jax.adapter.arguments import RestoreInfo
from adacheck_jax.adapter.observe.reports import OnSave, RestoreTimes, SaveReport
from adacheck_jax.store.steps.lineage import shown_steps

_log = logging.getLogger(__name__)


class Announcer:
    """Tells of the saves and restores of one training run.

    Args:
        on_save: the caller's callback; None for none.
    """

    def __init__(self, on_save: OnSave | None = None) -> None:
        self._on_save = on_save
        self._failed: set[str] = set()

    def tell_saved(self, report: SaveReport) -> None:
        """Tells of a save that was committed.

        Args:
            report: the report.
        """
        _log.info("%s", _line(report))
        self._call("a listener of jax.monitoring", lambda: _record_saved(report))
        if (on_save := self._on_save) is not None:
            self._call("on_save", lambda: on_save(report))

    def tell_restored(self, info: RestoreInfo, times: RestoreTimes) -> None:
        """Tells of a step that was restored and verified.

        Args:
            info: the step.
            times: the seconds that it took.
        """
        _log.info(
            "step %d: restored in %.3g s (base %.3g s, %d updates replayed in %.3g s, waited %.3g "
            "s for the compiler)",
            *(info.step, times.total_s, times.base_s),
            *(info.replayed_count, times.replay_s, times.compile_wait_s),
        )
        self._call("a listener of jax.monitoring", lambda: _record_restored(info, times))

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Calls the user's code; its first error is logged, and none is raised."""
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
