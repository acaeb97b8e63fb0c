"""Examples: each runs to its end, and goes on where it was when it is run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
STEPS = ("--steps 3", "--steps 5")
"""Arguments of two runs in one directory: the second one resumes."""
ON_A_MESH = "--devices 8 --mesh 4x2"

RUNS = {
    "equinox_model": STEPS,
    "grain_data": STEPS,
    "lora": STEPS,
    "maxtext_like": ("--steps 4 --save-interval 3", "--steps 6 --save-interval 3", "--evaluate"),
    "moe": ("--steps 3 --devices 4", "--steps 5 --devices 2"),
    "multiprocess": ("--steps 3 --processes 2",),
    "nnx_model": STEPS,
    "object_store": ("--server gcs --steps 4",),
    "observe": STEPS,
    "plain_optax": STEPS,
    "preemption": ("--steps 100000 --preempt-after 4", "--steps 100000 --preempt-after 1"),
    "reinforce": STEPS,
    "rl_weight_sync": ("--steps 6",),
    "train_lm": (f"--steps 3 {ON_A_MESH}", "--steps 5 --devices 8 --mesh 2x4"),
    "train_muon": (f"--steps 3 {ON_A_MESH}",),
    "v1": STEPS,
}
"""Runs of each example; all check bits or raise by themselves."""

WITHOUT_RUNS = {"plan_llama"}  # it is read by ``adacheck plan``; tests/cli/test_plan_command.py
WITHOUT_ROOT = {"object_store"}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUNS.keys() | WITHOUT_RUNS


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")}))
def test_the_guide_lists_every_example(name):
    guide = (ROOT / "docs" / "guide" / "examples.md").read_text()
    assert f"(../../examples/{name}.py)" in guide


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_and_resumes(name, tmp_path):
    said = []
    for arguments in RUNS[name]:
        root = [] if name in WITHOUT_ROOT else ["--root", str(tmp_path / "root")]
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *root, *arguments.split()]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)  # each makes the devices that it needs
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=250, check=False
        )
        assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}{ended.stderr}"
        said.append(ended.stdout)
    if len(said) > 1 and name != "observe":  # which prints its metrics alone
        assert "resuming after step" in said[1]
    if name == "preemption":
        assert all("preempted after step" in each for each in said)
