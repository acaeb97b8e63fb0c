"""One process of a run that saves through Orbax v1, and goes on with what it loads.

Usage: worker.py save PROCESS PROCESSES PORT ROOT OUT DEVICES

A checkpointer saves three steps, and a new one three more; then free functions save two states of
each of three steps.
"""

from __future__ import annotations

from pathlib import Path

from tests.one_process import own, write  # isort: skip

import jax
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck
from tests import support
from tests.adapter.v1.common import checkpointer_of

run = support.dict_run(support.mesh_of((jax.device_count() // 2, 2)))
target = support.abstract(run.state)
for begin in (0, 3):
    with (
        adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder)),
        checkpointer_of(Path(own.root)) as checkpointer,
    ):
        if begin:
            run.state = checkpointer.load(begin, target)
        for _ in range(3):
            run.advance()
            write(run.state, f"saved{run.count}")
            checkpointer.save_async(run.count, run.state)
        checkpointer.wait()
root = Path(f"{own.root}-functions")
with (
    adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder)) as context,
    adacheck.v1.context(
        adacheck.AdaCheckHandler(run.recorder), parent=context, checkpointable_name="other"
    ),
):
    for _ in range(3):
        run.advance()
        write(run.state, f"saved{run.count}")
        items = {"state": run.state, "other": run.state}
        ocp.save_checkpointables_async(root / str(run.count), items).result()
    for name in ("state", "other"):
        found = ocp.load_checkpointables(root / str(run.count), {name: target})[name]
        write(found, f"restored-{name}")
