"""Host memory that may be taken: of the machine, of its control groups, and of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import jax

_PROCESSES = 8
"""Processes of a job on one machine, at most: one for each accelerator."""
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller in ``/proc/self/cgroup``, of version 2 and 1: files of a limit and of what is
taken, and the name in ``memory.stat`` of cached files, which give way."""


def free_bytes() -> int:
    """Host memory that is free, shared by as many processes as a machine usually has."""
    free = _number("/proc/meminfo", "MemAvailable:") << 10
    if not free:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    free = min([free, *_left_in_groups()])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - (_number("/proc/self/status", "VmSize:") << 10))
    return max(free, 0) // min(jax.process_count(), _PROCESSES)


def _left_in_groups() -> Iterator[int]:
    """Bytes left in each control group that this process is in, and in those around it."""
    for line in _read("/proc/self/cgroup"):
        _, controllers, inside = line.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in _MEMORY:
            continue
        names, own = _MEMORY[controller], PurePosixPath(inside.lstrip("/"))
        for group in (own, *own.parents):  # a container sees its own part of them
            place = _GROUPS / controller / group
            limit, taken = (_first(place / name) for name in names[:2])
            if limit is not None and taken is not None:
                yield limit - max(taken - _number(place / "memory.stat", names[2]), 0)


def _first(path: Path) -> int | None:
    """The number in a file; None if there is none, as where nothing is limited."""
    found = "".join(_read(path))
    return int(found) if found.isdecimal() else None


def _number(path: str | Path, name: str) -> int:
    """The number behind a name in a file; 0 if there is none."""
    found = (each.split() for each in _read(path))
    return next((int(words[1]) for words in found if words[:1] == [name]), 0)


def _read(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
