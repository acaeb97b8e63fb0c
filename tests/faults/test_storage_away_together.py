"""Storage of one of two processes, or of both, refuses or hangs: both go on, and lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import located
from tests import support
from tests.processes import launch, leaves

WORKER = "tests.faults.away_worker"
REFUSED = [
    "rename-0-refuse",
    "pack-1-refuse",
    "mkdir-0-refuse",
    "pack-all-refuse",
    "claim-1-refuse",
    "manifest-0-refuse",
    "pack-0-refuse",
    "rename-0-refuse-base",
    "claim-1-refuse-base",
    "pack-1-refuse-close",
]
HUNG = [
    "pack-1-hang",
    "rename-0-hang",
    "mkdir-0-hang",
    "pack-all-hang",
    "claim-0-hang-base",
    "manifest-0-hang-base",
    "rename-0-hang-close",
]


def run_of(mode: str, path: Path, root: str = "") -> list[dict[str, Any]]:
    """What each of two processes found."""
    launch(mode, 2, root or path / "root", path / "out", 1, WORKER)
    found = [json.loads((path / f"out-found{n}").read_text()) for n in range(2)]
    assert {*found[0]["errors"]} == {*found[1]["errors"]}
    return found


def check(path: Path, lost: tuple[int, ...] = (), root: str = "") -> dict[int, list[int]]:
    """Restores every step in a run of its own; gives those that each directory holds."""
    held: dict[int, list[int]] = {}
    root = root or str(path / "root")
    for each in roots.steps_of(located(root)):
        assert each.error is None
        found = each.manifest
        recorded = () if isinstance(found, BaseManifest) else found.recorded
        held[each.step] = [*(x.step for x in recorded), each.step]
    saved = {int(each.stem.removeprefix("out-saved")) for each in path.glob("out-saved*.npz")}
    steps = sorted(step for every in held.values() for step in every)
    assert steps == sorted(saved - {*lost})
    target = support.abstract(support.dict_run(support.mesh_of((1, 1))).state)
    with adacheck.checkpoint_manager(root, max_to_keep=None) as manager:
        for step in steps:
            state = manager.restore(step, args=adacheck.RestoreArgs(target))
            bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
            assert bits == leaves(path / f"out-saved{step}.npz"), step
    return held


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("mode", REFUSED)
def test_what_storage_refuses_one_process_all_write_again(mode, tmp_path):
    found, first = run_of(mode, tmp_path), 5 if "base" in mode else 3
    for each in found:
        assert not each["errors"]
        assert each["kept"] == [*range(first, first + 4)]
        assert each["kept later"] == [*range(first, first + 6)]
    held = check(tmp_path)
    assert [held[first], held[first + 2]] == [[first], [first + 1, first + 2]]


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("mode", HUNG)
def test_what_hangs_in_one_process_does_not_stop_the_loop(mode, tmp_path):
    found, first = run_of(mode, tmp_path), 5 if "base" in mode else 3
    for each in found:
        assert not each["errors"]
        assert each["kept"] == [*range(first + 1, first + 6)]
    held = check(tmp_path)
    assert held[first + 2] == [first + 1, first + 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.campaign) for n in range(1, 20))]
)
def test_whatever_happens_to_a_process_no_step_is_lost(seed, tmp_path):
    for each in run_of(f"any-{seed}-at-random", tmp_path):
        assert not each["errors"]
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", SCHEMES)
def test_in_a_bucket_no_process_reads_in_the_loop(kind, request, tmp_path):
    root = f"{request.getfixturevalue(kind).url}/together"
    for each in run_of("pack-1-refuse", tmp_path, root):
        assert not each["errors"]
        assert not each["reads"]
    assert check(tmp_path, root=root)[5] == [4, 5]


@pytest.mark.slow
def test_a_directory_that_is_made_too_late_is_a_refusal(tmp_path):
    for each in run_of("mkdir-0-hang-late", tmp_path):
        assert not each["errors"]
    check(tmp_path)


@pytest.mark.slow
def test_where_memory_of_one_process_is_full_the_save_waits_in_all(tmp_path):
    found = run_of("pack-0-hang-full", tmp_path)
    assert found[0]["by step"] == found[1]["by step"]
    kept = [*found[0]["by step"].values()]
    assert kept[3] == [4]
    assert not kept[8]
    check(tmp_path)


@pytest.mark.slow
def test_what_is_lost_is_raised_in_all_processes(tmp_path):
    found = run_of("rename-0-hang-broken", tmp_path)
    for each in found:
        assert [*each["errors"]] == ["7"]
        assert "a mistake" in each["errors"]["7"]
        assert "Step 5 is not saved, nor are the recorded steps 4, 6" in each["errors"]["7"]
    check(tmp_path, lost=(4, 5, 6, 7))


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("mode", ["pack-0-hang-leaf", "pack-1-refuse-leaf"])
def test_a_step_that_one_process_cannot_keep_is_an_error_in_all(mode, tmp_path):
    told = [[*each["errors"].values()] for each in run_of(mode, tmp_path)]
    (other,), (own,) = told
    assert own.startswith("MismatchError: Unsupported")
    assert other.startswith("AdaCheckError: process 1 could not call save(")
    assert "Unsupported" in other
    check(tmp_path)


@pytest.mark.slow
def test_what_all_keep_is_written_where_one_process_closes_and_the_others_save(tmp_path):
    launch("pack-1-refuse-left", 2, tmp_path / "root", tmp_path / "out", 1, WORKER)
    errors = json.loads((tmp_path / "out-found0").read_text())["errors"]
    ((step, told),) = errors.items()
    assert told.startswith("DifferingCallsError: ")
    assert f"save({step}) in process 0 where process 1 called close()" in told
    check(tmp_path)


@pytest.mark.slow
def test_a_manager_that_one_process_closes_waits_for_the_others_a_while(tmp_path):
    for each in run_of("pack-1-refuse-crash", tmp_path):
        assert "expected to hear of process 0" in each["errors"]["close"]
        assert "Steps that are not written: 3 to 8. They are lost." in each["errors"]["close"]
    check(tmp_path, lost=tuple(range(3, 9)))
