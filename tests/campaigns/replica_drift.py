"""Runs whose replicas, declared equal, drift apart: is each saved step one replica of its state?

    python -m tests.campaigns.replica_drift --runs 200 --seed 0
    python -m tests.campaigns.replica_drift --runs 50 --seed 0 --processes 2

A seed draws a mesh, an optimizer, a check, and one or two faults that begin at some step: gradients
that are not averaged (of all replicas, of groups of them, or of one), a bit that flips once, a
device that computes another update. Then every reported step is restored: all of its leaves have to
be those of one device's neighbourhood.

With several processes the module is started once for each, as ``tests.one_process`` says.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and len(sys.argv) > 7 and not sys.argv[1].startswith("-"):
    from tests import one_process  # joins the other processes, before JAX is used

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from tests.campaigns import command
from tests.processes import launch
from tests.support import SHADOWS

STEPS = 10
SHAPES = {"a": (16, 8), "b": (8,), "c": (4, 16), "e": (96, 64)}
SMALL = ("a", "b", "c")
CUT = {"c": PartitionSpec("model"), "e": PartitionSpec(None, "model")}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}
_log = logging.getLogger("adacheck_jax")


@dataclass(frozen=True)
class Fault:
    """One way in which replicas come to differ.

    Attributes:
        kind: "apart", "groups", "one", "flip" or "device".
        step: first step that has it.
        leaves: params concerned.
        place: coordinate along the data axis, or device, concerned.
        is_late: True for a bit of the record, that flips behind the update.
    """

    kind: str
    step: int
    leaves: tuple[str, ...]
    place: int
    is_late: bool = False


@dataclass(frozen=True)
class Plan:
    """One run, drawn from a seed."""

    seed: int
    mesh: tuple[int, int]
    order: tuple[int, ...]
    optimizer: str
    options: dict[str, Any]
    faults: tuple[Fault, ...]
    recorded: frozenset[int]
    restored: int | None


@dataclass
class Outcome:
    """What became of one run.

    Attributes:
        saved: number of steps that were reported as saved.
        exact: number of these that are one replica of their state.
        wrong: steps that are of several replicas, or not of the one that is named.
        lost: steps that do not restore, with the error.
        given_up: recorded steps of which a warning said that they are not saved.
        refused: steps that were refused, with the error.
    """

    seed: int
    text: str
    saved: int = 0
    exact: int = 0
    wrong: list[int] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    given_up: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


def draw(seed: int, devices: int) -> Plan:
    """The run of a seed."""
    rng = random.Random(seed)
    mesh = rng.choice([(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)])
    if mesh[0] * mesh[1] > devices or devices not in (8,):
        mesh = (devices, 1)
    order = [*range(devices)]
    if rng.random() < 0.5:
        rng.shuffle(order)
    faults = []
    for _ in range(rng.choice([1, 1, 2])):
        names = rng.sample([*SHAPES], rng.randint(1, len(SHAPES)))
        kind = rng.choice(["apart", "groups", "one", "flip", "device"])
        place = rng.randrange(mesh[0] * mesh[1] if kind in ("flip", "device") else mesh[0])
        step, is_late = rng.randint(0, STEPS - 3), rng.random() < 0.5
        faults.append(Fault(kind, step, tuple(names), place, is_late))
    shadow = SHADOWS[rng.choice(["auto", "auto", "sample", "full"])]
    options: dict[str, Any] = {"shadow": shadow}
    if rng.random() < 0.2:
        options = {"delta": "bits"}
    if options == {"shadow": None}:  # which may miss one element of a large leaf
        faults = [replace(f, leaves=f.leaves if f.kind != "flip" else SMALL) for f in faults]
    options["max_deltas"] = rng.choice(["auto", 3])
    recorded = frozenset(s for s in range(STEPS) if rng.random() < 0.3)
    restored = rng.randint(4, STEPS - 1) if rng.random() < 0.25 else None
    chosen = tuple(order[: mesh[0] * mesh[1]])
    optimizer = rng.choice([*OPTIMIZERS])
    return Plan(seed, mesh, chosen, optimizer, options, tuple(faults), recorded, restored)


class Training:
    """The training of a plan: element-wise gradients, so that any mesh computes them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        devices = np.array(jax.devices())[[*plan.order]].reshape(plan.mesh)
        self.mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        self.recorder = adacheck.Recorder(OPTIMIZERS[plan.optimizer]())
        rng = np.random.default_rng(plan.seed)
        params = {k: rng.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
        state = {"params": params, "opt": self.recorder.init(jax.tree.map(jnp.asarray, params))}
        self.specs = jax.tree_util.tree_map_with_path(_spec_of, state)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        self.state = jax.tree.map(_placed, state, shardings)
        self._step = jax.jit(
            jax.shard_map(
                self._update,
                mesh=self.mesh,
                in_specs=(self.specs, PartitionSpec()),
                out_specs=self.specs,
                check_vma=False,
            )
        )

    def advance(self, step: int) -> None:
        """Trains one step, with the faults that have begun."""
        self.state = self._step(self.state, np.int32(step))
        for fault in self.plan.faults:
            if fault.kind == "flip" and fault.step == step:
                at = self.mesh.devices.flat[fault.place]
                where = self.state["params"]
                if fault.is_late:  # what the update consumed, after it did
                    where = self.state["opt"].adacheck_record
                for name in fault.leaves:
                    where[name] = _flipped(where[name], at)

    def _update(self, state: Any, step: jax.Array) -> Any:
        params, row = state["params"], jax.lax.axis_index("data")
        device = row * self.plan.mesh[1] + jax.lax.axis_index("model")
        gradients = {k: jnp.sin(3 * p + 0.1 * step) for k, p in params.items()}
        wrong = dict.fromkeys(params, 0.0)
        for fault in self.plan.faults:
            begun = step >= fault.step
            offsets = {
                "apart": row.astype(jnp.float32),
                "groups": (row // 2).astype(jnp.float32),
                "one": jnp.where(row == fault.place, 1.0, 0.0),
            }
            for name in fault.leaves:
                if fault.kind in offsets:
                    more = jnp.where(begun, 0.01 * offsets[fault.kind], 0.0)
                    gradients[name] = gradients[name] + more
                elif fault.kind == "device":
                    is_it = begun & (device == fault.place)
                    wrong[name] = wrong[name] + jnp.where(is_it, 1e-3, 0.0)
        updates, inner = self.recorder.update(gradients, state["opt"], params)
        params = optax.apply_updates(params, updates)
        params = {k: p + wrong[k] for k, p in params.items()}
        return {"params": params, "opt": inner}

    def shards(self) -> list[dict[Any, np.ndarray]]:
        """For each leaf the bits that each device of this process holds."""
        return [
            {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
            for leaf in jax.tree.leaves(self.state)
        ]

    def leads_of(self, held: list[dict[Any, np.ndarray]], state: Any) -> set[int]:
        """Positions in the mesh of the devices whose neighbourhood has a state, as seen here.

        Args:
            held: as of :meth:`shards`.
            state: a restored state.
        """
        shape = self.mesh.devices.shape
        found = {n: np.unravel_index(n, shape) for n in range(self.mesh.devices.size)}
        where = {device: at for at, device in np.ndenumerate(self.mesh.devices)}
        for leaf, spec, values in zip(
            jax.tree.leaves(state), jax.tree.leaves(self.specs), held, strict=True
        ):
            new = {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
            uncut = [n for n, axis in enumerate(("data", "model")) if axis not in [*spec]]
            for device, value in values.items():
                if value.tobytes() != new[device].tobytes():
                    at = where[device]  # neighbours that would have given this box, and did not
                    found = {
                        n: primary
                        for n, primary in found.items()
                        if any(primary[x] != at[x] for x in uncut)
                    }
        return {*found}


def _spec_of(path: Any, leaf: Any) -> PartitionSpec:
    name = getattr(path[-1], "key", "")
    return CUT.get(name, PartitionSpec()) if np.shape(leaf) == SHAPES.get(name) else PartitionSpec()


def _placed(value: Any, sharding: NamedSharding) -> jax.Array:
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])


def _flipped(array: jax.Array, device: Any) -> jax.Array:
    """The array with one bit turned over on one device."""
    buffers = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[1] ^= 4
        buffers.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)


def run(plan: Plan, root: Path) -> dict[int, dict[str, Any]]:
    """Trains, saves and restores; what became of each step, as this process sees it."""
    training, held, found = Training(plan), dict[int, Any](), dict[int, dict[str, Any]]()
    handler = adacheck.AdaCheckHandler(training.recorder, **plan.options)
    pending: list[int] = []
    with (
        command.GivenUp() as given_up,
        ocp.CheckpointManager(root, item_handlers=handler) as manager,
    ):
        holders: dict[int, int] = {}
        for step in range(STEPS):
            training.advance(step)
            held[step] = training.shards()
            try:
                if step in plan.recorded and handler.record_step(training.state, step):
                    pending.append(step)
                    continue
                manager.save(step, args=adacheck.SaveArgs(training.state))
                manager.wait_until_finished()
                holders |= dict.fromkeys([*pending, step], step)
            except adacheck.AdaCheckError as error:
                lost = dict.fromkeys([*pending, step], str(error)[:300])
                found |= {each: {"refused": text} for each, text in lost.items()}
                manager.reload()
            pending = []
            if step == plan.restored and (newest := manager.latest_step()) is not None:
                training.state = manager.restore(newest, args=adacheck.RestoreArgs(training.state))
        for step, holder in holders.items():
            if step in given_up.steps:
                found[step] = {"given_up": True}
                continue
            try:
                wanted = adacheck.RestoreArgs(training.state, step=None if step == holder else step)
                restored = manager.restore(holder, args=wanted)
            except Exception as error:
                found[step] = {"lost": f"{type(error).__name__}: {error}"[:300]}
                continue
            leads = training.leads_of(held[step], restored)
            named = handler.restored.replica if handler.restored else ""
            ids = [f"{d.platform}:{d.id}" for d in training.mesh.devices.flat]
            found[step] = {
                "leads": sorted(leads),
                "named": ids.index(named) if named else None,
            }
    return found


def judged(plan: Plan, parts: list[dict[int, dict[str, Any]]]) -> Outcome:
    """The outcome of a run, from what each of its processes saw."""
    outcome = Outcome(plan.seed, str(plan))
    for step in sorted(parts[0]):
        own = [part[step] for part in parts]
        if refused := [each["refused"] for each in own if "refused" in each]:
            outcome.refused[step] = refused[0]
            continue
        if any("given_up" in each for each in own):
            outcome.given_up.append(step)
            continue
        outcome.saved += 1
        if lost := [each["lost"] for each in own if "lost" in each]:
            outcome.lost[step] = lost[0]
            continue
        leads = set.intersection(*(set(each["leads"]) for each in own))
        named = own[0]["named"]
        is_right = named in leads if named is not None else len(leads) == len(plan.order)
        if not leads or not is_right:
            outcome.wrong.append(step)
            continue
        outcome.exact += 1
    return outcome


def in_processes(seed: int, processes: int) -> Outcome:
    """A run of several processes."""
    plan = draw(seed, 8 // 2)
    with tempfile.TemporaryDirectory() as folder:
        out, worker = Path(folder, "out"), "tests.campaigns.replica_drift"
        launch(str(seed), processes, Path(folder, "root"), out, 8 // processes // 2, worker)
        parts = [json.loads(Path(f"{out}-{n}.json").read_text()) for n in range(processes)]
    return judged(plan, [{int(k): v for k, v in part.items()} for part in parts])


def outcomes(seeds: Iterator[int], processes: int) -> Iterator[Outcome]:
    """The outcomes of several runs."""
    for seed in seeds:
        if processes > 1:
            yield in_processes(seed, processes)
            continue
        with tempfile.TemporaryDirectory() as folder:
            plan = draw(seed, 8)
            yield judged(plan, [run(plan, Path(folder))])


def main() -> None:
    """Reads the command line, and prints what was found."""
    if len(sys.argv) > 7 and not sys.argv[1].startswith("-"):
        own = one_process.own
        plan = draw(int(own.mode), own.devices * own.processes)
        Path(f"{own.out}-{own.process}.json").write_text(json.dumps(run(plan, Path(own.root))))
        return
    parser = command.parser(__doc__, seed=0)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    _log.propagate = False
    sums = Counter[str]()
    seeds = itertools.islice(itertools.count(options.seed), options.runs)
    for each in outcomes(seeds, options.processes):
        bad = f" WRONG {each.wrong} LOST {each.lost}" if each.wrong or each.lost else ""
        told = f"{each.seed}: saved {each.saved} exact {each.exact}"
        print(f"{told} refused {[*each.refused]}{bad}", flush=True)
        if bad:
            print(each.text, each.refused, flush=True)
        sums.update(saved=each.saved, exact=each.exact)
        sums.update(
            {name: len(getattr(each, name)) for name in ("wrong", "lost", "refused", "given_up")}
        )
    print(dict(sums))
    sys.exit(bool(sums["wrong"] or sums["lost"]))


if __name__ == "__main__":
    main()
