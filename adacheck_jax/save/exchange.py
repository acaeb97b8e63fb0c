"""What the processes of a save tell each other: one small JSON file each, on the shared root.

Every process waits for the parts of all, in the background and before Orbax's own barrier, and
judges them alike. So if one has failed, or they do not agree, all of them raise, instead of one
that raises while the others wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.format.manifest_file import DIRECTORY

Part = dict[str, Any]

FOLDER = f"{DIRECTORY}/parts"
TIMEOUT_S = 600.0
"""How long a process waits for the others: as long as Orbax does by default."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


def write(item_directory: Path, process: int, part: Part) -> None:
    """Tells the others; a reader sees all of it or nothing."""
    path = item_directory / FOLDER / f"{process}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(part))
    os.replace(temporary, path)


def fail(item_directory: Path, process: int, error: BaseException) -> None:
    """Tells the others that this process has failed, if it still can."""
    with contextlib.suppress(OSError):
        text, is_replay = f"{type(error).__name__}: {error}", isinstance(error, ReplayError)
        write(item_directory, process, {"error": text, "is_replay": is_replay})


def gather(item_directory: Path, process_count: int) -> list[Part]:
    """Waits for the parts of all processes, and reads them, in order.

    Raises:
        AdaCheckError: a process has failed, or its part does not come.
        ReplayError: a process found that replay does not give its state.
    """
    deadline_s, pause_s = time.monotonic() + TIMEOUT_S, _FIRST_PAUSE_S
    found: list[Part] = []
    while len(found) < process_count:
        path = item_directory / FOLDER / f"{len(found)}.json"
        try:
            part = json.loads(path.read_text())
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
        if "error" in part:
            kind = ReplayError if part["is_replay"] else AdaCheckError
            raise kind(
                f"process {len(found)} could not write its share ({part['error']}). The step is "
                "not saved."
            )
        found.append(part)
    return found


def remove(item_directory: Path) -> None:
    """Removes what was told: the manifest says it all."""
    shutil.rmtree(item_directory / FOLDER)
