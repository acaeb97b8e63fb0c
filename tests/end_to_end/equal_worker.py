"""One process of a run of which several processes have the same.

Usage: equal_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is equal: leaves are equal, though different processes own them; the second base has other
values, of which fewer are equal; or failing: the last process cannot write, once the processes have
told each other what is equal; or local: every process has the same by itself, but at step 3 process
1 has another leaf.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.store import volumes
from tests import support

SHAPE = (64, 512)


def arrays(seed: int, *, all_equal: bool) -> dict[str, np.ndarray]:
    """Tied leaves and copies of an expert; else one bit of each second one is another."""
    noise = np.random.default_rng(seed).standard_normal((3, *SHAPE)).astype(np.float32)
    found = {"embedding": noise[0], "head": noise[0].copy(), "rest": noise[1]}
    found["experts"] = np.repeat(noise[2:], 8, 0)
    if not all_equal:
        found["head"].view(np.uint32)[-1, -1] ^= 1
        found["experts"].view(np.uint32)[4:, 0, 0] ^= 1
    return found


def placed(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Each expert lies on one device, and all else on every one."""
    mesh = support.mesh_of((jax.device_count(),))
    specs = {"experts": PartitionSpec("data")}
    return {
        name: jax.make_array_from_callback(
            each.shape, NamedSharding(mesh, specs.get(name, PartitionSpec())), each.__getitem__
        )
        for name, each in values.items()
    }


def same(found: Any, state: dict[str, jax.Array]) -> bool:
    """True if this process's shards hold the same bits."""
    return all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for name in state
        for a, b in zip(found[name].addressable_shards, state[name].addressable_shards, strict=True)
    )


def equal() -> dict[str, Any]:
    """Saves bases; stock Orbax and this library restore each."""
    states = [placed(arrays(n, all_equal=n != 1)) for n in range(3)]
    with support.manager_of(own.root, adacheck.AdaCheckHandler()) as manager:
        for step, state in enumerate(states):
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        restored = [
            manager.restore(step, args=adacheck.RestoreArgs(support.abstract(state)))
            for step, state in enumerate(states)
        ]
    stock = [
        ocp.StandardCheckpointer().restore(
            Path(own.root, str(step), "default"),
            jax.tree.map(ocp.utils.to_shape_dtype_struct, state),
        )
        for step, state in enumerate(states)
    ]
    return {
        "own": [*map(same, restored, states)],
        "stock": [*map(same, stock, states)],
    }


def failing() -> dict[str, Any]:
    """A process fails behind the exchange; all learn of it, and the next step is saved."""
    write, calls = volumes.Volume.write, []

    def refused(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no such luck")
        write(*arguments)

    if own.process == own.processes - 1:
        volumes.Volume.write = refused
    states = [placed(arrays(n, all_equal=True)) for n in range(2)]
    told = ""
    with support.manager_of(own.root, adacheck.AdaCheckHandler()) as manager:
        for step, state in enumerate(states):
            try:
                manager.save(step, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
            except Exception as error:
                told = str(error)
        steps = [*manager.all_steps(read=True)]
        restored = manager.restore(steps[-1], args=adacheck.RestoreArgs(support.abstract(state)))
    return {"told": told, "steps": steps, "own": same(restored, states[steps[-1]])}


def local() -> dict[str, Any]:
    """Saves bases; what each process has for itself comes back to it."""
    here = jax.make_mesh((own.devices,), ("here",), devices=jax.local_devices())
    everywhere = NamedSharding(support.mesh_of((jax.device_count(),)), PartitionSpec("data"))
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((2048, 1024)).astype(np.float32)
    cut = rng.standard_normal((8, 512))
    state = {
        "global": jax.device_put(np.arange(64.0), everywhere),
        "host": rng.integers(0, 9, 1 << 21, dtype=np.int8),
        "one device": jax.device_put(whole, jax.local_devices()[0]),
        "local mesh": jax.device_put(cut, NamedSharding(here, PartitionSpec("here"))),
        "number": 7,
    }
    expected = {key: np.asarray(state[key]) for key in state if key != "global"}
    message = ""
    with support.manager_of(own.root, adacheck.AdaCheckHandler(max_deltas=0)) as manager:
        for step in (1, 2, 3, 4):
            is_other = step == 3 and own.process == 1
            saved = state | ({"host": state["host"] + 1} if is_other else {})
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
    return {"steps": steps, "message": message}


result = {"equal": equal, "failing": failing, "local": local}[own.mode]()
Path(f"{own.out}-{own.process}.json").write_text(json.dumps(result))
