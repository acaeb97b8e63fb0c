"""Real processes save through Orbax v1, and another number of them loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapter.v1.common import kinds_of
from tests.processes import launch, leaves

WORKER = "tests.adapter.v1.worker"


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    """Three steps saved by two processes with two devices each, mesh (2, 2)."""
    root = tmp_path_factory.mktemp("two")
    launch("save", 2, root / "run", root / "out", 2, WORKER)
    return root


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2), (4, 2)])
def test_another_number_of_processes_loads_the_same_bits(run_of_two, processes, devices):
    assert kinds_of(run_of_two / "run").startswith("BDD")
    out = run_of_two / f"restored-by-{processes}x{devices}"
    launch("restore", processes, run_of_two / "run", out, devices, WORKER)
    for step in (1, 3):
        restored = leaves(Path(f"{out}-restored{step}.npz"))
        assert restored == leaves(run_of_two / f"out-saved{step}.npz")


@pytest.mark.slow
def test_a_lineage_goes_on_after_a_restart_of_all_processes(run_of_two):
    launch("resume", 2, run_of_two / "run", run_of_two / "resumed", 2, WORKER)
    assert kinds_of(run_of_two / "run") == "BDDDDD"


@pytest.mark.slow
def test_two_states_of_one_step_are_saved_by_free_functions(tmp_path):
    launch("functions", 2, tmp_path / "run", tmp_path / "out", 2, WORKER)
    assert kinds_of(tmp_path / "run") == kinds_of(tmp_path / "run", "other") == "BDD"
    for name in ("state", "other"):
        assert leaves(tmp_path / f"out-restored-{name}.npz") == leaves(tmp_path / "out-saved3.npz")
