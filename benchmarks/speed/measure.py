"""What one save costs the process that makes it."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.speed.states import size_bytes
from benchmarks.speed.ways import Way

_TOUCHED_BYTES = 4 << 30


@dataclass(frozen=True)
class Cost:
    """Of one save, or medians over several.

    Attributes:
        blocking_s: until ``save`` returned.
        durable_s: until the save was finished.
        cpu_s: of all threads of the process, until then.
        new_bytes: that it wrote; a hard link counts once.
        peak_bytes: of host memory, beyond what was in use before.
    """

    blocking_s: float
    durable_s: float
    cpu_s: float
    new_bytes: float
    peak_bytes: float


def median(costs: Sequence[Cost]) -> Cost:
    rows = [asdict(cost) for cost in costs]
    return Cost(**{key: statistics.median(row[key] for row in rows) for key in rows[0]})


def memory_bytes(name: str) -> int:
    """One of the lines of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status: expected a line {name}, found none")


def touch_memory(wanted_bytes: int) -> None:
    """Writes to memory that is free: a virtual machine gets it at the first touch, slowly."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.ones(min(wanted_bytes, _TOUCHED_BYTES, free_bytes // 4), np.uint8)


def forget_peak() -> None:
    """Gives back what is free, and lets the peak of resident memory start again from the rest."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def one_save(way: Way, number: int, state: Any) -> Cost:
    """Saves and waits."""
    forget_peak()
    before_bytes = memory_bytes("VmRSS")
    cpu_s, start_s = time.process_time(), time.perf_counter()
    way.save(number, state)
    blocking_s = time.perf_counter() - start_s
    way.wait()
    durable_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    peak_bytes = memory_bytes("VmHWM") - before_bytes
    return Cost(blocking_s, durable_s, cpu_s, way.new_bytes(number), peak_bytes)


def side_by_side(
    ways: Mapping[str, Callable[[], Way]],
    state: Any,
    step: Callable[[Any], Any],
    *,
    rounds: int,
    saves: int,
    paired: Mapping[str, str],
    is_computed: bool = True,
) -> dict[str, Cost]:
    """Medians of several saves of each way, in turns, after a step each and a save to warm up.

    Args:
        ways: by name.
        state: to begin with; donated.
        step: that trains it.
        rounds: how often it is each way's turn.
        saves: that are measured in each turn.
        paired: a way to the one that it has its turns with, save by save: writing takes longer
            where the page cache has to find memory, and that depends on what was deleted before.
        is_computed: True to save states that are computed, False those that are computing, so that
            their step counts until the save is durable.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    open_ways = {name: begin() for name, begin in ways.items()}
    number = 0
    turns: dict[str, list[str]] = {}
    for name in ways:
        turns.setdefault(paired[name] if paired.get(name) in ways else name, []).append(name)
    for _ in range(rounds):
        for names in turns.values():
            for position in range(saves + 2):  # a base, where it is one, and a first delta
                touch_memory(2 * size_bytes(state))
                state = step(jax.block_until_ready(state))
                for name in names:
                    if is_computed:
                        jax.block_until_ready(state)
                        touch_memory(2 * size_bytes(state))  # else the first does it for the next
                    cost = one_save(open_ways[name], number, state)
                    if position >= 2:
                        costs[name].append(cost)
                number += 1
    for way in open_ways.values():
        way.close()
    return {name: median(each) for name, each in costs.items()}
