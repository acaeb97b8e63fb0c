"""Runs whose leaves change their place, data type and structure in between, saved all the while.

    nice python -m tests.campaigns.places --minutes 5
    python -m tests.campaigns.places --only 17
    nice python -m tests.campaigns.places --scheduled --minutes 60

Each run is drawn from its seed: a handler's options, and for each step what becomes of the state
after its update: it goes to another mesh, another device, to numpy and back, into another memory of
the devices; its params get another data type, or it gets a leaf or a layer more or less. Steps are
saved and recorded without a wait, or as if the devices still computed them; in between an older one
is looked at, or the run goes on in a new manager. In the end every step that was reported as saved
is restored and compared bit by bit. Nothing but this library's own errors may be raised, and of
them none: no such change is a fault.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.state import exported_update
from tests import support
from tests.campaigns import command
from tests.save.loop import kinds

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sample": {"shadow": None},
    "full": {"shadow": adacheck.Shadow(on_devices=True)},
    "bits": {"delta": "bits"},
    "short": {"max_deltas": 2},
    "large": {},  # no second copy is kept, as of a state that takes gigabytes
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
}
CHANGES = ("place", "place", "place", "some leaves", "type", "leaf", "layer")
LOOKS = ("look", "reopen")
WIDTH = 72  # more elements than a sample takes whole


@functools.cache
def _mesh(shape: tuple[int, ...], is_turned: bool = False, is_explicit: bool = False) -> Any:
    devices = jax.devices()[: int(np.prod(shape))]
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    names = ("data", "model")[: len(shape)]
    return jax.sharding.Mesh(
        np.array(devices[::-1] if is_turned else devices).reshape(shape),
        names,
        axis_types=(kind,) * len(shape),
    )


def _on_mesh(mesh: Any, *, cuts: bool = True, memory: str | None = None) -> Callable[[Any], Any]:
    def place(leaf: Any) -> Any:
        rows = np.ndim(leaf) == 2 and np.shape(leaf)[0] % mesh.devices.shape[0] == 0
        spec = PartitionSpec(mesh.axis_names[0]) if cuts and rows else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec, memory_kind=memory))

    return place


def _on_device(number: int, memory: str | None = None) -> Callable[[Any], Any]:
    where = SingleDeviceSharding(jax.devices()[number], memory_kind=memory)
    return lambda leaf: jax.device_put(leaf, where)


PLACES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "numpy": lambda: np.array,
    "one": lambda: _on_device(0),
    "another": lambda: _on_device(5),
    "eight": lambda: _on_mesh(_mesh((8,))),
    "eight turned": lambda: _on_mesh(_mesh((8,), True)),
    "eight whole": lambda: _on_mesh(_mesh((8,)), cuts=False),
    "four": lambda: _on_mesh(_mesh((4,))),
    "four turned": lambda: _on_mesh(_mesh((4,), True)),
    "four by two": lambda: _on_mesh(_mesh((4, 2))),
    "explicit": lambda: _on_mesh(_mesh((4, 2), is_explicit=True)),
    "eight pinned": lambda: _on_mesh(_mesh((8,)), memory="pinned_host"),
    "eight unpinned": lambda: _on_mesh(_mesh((8,)), memory="unpinned_host"),
    "one pinned": lambda: _on_device(0, "pinned_host"),
    "one unpinned": lambda: _on_device(0, "unpinned_host"),
}


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        change: one of :data:`CHANGES` that is made after its update; empty for none.
        place: one of :data:`PLACES`, where the change needs one.
        records: True if it is recorded where it can be, and not saved.
        computes: True if it is saved as if the devices still computed it.
        waits: True if its save is waited for.
        look: one of :data:`LOOKS` that is made behind it; empty for none.
    """

    change: str
    place: str
    records: bool
    computes: bool
    waits: bool
    look: str


