"""One process of a run with error feedback, whose residual is saved with bases alone.

Usage: feedback_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES
"""

from __future__ import annotations

from tests.one_process import own  # isort: skip

import jax
import numpy as np
from jax.experimental import multihost_utils

import adacheck_jax as adacheck
from tests import support
from tests.end_to_end.test_ephemeral_leaves import run_of

run, handler = run_of(support.mesh_of((2, 2)), max_deltas=4)
with support.manager_of(own.root, handler) as manager:
    for step in range(1, 7):
        state = run.advance()
        arrays = jax.tree.leaves(multihost_utils.process_allgather(state, tiled=True))
        if own.process == 0:
            np.savez(f"{own.out}-{step}.npz", *arrays)
        if step != 3 or not handler.record_step(state, step):
            manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
