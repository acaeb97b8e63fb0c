"""Memory that handing a step over takes: exports and transforms, each in a process of its own.

python -m benchmarks.speed.handover PEAK COMMAND...

runs a command of ``adacheck``, and writes the peak of its resident memory, in bytes, to a file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from benchmarks.speed import measure, states

BASE_STEP, DELTA_STEP = 0, 2
TINY = 100
RULES = '[[rule]]\ntranspose = "{leaf}"\naxes = [1, 0]\n'


def run(root: str, leaf_bytes: int, leaves: int) -> Any:
    """Saves a base and two deltas, and hands them over in every form.

    Args:
        root: where it is saved.
        leaf_bytes: of each array of params, float32.
        leaves: arrays of params; AdamW keeps two more of each.

    Returns:
        Of each form the peak of resident memory beyond that of the same command on a tiny root.
    """
    folder = Path(root)
    (folder / "rules.toml").write_text(RULES)
    sizes = {
        "tiny": _save(folder / "tiny", TINY, leaves),
        "large": _save(folder / "large", leaf_bytes // 4, leaves),
    }
    rows = []
    for step, kind in ((BASE_STEP, "base"), (DELTA_STEP, "delta")):
        for form in ("safetensors", "orbax", "transform"):
            peaks = [_peak_bytes(folder, name, step, form) for name in sizes]
            rows.append({"form": form, "kind": kind, "peak_bytes": peaks[1] - peaks[0]})
    return {"rows": rows, "leaf_bytes": leaf_bytes, "leaves": leaves, "state_bytes": sizes["large"]}


def _save(root: Path, params_of_a_leaf: int, leaves: int) -> int:
    """Saves the steps; the bytes of a state without the record."""
    recorder = states.recorder()
    state = states.train_state(params_of_a_leaf * leaves, leaves, recorder)
    step = states.train_step_of(recorder)
    handler = adacheck.AdaCheckHandler(recorder)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("default", adacheck.SaveArgs, handler)
    registry.add("default", adacheck.RestoreArgs, handler)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for number in range(DELTA_STEP + 1):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
    return states.size_bytes(states.without_record(state))


def _peak_bytes(folder: Path, name: str, step: int, form: str) -> int:
    """Peak of resident memory of one command."""
    root, to = str(folder / name), str(folder / f"{name}-{step}-{form}")
    words = ["export", root, str(step), to, "--format", form]
    if form == "transform":
        words = ["transform", root, to, "--step", str(step), "--rules", f"{folder}/rules.toml"]
    peak = folder / "peak"
    ended = subprocess.run(
        [sys.executable, "-m", __name__, peak, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {ended.returncode}: {ended.stdout}")
    return int(peak.read_text())


if __name__ == "__main__":
    try:
        app(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(str(measure.memory_bytes("VmHWM")))
