"""One process of a run that saves through Orbax v1, or loads and writes what it got.

Usage: worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is save, resume or restore; or functions, which saves by ``ocp.save_async`` and two states.
"""

from __future__ import annotations

from pathlib import Path

from tests.one_process import own, write  # isort: skip

import jax
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck
from tests import support
from tests.adapter.v1.common import checkpointer_of

STEPS = 3
mode, root = own.mode, Path(own.root)
mesh = support.mesh_of((jax.device_count() // 2, 2))
run = support.dict_run(mesh)
with adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder)) as context:
    if mode == "functions":
        handler = adacheck.AdaCheckHandler(run.recorder)
        both = adacheck.v1.context(handler, parent=context, checkpointable_name="other")
        with both:
            for _ in range(STEPS):
                run.advance()
                write(run.state, f"saved{run.count}")
                items = {"state": run.state, "other": run.state}
                saving = ocp.save_checkpointables_async(root / str(run.count), items)
                saving.result()
            for name in ("state", "other"):
                target = {name: support.abstract(run.state)}
                found = ocp.load_checkpointables(root / str(STEPS), target)[name]
                write(found, f"restored-{name}")
    else:
        with checkpointer_of(root) as checkpointer:
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
