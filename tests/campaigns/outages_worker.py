"""One process of a run of several, through one outage of its storage; see ``outages.py``.

Usage: outages_worker.py JSON PROCESS PROCESSES PORT ROOT OUT DEVICES

Writes what it was answered, and how long it waited, to OUT-PROCESS.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from tests import support
from tests.campaigns import outages
from tests.campaigns.disk import Run


class SharedRun(Run):
    """A run of which each process has some rows of each matrix."""

    def __init__(self) -> None:
        super().__init__()
        mesh = support.mesh_of((jax.device_count(), 1))

        def placed(leaf: Any) -> Any:
            parts = PartitionSpec(mesh.axis_names[0]) if leaf.ndim else PartitionSpec()
            host, there = np.asarray(leaf), NamedSharding(mesh, parts)
            return jax.make_array_from_callback(host.shape, there, lambda index: host[index])

        self.state = jax.tree.map(placed, self.state)

    def advance(self) -> Any:
        self.state = self._train_step(self.state)
        self.step += 1
        leaves = jax.tree.leaves(self.state)
        self.saved[self.step] = [np.asarray(x.addressable_shards[0].data) for x in leaves]
        return self.state


given = json.loads(own.mode)
trial = outages.Trial(SharedRun(), given["pace_s"])
manager = adacheck.checkpoint_manager(
    own.root, trial.run.recorder, max_to_keep=None, **given["options"]
)


def outage() -> None:
    time.sleep(given["delay_s"])
    with outages.on_disk(own.root, f"{own.out}-log{own.process}", given["does"]) as storage:
        storage.leave()
        time.sleep(given["seconds"])
        storage.come_back()


with manager:
    for _ in range(10):
        trial.step(manager)
    trial.healthy = len(trial.calls_s)
    if given["does"] and own.process in given["where"]:
        threading.Thread(target=outage).start()
    Path(f"{own.out}-ready{own.process}").touch()
    for _ in range(int((given["delay_s"] + given["seconds"] + 5) / given["pace_s"])):
        trial.step(manager)
    for _ in range(600):
        if manager._keeping.promised.last < 0:  # as in all processes
            break
        trial.step(manager)
    for _ in range(3):
        trial.step(manager)
    try:
        manager.wait_until_finished()
    except Exception as error:
        trial.errors.append(f"{type(error).__name__}: {error}"[:400])
told = {f.name: getattr(trial, f.name) for f in dataclasses.fields(trial) if f.name != "run"}
Path(f"{own.out}-{own.process}").write_text(json.dumps(told))
