"""A training loop by the public API, and a dictionary from each of its steps to its bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.tree_util import keystr

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.format.manifest import BaseManifest, Delta, Manifest
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.storage.location import located
from tests import support


def _steps_of(root: Any) -> list[roots.Step]:
    return [*roots.steps_of(located(str(root)))]


def manifest_of(root: Any, step: int) -> Manifest:
    return manifest_file.read(root / str(step) / "default")


def kinds(root: Any) -> list[str]:
    """For each step B for a base, R for a replayed delta, D for differences alone."""
    found = [step.manifest for step in _steps_of(root)]
    return [
        "B" if isinstance(each, BaseManifest) else "R" if each and each.has_update else "D"
        for each in found
    ]


def deltas_of(root: Any) -> dict[int, Delta]:
    """The deltas of all steps, those of recorded ones included, by step."""
    found = [step.manifest for step in _steps_of(root)]
    every = [
        d for each in found if each and not isinstance(each, BaseManifest) for d in each.deltas
    ]
    return {each.step: each for each in every}


def checked(root: Any) -> list[str]:
    """How each delta was checked."""
    return [each.checked for each in deltas_of(root).values()]


def names(root: Any, indices: Any) -> set[str]:
    """The paths of leaves, but for records, counters and the step's number."""
    leaves = next(each.manifest for each in _steps_of(root) if each.manifest).leaves
    paths = [leaves[i].path for i in indices]
    left_out = ("adacheck_record", "adacheck_passed")
    is_number = lambda path: path.endswith(("adacheck_count", "step"))  # noqa: E731
    return {x for x in paths if not is_number(x) and not any(each in x for each in left_out)}


def holders(root: Any) -> dict[int, int]:
    """The step whose directory holds each step, whether saved or recorded."""
    found: dict[int, int] = {}
    for each in _steps_of(root):
        assert each.error is None, each.error
        recorded = getattr(each.manifest, "recorded", ())
        found |= dict.fromkeys((*(x.step for x in recorded), each.step), each.step)
    return found


def assert_all_restorable(root: Any, saved: Any, state: Any, mesh: Any = None) -> None:
    target, where = support.abstract(state, mesh), holders(root)
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        for step, expected in saved.items():
            options: Any = {} if where[step] == step else {"step": step}
            args = adacheck.RestoreArgs(target, **options)
            support.assert_same_bits(manager.restore(where[step], args=args), expected)


def edited(state: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """A state of which one leaf was changed by hand."""
    found = []

    def new(where: Any, leaf: Any) -> Any:
        if keystr(where, simple=True, separator="/") != path:
            return leaf
        found.append(leaf)
        return jax.device_put(change(leaf), leaf.sharding)

    state = jax.tree_util.tree_map_with_path(new, state)
    assert found, path
    return state


@contextlib.contextmanager
def computing(is_computing: bool = True) -> Iterator[None]:
    """Has the devices seem to compute still what is saved or recorded meanwhile."""
    if is_computing:
        with mock.patch.object(transfer, "are_ready", return_value=False):
            yield
    else:
        yield


class Loop:
    """A run, the manager that saves it, and the bits of each step that is to be restored.

    Attributes:
        number: number of the step that the state is of.
        states: bits of each step that was saved or recorded.
    """

    def __init__(
        self, root: Any, run: support.Run | None = None, *, manager: Any = None, **options: Any
    ) -> None:
        self.run = support.dict_run(support.mesh_of((1, 1))) if run is None else run
        self.root, self.options, self.manager_options = root, options, manager or {}
        self.number, self.states = 0, dict[int, list[np.ndarray]]()
        self.open()

    def open(self) -> None:
        self.handler = adacheck.AdaCheckHandler(self.run.recorder, **self.options)
        self.manager = support.manager_of(self.root, self.handler, **self.manager_options)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def train(self, updates: int = 1) -> Any:
        for _ in range(updates):
            self.run.advance()
        self.number += 1
        return self.run.state

    def edit(self, path: str, change: Callable[[Any], Any]) -> None:
        self.run.state = edited(self.run.state, path, change)

    def note(self) -> None:
        self.states[self.number] = support.host_copy(self.run.state)

    def put(self, **options: Any) -> None:
        """Saves the state."""
        self.note()
        args = adacheck.SaveArgs(self.run.state)
        assert self.manager.save(self.number, args=args, **options)

    def put_and_wait(self) -> None:
        self.put()
        self.manager.wait_until_finished()

    def record(self) -> bool:
        """Records the state, if that is possible."""
        if found := self.handler.record_step(self.run.state, self.number):
            self.note()
        return found

    def save(self, count: int = 1) -> None:
        """Trains and saves steps, and waits for them."""
        for _ in range(count):
            self.train()
            self.put()
        self.manager.wait_until_finished()

    def keep(self, count: int = 1) -> str:
        """Trains and records steps, or saves those that cannot be; tells which, as r and s."""
        found = ""
        for _ in range(count):
            self.train()
            found += "r" if self.record() else "s"
            if found[-1] == "s":
                self.put(force=True)
        return found

    def fail(self, error: type[Exception], match: str, *steps: int) -> None:
        """Waits for an error; with it steps are lost, the newest where none is named."""
        with pytest.raises(error, match=match):
            self.manager.wait_until_finished()
        self.forget(*steps)
        self.manager.reload()

    def forget(self, *steps: int) -> None:
        for step in steps or (self.number,):
            del self.states[step]

    def reopen(self, step: int | None = None, mesh: Any = None) -> None:
        """Goes on in a new manager from a saved step, else the newest."""
        self.manager.close()
        self.open()
        self.number = max(self.states) if step is None else step
        args = adacheck.RestoreArgs(support.abstract(self.run.state, mesh))
        self.run.state = self.manager.restore(self.number, args=args)
        support.assert_same_bits(self.run.state, self.states[self.number])

    def check(self, mesh: Any = None) -> str:
        """Restores every step, and no other is there; gives the kinds of the saved ones."""
        self.manager.close()
        return self.verify(mesh)

    def verify(self, mesh: Any = None) -> str:
        """As :meth:`check`, of a manager that is closed."""
        assert holders(self.root).keys() == self.states.keys()
        assert_all_restorable(self.root, self.states, self.run.state, mesh)
        return "".join(kinds(self.root))

    @property
    def deltas(self) -> dict[int, Delta]:
        return deltas_of(self.root)

    def stored(self, step: int) -> set[str]:
        return names(self.root, self.deltas[step].stored)

    def unreplayed(self, step: int) -> set[str]:
        return names(self.root, self.deltas[step].unreplayed)
