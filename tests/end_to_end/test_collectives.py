"""No process begins a collective behind its training loop's back, where it meets the loop's own."""

from __future__ import annotations

import json

import pytest

from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import roots
from tests.processes import launch

WORKER = "tests.end_to_end.collectives_worker"


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_a_comparison_that_adds_up_over_processes_is_waited_for(optimizer, tmp_path):
    launch(optimizer, 2, tmp_path / "root", tmp_path / "out", 2, WORKER)
    for process in range(2):
        found = json.loads((tmp_path / f"out-{process}.json").read_text())
        assert sum(found.values()) == 7
        assert ("behind" in found) == (optimizer == "adamw")  # which moves no elements
    steps = [each.manifest for each in roots.steps_of(tmp_path / "root")]
    assert [each.step for each in steps if isinstance(each, BaseManifest)] == [1]


@pytest.mark.slow
def test_processes_that_do_not_compare_alike_all_raise(tmp_path):
    launch("adafactor-apart", 2, tmp_path / "root", tmp_path / "out", 2, WORKER)
    for process in range(2):
        found = json.loads((tmp_path / f"out-{process}.json").read_text())
        # Step 5 is a base in one alone; so is step 7, which none records behind a save that failed.
        assert {*found} == {"waited for", "step 5: True", "step 7: True"}
