"""Every door by which Orbax lets a handler in; what enters by one goes on by another.

Also steps that Orbax does not rename but marks: the protocol of object stores, on a local root.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint import v1

import adacheck_jax as adacheck
from adacheck_jax import AdaCheckHandler, RestoreArgs, SaveArgs
from adacheck_jax.errors import FormatError, LineageError
from adacheck_jax.store.steps import lookup, marks, roots
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
    save_steps,
    without_links,
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


MARK = "commit_success.txt"
"""File by which Orbax marks a step that it does not rename."""
MARKED: Any = {"atomicity_options": COMMIT_FILE}


@pytest.mark.parametrize("lost", [[MARK], [f"default/{MARK}", MARK]])
def test_a_step_whose_save_was_killed_does_not_exist(tmp_path, lost):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(tmp_path, AdaCheckHandler(run.recorder), **MARKED) as manager:
        saved = save_steps(manager, run, 3)
    assert all((tmp_path / "2/default" / name).exists() for name in (MARK, marks.IN_PLACE))
    for name in lost:  # written in this order, after our manifest
        (tmp_path / "3" / name).unlink()
    (tmp_path / "3/_CHECKPOINT_METADATA").touch()
    assert adacheck.latest_restorable(tmp_path) == 2
    assert kinds_of(tmp_path) == "BD"
    report = audit.verify_root(tmp_path)
    assert [step.step for step in report.steps] == [1, 2]
    assert [(each.path, each.is_temporary) for each in report.leftovers] == [("3", True)]
    handler = AdaCheckHandler(run.recorder)
    with pytest.raises(LineageError, match="expected a step that Orbax has committed"):
        handler.restore(tmp_path / "3/default")
    args = RestoreArgs(abstract(run.state), skip_damaged=True)
    assert_same_bits(handler.restore(tmp_path / "3/default", args), saved[2])
    with manager_of(tmp_path, AdaCheckHandler(run.recorder), **MARKED) as manager:
        assert manager.all_steps() == [1, 2]  # Orbax removes what was not committed
        run.state, run.count = manager.restore(2, args=RestoreArgs(abstract(run.state))), 2
        again = save_steps(manager, run, 1)
        assert_same_bits(again[3], saved[3])
    assert kinds_of(tmp_path) == "BDD"


def test_a_step_that_orbax_did_not_commit_is_no_parent(tmp_path, monkeypatch):
    class Failing(commit_file_class()):
        fails = False

        async def finalize(self):
            if self.fails and self.get().name == "default":
                raise OSError("no space left on device")
            await super().finalize()

    run = dict_run(mesh_of((1, 1)))
    handler = AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, temporary_path_class=Failing) as manager:
        save_steps(manager, run, 1)
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(OSError, match="no space left"):
            save_steps(manager, run, 1)
        assert adacheck.latest_restorable(tmp_path) == 1
        monkeypatch.setattr(Failing, "fails", False)
        save_steps(manager, run, 2)
    assert [step.step for step in roots.steps_of(tmp_path)] == [1, 3, 4]
    assert kinds_of(tmp_path) == "BBD"


def test_a_parent_that_is_referred_to_is_committed_too(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    keep = adacheck.KeepLineage(ocp.checkpoint_managers.LatestN(9))
    handler = AdaCheckHandler(run.recorder, keep_lineage=keep)
    options = {**MARKED, "preservation_policy": keep}
    with without_links(), manager_of(tmp_path, handler, **options) as manager:
        save_steps(manager, run, 2)
    assert kinds_of(tmp_path) == "BD"
    (tmp_path / "1" / MARK).unlink()
    with pytest.raises(LineageError, match=r"/1/default: expected a step that Orbax"):
        lookup.resolve(tmp_path / "2/default")


def test_numbers_in_names_of_items_and_directories(tmp_path):
    """They are no step numbers; and an item that was copied elsewhere is whole."""
    run = dict_run(mesh_of((1, 1)))
    handlers = {"ema_2": AdaCheckHandler(run.recorder)}
    options = {**MARKED, "step_prefix": "at"}
    with manager_of(tmp_path, handlers, **options) as manager:
        for step in (10, 20):
            args = ocp.args.Composite(ema_2=SaveArgs(run.advance()))
            manager.save(step, args=args)
    found = roots.steps_of(tmp_path, "ema_2")
    assert [each.step for each in found] == [10, 20]
    assert found[-1].directory == tmp_path / "at_20" / "ema_2"
    assert kinds_of(tmp_path) == "BD"
    with manager_of(tmp_path / "root", AdaCheckHandler()) as manager:
        manager.save(5, args=SaveArgs({"x": jnp.arange(3.0)}))
    (tmp_path / "copies").mkdir()
    item = (tmp_path / "root/5/default").rename(tmp_path / "copies/best")
    assert_same_bits(AdaCheckHandler().restore(item), host_copy(jnp.arange(3.0)))
    assert dataclasses.astuple(roots.place_of(item)) == ((tmp_path / "copies", None), None)
