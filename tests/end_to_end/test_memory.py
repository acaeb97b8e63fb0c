"""Real processes on one machine recover what others have left in its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import free_port
from tests.processes import forked, outputs

WORKER = "tests.campaigns.hosts_worker"


def run(directory: Path, processes: int, layout: str, last: int) -> dict[str, list[list[str]]]:
    """Recovers and trains to a step; the lines that each process told, by their first words."""
    given = {
        "layout": layout,
        "seed": last,
        "last": last,
        "copies": 1,
        "pause_s": 0.0,
        "chunk_s": 0.0,
        "recorded": 0.5,
        "compiled": str(directory / "compiled"),
        "memory": str(directory / "memory"),
        "shared": True,
    }
    port = free_port()
    out = directory / f"to-{last}"
    outputs(
        [
            forked(
                *(WORKER, json.dumps({**given, "host": n}), n, processes, port),
                *(directory / "root", out, 1, 100),
            )
            for n in range(processes)
        ]
    )
    found: dict[str, list[list[str]]] = {}
    for n in range(processes):
        for line in Path(f"{out}-{n}").read_text().splitlines():
            word, *rest = line.split()
            found.setdefault(word, []).append(rest)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "cut"])
def test_another_number_of_processes_recovers_what_was_left_in_memory(tmp_path, layout):
    before = run(tmp_path, 4, layout, 7)
    for processes, last in ((2, 10), (1, 12), (2, 14)):
        now = run(tmp_path, processes, layout, last)
        state = next(rest for rest in before["state"] if rest[0] == str(before_last(before)))
        assert now["recovered"] == [state] * processes
        assert len([*(tmp_path / "memory").iterdir()]) == processes
        before = now


def before_last(told: dict[str, list[list[str]]]) -> int:
    """The last step that a run trained."""
    return max(int(rest[0]) for rest in told["state"])
