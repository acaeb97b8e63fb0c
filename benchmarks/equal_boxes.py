"""Bytes and seconds of bases whose leaves are equal though nothing declares it, in 4 processes.

    python -m benchmarks.equal_boxes
    python -m benchmarks.equal_boxes --mb 200 --cases tied experts --bases 5

Each state is saved as several bases, whose values differ so that no file is used again: by turns as
it is, where each process looks for what is equal in its own part alone, and by stock Orbax; and
stock Orbax restores the last one of ours to the bits of the state. ``dp`` replicates every leaf,
``fsdp`` cuts its first axis. Prints bytes of a base divided by those of the state, and of the
slowest process the median milliseconds that a save blocks and the seconds until it is durable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment
from benchmarks.speed import child

_PROCESSES, _WIDTH, _EXPERTS = 4, 512, 8
State = dict[str, np.ndarray]
Noise = Callable[..., np.ndarray]


def tied(noise: Noise, rows: int) -> State:
    """An embedding of a quarter of the bytes that is the output layer too."""
    embedding = noise(rows, _WIDTH)
    return {"embedding": embedding, "head": embedding, "rest": noise(2 * rows, _WIDTH)}


def small(noise: Noise, rows: int) -> State:
    """Pairs of equal leaves of 256 KiB among unequal ones of other shapes."""
    pairs = [noise(128, _WIDTH) for _ in range(max(1, rows // 512))]
    state = {f"{name}{n}": each for n, each in enumerate(pairs) for name in ("embedding", "head")}
    return state | {f"rest{n}": noise(128, _WIDTH + n) for n in range(2 * len(pairs))}


def average(noise: Noise, rows: int) -> State:
    """Params, and their moving average at its start."""
    params = {f"layer{n}": noise(rows // 2, _WIDTH) for n in range(4)}
    params |= {f"bias{n}": noise(5000 + 4 * n) for n in range(8)}
    return params | {f"average_{name}": each for name, each in params.items()}


def experts(noise: Noise, rows: int) -> State:
    """A layer whose experts begin as copies of one."""
    stack = np.repeat(noise(1, rows // 2, _WIDTH), _EXPERTS, 0)
    return {"experts": stack, "gate": noise(_WIDTH, _EXPERTS)}


def almost(noise: Noise, rows: int) -> State:
    """Experts of which each differs from the others in one element."""
    state = experts(noise, rows)
    state["experts"][:, 1, 1] += np.arange(_EXPERTS, dtype=np.float32)
    return state


def unequal(noise: Noise, rows: int) -> State:
    """Leaves of which none is equal to another."""
    return {f"layer{n}": noise(rows // 8, _WIDTH) for n in range(32)}


CASES: Mapping[str, Callable[[Noise, int], State]] = {
    each.__name__: each for each in (tied, small, average, experts, almost, unequal)
}


def main() -> None:
    """Run all cases in one set of processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64, help="megabytes of a state")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--bases", type=int, default=4)
    arguments = parser.parse_args()
    print(json.dumps(environment() | {"processes": _PROCESSES, "mb": arguments.mb}))
    print(
        "| case | layout | base ÷ state | alone | stock | blocked ms | alone | stock "
        "| durable s | alone | stock |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        given = {"processes": _PROCESSES, "mb": arguments.mb, "bases": arguments.bases}
        for row in zip(*child.measure_each(".equal_boxes", case=case, **given), strict=True):
            cells = [f"{each:.3f}" for each in row[0]["bytes"]]
            for key, factor, digits in (("blocked_s", 1000, 1), ("durable_s", 1, 3)):
                slowest = map(max, zip(*(each[key] for each in row), strict=True))
                cells += [f"{factor * each:.{digits}f}" for each in slowest]
            print(f"| {case} | {row[0]['layout']} | {' | '.join(cells)} |", flush=True)


def run(root: str, mb: int, bases: int, case: str) -> Any:
    """Saves a case in both layouts."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, rows = jax.make_mesh((_PROCESSES,), ("data",)), mb * 10**6 // (4 * _WIDTH * 4) // 64 * 64
    result = []
    for layout in ("dp", "fsdp"):

        def place(array: np.ndarray, layout: str = layout) -> jax.Array:
            is_cut = layout == "fsdp" and array.shape[0] % _PROCESSES == 0
            sharding = NamedSharding(mesh, PartitionSpec("data") if is_cut else PartitionSpec())
            return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])

        states = []
        for step in range(bases):
            generator = np.random.default_rng(step)

            def noise(*shape: int, generator: np.random.Generator = generator) -> np.ndarray:
                return generator.standard_normal(shape).astype(np.float32)

            states.append({key: place(each) for key, each in CASES[case](noise, rows).items()})
        result.append({"layout": layout, **_measured(Path(root) / layout, states)})
    return result


def _measured(root: Path, states: list[Any]) -> dict[str, list[float]]:
    import jax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    import adacheck_jax as adacheck
    from adacheck_jax.store import sharing
    from benchmarks.common import new_bytes

    share, own = sharing.share, adacheck.AdaCheckHandler
    ways = {"own": own, "alone": own, "stock": ocp.StandardCheckpointHandler}
    managers = {
        way: ocp.CheckpointManager(root / way, item_handlers=handler())
        for way, handler in ways.items()
    }
    blocked_s: dict[str, list[float]] = {way: [] for way in ways}
    durable_s: dict[str, list[float]] = {way: [] for way in ways}
    for step, state in enumerate(states):
        for way, manager in managers.items():
            sharing.share = (lambda *_: {}) if way == "alone" else share
            arguments = ocp.args.StandardSave if way == "stock" else adacheck.SaveArgs
            multihost_utils.sync_global_devices(f"{root} {way} {step}")
            begin_s = time.perf_counter()
            manager.save(step, args=arguments(state))
            blocked_s[way].append(time.perf_counter() - begin_s)
            manager.wait_until_finished()
            durable_s[way].append(time.perf_counter() - begin_s)
    for manager in managers.values():
        manager.close()
    state_bytes, number = sum(each.nbytes for each in states[-1].values()), str(len(states) - 1)
    last = root / "own" / number / "default"
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states[-1])
    restored = ocp.StandardCheckpointer().restore(last, target)
    for name, leaf in states[-1].items():
        pairs = zip(leaf.addressable_shards, restored[name].addressable_shards, strict=True)
        for a, b in pairs:
            if np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes():
                raise SystemExit(f"{last}: stock Orbax restores other bits in {name}")
    return {
        "bytes": [new_bytes(root / way / number) / state_bytes for way in ways],
        # The first save of a process compiles.
        "blocked_s": [statistics.median(each[1:]) for each in blocked_s.values()],
        "durable_s": [statistics.median(each[1:]) for each in durable_s.values()],
    }


if __name__ == "__main__":
    main()
