"""Keeping a root small: steps that Orbax keeps or deletes restore, and where the bytes go."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, CustomSteps, LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.tools import listing
from adacheck_jax.tools.handover import copying
from tests import support
from tests.tools.small_run import RECORDER, initial, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("upkeep") / "run"
    return root, train(root)


@pytest.fixture
def copy(run, tmp_path):
    root = tmp_path / "run"
    copying.copy(run[0], root)
    return root


def numbers(root: Path) -> list[int | None]:
    return [row.step for row in listing.summarize_root(root).steps]


def assert_restores(root: Path, step: int, states: dict[int, Any]) -> None:
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler(RECORDER)) as manager:
        state = manager.restore(step, args=adacheck.RestoreArgs(initial()))
    jax.tree.map(np.testing.assert_array_equal, state, states[step])


def test_steps_that_outlive_retention_restore(tmp_path):
    root, kept = tmp_path / "run", tmp_path / "kept"
    kept.mkdir()

    def link(step: int) -> None:
        if step == 6:
            subprocess.run(["cp", "-al", root / "6", kept / "6"], check=True)

    policy = AnyPreservationPolicy([LatestN(3), CustomSteps([8])])
    states = train(
        root, options=ocp.CheckpointManagerOptions(preservation_policy=policy), after=link
    )
    assert numbers(root) == [8, 11, 12, 13]
    with ocp.CheckpointManager(root) as manager:  # that knows no handler
        for step in manager.all_steps()[1:-1]:
            manager.delete(step)
    assert numbers(root) == [8, 13]
    for place, step in ((root, 8), (root, 13), (kept, 6)):
        assert_restores(place, step, states)


def test_one_flipped_bit_is_one_cause(copy):
    path = max((copy / "13/default/adacheck").glob("delta.*"), key=lambda p: p.stat().st_size)
    path.write_bytes(support.with_flipped_data(path.read_bytes()))
    shown = CliRunner().invoke(app, ["verify", str(copy), "--read-data", "--json"])
    causes = json.loads(shown.output)["causes"]
    assert [(each["steps"], bool(each["leaves"])) for each in causes] == [([13], True)]
