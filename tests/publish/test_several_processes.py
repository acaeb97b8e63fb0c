"""Several processes publish together: each writes its share, and followers have all of it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from adacheck_jax.publish import Follower, Publisher
from tests.processes import launch, start
from tests.publish.states import bits, moving

WORKER = "tests.publish.sharing_worker"


def together(mode: str, processes: int, root: Path, devices: int = 1) -> None:
    """Runs all processes to their end."""
    launch(mode, processes, root, root.parent / "out", devices, WORKER)
    for process in range(processes):
        assert Path(f"{root.parent / 'out'}-{process}").read_text() == "done"


def follower(root: Path) -> Follower:
    kinds = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in moving(0).items()}
    return Follower(root, kinds)


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_followers_have_what_all_processes_published(processes, devices, tmp_path):
    root = tmp_path / "weights"
    together("publish", processes, root, devices)
    late = follower(root)
    assert bits(late.latest()) == bits(moving(9))
    assert late.version == 9
    assert late.bases_read == 1
    assert not late.problem
    deltas = sorted(each.name for each in (root / "deltas").iterdir())
    assert {name.rpartition("-")[2] for name in deltas} == {str(n) for n in range(processes)}
    # A program of one process goes on, from a base of its own.
    with Publisher(root) as publisher:
        assert publisher.version == 9
        for version in (10, 11):
            publisher.publish(moving(version), version=version, wait=True)
            assert bits(late.latest()) == bits(moving(version))
    assert late.bases_read == 2
    positions, words = late.changes()["large"]
    before, after = (moving(n)["large"].reshape(-1).view(np.uint16) for n in (10, 11))
    assert np.array_equal(positions, np.flatnonzero(before != after))
    assert np.array_equal(words, after[positions])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "last"), [("refused", 8), ("differing", 2), ("taken_over", 2)])
def test_what_one_process_cannot_do_none_does(mode, last, tmp_path):
    root = tmp_path / "weights"
    together(mode, 2, root)
    late = follower(root)
    assert bits(late.latest()) == bits(moving(last))
    assert late.version == last


def test_replicas_that_differ_are_not_published(tmp_path):
    root = tmp_path / "weights"
    together("drifted", 2, root, 2)
    late = follower(root)
    assert bits(late.latest()) == bits(moving(4))
    assert late.version == 4


@pytest.mark.slow
def test_all_processes_follow_to_the_same_version(tmp_path):
    together("follow", 2, tmp_path / "weights", 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_killed_process_leaves_no_mixed_version(first, tmp_path):
    root, wanted = tmp_path / "weights", 0
    lasting = follower(root)
    for run in range(3):
        processes = start("endless", 2, root, tmp_path / f"out-{run}", 1, WORKER)
        wanted += 4
        lasting.wait_for(wanted, timeout_s=100)
        for number in (first, 1 - first):
            process = processes[number].process
            process.kill()  # the second one may have ended by the error of the first
            process.join()
        for each in (lasting, follower(root)):
            assert bits(each.latest()) == bits(moving(each.version or 0))
            assert (each.version or 0) >= wanted
            assert not each.problem
        wanted = lasting.version or 0
