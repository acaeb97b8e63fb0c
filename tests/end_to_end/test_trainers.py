"""Trainers from the registry, killed and resumed; each where it is installed.

They need environments of their own, in which ``python -m pytest -o addopts= THIS_FILE`` runs them::

    pip install -e . pytest pytest-timeout pytest-xdist hypothesis google-tunix==0.1.7 jax==0.10.2

    pip install -e . pytest pytest-timeout pytest-xdist hypothesis brax==0.14.2 jax==0.10.2

kauldron's dependencies take pip long to resolve: ``--no-deps kauldron==1.4.2``, and all that it
requires but xmanager.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, launch, leaves, start
from tests.support import kinds_of
from tests.test_examples import environment

EXAMPLES = ROOT / "examples" / "trainers"
STEPS = 40
RUNS = {
    "tunix_sft": ("tunix", (), "4", "model_params+optimizer_state"),
    "tunix_sft, LoRA": ("tunix", ("--lora",), "4", "model_params+optimizer_state"),
    "tunix_sft, mesh": ("tunix", ("--mesh", "2", "2"), "4", "model_params+optimizer_state"),
    "kauldron_mlp": ("kauldron", (), "checkpoints/ckpt_4", "default"),
}
"""Package, arguments, directory of a step below the root, and item of the state."""


def run(name, root, *arguments, until=None):
    """Runs an example, or kills it once a step is there; gives its last lines."""
    path = EXAMPLES / f"{name.partition(',')[0]}.py"
    command = [sys.executable, path, "--root", str(root), "--steps", str(STEPS), *arguments]
    options = {"cwd": ROOT, "env": environment()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    while until is not None and not until.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    if until is not None:
        process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == (0 if until is None else -signal.SIGKILL)
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_goes_on_where_it_was_killed(tmp_path, name):
    package, arguments, first, item = RUNS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    whole = run(name, tmp_path / "whole", *arguments)
    root = tmp_path / "killed"
    run(name, root, *arguments, until=root / first)
    resumed = run(name, root, *arguments)
    assert re.search(r"begins behind step [1-9]", resumed)
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    for each in (root, tmp_path / "whole"):
        assert kinds_of((each / first).parent, item)[1:] in ("DD", "DDD")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_params_alone_that_brax_hands_out_go_on_where_it_was_killed(tmp_path):
    if importlib.util.find_spec("brax") is None:
        pytest.skip("brax is not installed")
    saved = run("brax_ppo", tmp_path, until=tmp_path / "4")
    resumed = run("brax_ppo", tmp_path)
    step, params = re.search(r"begins behind step (\d+): (.*)", resumed).groups()
    assert f"step {step}: {params}" in saved.splitlines()
    assert resumed.splitlines()[-1].startswith(f"step {STEPS}:")
    assert kinds_of(tmp_path)[1:] == "DD"


@pytest.mark.slow
def test_a_plugged_manager_of_two_processes_goes_on_where_it_was_killed(tmp_path):
    worker, root = "tests.end_to_end.plugged_worker", tmp_path / "killed"
    children = start("1000", 2, root, tmp_path / "killed_out", 2, worker)
    while not (root / "4").exists():
        assert all(each.returncode is None for each in children), children[0].ended()
        time.sleep(0.01)
    for each in children:
        each.process.kill()
        each.process.join()
    newest = max(int(each.name) for each in root.iterdir() if each.name.isdigit())
    steps = str(newest + 3)
    launch(steps, 2, root, tmp_path / "again_out", 2, worker)
    assert kinds_of(root, "opt_state+params") == "DDD"
    launch(steps, 2, tmp_path / "whole", tmp_path / "whole_out", 2, worker)
    assert leaves(tmp_path / "again_out-end.npz") == leaves(tmp_path / "whole_out-end.npz")
