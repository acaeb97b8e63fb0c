"""Series of tasks in child processes: each has its own XLA flags, and a crash costs one task."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DEVICES_FLAG = "--xla_force_host_platform_device_count"
PREFIX = "@@ "
"""Begins the lines of a child that are results."""


def environment(devices: int, flags: str = "", cache: Path | None = None) -> dict[str, str]:
    """The environment of a child with some virtual CPU devices.

    Args:
        devices: how many.
        flags: more XLA flags.
        cache: where JAX keeps compiled programs, if the caller's environment does not say.
    """
    found = re.sub(rf"{DEVICES_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    made = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{found} {DEVICES_FLAG}={devices} {flags}".strip(),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if cache is not None:
        made = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **made,
        }
    return made


def tell(result: Any) -> None:
    """Prints a result, in a child."""
    print(f"{PREFIX}{json.dumps(result)}", flush=True)


def results(
    module: str,
    arguments: Sequence[str],
    keys: Sequence[str],
    environ: dict[str, str],
    *,
    group: int,
    limit_s: float,
    python: str = sys.executable,
) -> Iterator[tuple[str, Any]]:
    """Runs tasks in children, some at a time, and gives each result as it comes.

    Args:
        module: run with ``-m``, with ``--child`` and the keys of some tasks; it prints one result
            for each of them, in order.
        arguments: further ones.
        keys: of all tasks.
        environ: of the children.
        group: tasks a child.
        limit_s: for one task.
        python: the interpreter.

    Yields:
        Key and result; where a child crashed or hung, a text that says so.
    """
    left = list(keys)
    while left:
        now = left[:group]
        done = 0
        with tempfile.TemporaryFile() as errors:
            command = [python, "-m", module, *arguments, "--child", ",".join(now)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environ)
            why = ""
            try:
                for line in _lines(child, limit_s):
                    if line.startswith(PREFIX):
                        yield now[done], json.loads(line.removeprefix(PREFIX))
                        done += 1
            except TimeoutError:
                why = f"hang: nothing for {limit_s:.0f} s"
            finally:
                child.kill()
                child.wait()
            if done < len(now):
                errors.seek(0)
                last = errors.read()[-600:].decode(errors="replace")
                yield now[done], why or f"crash: ended with {child.returncode}: {last}"
                done += 1
        left = left[done:]


def _lines(child: subprocess.Popen[bytes], limit_s: float) -> Iterator[str]:
    """The lines that a child prints.

    Raises:
        TimeoutError: there was none for too long.
    """
    assert child.stdout is not None
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(limit_s):
                raise TimeoutError
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
