"""The library that stands between a process and its disk: compiled, loaded, and told what to do.

See ``disk_shim.c`` for what it does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePath

VARIABLE = "DISK_SHIM"
"""Where a process that has it loaded finds it."""
MODES = {
    "log": (1, 0),
    "once": (3, errno.EIO),
    "full": (4, errno.ENOSPC),
    "refuses": (4, errno.EIO),
    "exit": (5, 0),
    "hangs": (6, 0),
}
"""Modes of the library, and the errors that operations fail with."""
_SOURCE = Path(__file__).with_name("disk_shim.c")


def build(directory: Path) -> Path | None:
    """Compiles the library.

    Args:
        directory: where to put it; must exist.

    Returns:
        The library, or None where there is no compiler or the system has no ``LD_PRELOAD``.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = directory / "disk_shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return library


def loading(library: Path) -> dict[str, str]:
    """The environment variables with which a new process loads it."""
    return {"LD_PRELOAD": str(library), VARIABLE: str(library)}


class Disk:
    """The shim that was loaded with this process."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ[VARIABLE])

    def arm(self, root: Path, out: Path, mode: str, at: int = 0) -> None:
        """Begins to look at what is done under a root.

        Args:
            root: directory of the checkpoints.
            out: directory for the log.
            mode: one of :data:`MODES`.
            at: number of an operation, from 1.
        """
        number, error = MODES[mode]
        out.mkdir(parents=True, exist_ok=True)
        self._shim.disk_arm(
            os.fsencode(root), os.fsencode(out), number, ctypes.c_long(at), ctypes.c_int(error)
        )

    @property
    def hits(self) -> int:
        """Positive if an operation was failed."""
        return self._shim.disk_fired()

    def disarm(self) -> int:
        """Looks no more; the number of operations since it began."""
        return self._shim.disk_disarm()


def volatile(log: Path, renamed: PurePath) -> list[str]:
    """What may be lost with the power although a directory is renamed, as its commit.

    Args:
        log: file of the calls of a save.
        renamed: the directory, before it is.
    """
    files, directories = set[PurePath](), set[PurePath]()
    for line in log.read_text().splitlines():
        call, first, second = line.split("\t")
        path, target = PurePath(first), PurePath(second)
        if call == "rename" and path == renamed:
            return sorted(str(p) for p in files | directories if p.is_relative_to(renamed))
        if call == "fsync":
            files.discard(path)
            directories.discard(path)
        elif call == "write":
            files.add(path)
        elif call in {"open", "mkdir", "unlink"}:
            directories.add(path.parent)
            if call == "unlink":
                files.discard(path)
                directories.discard(path)
        elif call in {"rename", "link"}:
            directories |= {path.parent, target.parent} if call == "rename" else {target.parent}
            if path in files:
                files = files - {path} | {target}
    raise AssertionError(f"{renamed} is not renamed")
