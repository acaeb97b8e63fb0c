"""Saves of real trainers beside their own checkpointing, and whether a killed run ends the same.

    python -m benchmarks.trainers --only "tunix_sft --lora"

Runs the scripts of ``examples/trainers`` whose trainers are installed: by this library, as trainers
save by themselves (also with a Recorder), and without saves. Then one is killed (SIGKILL) once its
fourth step is there, and runs again. A row has, by this library and by the trainer: MB of a delta
and a base, and of a step; median time for which a save blocks, and CPU time a save beyond the run
without saves, both behind the first three; time of the restore.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.adapter.plug_in import TrainerManager

EXAMPLES = Path(__file__).parents[1] / "examples/trainers"
RUNS = {
    **{f"tunix_sft{x}": "tunix" for x in ("", " --lora", " --accumulate 2", " --mesh 2 2")},
    **{"kauldron_mlp": "kauldron", "brax_ppo": "brax", "maxtext_like": "flax"},
}  # scripts with their arguments, and the package that each needs
OURS, OWN, NOTHING, WARM = "ours", "own", "nothing", 3


def child(way: str, results: str, script: str, *arguments: str) -> None:
    """Runs a script, and writes its times."""
    spent_s: dict[str, list[float]] = {"save": [], "restore": [], "cpu": []}
    reports = list[adacheck.SaveReport]()

    def wait() -> None:
        for array in jax.live_arrays():
            with contextlib.suppress(RuntimeError):  # another thread may delete it
                array.block_until_ready()

    def time_calls(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            wait()
            if name == "save":
                spent_s["cpu"].append(time.process_time())
                if way == NOTHING:
                    return False
            begin_s = time.perf_counter()
            found = real(*args, **kwargs)
            wait()
            spent_s[name].append(time.perf_counter() - begin_s)
            return found

        setattr(owner, name, call)

    is_brax = script == "brax_ppo"
    owner: Any = adacheck.AdaCheckManager if is_brax else TrainerManager
    if way == OURS:
        for name in ("plug_in", "checkpoint_manager"):
            made = functools.partial(getattr(adacheck, name), on_save=reports.append)
            setattr(adacheck, name, made)
    elif is_brax:
        from brax.training.agents.ppo import checkpoint, train

        owner, checkpoint.restore = checkpoint, checkpoint.load
        train.train = functools.partial(train.train, save_checkpoint_path=arguments[1])
        adacheck.checkpoint_manager = mock.MagicMock()
        adacheck.checkpoint_manager.return_value.restore_newest.return_value = None
    else:
        owner, adacheck.plug_in = ocp.CheckpointManager, mock.MagicMock()
    for name in ("save", "restore"):
        time_calls(owner, name)
    sys.argv = [script, *arguments]
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    cpu = spent_s["cpu"][WARM:]
    cpu_s = (time.process_time() - cpu[0]) / len(cpu) if cpu else 0.0
    found = {**spent_s, "cpu_s": cpu_s, "saves": [(x.kind, x.new_bytes) for x in reports]}
    Path(results).write_text(json.dumps(found))


def run(name: str, way: str, root: Path, steps: int, *, killed: bool = False) -> Any:
    """Times of a run, and its lines; None for one that is killed once its fourth step is there."""
    script, *arguments = name.split()
    results = f"{root.parent}/results.json"
    given = ["--child", way, results, script, "--root", str(root), "--steps", str(steps)]
    command = [sys.executable, "-m", __spec__.name, *given, *arguments]
    cached = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(root.parent / "programs")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cached)
    while killed and not any((root / each).exists() for each in ("4", "checkpoints/ckpt_4")):
        assert process.poll() is None
        time.sleep(0.01)
    if killed:
        process.kill()
    lines = [each for each in process.communicate()[0].splitlines() if "step" in each]
    assert process.returncode == (-9 if killed else 0), lines
    return None if killed else {**json.loads(Path(results).read_text()), "lines": lines}


def row(name: str, steps: int, place: Path) -> str:
    """What is measured of one script."""
    found = {way: run(name, way, place / way, steps) for way in (OURS, OWN, NOTHING)}
    run(name, OURS, place / "killed", steps, killed=True)
    resumed, again = run(name, OURS, place / "killed", steps), run(name, OWN, place / OWN, steps)
    ours, own = found[OURS], found[OWN]
    kinds = "".join(kind[0].upper() for kind, _ in ours["saves"])
    mb = {kind: f"{size / 1e6:.3f}" for kind, size in ours["saves"]}
    written = place.joinpath(OWN).rglob("_CHECKPOINT_METADATA")
    files = max(written, key=lambda each: each.stat().st_ctime).parent.rglob("*")
    own_mb = sum(each.stat().st_size for each in files if each.is_file()) / 1e6
    cells = [f"{mb.get('delta')}, {mb.get('base')}; {own_mb:.3f}"]
    cells += ["; ".join(f"{1e3 * statistics.median(x['save'][WARM:]):.0f}" for x in (ours, own))]
    cells += ["; ".join(f"{1e3 * (x['cpu_s'] - found[NOTHING]['cpu_s']):.0f}" for x in (ours, own))]
    cells += ["; ".join(f"{sum(x['restore']):.2f}" for x in (resumed, again) if x["restore"])]
    first = resumed["lines"][0].removeprefix("begins behind ")  # of brax equal, and not the last
    is_equal = first in ours["lines"] or resumed["lines"][-1] == ours["lines"][-1]
    return f"| {' | '.join([name, kinds, *cells])} | {first}; {'equal' if is_equal else 'not'} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*RUNS], action="append", help="may be repeated")
    parser.add_argument("--steps", type=int, default=20, help="(default %(default)s)")
    given = parser.parse_args()
    print("| run | kinds | MB | a save blocks: ms | CPU: ms | restore: s | killed |")
    print("|---|---|---|---|---|---|---|")
    for name in given.only or RUNS:
        if importlib.util.find_spec(RUNS[name]) is not None:
            with tempfile.TemporaryDirectory() as place:
                print(row(name, given.steps, Path(place)), flush=True)


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
