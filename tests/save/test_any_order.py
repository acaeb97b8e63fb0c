"""Saves, recorded steps, edits, refusals and restarts in any order, against a dictionary."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.store.packs import writer
from tests import support
from tests.save.loop import Loop, computing, holders, kinds

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sample": {"shadow": None},
    "full": {"shadow": adacheck.Shadow(on_devices=True)},
    "bits": {"delta": "bits"},
    "short": {"max_deltas": 2},
}
CHANGES = {
    "a leaf": ("params/b", lambda x: x + 1),
    "an element": ("params/b", lambda x: x.at[5].add(0.5)),
    "the counter": ("opt/adacheck_inner/0/count", lambda x: x + 3),
    "a leaf of its own": ("more", lambda x: x * 2),
    "an average": ("average/b", lambda x: x + 1),
}


@functools.cache
def program() -> Any:
    """A small state, of which a sample takes every element, with an average beside it."""
    average = lambda params, old, _: optax.incremental_update(params, old, 0.1)  # noqa: E731
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"average": average})

    @jax.jit
    def step(state: Any, _: Any) -> Any:
        grads = jax.tree.map(lambda p: jnp.sin(3 * p), state["params"])
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        mean = recorder.derive("average", opt, params, state["average"])
        return {**state, "params": params, "opt": opt, "average": mean}

    return recorder, step


class Run(Loop):
    """A loop that may go wrong.

    Attributes:
        certain: steps that are saved for sure: somebody waited for them, and nothing was raised.
        last: newest step that was put; 0 behind an error.
        is_spoiled: True if something was done that may cost steps, and is not told of yet.
    """

    def __init__(self, root: Any, seed: int, options: str, *, is_tame: bool) -> None:
        recorder, step = program()
        params = {"w": jnp.linspace(-1.0, 1.0, 96).reshape(8, 12), "b": jnp.ones(12)}
        state = {"params": params, "opt": recorder.init(params), "average": params}
        state["more"] = jnp.ones(3)
        super().__init__(root, support.Run(recorder, state, step), **OPTIONS[options])
        self.rng, self.is_tame = random.Random(seed), is_tame
        self.certain, self.is_spoiled, self.older = set[int](), False, state
        self.last = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error costs no step that was certain, and comes from what was done alone."""
        try:
            yield
        except adacheck.AdaCheckError:
            self.fail_once()

    def fail_once(self) -> None:
        assert self.is_spoiled
        self.manager.reload()
        self.last = 0

    def go_on(self, patch: pytest.MonkeyPatch) -> None:
        """Trains, and saves or records what becomes of the state."""
        updates = 1 if self.is_tame or self.chance(0.85) else self.rng.choice([0, 2])
        self.older = self.run.state if self.chance(0.3) else self.older
        self.train(updates)
        if not self.is_tame and self.chance(0.25):
            if self.chance(0.2):
                self.run.state = self.older
            else:
                self.edit(*CHANGES[self.rng.choice([*CHANGES])])
            self.is_spoiled = True
        self.is_spoiled |= updates == 2
        is_refused = not self.is_tame and self.chance(0.1)
        with computing(self.chance(0.5)), patch.context() as refusing, self.told():
            if is_refused:
                refusing.setattr(writer, "write_pack", _refuse)
                self.is_spoiled = True
            if not (self.chance(0.5) and self.record()) or self.chance(0.2):
                self.put(force=True)
                self.last = self.number
            if is_refused:
                self.manager.wait_until_finished()

    def wait(self) -> None:
        try:
            self.manager.wait_until_finished()
        except adacheck.AdaCheckError:
            self.fail_once()
        else:
            saved = holders(self.root)
            assert self.is_spoiled or self.last in {0, *saved}
            self.certain |= saved.keys() & self.states.keys()
        self.is_spoiled &= self.last < self.number  # recorded steps may still be found wrong

    def restart(self) -> None:
        """Goes on from the newest step, or looks at an older one."""
        self.wait()
        if steps := [*self.manager.all_steps()]:
            step = max(steps) if self.chance(0.5) else self.rng.choice(steps)
            if step == max(steps):
                self.reopen(step)
            else:
                args = adacheck.RestoreArgs(support.abstract(self.run.state))
                found = self.manager.restore(step, args=args)
                support.assert_same_bits(found, self.states[step])

    def end(self) -> None:
        """Every step that is there has its bits, and every certain one is there."""
        self.wait()
        self.manager.close()
        there = holders(self.root).keys()
        assert self.certain <= there <= self.states.keys()
        self.states = {step: self.states[step] for step in there}
        self.check()


def _refuse(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def ran(root: Any, seed: int, options: str, patch: Any, *, is_tame: bool, length: int = 16) -> Run:
    run = Run(root, seed, options, is_tame=is_tame)
    for _ in range(length):
        run.go_on(patch)
        if run.chance(0.3):
            run.wait()
        if not is_tame and run.chance(0.1):
            run.restart()
    run.end()
    return run


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        *((n, options) for n, options in enumerate(OPTIONS)),
        *(pytest.param(n, [*OPTIONS][n % 5], marks=pytest.mark.campaign) for n in range(5, 60)),
    ],
)
def test_whatever_happens_a_step_that_is_saved_has_its_bits(tmp_path, monkeypatch, seed, options):
    ran(tmp_path, seed, options, monkeypatch, is_tame=False)


@pytest.mark.first(2)
@pytest.mark.parametrize("seed", range(20))
def test_where_nothing_goes_wrong_every_step_is_there_and_one_alone_is_a_base(
    tmp_path, monkeypatch, seed
):
    run = ran(tmp_path, seed, ["auto", "sample", "full"][seed % 3], monkeypatch, is_tame=True)
    assert {*run.states} >= {*range(1, max(run.states) + 1)}
    assert {*kinds(tmp_path)[1:]} == {"R"}
