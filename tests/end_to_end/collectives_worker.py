"""One process of a run whose comparisons of replays may be collective.

Usage: collectives_worker.py OPTIMIZER[-apart] PROCESS PROCESSES PORT ROOT OUT DEVICES

Trains with arrays cut over all devices, and has a second copy of the state on them. Some steps are
recorded, the others saved; no barrier of a save may be a program on the devices. Writes how many
comparisons began, and ended, in a call of the training loop's, and how many behind its back;
restores every step, and compares it with what was saved. With ``-apart`` process 1 has a leaf more
at steps 5 and 7; errors are written too.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import adacheck_jax as adacheck
from adacheck_jax.proof.second_copy import Following
from tests import support

OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adamw": optax.adamw(1e-2),
}
optimizer, _, is_apart = own.mode.partition("-")
run = support.dict_run(support.mesh_of((1, jax.device_count())), OPTIMIZERS[optimizer])
calls, found, saved = itertools.count(1), Counter[str](), dict[int, list[bytes]]()
call = 0  # number of the one that the loop is in; 0 outside of them
moves_to = Following._moves_to


def observed(*args: Any) -> Any:
    begun = call
    time.sleep(0.05)  # in which the loop would leave
    is_next = moves_to(*args)
    found["waited for" if begun and begun == call else "behind"] += 1
    return is_next


def on_devices(name: str) -> None:
    raise AssertionError(f"a barrier on the devices: {name}")


def shards(state: Any) -> list[bytes]:
    leaves = jax.tree.leaves(state)
    return [np.asarray(each.data).tobytes() for x in leaves for each in x.addressable_shards]


Following._moves_to, multihost_utils.sync_global_devices = observed, on_devices
shadow = adacheck.Shadow(on_devices=True)
with adacheck.checkpoint_manager(
    own.root, run.recorder, shadow=shadow, max_to_keep=None
) as manager:
    for _ in range(8):
        run.advance()
        jax.block_until_ready(run.state) if run.count % 2 else None
        call = next(calls)
        state = run.state
        if is_apart and own.process and run.count in (5, 7):
            state = {**state, "more": np.float32(1)}
        try:
            is_kept = run.count % 4 == 3 and manager.handler.record_step(state, run.count)
            if not is_kept:
                assert manager.save(run.count, args=adacheck.SaveArgs(state))
            saved[run.count] = shards(run.state)
        except adacheck.AdaCheckError as error:
            found[f"step {run.count}: {'did not decide alike' in str(error)}"] += 1
        call = 0
        time.sleep(0.4)
    manager.wait_until_finished()
    target = support.abstract(run.state)
    for step in manager.all_steps() if is_apart else saved:
        holder = min(x for x in manager.all_steps() if x >= step)
        options = {} if holder == step else {"step": step}
        restored = manager.restore(holder, args=adacheck.RestoreArgs(target, **options))
        assert shards(restored) == saved[step], step
Path(f"{own.out}-{own.process}.json").write_text(json.dumps(found))
