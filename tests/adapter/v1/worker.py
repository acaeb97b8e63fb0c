"""One process of a run that saves through Orbax v1, or loads and writes what it got.

Usage: worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is save, resume or restore; or functions, which saves by ``ocp.save_async`` and two states.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

mode, process, processes, port, root, out, devices = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
if int(processes) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from orbax.checkpoint import v1 as ocp  # noqa: E402

from adacheck_jax import v1 as adacheck  # noqa: E402
from tests import support  # noqa: E402
from tests.adapter.v1.common import checkpointer_of  # noqa: E402

STEPS = 3


def write(state: object, name: str) -> None:
    """The whole state as this process can gather it."""
    gathered = [
        np.asarray(x) for x in jax.tree.leaves(multihost_utils.process_allgather(state, tiled=True))
    ]
    if jax.process_index() == 0:
        np.savez(f"{out}-{name}.npz", *gathered)


mesh = support.mesh_of((jax.device_count() // 2, 2))
run = support.dict_run(mesh)
with adacheck.context(run.recorder) as context:
    if mode == "functions":
        both = adacheck.context(run.recorder, parent=context, checkpointable_name="other")
        with both:
            for _ in range(STEPS):
                run.advance()
                write(run.state, f"saved{run.count}")
                items = {"state": run.state, "other": run.state}
                saving = ocp.save_checkpointables_async(Path(root) / str(run.count), items)
                saving.result()
            for name in ("state", "other"):
                target = {name: support.abstract(run.state)}
                found = ocp.load_checkpointables(Path(root) / str(STEPS), target)[name]
                write(found, f"restored-{name}")
    else:
        with checkpointer_of(Path(root)) as checkpointer:
            if mode == "restore":
                for step in (1, STEPS):
                    write(checkpointer.load(step, support.abstract(run.state)), f"restored{step}")
            if mode == "resume":
                run.state, run.count = checkpointer.load(STEPS, support.abstract(run.state)), STEPS
            if mode in ("save", "resume"):
                for _ in range(STEPS):
                    run.advance()
                    write(run.state, f"saved{run.count}")
                    checkpointer.save_async(run.count, run.state)
                checkpointer.wait()
