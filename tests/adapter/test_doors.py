"""Every door by which Orbax lets a handler in; what enters by one goes on by another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint import v1

import adacheck_jax as adacheck
from adacheck_jax import AdaCheckHandler, RestoreArgs, SaveArgs
from adacheck_jax.errors import FormatError, LineageError
from adacheck_jax.store.steps import marks
from adacheck_jax.tools import audit
from tests.support import (
    WIDTH,
    abstract,
    assert_same_bits,
    dict_run,
    host_copy,
    kinds_of,
    manager_of,
    mesh_of,
)

COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


@dataclass
class Door:
    """One way in.

    Attributes:
        save: takes a step and a state.
        load: takes a step, an abstract state and options of ``RestoreArgs``.
        describe: gives the tree that a step is described by.
    """

    save: Callable[..., Any]
    load: Callable[..., Any]
    describe: Callable[[int], Any]


@contextlib.contextmanager
def manager(root: Path, handler: Any, **options: Any) -> Iterator[Door]:
    with manager_of(root, handler, **options) as own:

        def save(step: int, state: Any) -> None:
            own.save(step, args=SaveArgs(state))
            own.wait_until_finished()

        def load(step: int, target: Any = None, **options: Any) -> Any:
            return own.restore(step, args=RestoreArgs(target, **options))

        yield Door(save, load, lambda step: own.item_metadata(step).tree)


@contextlib.contextmanager
def items(root: Path, handler: Any, registry: bool = False) -> Iterator[Door]:
    """One item beside JSON and arrays that stock Orbax saves."""
    if registry:
        known = ocp.DefaultCheckpointHandlerRegistry()
        for args in (SaveArgs, RestoreArgs):
            known.add("state", args, handler)
        own = ocp.CheckpointManager(root, handler_registry=known)
    else:
        others = {"config": ocp.JsonCheckpointHandler(), "more": ocp.StandardCheckpointHandler()}
        own = manager_of(root, {"state": handler, **others})
    args = ocp.args
    with own:

        def save(step: int, state: Any) -> None:
            more = {"config": args.JsonSave([step]), "more": args.StandardSave({"x": np.ones(2)})}
            own.save(step, args=args.Composite(state=SaveArgs(state), **({} if registry else more)))
            own.wait_until_finished()

        def load(step: int, target: Any = None, **options: Any) -> Any:
            wanted = {"state": RestoreArgs(target, **options)}
            if not registry and (root / f"{step}/config").exists():
                wanted |= {"config": args.JsonRestore(), "more": args.StandardRestore()}
            found = own.restore(step, args=args.Composite(**wanted))
            assert len(wanted) == 1 or found["config"] == [step]
            assert len(wanted) == 1 or found["more"]["x"].tolist() == [1, 1]
            return found["state"]

        yield Door(save, load, lambda step: own.item_metadata(step)["state"].tree)


@contextlib.contextmanager
def checkpointer(root: Path, handler: Any, kind: Any = ocp.Checkpointer, **options: Any) -> Any:
    with kind(handler, **options) as own:

        def save(step: int, state: Any) -> None:
            own.save(root / f"{step}", args=SaveArgs(state))
            if kind is ocp.AsyncCheckpointer:
                own.wait_until_finished()

        def load(step: int, target: Any = None, **options: Any) -> Any:
            return own.restore(root / f"{step}", args=RestoreArgs(target, **options))

        yield Door(save, load, lambda step: own.metadata(root / f"{step}").item_metadata.tree)


@contextlib.contextmanager
def alone(root: Path, handler: Any, is_async: bool = False) -> Iterator[Door]:
    """No checkpointer and no manager drives the handler."""

    async def begun(path: Any, args: Any) -> Any:
        return await handler.async_save(path, args=args)

    def save(step: int, state: Any) -> None:
        path = epath.Path(root / f"{step}")
        if is_async:
            path.mkdir(parents=True)
            for future in asyncio.run(begun(path, SaveArgs(state))):
                future.result()
        else:
            handler.save(path, args=SaveArgs(state))
        with pytest.raises((LineageError, FormatError)):
            AdaCheckHandler().restore(path)
        handler.finalize(path)

    def load(step: int, target: Any = None, **options: Any) -> Any:
        return handler.restore(root / f"{step}", RestoreArgs(target, **options))

    yield Door(save, load, lambda step: handler.metadata(epath.Path(root / f"{step}")).tree)


def as_state(target: Any, options: dict[str, Any]) -> Any:
    return RestoreArgs(target, **options) if options else target


@contextlib.contextmanager
def v1_checkpointer(
    root: Path, handler: Any, item: str = "state", marked: bool = False
) -> Iterator[Door]:
    parent = v1.Context()
    if marked:
        parent.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    every = v1.training.save_decision_policies.FixedIntervalPolicy(1)
    with (
        adacheck.v1.context(handler, parent=parent, checkpointable_name=item),
        v1.training.Checkpointer(root, save_decision_policy=every) as own,
    ):

        def save(step: int, state: Any) -> None:
            assert own.save_checkpointables_async(step, {item: state})
            own.wait()

        def load(step: int, target: Any = None, **options: Any) -> Any:
            wanted = as_state(target, options)
            return own.load_checkpointables(step, {item: wanted})[item]

        yield Door(save, load, lambda step: own.checkpointables_metadata(step).metadata[item])


@contextlib.contextmanager
def v1_functions(root: Path, handler: Any) -> Iterator[Door]:
    with adacheck.v1.context(handler):

        def save(step: int, state: Any) -> None:
            v1.save_async(root / f"{step}", state).result()

        def load(step: int, target: Any = None, **options: Any) -> Any:
            return v1.load(root / f"{step}", as_state(target, options))

        yield Door(save, load, lambda step: v1.metadata(root / f"{step}").metadata)


def commit_file_class() -> Any:
    from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath  # no public name

    return CommitFileTemporaryPath


Way = Callable[[Path, Any], contextlib.AbstractContextManager[Door]]
DOORS: dict[str, tuple[Way, str]] = {
    "manager": (manager, "v1 as default"),
    "v1": (v1_checkpointer, "items"),
    "handler": (alone, "AsyncCheckpointer"),
    "items": (items, "registry"),
    "AsyncCheckpointer that marks": (
        lambda *a: checkpointer(*a, ocp.AsyncCheckpointer, atomicity_options=COMMIT_FILE),
        "AsyncCheckpointer",
    ),
    "v1 functions": (v1_functions, "v1"),
    "manager that waits": (lambda *a: manager(*a, enable_async_checkpointing=False), "manager"),
    "manager that marks": (lambda *a: manager(*a, atomicity_options=COMMIT_FILE), "manager"),
    "manager with a class": (
        lambda *a: manager(*a, temporary_path_class=commit_file_class()),
        "manager",
    ),
    "manager with names": (lambda *a: manager(*a, step_prefix="ckpt"), "manager with names"),
    "manager with digits": (
        lambda *a: manager(*a, step_format_fixed_length=6),
        "manager with digits",
    ),
    "registry": (lambda *a: items(*a, registry=True), "v1"),
    "Checkpointer": (checkpointer, "handler"),
    "AsyncCheckpointer": (lambda *a: checkpointer(*a, ocp.AsyncCheckpointer), "Checkpointer"),
    "handler, async": (lambda *a: alone(*a, is_async=True), "handler"),
    "v1 as default": (lambda *a: v1_checkpointer(*a, "default"), "manager"),
    "v1 that marks": (lambda *a: v1_checkpointer(*a, marked=True), "v1"),
}
"""Doors, and those by which what entered there goes on; the first six are tried by default."""

IN_A_LOOP = ("manager", "manager that waits", "Checkpointer")
"""Doors that are tried where an event loop runs already too, as in a notebook."""


def enter(root: Path, name: str) -> None:
    """Saves by a door, and asks and goes on by it and the next one."""
    run, saved = dict_run(mesh_of((2, 2))), {}

    def train(own: Door, steps: int) -> None:
        for _ in range(steps):
            run.advance()
            saved[run.count] = host_copy(run.state)
            own.save(run.count, run.state)

    way, then = DOORS[name]
    with way(root, AdaCheckHandler(run.recorder)) as own:
        train(own, 3)
    assert kinds_of(root) == "BDD"
    if "mark" in name or "class" in name:
        assert [*root.glob("2/**/commit_success.txt")]
    for each, looks in ((way, [(1, (4, 2)), (2, (1, 1))]), (DOORS[then][0], [])):
        handler = AdaCheckHandler(run.recorder)
        with each(root, handler) as own:
            for step in (1, 3) if looks else (3,):
                leaves = host_copy(own.load(step))
                assert sorted(x.tobytes() for x in leaves) == sorted(
                    x.tobytes() for x in saved[step]
                )
                kernel = own.describe(step)["params"]["in"]["kernel"]
                assert (tuple(kernel.shape), kernel.dtype) == ((WIDTH, 2 * WIDTH), np.float32)
            for step, shape in (*looks, (run.count, (2, 2))):
                target = abstract(run.state, mesh_of(shape))
                found = own.load(step, target)
                assert_same_bits(found, saved[step])
                for leaf, wanted in zip(*map(jax.tree.leaves, (found, target)), strict=True):
                    assert leaf.sharding == wanted.sharding
                assert handler.restored is not None
                assert (handler.restored.step, handler.restored.exact) == (step, True)
            run.state = found
            train(own, 1)
    assert kinds_of(root) == "BDDDD"
    assert adacheck.latest_restorable(root) == 5
    assert not audit.verify_root(root).damaged_count


@pytest.mark.first(6, slow=len(DOORS))
@pytest.mark.parametrize("name", DOORS)
def test_what_enters_by_a_door_goes_on_by_another(tmp_path, name):
    enter(tmp_path, name)


@pytest.mark.first(1, slow=len(IN_A_LOOP))
@pytest.mark.parametrize("name", IN_A_LOOP)
def test_doors_in_a_running_event_loop(tmp_path, name):
    async def cell() -> None:
        enter(tmp_path, name)

    asyncio.run(cell())


def test_orbax_finds_the_handler_by_the_name_in_each_step(tmp_path):
    run = dict_run(mesh_of((4, 2)))
    for name, item in (("manager", "default"), ("v1", "state")):
        root = tmp_path / name
        with DOORS[name][0](root, AdaCheckHandler(run.recorder)) as own:
            for _ in range(2):
                own.save(run.count + 1, run.advance())
        expected = sorted(x.tobytes() for x in host_copy(run.state))
        with ocp.CheckpointManager(root) as stock, adacheck.v1.context():
            found = stock.restore(run.count)
            found = found[item] if item == "state" else found
            loaded = v1.load_checkpointables(root / str(run.count))[item]
        for each in (found, loaded):
            assert sorted(x.tobytes() for x in host_copy(each)) == expected
            assert each["params"]["in"]["kernel"].sharding.mesh.devices.shape == (4, 2)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["checkpointer", "manager"])
def test_a_step_that_orbax_marks_is_not_committed_before(tmp_path, monkeypatch, kind, is_async):
    committed, finalize = [], AdaCheckHandler.finalize

    def watched(self, directory):
        finalize(self, directory)
        committed.append(marks.is_committed(directory))

    monkeypatch.setattr(AdaCheckHandler, "finalize", watched)
    options = {"atomicity_options": COMMIT_FILE}
    if kind == "manager":
        way = manager(tmp_path, AdaCheckHandler(), enable_async_checkpointing=is_async, **options)
    else:
        driver = ocp.AsyncCheckpointer if is_async else ocp.Checkpointer
        way = checkpointer(tmp_path, AdaCheckHandler(), driver, **options)
    state = {"x": np.arange(3.0)}
    with way as own:
        own.save(1, state)
        assert_same_bits(own.load(1, state), host_copy(state))
    assert committed == [False]
    assert not [*tmp_path.rglob(marks.FINALIZED)]


def test_a_second_save_into_a_directory_is_not_committed_by_the_first(tmp_path):
    directory, handler = epath.Path(tmp_path / "5"), AdaCheckHandler()
    for first in (0.0, 7.0):
        handler.save(directory, args=SaveArgs({"x": first + np.arange(3.0)}))
        assert not marks.is_committed(directory)
        handler.finalize(directory)
    assert_same_bits(handler.restore(directory), [7.0 + np.arange(3.0)])
    with pytest.raises(adacheck.AdaCheckError, match="expected to commit a save"):
        handler.finalize(epath.Path(tmp_path / "1"))
