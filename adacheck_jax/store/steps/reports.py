"""Reports: what each process wrote of a step, as JSON on the root that all processes share."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.store.steps.manifest_file import DIRECTORY
from adacheck_jax.store.storage.location import AnyPath, at

Report = dict[str, Any]
"""Account of what one process wrote, as JSON."""

FOLDER = f"{DIRECTORY}/parts"
TIMEOUT_S = 600.0
"""Longest wait for another process's report: as long as Orbax waits by default."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


def _path(item_directory: AnyPath, process: int) -> AnyPath:
    return item_directory / FOLDER / f"{process}.json"


def publish(item_directory: AnyPath, process: int, report: Report) -> None:
    """Writes a process's report; a reader sees all of it or nothing."""
    at(_path(item_directory, process)).write(json.dumps(report).encode())


def publish_failure(item_directory: AnyPath, process: int, error: BaseException) -> None:
    """Reports that this process has failed, if the disk still takes a report."""
    with contextlib.suppress(OSError):
        text, is_replay = f"{type(error).__name__}: {error}", isinstance(error, ReplayError)
        publish(item_directory, process, {"error": text, "is_replay": is_replay})


def gather(item_directory: AnyPath, process_count: int) -> list[Report]:
    """Reports of all processes, in the order of the processes; waits for them.

    Raises:
        AdaCheckError: a process has failed, or its report does not come.
        ReplayError: a process found that replay does not give its state.
    """
    deadline_s, pause_s = time.monotonic() + TIMEOUT_S, _FIRST_PAUSE_S
    found: list[Report] = []
    while len(found) < process_count:
        path = _path(item_directory, len(found))
        try:
            report = json.loads(at(path).read())
        except FileNotFoundError:
            if time.monotonic() > deadline_s:
                raise AdaCheckError(
                    f"{path}: expected what process {len(found)} wrote of this step, found nothing "
                    f"for {TIMEOUT_S:.0f} s. Check that all processes see the same root, and that "
                    "it is alive. The step is not saved."
                ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            continue
        if "error" in report:
            kind = ReplayError if report["is_replay"] else AdaCheckError
            raise kind(
                f"process {len(found)} could not write its share ({report['error']}). The step is "
                "not saved."
            )
        found.append(report)
    return found


def remove(item_directory: AnyPath) -> None:
    """Removes the reports: the manifest holds all that outlives the save."""
    at(item_directory / FOLDER).delete()
