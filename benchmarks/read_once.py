"""Bytes and seconds of a restore in several processes that read each box once, or each for itself.

    python -m benchmarks.read_once
    python -m benchmarks.read_once --mb 1000 --processes 2 4

Saves a base and deltas from one process, and restores the last step in 1, 2 and 4 processes of one
device each, onto replicated (data-parallel) and cut (FSDP) shardings: by turns as it comes by
default (auto), each process for itself, and together. Prints bytes that all processes read from
files, divided by the bytes of base and deltas, and the slowest process's seconds as the median of
some restores after a first one, which is given beside it: it compiles and opens connections.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from benchmarks.speed import child

_COUNTER = "/tensorstore/kvstore/file/bytes_read"
_CHOICES: dict[str, bool | None] = {"auto": None, "each for itself": False, "together": True}


def main() -> None:
    """Save once, and restore in every number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="megabytes of the state")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--deltas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(environment()))
    print("| processes | sharding | read | bytes read / stored | s | first s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        given = {"root": root, "mb": arguments.mb, "deltas": arguments.deltas}
        stored = child.measure(".read_once", **given)
        for processes in arguments.processes:
            given |= {"processes": processes, "repeats": arguments.repeats}
            for row in zip(*child.measure_each(".read_once", **given), strict=True):
                ratio = sum(each["bytes"] for each in row) / stored["bytes"]
                slowest_s = [max(times) for times in zip(*(e["s"] for e in row), strict=True)]
                print(
                    f"| {processes} | {row[0]['sharding']} | {row[0]['read']} | {ratio:.3f} "
                    f"| {statistics.median(slowest_s[1:]):.2f} | {slowest_s[0]:.2f} |",
                    flush=True,
                )


def run(root: str, mb: int, deltas: int, repeats: int = 0) -> Any:
    """Saves a base and deltas, or restores the last one some times."""
    return _restores(root, mb, deltas, repeats) if repeats else _save(root, mb, deltas)


def _state_of(mb: int) -> tuple[Any, Any, Any]:
    """A recorder, its chain, and params: 14 bytes a param with moments and a bfloat16 record."""
    import jax
    import jax.numpy as jnp
    import optax

    import adacheck_jax as adacheck

    count, width = 24, 512
    rows = max(64, mb * 10**6 // (14 * count * width) // 64 * 64)
    recorder = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"layer_{i}": jax.random.normal(key, (rows, width)) for i, key in enumerate(keys)}
    params |= {f"bias_{i}": jnp.zeros(width) for i in range(count)}
    return recorder, optax.chain(recorder), params


def _save(root: str, mb: int, deltas: int) -> Any:
    import jax
    import optax
    import orbax.checkpoint as ocp

    import adacheck_jax as adacheck
    from benchmarks.common import new_bytes

    recorder, chain, params = _state_of(mb)
    state = {"params": params, "opt_state": chain.init(params)}

    @jax.jit
    def train_step(state: Any, key: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state["params"])
        keys = jax.random.split(key, len(leaves))
        noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        gradient = jax.tree.unflatten(treedef, noise)
        updates, opt_state = chain.update(gradient, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    handler = adacheck.AdaCheckHandler(recorder)
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        for step in range(deltas + 1):
            state = train_step(state, jax.random.key(step))
            manager.save(step, args=adacheck.SaveArgs(state))
    return {"bytes": sum(new_bytes(Path(root) / str(step)) for step in range(deltas + 1))}


def _restores(root: str, mb: int, deltas: int, repeats: int) -> Any:
    import jax
    import orbax.checkpoint as ocp
    import tensorstore as ts

    import adacheck_jax as adacheck

    def bytes_read() -> int:
        found = ts.experimental_collect_matching_metrics(_COUNTER)
        return sum(int(value["value"]) for each in found for value in each["values"])

    _, chain, params = _state_of(mb)
    shapes = jax.eval_shape(lambda: {"params": params, "opt_state": chain.init(params)})
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    results = []
    for sharding in ("replicated", "cut"):

        def placed(leaf: Any, cut: bool = sharding == "cut") -> Any:
            axes = ("data",) if cut and leaf.ndim == 2 else ()
            where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        target = jax.tree.map(placed, shapes)
        times_s: dict[str, list[float]] = {name: [] for name in _CHOICES}
        counts: dict[str, int] = {}
        for _ in range(repeats + 1):
            for name, choice in _CHOICES.items():
                with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler()) as m:
                    before, start_s = bytes_read(), time.perf_counter()
                    args = adacheck.RestoreArgs(target, read_once=choice)
                    jax.block_until_ready(m.restore(deltas, args=args))
                    times_s[name].append(time.perf_counter() - start_s)
                    counts[name] = bytes_read() - before
        results += [
            {"sharding": sharding, "read": name, "bytes": counts[name], "s": times_s[name]}
            for name in _CHOICES
        ]
    return results


if __name__ == "__main__":
    main()
