"""Real processes save through Orbax v1, go on, and load; one alone loads the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import adacheck_jax as adacheck
from tests import support
from tests.adapter.v1.common import checkpointer_of
from tests.processes import launch, leaves


@pytest.mark.slow
def test_processes_save_go_on_and_save_two_states_of_one_step(tmp_path):
    root = tmp_path / "run"
    launch("save", 2, root, tmp_path / "out", 2, "tests.adapter.v1.worker")
    assert support.kinds_of(root) == "BDDDDD"
    run = support.dict_run(support.mesh_of((2, 2)))
    with adacheck.v1.context(), checkpointer_of(root) as checkpointer:
        for step in (1, 3, 6):
            found = jax.tree.leaves(checkpointer.load(step, support.abstract(run.state)))
            expected = leaves(tmp_path / f"out-saved{step}.npz")
            assert [np.asarray(x).tobytes() for x in found] == expected, step
    for name in ("state", "other"):
        assert support.kinds_of(tmp_path / "run-functions", name) == "BDD"
        assert leaves(tmp_path / f"out-restored-{name}.npz") == leaves(tmp_path / "out-saved9.npz")
