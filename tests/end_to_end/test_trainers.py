"""Trainers from the registry, killed and resumed; each where it is installed.

They need environments of their own, in which ``python -m pytest -o addopts= THIS_FILE`` runs them::

    pip install -e . pytest pytest-timeout pytest-xdist hypothesis google-tunix==0.1.7 jax==0.10.2

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

from tests.processes import ROOT
from tests.support import kinds_of

EXAMPLES = ROOT / "examples" / "trainers"
STEPS = 40
RUNS = {
    "tunix_sft": ("tunix", (), "4", "model_params+optimizer_state"),
    "tunix_sft, LoRA": ("tunix", ("--lora",), "4", "model_params+optimizer_state"),
    "kauldron_mlp": ("kauldron", (), "checkpoints/ckpt_4", "default"),
}
"""Package, arguments, directory of a step below the root, and item of the state."""


def run(name, root, *arguments, until=None):
    """Runs an example, or kills it once a step is there; gives its last lines."""
    path = EXAMPLES / f"{name.partition(',')[0]}.py"
    command = [sys.executable, path, "--root", str(root), "--steps", str(STEPS), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