@dataclass(frozen=True)
class Plan:
    """A run."""

    options: str
    optimizer: str
    steps: tuple[Step, ...]

    @classmethod
    def drawn(cls, seed: int, length: int = 24) -> Plan:
        """The run of a seed."""
        rng = random.Random(seed)

        def chance(share: float) -> bool:
            return rng.random() < share

        return cls(
            rng.choice([*OPTIONS]),
            "adamw" if chance(0.75) else "muon",
            tuple(
                Step(
                    change=rng.choice(CHANGES) if chance(0.45) else "",
                    place=rng.choice([*PLACES]),
                    records=chance(0.4),
                    computes=chance(0.4),
                    waits=chance(0.3),
                    look=rng.choice(LOOKS) if chance(0.06) else "",
                )
                for _ in range(length)
            ),
        )


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        saved: number of steps that were reported as saved.
        problems: what is not as it has to be.
        kinds: for each save B for a base, R for a replayed delta, D for differences.
    """

    saved: int = 0
    problems: list[str] = field(default_factory=list)
    kinds: str = ""


@functools.cache
def _program(optimizer: str, is_large: bool) -> tuple[adacheck.Recorder, Any]:
    """An update that no other one shares what is kept with, and the step that makes it."""
    del is_large
    recorder = adacheck.Recorder(OPTIMIZERS[optimizer]())

    @jax.jit
    def step(state: Any, number: Any) -> Any:
        params = state["params"]
        grads = jax.tree.map(lambda p: jnp.sin(p * 3 + number).astype(p.dtype), params)
        updates, inner = recorder.update(grads, state["opt_state"], params)
        return {**state, "params": optax.apply_updates(params, updates), "opt_state": inner}

    return recorder, step


def _params(layers: int, dtype: Any) -> Any:
    wide = jnp.linspace(-1, 1, WIDTH * 64).reshape(64, WIDTH)
    params = {f"layer_{n}": {"w": wide + n, "b": jnp.ones(64) + n} for n in range(layers)}
    return jax.tree.map(lambda x: x.astype(dtype), {**params, "scale": jnp.ones(())})


class Run:
    """A run in work: the state on one device, which trains it, and places of what is saved."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self.recorder, self._step = _program(plan.optimizer, plan.options == "large")
        self.plan, self.root = plan, root
        self.outcome, self.saved = Outcome(), dict[int, tuple[list[np.ndarray], Any]]()
        self.recorded, self.pending = list[int](), list[int]()
        self._given_up = command.GivenUp().__enter__()
        self.holders: dict[int, int] = {}
        self._dtype, self._layers, self._more = jnp.float32, 1, False
        self._place: Callable[[Any], Any] = _on_device(0)
        self._some: Callable[[Any], Any] | None = None
        self._begin()
        self._open()

    def _begin(self) -> None:
        params = _params(self._layers, self._dtype)
        self.state = {"params": params, "opt_state": self.recorder.init(params)}

    def _open(self) -> None:
        self.handler = adacheck.AdaCheckHandler(self.recorder, **OPTIONS[self.plan.options])
        self.manager = support.manager_of(self.root, self.handler)

    def change(self, kind: str, place: str) -> None:
        if kind == "place":
            self._place, self._some = PLACES[place](), None
        elif kind == "some leaves":
            self._some = PLACES[place]()
        elif kind == "type":
            self._dtype = jnp.bfloat16 if self._dtype == jnp.float32 else jnp.float32
            self._begin()
        elif kind == "layer":
            self._layers = 3 - self._layers
            self._begin()
        elif kind == "leaf":
            self._more = not self._more

    def placed(self, number: int) -> Any:
        """The state as it is saved."""
        state = dict(self.state, number=np.int32(number))
        if self._more:
            state["more"] = jnp.arange(8.0) + number
        leaves, treedef = jax.tree.flatten(state)
        some = self._some
        return treedef.unflatten(
            self._place(x) if some is None or n % 3 else some(x) for n, x in enumerate(leaves)
        )

    def step(self, number: int, step: Step) -> None:
        self.state = jax.block_until_ready(self._step(self.state, np.float32(number)))
        self.change(step.change, step.place)
        state = self.placed(number)
        with self._told(number), self._computing(step.computes):
            if step.records and self.handler.record_step(state, number):
                self._note(number, state)
                self.recorded.append(number)
            else:
                self.save(number, state)
        if step.waits:
            self.wait()
        if step.look == "look" and self.saved:
            self.look(random.Random(number).choice([*self.saved]))
        elif step.look == "reopen":
            self.reopen(number)

    def _note(self, number: int, state: Any) -> None:
        alone = SingleDeviceSharding(jax.devices()[3])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                np.shape(x), x.dtype, sharding=getattr(x, "sharding", alone)
            ),
            state,
        )
        self.saved[number] = support.host_copy(state), target

    def save(self, number: int, state: Any) -> None:
        """Saves a step; what was saved before it is certain then."""
        if not self.manager.save(number, args=adacheck.SaveArgs(state)):
            raise AssertionError(f"step {number} was not saved")
        self._note(number, state)
        self.pending, self.recorded = [*self.recorded, number], []
        self.holders |= dict.fromkeys(self.pending, number)

    def wait(self) -> None:
        with self._told(None):
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def _told(self, number: int | None) -> Iterator[None]:
        """Notes an error of this run; what was on its way is not saved then."""
        try:
            yield
        except Exception as error:
            if os.environ.get("PLACES_TRACE"):
                import traceback

                traceback.print_exc()
            kind = "refused" if isinstance(error, adacheck.AdaCheckError) else "failed"
            self.outcome.problems.append(f"step {number} {kind}: {type(error).__name__}: {error}")
            for each in (*self.pending, *self.recorded):
                self.saved.pop(each, None)
            self.pending, self.recorded = [], []
            self.manager.reload()

    @contextlib.contextmanager
    def _computing(self, is_computing: bool) -> Iterator[None]:
        """Has the devices seem to compute still what is saved."""
        with contextlib.ExitStack() as stack:
            if is_computing:
                stack.enter_context(mock.patch.object(transfer, "are_ready", return_value=False))
            yield

    def look(self, number: int) -> None:
        """Restores a step, and goes on from the newest state nevertheless."""
        holder = self.holders.get(number)
        if holder is not None and number not in self._given_up.steps:
            self.wait()
            self.restore(number, holder, self.saved[number][1])

    def restore(self, number: int, holder: int, target: Any) -> Any:
        options: dict[str, Any] = {} if holder == number else {"step": number}
        try:
            found = self.manager.restore(holder, args=adacheck.RestoreArgs(target, **options))
            support.assert_same_bits(found, self.saved[number][0])
        except Exception as error:
            self.outcome.problems.append(f"step {number} lost: {type(error).__name__}: {error}")
            return None
        return found

    def reopen(self, number: int) -> None:
        """Goes on in another manager, from the newest step that is saved, wherever it is put."""
        if self.recorded:
            self.save(number + 1, self.placed(number + 1))
        self.wait()
        self.manager.close()
        self._open()
        newest = self.manager.latest_step()
        if newest is not None and newest in self.saved:
            found = self.restore(newest, newest, self.saved[newest][1])
            if found is not None:
                home = _on_device(0)
                self.state = {
                    each: jax.tree.map(lambda x: home(np.asarray(x)), found[each])
                    for each in self.state
                }

    def verify(self) -> Outcome:
        """Restores every step that was reported as saved."""
        self.wait()
        self.manager.close()
        self.outcome.kinds = "".join(kinds(self.root))
        self.handler = adacheck.AdaCheckHandler()
        self.manager = support.manager_of(self.root, self.handler)
        self._given_up.__exit__()
        told = set(self._given_up.steps)
        for number, (_, target) in self.saved.items():
            if (holder := self.holders.get(number)) is not None and number not in told:
                self.outcome.saved += 1
                self.restore(number, holder, target)
        self.manager.close()
        return self.outcome


