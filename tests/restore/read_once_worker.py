"""One of several processes that restore together, and compare what they get with what was saved.

Usage: read_once_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

At the end the first process finds its reads failing, and all have to raise.
Prints two lines of JSON: the bytes that were read from files, by layout and way of reading; and
the error.
"""

from __future__ import annotations

import json
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError
from adacheck_jax.store import host_memory
from tests.restore.read_once_state import saved_run

LAYOUTS = {"replicated": (), "cut": ("data",), "half cut": ("half",)}
"""Mesh axes that cut the first axis of each array whose length they divide."""


def bytes_read() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for each in found for value in each["values"])


def target_of(state: Any, axes: tuple[str, ...]) -> Any:
    count = jax.device_count()
    mesh = jax.make_mesh((count // 2, 2), ("half", "pair")) if "half" in axes else None
    mesh = mesh or jax.make_mesh((count,), ("data",))
    cuts = int(np.prod([mesh.shape[axis] for axis in axes]))

    def leaf(path: Any, x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        name = jax.tree_util.keystr(path)
        if "host" in name:
            return np.empty(x.shape, x.dtype)
        is_cut = bool(axes) and x.ndim > 0 and x.shape[0] % cuts == 0
        spec = PartitionSpec(axes) if is_cut else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(leaf, state)


def bits(leaf: Any) -> list[tuple[Any, bytes]]:
    """Bytes of every shard on this process."""
    if not isinstance(leaf, jax.Array):
        return [((), np.asarray(leaf).tobytes())]
    leaf = (
        jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )
    return [(str(s.index), np.asarray(s.data).tobytes()) for s in leaf.addressable_shards]


_, state = saved_run()
counts: dict[str, dict[str, int]] = {}
for name, axes in LAYOUTS.items():
    found = {}
    for way in (False, True):
        with ocp.CheckpointManager(own.root, item_handlers=adacheck.AdaCheckHandler()) as manager:
            before = bytes_read()
            args = adacheck.RestoreArgs(target_of(state, axes), read_once=way)
            found[way] = manager.restore(2, args=args)
            way_name = "together" if way else "alone"
            counts.setdefault(name, {})[way_name] = bytes_read() - before
    for alone, together in zip(*map(jax.tree.leaves, (found[False], found[True])), strict=True):
        assert getattr(alone, "sharding", None) == getattr(together, "sharding", None)
        assert bits(alone) == bits(together)
    with np.load(own.out) as saved:
        for key, leaf in zip(saved.files, jax.tree.leaves(found[True]), strict=True):
            for index, data in bits(leaf):
                whole = saved[key]
                part = whole if index == () else whole[eval(str(index))]
                assert np.ascontiguousarray(part).tobytes() == data, key
print(json.dumps(counts))
if own.process == 0:
    host_memory.begin_read_into = lambda *_: (_ for _ in ()).throw(ValueError("a bad chunk"))
with ocp.CheckpointManager(own.root, item_handlers=adacheck.AdaCheckHandler()) as manager:
    try:
        manager.restore(2, args=adacheck.RestoreArgs(target_of(state, ()), read_once=True))
    except IntegrityError as error:
        print(json.dumps(str(error)))
    else:
        raise AssertionError("expected every process to raise")
