"""One process of a run of several, whose manager of two items was made in a block of ``plug_in``.

Usage: plugged_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is the number of the last step. The run goes on from the newest step that is there.
"""

from __future__ import annotations

from tests.one_process import own, write  # isort: skip

import jax
import numpy as np
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from tests import support

ITEMS = ("params", "opt_state")
run = support.dict_run(support.mesh_of((jax.device_count() // 2, 2)))
with adacheck.plug_in(run.recorder):
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    handlers = {name: ocp.PyTreeCheckpointHandler() for name in ITEMS}
    manager = ocp.CheckpointManager(own.root, options=options, item_handlers=handlers)
with manager:
    if (newest := manager.latest_step()) is not None:
        wanted = {name: ocp.args.PyTreeRestore(support.abstract(run.state[name])) for name in ITEMS}
        found = manager.restore(newest, args=ocp.args.Composite(**wanted))
        step = jax.device_put(np.int32(newest), run.state["step"].sharding)
        run.state, run.count = {**{name: found[name] for name in ITEMS}, "step": step}, newest
    while run.count < int(own.mode):
        run.advance()
        args = {name: ocp.args.PyTreeSave(run.state[name]) for name in ITEMS}
        manager.save(run.count, args=ocp.args.Composite(**args))
    write(run.state, "end")
