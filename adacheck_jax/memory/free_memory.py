"""Host memory that may be taken."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_PROCESSES = 8
"""Processes of a job on one machine, at most: one for each accelerator."""


def free_bytes() -> int:
    """Host memory that is free, shared by as many processes as a machine usually has."""
    found = _read("/proc/meminfo")
    free = next((int(x.split()[1]) << 10 for x in found if x.startswith("MemAvailable:")), None)
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (_read(f"/sys/fs/cgroup/{name}") for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdecimal():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0) // min(jax.process_count(), _PROCESSES)


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
