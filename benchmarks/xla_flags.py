"""XLA flags that the installed release knows: XLA ends a process that is given any other one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

ASK = "import jax; jax.devices()"  # XLA reads its flags when it is first asked for devices


def known(flags: Sequence[str], python: str = sys.executable) -> list[str]:
    """Those of some flags that XLA knows.

    Args:
        flags: each with its value, as in ``XLA_FLAGS``.
        python: the interpreter whose JAX is asked, in processes of its own.

    Returns:
        The flags in their order; XLA releases add and remove flags without notice.
    """
    if accepts(flags, python):
        return list(flags)
    return [flag for flag in flags if accepts([flag], python)]


def accepts(flags: Sequence[str], python: str = sys.executable) -> bool:
    """True if a process starts under all these flags.

    Raises:
        RuntimeError: JAX does not start for another reason; with the end of what it printed.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    asked = subprocess.run(
        [python, "-c", ASK], env=environment, capture_output=True, text=True, check=False
    )
    if asked.returncode and "Unknown flag" not in asked.stderr:
        raise RuntimeError(f"JAX does not start under {flags}: {asked.stderr[-2000:]}")
    return not asked.returncode