def run(plan: Plan, root: Path) -> Outcome:
    """Makes a run, and restores its steps."""
    copied_bytes = 0 if plan.options == "large" else exported_update._COPIED_BYTES
    with mock.patch.object(exported_update, "_COPIED_BYTES", copied_bytes):
        it = Run(plan, root)
        number = 1
        for step in plan.steps:
            it.step(number, step)
            number += 2 if step.look == "reopen" else 1  # which may save one more
        return it.verify()


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, seed=0, minutes=5.0)
    parser.add_argument("--only", type=int, help="seed of the only run")
    parser.add_argument("--scheduled", action="store_true", help="draw which thread goes on")
    arguments = parser.parse_args()
    from tests.campaigns import interleavings  # which makes runs of this module

    first, count = arguments.seed, sys.maxsize
    if arguments.only is not None:
        first, count = arguments.only, 1
    found, problems = Counter[str](), list[str]()
    for number in command.trials(count, arguments.minutes):
        seed = first + number
        with tempfile.TemporaryDirectory() as root:
            if arguments.scheduled:
                faulthandler.dump_traceback_later(interleavings.LONGEST_S, exit=True)
                outcome, scheduler = interleavings.run(seed, Path(root))
                faulthandler.cancel_dump_traceback_later()
                found += Counter(choices=scheduler.choices, turns=scheduler.turns.total())
            else:
                outcome = run(Plan.drawn(seed), Path(root))
        found += Counter(runs=1, saved=outcome.saved)
        problems += [f"run {seed}: {each}" for each in outcome.problems]
        print(seed, outcome.kinds, *outcome.problems, flush=True)
    return command.finish({**found}, problems)


if __name__ == "__main__":
    sys.exit(main())
