"""One process of a run in which one replica of process 1 is not what it is declared to be.

Usage: replica_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is what the handler does about it: warn or raise.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tests.one_process import own  # isort: skip

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplicaError
from adacheck_jax.tools import replica_report
from tests import support

mode, root, out, devices = own.mode, own.root, own.out, own.devices

# Each box of the kernel lies on two devices of either process.
order = np.array(jax.devices()).reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2)
mesh = jax.sharding.Mesh(order, ("data", "model"))
bad = jax.local_devices()[2] if jax.process_index() == 1 else None


def array(shape: tuple[int, ...], spec: PartitionSpec, step: int, odd: object = None) -> jax.Array:
    """A global array of this step's number; the odd device's shard has one element more."""
    sharding = NamedSharding(mesh, spec)
    buffers = []
    for device in sharding.addressable_devices:
        data = np.full(sharding.shard_shape(shape), step, np.float32)
        if device is odd:
            data[0, 0] += 1
        buffers.append(jax.device_put(data, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def state_of(step: int, odd: object = None) -> dict[str, jax.Array]:
    return {
        "bias": array((4,), PartitionSpec(), step),
        "kernel": array((16, 4), PartitionSpec("model"), step, odd),
        "rows": array((8, 4), PartitionSpec("data"), step),
        "whole": array((8, 4), PartitionSpec(("model", "data")), step),
    }


class Messages(logging.Handler):
    """What the library logs about replicas."""

    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


messages: list[str] = []
logging.getLogger("adacheck_jax.device.replicas").addHandler(Messages())
here = jax.make_mesh((devices,), ("here",), devices=jax.local_devices())
alone = jax.device_put(jax.numpy.arange(3), NamedSharding(here, PartitionSpec()))
good = replica_report(state_of(0) | {"alone": alone, "uncommitted": jax.numpy.ones(3)})
assert good.divergences == ()
assert good.replica_count == 8 + 8 + 8 + 4
found = replica_report(state_of(0, bad)).divergences
handler = adacheck.AdaCheckHandler(check_replicas="raise" if mode == "raise" else "warn")
with support.manager_of(root, handler) as manager:
    for step in (1, 2):
        manager.save(step, args=adacheck.SaveArgs(state_of(step, bad if step == 2 else None)))
        try:
            manager.wait_until_finished()
        except ReplicaError as error:
            messages.append(str(error))
    steps = list(manager.all_steps(read=True))
summary = {
    "report": [
        [d.path, d.box.start, d.box.stop, d.devices, d.processes, d.agreeing_count, d.replica_count]
        for d in found
    ],
    "message": " | ".join(messages),
    "steps": steps,
    "bad": jax.devices()[devices + 2].id,
}
Path(f"{out}-{own.process}.json").write_text(json.dumps(summary))
