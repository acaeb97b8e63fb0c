"""One process of a run that keeps an average of its params and a target network.

Usage: derived_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is save; or edited, in which the average is set by hand before the third step.
"""

from __future__ import annotations

from tests.one_process import own, write  # isort: skip

import jax

import adacheck_jax as adacheck
from tests import support
from tests.end_to_end import test_derived as derived

mesh = support.mesh_of((jax.device_count() // 2, 2))
functions = {"ema": derived.average, "target": derived.hard_copy}
run = derived.dict_program(mesh, functions).run()
with support.manager_of(own.root, adacheck.AdaCheckHandler(run.recorder)) as manager:
    for _ in range(4):
        run.advance()
        if own.mode == "edited" and run.count == 3:
            run.state["ema"] = jax.tree.map(lambda x: x + 1, run.state["ema"])
        write(run.state, f"saved{run.count}")
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
