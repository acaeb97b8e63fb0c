"""Output of a test process that died: pytest has captured it in files that nobody reads then."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest


class LastWords:
    """Prints what a worker process of pytest-xdist said before it died.

    XLA and tensorstore end a process after a line on stderr. The worker's pytest captures that
    line in files without a name, which go with the process; here they are opened a second time
    while it lives, by the way of Linux's ``/proc``.
    """

    def __init__(self) -> None:
        self._captured: dict[Any, list[BinaryIO]] = {}

    def pytest_testnodeready(self, node: Any) -> None:
        """Opens what captures a worker's stdout and stderr, before it collects tests."""
        files = self._captured[node] = []
        pid = node.gateway._rinfo().pid  # pytest-xdist has asked for it
        for path in sorted(Path(f"/proc/{pid}/fd").glob("*"), key=lambda each: int(each.name)):
            with contextlib.suppress(OSError):  # closed, or the worker is dead
                if os.readlink(path).endswith(" (deleted)"):
                    files.append(path.open("rb"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Prints the end of it where a worker did not end as it should."""
        files = self._captured.pop(node, [])
        said = b"".join(each.read()[-4000:] for each in files).decode(errors="replace").strip()
        for each in files:
            each.close()
        if error and said:
            print(f"\n{node.gateway.id} died; the end of its output:\n{said}", flush=True)
