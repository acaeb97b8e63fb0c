"""Real processes on one machine recover what others have left in its memory."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adacheck_jax.memory.files.step_file import kind_at
from benchmarks.common import free_port
from tests.processes import forked, outputs

WORKER = "tests.campaigns.life"


def run(
    directory: Path, processes: int, layout: str, last: int, **options: Any
) -> dict[str, list[list[str]]]:
    """Recovers and trains to a step; the lines that each process told, by their first words."""
    given = {
        "layout": layout,
        "seed": last,
        "last": last,
        "copies": 1,
        "pause_s": 0.0,
        "chunk_s": 0.0,
        "recorded": 0.5,
        "compiled": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "memory": str(directory / "memory"),
        **options,
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


def last_state(told: dict[str, list[list[str]]]) -> list[str]:
    """The last state that a run trained, with its step."""
    return max(told["state"], key=lambda rest: int(rest[0]))


def said_by(told: dict[str, list[list[str]]]) -> list[str]:
    """The messages of all processes."""
    return [" ".join(each) for each in told.get("said", ())]


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("records", [True, None], ids=["records", "state"])
@pytest.mark.parametrize("layout", ["cut", "replicated"])
def test_another_number_of_processes_recovers_what_was_left_in_memory(tmp_path, layout, records):
    before = run(tmp_path, 4, layout, 7, shared=True, records=records)
    for processes, last in ((1, 10), (2, 12)):
        now = run(tmp_path, processes, layout, last, shared=True, records=records)
        assert now["recovered"] == [last_state(before)] * processes
        assert len([*(tmp_path / "memory").iterdir()]) == processes
        before = now


@pytest.mark.slow
def test_a_state_cut_over_all_hosts_outlives_any_of_them(tmp_path):
    told = run(tmp_path, 4, "cut", 7)
    for lost, last in ((2, 10), (0, 11)):  # the second from what was sent of a restored state
        assert told["sent"]
        state = last_state(told)
        shutil.rmtree(tmp_path / f"memory/{lost}")
        told = run(tmp_path, 4, "cut", last)
        assert told["recovered"] == [state] * 4


@pytest.mark.slow
def test_copies_lie_in_the_other_domain_of_two_with_two_processes_each(tmp_path):
    told = run(tmp_path, 4, "cut", 7, per_domain=2)
    for host in (2, 3):
        shutil.rmtree(tmp_path / f"memory/{host}")
    again = run(tmp_path, 4, "cut", 8, per_domain=2)
    assert again["recovered"] == [last_state(told)] * 4


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("layout", ["cut", "replicated"])
def test_a_bad_copy_costs_the_copy_alone_and_is_told(tmp_path, layout):
    told = run(tmp_path, 2, layout, 9, spoiled=1)
    assert ("sent" in told) == (layout == "cut")
    said = said_by(told)
    assert len([x for x in said if "keeps no copies of the state of process 0" in x]) == 1
    assert len(told["over"]) == 2
    assert not [each for each in said if "not saved" in each]
    # Its owner is lost, so there is no whole copy; the owner of the others is not.
    shutil.rmtree(tmp_path / "memory/0")
    again = run(tmp_path, 2, layout, 10)
    assert "recovered" not in again
    assert [each[0] for each in again["restored"]] == ["9"] * 2


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("layout", ["cut", "replicated"])
def test_where_a_process_has_no_room_nothing_is_recovered_and_all_is_saved(tmp_path, layout):
    told = run(tmp_path, 2, layout, 6, without=1)
    said = said_by(told)
    assert [x for x in said if "Nothing can be recovered from memory until the next base" in x]
    assert [x for x in said if "nothing can be recovered from memory: a copy of the state" in x]
    again = run(tmp_path, 2, layout, 7)
    assert [each[0] for each in again["restored"]] == ["6"] * 2


@pytest.mark.slow
def test_an_update_that_adds_up_elements_is_recovered_without_an_option(tmp_path):
    told = run(tmp_path, 2, "replicated", 6, optimizer="adafactor")
    again = run(tmp_path, 2, "replicated", 7, optimizer="adafactor")
    assert again["recovered"] == [last_state(told)] * 2
    shutil.rmtree(tmp_path / "memory/0")  # all of it has a copy
    told = run(tmp_path, 2, "replicated", 8, optimizer="adafactor")
    assert told["recovered"] == [last_state(again)] * 2


@pytest.mark.slow
def test_all_keep_records_where_one_host_computes_other_bits(tmp_path):
    """On a platform that is no CPU."""
    told = run(tmp_path, 2, "replicated", 8, differs=1, recorded=0.0)
    said = [x for x in said_by(told) if "the host computes other bits than the devices" in x]
    assert len(said) == 2
    kinds = [kind_at(path) for path in sorted((tmp_path / "memory").glob("*/*"))]
    assert kinds == ["records"] * 2
    again = run(tmp_path, 2, "replicated", 9, differs=1, recorded=0.0)
    assert again["recovered"] == [last_state(told)] * 2
    assert not [x for x in said_by(again) if "other bits" in x]  # what was recovered tells


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("recorded", [0.5, 0.0])
def test_where_records_fill_the_memory_all_save_a_base(tmp_path, recorded):
    options = {"records": True, "bytes": 3 << 20, "recorded": recorded}
    told = run(tmp_path, 2, "replicated", 26, **options)
    assert not [x for x in said_by(told) if "No later step" in x]
    again = run(tmp_path, 2, "replicated", 27, **options)
    assert again["recovered"] == [last_state(told)] * 2


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("fails", [1, 0])
def test_where_one_process_cannot_replay_all_go_on_from_storage(tmp_path, fails):
    told = run(tmp_path, 2, "cut", 5, records=True, recorded=0.0)
    again = run(tmp_path, 2, "cut", 6, records=True, fails=fails, fails_at=2)
    assert "recovered" not in again
    assert again["restored"] == [last_state(told)] * 2
    refused = [" ".join(each) for each in again["refused"]]
    assert len(refused) == 2
    assert all(f"process {fails}: RuntimeError: on purpose" in each for each in refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "parts"),
    [({"records": True, "bytes": 8 << 20}, r"\b2 parts "), ({"unfolded": True}, "")],
    ids=["in a record", "before a step is folded"],
)
def test_a_bit_that_changes_costs_the_box_alone(tmp_path, options, parts):
    told = run(tmp_path, 2, "replicated", 6, recorded=0.0, **options)
    (path,) = (tmp_path / "memory/1").iterdir()
    memory = np.memmap(path, np.uint8, "r+")
    used = np.flatnonzero(memory)
    if "records" in options:
        memory[used[[len(used) // 3, -3000]]] ^= 1  # of the state, and of the last record
    else:
        memory[used[len(used) // 4 : -3000 : 40_000]] ^= 1
    memory.flush()
    options.pop("unfolded", None)
    again = run(tmp_path, 2, "replicated", 7, **options)
    assert again["recovered"] == [last_state(told)] * 2
    message = " ".join(again["changed"][0])
    assert re.search(parts + ".*of the state have changed since they were stored", message)
