"""One process of a run whose state lies, in parts, on every process by itself.

Usage: local_worker.py save PROCESS PROCESSES PORT ROOT OUT DEVICES

Every process has the same; but at step 3 process 1 has another leaf.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.one_process import own  # isort: skip

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from tests import support

root, out, devices = own.root, own.out, own.devices

SIZE = 1 << 21
mesh = support.mesh_of((jax.device_count(),))
here = jax.make_mesh((devices,), ("here",), devices=jax.local_devices())
rng = np.random.default_rng(0)
whole = rng.standard_normal((2048, 1024)).astype(np.float32)
state = {
    "global": jax.device_put(np.arange(64.0), NamedSharding(mesh, PartitionSpec("data"))),
    "host": rng.integers(0, 9, SIZE, dtype=np.int8),
    "one device": jax.device_put(whole, jax.local_devices()[0]),
    "local mesh": jax.device_put(
        rng.standard_normal((8, 512)), NamedSharding(here, PartitionSpec("here"))
    ),
    "number": 7,
}
expected = jax.tree.map(np.asarray, {key: state[key] for key in state if key != "global"})
message = ""
with support.manager_of(root, adacheck.AdaCheckHandler(max_deltas=0)) as manager:
    for step in (1, 2, 3, 4):
        saved = dict(state)
        if step == 3 and jax.process_index() == 1:
            saved["host"] = state["host"] + 1
        manager.save(step, args=adacheck.SaveArgs(saved))
        try:
            manager.wait_until_finished()
        except MismatchError as error:
            message = str(error)
    steps = list(manager.all_steps(read=True))
    restored = manager.restore(steps[-1], args=adacheck.RestoreArgs(state))
for key, value in expected.items():
    assert np.asarray(restored[key]).tobytes() == value.tobytes(), key
    assert type(restored[key]) is type(state[key]), key
    assert getattr(restored[key], "sharding", 0) == getattr(state[key], "sharding", 0), key
Path(f"{out}-{own.process}.json").write_text(json.dumps({"steps": steps, "message": message}))
