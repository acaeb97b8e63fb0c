"""Examples: each runs to its end, and goes on where it was when it is run again."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests import docs_code, processes
from tests.docs_code import ROOT

EXAMPLES = ROOT / "examples"
STEPS = ("--steps 3", "--steps 5")
"""Arguments of two runs in one directory: the second one resumes."""
ON_A_MESH = "--devices 4 --mesh 2x2"

IN_ONE_PROCESS = """
import json, runpy, sys

for path, root, runs in json.loads(sys.argv[1]):
    for run in runs:
        sys.argv = [path, "--root", root, *run.split()]
        runpy.run_path(path, run_name="__main__")
        print("END OF A RUN", flush=True)
"""

RUNS = {
    "equinox_model": STEPS,
    "grain_data": STEPS,
    "lora": STEPS,
    "memory_of_hosts": ("",),
    "moe": ("--steps 3 --devices 4", "--steps 5 --devices 2"),
    "nnx_model": STEPS,
    "observe": STEPS,
    "plain_optax": STEPS,
    "preemption": (
        "--steps 100000 --preempt-after 4",
        "--steps 100000 --preempt-after 1",  # before the first step that is asked about
        "--steps 100000 --preempt-after 9 --plain",
    ),
    "reinforce": STEPS,
    "rl_weight_sync": ("--steps 6",),
    "train_lm": (f"--steps 3 {ON_A_MESH}", f"--steps 5 {ON_A_MESH}"),
    "train_muon": ("--steps 3",),
    "trainers/maxtext_like": ("--steps 4 --devices 4", "--steps 6 --devices 2", "--evaluate"),
    "v1": STEPS,
}
"""Runs of each example; all check bits or raise by themselves."""

ALIKE = [name for name, runs in RUNS.items() if runs == STEPS]

LONG = {"memory_of_hosts"}
"""Starts eight processes; tests/end_to_end/test_memory.py has forks do the same."""

RUN_BY_PAGES = {"multiprocess": "clusters", "object_store": "clusters"}
"""Guides whose commands run an example, in ``tests/test_docs_code.py``."""

WITHOUT_RUNS = {
    "plan_llama",  # it is read by ``adacheck plan``; tests/cli/test_plan_command.py
    *("trainers/brax_ppo", "trainers/kauldron_mlp", "trainers/tunix_sft"),  # test_trainers.py
}


def test_every_example_is_run():
    run = RUNS.keys() | RUN_BY_PAGES.keys() | WITHOUT_RUNS
    found = {f"{path.relative_to(EXAMPLES).with_suffix('')}" for path in EXAMPLES.rglob("*.py")}
    assert found == run
    for name, page in RUN_BY_PAGES.items():
        blocks = docs_code.blocks_of(ROOT / "docs" / "guide" / f"{page}.md")
        code = "".join(block.code for block in blocks if block.runs and block.language == "sh")
        assert code.count(f"python examples/{name}.py ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALIKE[::2], ALIKE[1::2]], ids=["one half", "other half"])
def test_examples_run_and_resume_in_one_process(names, tmp_path):
    """What they import and compile takes longer than what they do."""
    runs = [(str(EXAMPLES / f"{name}.py"), str(tmp_path / name), RUNS[name]) for name in names]
    program = tmp_path / "runs.py"
    program.write_text(IN_ONE_PROCESS)
    run = processes.forked(program, json.dumps(runs), environment=environment())
    *said, _ = processes.outputs([run])[0].split("END OF A RUN")
    for name, first, second in zip(names, said[::2], said[1::2], strict=True):
        if name != "observe":  # which prints its metrics alone
            assert "resuming after step" not in first, name
            assert "resuming after step" in second, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in LONG else ())
        for name in RUNS
        if name not in ALIKE
    ],
)
def test_an_example_runs_and_resumes(name, tmp_path):
    path, root = str(EXAMPLES / f"{name}.py"), str(tmp_path / "root")
    said = []
    for arguments in RUNS[name]:
        run = processes.forked(path, "--root", root, *arguments.split(), environment=environment())
        said += processes.outputs([run])
    if len(said) > 1:
        assert "resuming after step" in said[1]
    if name == "memory_of_hosts":
        (found,) = re.findall(r"after step (\d+), from memory; storage has step (\d+)\n", said[0])
        assert int(found[0]) > int(found[1]), said[0]
    if name == "preemption":
        assert all("preempted after step" in each for each in said)


def environment() -> dict[str, str]:
    """The environment of examples: each makes the devices that it needs."""
    flags = os.environ["XLA_FLAGS"].split()
    kept = [each for each in flags if "force_host_platform_device_count" not in each]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}
