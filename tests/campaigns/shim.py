"""The library that stands between a process and its disk: compiled, and loaded with a process.

See ``disk_shim.c`` for what it does, and :mod:`tests.campaigns.operations` for who tells it to.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "DISK_SHIM"
"""Where a process that has it loaded finds it."""
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
