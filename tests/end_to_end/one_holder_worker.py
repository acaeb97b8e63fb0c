"""One process of a run whose state lies, in parts, on the devices of one process alone.

Usage: one_holder_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is save, in one process; or restore, in several: each of them compares the shards that it has
with what was saved. What they restored no process can save, and all of them say so.
"""

from __future__ import annotations

from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from tests import support

STEPS = 3
first, last = (SingleDeviceSharding(jax.devices()[i]) for i in (0, -1))
half = NamedSharding(Mesh(np.array(jax.devices()[: own.devices]), ("half",)), PartitionSpec("half"))


def others(step: int) -> dict[str, Any]:
    """Leaves that no update explains; some of them change at every step."""
    rng = np.random.default_rng(step)
    return {
        "constant": np.arange(6, dtype=np.float32),
        "cut": rng.standard_normal((8, 4)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "key": np.array([step, 7], np.uint32),
        "whole": rng.integers(0, 99, 7, dtype=np.int32),
    }


PLACES = {"constant": last, "cut": half, "empty": last, "key": first, "whole": last}


def keyed(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "key": jax.random.wrap_key_data(state["key"])}


def place_of(path: Any, leaf: Any) -> jax.sharding.Sharding:
    """The counters of the update, its smallest param and a bias lie on one device each."""
    name = jax.tree_util.keystr(path)
    if "others" in name:
        return PLACES[path[-1].key]
    if "bias" in name:
        return last
    if leaf.ndim == 0:
        return first
    spec = PartitionSpec("data") if leaf.ndim else PartitionSpec()
    return NamedSharding(support.mesh_of((jax.device_count(),)), spec)


def state_of(run: support.Run) -> dict[str, Any]:
    return {"run": run.state, "others": keyed(others(run.count))}


def shards(leaf: Any) -> list[tuple[tuple[slice, ...], bytes]]:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return [(each.index, np.asarray(each.data).tobytes()) for each in leaf.addressable_shards]


def assert_restores(read_once: bool, step: int) -> Any:
    restored = manager.restore(step, args=adacheck.RestoreArgs(target, read_once=read_once))
    with np.load(f"{own.out}-{step}.npz") as saved:
        expected = [saved[name] for name in saved.files]
    found = jax.tree_util.tree_leaves_with_path(restored)
    for (path, leaf), wanted, whole in zip(found, jax.tree.leaves(target), expected, strict=True):
        assert leaf.sharding == wanted.sharding, path
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype), path
        here = leaf.sharding.addressable_devices
        assert {each.device for each in leaf.addressable_shards} == here, path
        for index, data in shards(leaf):
            assert whole[index].tobytes() == data, path
    return restored


def save(state: Any) -> None:
    manager.save(STEPS, args=adacheck.SaveArgs(state))
    manager.wait_until_finished()


run = support.dict_run(support.mesh_of((own.devices,)))
handler = adacheck.AdaCheckHandler(run.recorder if own.mode == "save" else None)
with support.manager_of(own.root, handler) as manager:
    if own.mode == "save":
        for step in range(STEPS):
            state = state_of(run)
            np.savez(f"{own.out}-{step}.npz", *support.host_copy(state))
            manager.save(step, args=adacheck.SaveArgs(state))
            run.advance()
    else:
        target = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place_of(path, x)),
            jax.eval_shape(lambda: state_of(run)),
        )
        for read_once in (False, True):
            for step in (0, STEPS - 1):
                restored = assert_restores(read_once, step)
        kernel = restored["run"]["params"]["in"]["kernel"]
        for name in ("whole", "cut"):
            with pytest.raises(MismatchError, match=f"leaf {name}: it lies on devices of"):
                save({"kernel": kernel, name: restored["others"][name]})
