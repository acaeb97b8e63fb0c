"""Saves, deletions, crashes and restores in any order, against a dict of what was saved."""

from __future__ import annotations

import errno
import functools
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    CustomSteps,
    EveryNSteps,
    LatestN,
)

import adacheck_jax as adacheck
from adacheck_jax.errors import LineageError
from adacheck_jax.format.manifest import DeltaManifest, Link
from adacheck_jax.state import exported_update
from adacheck_jax.store import links
from adacheck_jax.store.steps import folders, manifest_file, marks, roots
from adacheck_jax.store.storage.location import Location, located
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from tests import object_stores, support

MESHES = [support.mesh_of(shape) for shape in ((2, 2), (4, 2), (8, 1), (1, 1))]
SHAPES = {"w": (32, 64), "b": (64,)}
RECORDER = adacheck.Recorder(optax.adamw(1e-2))


def initial() -> Any:
    params = {"w": jnp.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64), "b": jnp.zeros(64)}
    # Large enough for files of its own in a base, which later bases link.
    frozen = jnp.linspace(0.0, 1.0, 128 * 128).reshape(128, 128)
    state = {"params": params, "opt_state": RECORDER.init(params), "frozen": frozen}
    return support.place(state, MESHES[0])


START = initial()


@functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, START))
def train_step(state: Any, grads: Any) -> Any:
    updates, opt_state = RECORDER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt_state": opt_state}


def gradients(seed: int) -> dict[str, np.ndarray]:
    """From outside, for XLA:CPU might fuse their computation into the update."""
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}


def remembering(function: Any, key: Any) -> Any:
    """Handlers come and go in an example; what they compile is the same."""
    known: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        found = key(*args)
        if found not in known:
            known[found] = (function(*args), args)  # holds what an id in the key is of
        return known[found][0]

    return call


def _shardings(function: Any, *trees: Any) -> Any:
    return id(function), *(tuple((x.shape, x.sharding) for x in tree) for tree in trees)


MEMORY = [
    (exported_program, "vetted", remembering(exported_program.vetted, lambda data, *_: data)),
    (update_program, "jit_update_like", remembering(update_program.jit_update_like, _shardings)),
    (
        update_program,
        "update_function",
        remembering(update_program.update_function, lambda *args: tuple(map(id, args))),
    ),
    (
        exported_update.ExportedUpdates,
        "_export",
        remembering(
            exported_update.ExportedUpdates._export,
            lambda own, structure, _: (own._check, structure.leaves),
        ),
    ),
]


@dataclass
class Saved:
    """A step as it was saved: its bits and, once that is known, its manifest's checksum."""

    bits: list[np.ndarray] = field(repr=False)
    checksum: str = ""


class Watched:
    """A preservation policy that remembers what it was asked last, and what it said."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.kept: set[int] | None = None

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        kept = self._inner.should_preserve(checkpoints, context=context)
        self.kept = {c.step for c, keep in zip(checkpoints, kept, strict=True) if keep}
        return kept


class Chosen:
    """Keeps certain steps; Hypothesis can print it, which it cannot ``CustomSteps``."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def __repr__(self) -> str:
        return f"Chosen{self._steps}"

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        return CustomSteps(self._steps).should_preserve(checkpoints, context=context)


policies = st.one_of(
    st.integers(1, 4).map(LatestN),
    st.integers(2, 4).map(EveryNSteps),
    st.integers(2, 4).map(lambda n: EveryNSteps(n, exact_interval=False)),
    st.builds(
        lambda n, every: AnyPreservationPolicy([LatestN(n), EveryNSteps(every)]),
        st.integers(1, 3),
        st.integers(2, 5),
    ),
    st.just(Chosen(2, 5, 7)),
    st.just(LatestN()),
)
counts = st.fixed_dictionaries(
    {"max_to_keep": st.integers(1, 4)}, optional={"keep_period": st.integers(2, 4)}
)
deletion = st.fixed_dictionaries(
    {},
    optional={"enable_background_delete": st.just(True), "todelete_subdir": st.just("trash")},
)


class Retention(RuleBasedStateMachine):
    """One training run, its checkpoint root, and all that may happen to it.

    Whatever happens, a step whose directory is there gives the bits that were saved. Where steps
    refer to each other, and somebody else than the retention policy deleted one, those that need it
    say so instead.
    """

    has_links = True

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.callback(self.end)
        for module, name, function in MEMORY:
            self.stack.enter_context(mock.patch.object(module, name, function))
        if not self.has_links:
            refused = mock.patch.object(links, "can_link", return_value=False)
            self.stack.enter_context(refused)
            self.stack.enter_context(
                mock.patch("os.link", side_effect=PermissionError(errno.EPERM, "no links"))
            )
        name = self.stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self.root, self.outside = Path(name) / "run", Path(name) / "outside"
        self.state, self.updates = START, 0
        self.managers: list[ocp.CheckpointManager] = []
        self.disk: dict[int, Saved] = {}
        self.moved: dict[int, Saved] = {}
        self.used: set[int] = set()  # every number of a step so far
        self.parents: dict[str, Link | None] = {}  # by the manifest's checksum
        self.removed: set[str] = set()  # checksums of what did not go by retention
        self.hidden: set[int] = set()  # steps gone that the manager does not know of

    # What the run is like.

    @initialize(
        policy=policies,
        counted=st.none() | counts,
        options=deletion,
        handler=st.fixed_dictionaries(
            {
                "delta": st.sampled_from(["auto", "bits"]),
                "max_deltas": st.integers(0, 3),
                # Compiled anew for every handler, which takes longest of all.
                "shadow": st.sampled_from([None, adacheck.Shadow(on_devices=True)]),
            }
        ),
    )
    def begin(self, policy, counted, options, handler):
        self.policy, self.options, self.handler_options = policy, options, handler
        self.counted = counted if self.has_links else None
        self.start()

    def start(self) -> None:
        options, handler_options = dict(self.options), dict(self.handler_options)
        self.watched = Watched(self.policy)
        if self.counted is not None:
            options |= self.counted
        elif self.has_links:
            options["preservation_policy"] = self.watched
        else:
            keep = adacheck.KeepLineage(self.watched)
            options["preservation_policy"] = handler_options["keep_lineage"] = keep
        handler = adacheck.AdaCheckHandler(RECORDER, **handler_options)
        self.manager = support.manager_of(self.root, handler, **options)
        self.managers.append(self.manager)
        self.hidden = set()

    # What happens.

    @rule(
        steps=st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 0, 2]), st.booleans(), st.sampled_from([1, 1, 1, 3])
            ),
            min_size=1,
            max_size=4,
        )
    )
    def save_steps(self, steps):
        """Trains and saves; of each save the updates before it, whether something else changed too,
        and how far the step's number goes on.
        """
        for updates, thaws, ahead in steps:
            self.train(updates, thaws)
            self.save_as(max(self.used, default=0) + ahead)
        self.settle()
        self.check_retention()

    @rule(data=st.data(), updates=st.integers(0, 1))
    def save_a_step_between(self, data, updates):
        free = set(range(1, max(self.used, default=0) + 3))
        free -= {*self.manager.all_steps(), *self.disk}
        step = data.draw(st.sampled_from(sorted(free)))
        self.train(updates, False)
        self.save_as(step, force=True)
        self.settle()

    def train(self, updates: int, thaws: bool) -> None:
        for _ in range(updates):
            self.updates += 1
            self.state = train_step(self.state, gradients(self.updates))
        if thaws:
            self.state = {**self.state, "frozen": self.state["frozen"] + 1}

    def save_as(self, step: int, **options: Any) -> None:
        # Orbax may delete what is saved under a number that still waits to be deleted.
        is_waiting = step in self.used and "enable_background_delete" in self.options
        if step in self.manager.all_steps() or is_waiting:
            return
        self.used.add(step)
        if self.has_links:
            self.settle()  # or else a step that is built on may go meanwhile, which is an error
        if "todelete_subdir" in self.options:  # Orbax does not replace in there
            shutil.rmtree(self.root / "trash", ignore_errors=True)
        bits = support.host_copy(self.state)
        if not self.manager.save(step, args=adacheck.SaveArgs(self.state), **options):
            return
        self.disk[step] = Saved(bits)
        self.hidden.discard(step)

    @precondition(lambda self: self.listed())
    @rule(data=st.data())
    def delete(self, data):
        step = data.draw(st.sampled_from(self.listed()))
        self.manager.delete(step)
        self.forget(step)
        if data.draw(st.booleans()):
            self.settle()

    @precondition(lambda self: self.disk)
    @rule(data=st.data(), how=st.sampled_from(["remove", "move"]))
    def take_away(self, data, how):
        """Behind the manager's back."""
        self.settle()
        step = data.draw(st.sampled_from(sorted(self.disk)))
        if how == "remove":
            self.remove(step)
        else:
            self.put_away(step)
            self.moved[step] = self.disk[step]
        self.forget(step)
        self.hidden.add(step)

    @precondition(lambda self: set(self.moved) - set(self.disk))
    @rule(data=st.data())
    def bring_back(self, data):
        self.settle()
        step = data.draw(st.sampled_from(sorted(set(self.moved) - set(self.disk))))
        self.put_back(step)
        self.disk[step] = self.moved.pop(step)
        self.manager.reload()
        self.hidden = set()

    def remove(self, step: int) -> None:
        shutil.rmtree(self.root / str(step))

    def put_away(self, step: int) -> None:
        shutil.rmtree(self.outside / str(step), ignore_errors=True)
        self.outside.mkdir(exist_ok=True)
        shutil.move(self.root / str(step), self.outside / str(step))

    def put_back(self, step: int) -> None:
        shutil.rmtree(self.half_written(step), ignore_errors=True)
        shutil.move(self.outside / str(step), self.root / str(step))

    def leave_half(self, step: int) -> None:
        """What a killed save of a step leaves behind."""
        # Under the name that Orbax itself gives, which the save of that step replaces. Under
        # another it would stay beside the step, and Orbax would delete it instead of the step.
        half = self.half_written(step)
        shutil.rmtree(half, ignore_errors=True)
        item = half / f"default{roots.TMP_SUFFIX}"
        if self.disk:
            shutil.copytree(self.root / str(max(self.disk)) / "default", item)
            (item / manifest_file.FILE).unlink()
        else:
            support.pack_index(item).parent.mkdir(parents=True)
            support.pack_index(item).write_bytes(b"half")

    def forget(self, step: int) -> None:
        saved = self.disk.pop(step, None)
        if saved:
            self.removed.add(saved.checksum)

    @rule()
    def reload(self):
        self.settle()
        self.manager.reload()
        self.hidden = set()

    @rule(leaves_more=st.booleans(), resumes=st.booleans())
    def crash(self, leaves_more, resumes):
        """Nothing is closed; the next life may find what was half written."""
        self.settle()
        if leaves_more:
            self.leave_half(max(self.used, default=0) + 1)
        self.start()
        if resumes:
            self.resume()

    def half_written(self, step: int) -> Path:
        """Where a save of a step that is under way writes."""
        return self.root / f"{step}{roots.TMP_SUFFIX}"

    @rule()
    def restart(self):
        self.manager.close()
        self.start()
        self.resume()

    def resume(self) -> None:
        """From the latest step that there is, as a training script would."""
        for step in sorted(self.listed(), reverse=True):
            if self.missing(step, self.disk) is None:
                self.state = self.restored(step)
                return

    @precondition(lambda self: self.listed())
    @rule(data=st.data(), mesh=st.sampled_from(MESHES), goes_on=st.booleans())
    def restore(self, data, mesh, goes_on):
        step = data.draw(st.sampled_from(self.listed()))
        self.check(step, mesh)
        if goes_on and self.missing(step, self.disk) is None:
            self.state = self.restored(step)
            for later in self.listed():
                if later > step and data.draw(st.booleans()):
                    self.manager.delete(later)
                    self.forget(later)

    @precondition(lambda self: self.moved)
    @rule(data=st.data())
    def restore_what_was_moved(self, data):
        step = data.draw(st.sampled_from(sorted(self.moved)))
        lost = self.missing(step, self.moved)
        target = adacheck.RestoreArgs(support.abstract(START))
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            path = epath.Path(self.outside) / str(step) / "default"
            if lost is None:
                found = checkpointer.restore(path, args=target)
                support.assert_same_bits(found, self.moved[step].bits)
            else:
                with pytest.raises(LineageError, match=rf"builds on step {lost}\b"):
                    checkpointer.restore(path, args=target)

    @rule()
    def check_everything(self):
        for step in self.listed():
            self.check(step, MESHES[0])

    # What must hold.

    def listed(self) -> list[int]:
        """What the manager lists, without what was taken away behind its back."""
        return sorted(set(self.manager.all_steps()) - self.hidden)

    def settle(self) -> None:
        """Waits for what is under way; then disk, manager and model agree."""
        self.manager.wait_until_finished()
        deadline = time.monotonic() + 5
        while self.options.get("enable_background_delete") and self.on_disk() != {*self.listed()}:
            assert time.monotonic() < deadline, (self.on_disk(), self.listed())
            time.sleep(0.005)
        assert self.on_disk() == {*self.listed()}
        self.disk = {step: self.disk[step] for step in self.listed()}
        for step, saved in self.disk.items():
            found = manifest_file.read(self.item(step))
            assert found.step == step
            saved.checksum = found.checksum
            self.parents[found.checksum] = (
                found.parent if isinstance(found, DeltaManifest) else None
            )

    def on_disk(self) -> set[int]:
        return {int(path.name) for path in self.root.iterdir() if path.name.isdecimal()}

    def item(self, step: int) -> Path:
        return self.root / str(step) / "default"

    def chain(self, step: int, there: dict[int, Saved]) -> list[Link]:
        """What a step builds on, latest first, as far as it is known."""
        found, checksum = [], there[step].checksum
        while link := self.parents.get(checksum):
            found.append(link)
            checksum = link.checksum
        return found

    def missing(self, step: int, there: dict[int, Saved]) -> int | None:
        """The step for want of which another cannot be restored."""
        if self.has_links:
            return None
        chain = self.chain(step, there)
        present = {(s, saved.checksum) for s, saved in there.items()}
        lost = next((link for link in chain if (link.step, link.checksum) not in present), None)
        if lost is None:
            return None
        # Somebody took something away: retention alone never takes what is needed. Beside a step
        # that was moved lies nothing but what was moved too.
        if there is self.disk:
            assert not self.removed.isdisjoint(link.checksum for link in chain), (step, lost)
        return lost.step

    def restored(self, step: int, mesh: Any = None) -> Any:
        target = adacheck.RestoreArgs(support.abstract(START, mesh))
        found = self.manager.restore(step, args=target)
        support.assert_same_bits(found, self.disk[step].bits)
        return found

    def check(self, step: int, mesh: Any) -> None:
        lost = self.missing(step, self.disk)
        if lost is None:
            self.restored(step, mesh)
            return
        with pytest.raises(LineageError, match=rf"builds on step {lost}\b") as caught:
            self.restored(step, mesh)
        good = [s for s in sorted(self.disk) if self.missing(s, self.disk) is None]
        hint = ", ".join(map(str, good[-10:])) or "none"
        assert f"Steps that can be restored: {hint}." in str(caught.value)

    def check_retention(self) -> None:
        """What the policy did not ask for is gone, but for what the rest builds on."""
        kept = self.watched.kept
        if kept is None:
            return
        needed = {link.step for step in self.disk for link in self.chain(step, self.disk)}
        if not self.has_links:
            kept = kept | needed | {max(self.disk, default=0)}  # the next step builds on the newest
        assert {*self.disk} <= kept

    @invariant()
    def roots_are_told_of_as_they_are(self):
        if not self.managers:
            return
        self.settle()
        steps = roots.steps_of(located(str(self.root)))
        assert [s.step for s in steps] == sorted(self.disk)
        assert {s.step for s in steps if s.error is None} == {
            s for s in self.disk if self.missing(s, self.disk) is None
        }

    @invariant()
    def nothing_is_left_that_no_step_needs(self):
        if not self.managers:
            return
        self.settle()
        names = {path.name for path in self.root.iterdir()}
        names -= {"trash", *(name for name in names if roots.TMP_SUFFIX in name)}
        assert names == {str(step) for step in self.disk}
        for step in self.disk:
            found = manifest_file.read(self.item(step))
            links = self.chain(step, self.disk) if self.has_links else []
            linked = names_in(self.item(step) / folders.LINEAGE)
            assert {name.split(".")[0] for name in linked} == {str(link.step) for link in links}
            for link in links:
                saved = self.disk.get(link.step)
                if saved and saved.checksum == link.checksum:
                    source = self.item(link.step)
                    place = self.item(step) / folders.LINEAGE
                    files = [*place.glob(f"{link.step}/**/*"), *place.glob(f"{link.step}.*")]
                    assert inodes(files) == inodes(own_files(source))
            kept = {int(name.split(".")[0]) for name in names_in(self.item(step) / folders.KEPT)}
            assert kept == {s for _, s in getattr(found, "kept", ())}

    def teardown(self):
        self.stack.close()

    def end(self) -> None:
        for manager in self.managers:
            manager.close()


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def own_files(item: Path) -> list[Path]:
    """What an item holds, without its links to the items that it builds on."""
    skipped = item / folders.LINEAGE
    return [path for path in item.rglob("*") if not path.is_relative_to(skipped)]


ORBAX_NOTE = "commit_success.txt"
"""That Orbax committed an item: nothing needs that of another one."""


def inodes(paths: Iterable[Path]) -> set[int]:
    """Of the files among some paths."""
    return {path.stat().st_ino for path in paths if path.is_file() and path.name != ORBAX_NOTE}


class RetentionOfReferences(Retention):
    has_links = False


class RetentionInStore(RetentionOfReferences):
    """The same in an object store, where Orbax marks steps and there are no directories."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        top = located(f"{self.url}/{uuid.uuid4().hex}")
        self.place, self.away = top / "run", top / "outside"
        self.root, self.outside = (epath.Path(str(each)) for each in (self.place, self.away))
        self.has_lost = False  # since the last save

    def start(self) -> None:
        # Nothing is renamed to be deleted, or deleted in the background.
        self.options = object_stores.stock_options(self.url)
        super().start()

    def item(self, step: int) -> Location:
        return self.place / str(step) / "default"

    def on_disk(self) -> set[int]:
        names = {name for name in self.place.folders() if name.isdecimal()}
        return {int(n) for n in names if (self.place / n / marks.COMMIT_MARK).exists}

    def remove(self, step: int) -> None:
        (self.place / str(step)).delete()
        object_stores.forget_listings()

    def forget(self, step: int) -> None:
        super().forget(step)
        self.has_lost = True

    def save_as(self, step: int, **options: Any) -> None:
        """A save looks in the background at what it builds on, and fails where that has gone."""
        has_lost, self.has_lost = self.has_lost, False
        super().save_as(step, **options)
        if has_lost:
            try:
                self.manager.wait_until_finished()
            except LineageError as error:
                if "was deleted or replaced" not in str(error):
                    raise
                self.disk.pop(step, None)
                self.manager.reload()

    def put_away(self, step: int) -> None:
        (self.away / str(step)).delete()
        _copy(self.place / str(step), self.away / str(step))
        self.remove(step)

    def put_back(self, step: int) -> None:
        (self.place / str(step)).delete()
        _copy(self.away / str(step), self.place / str(step))
        (self.away / str(step)).delete()
        object_stores.forget_listings()

    def leave_half(self, step: int) -> None:
        if self.disk:
            _copy(self.item(max(self.disk)), self.item(step))
            (self.item(step) / manifest_file.FILE).delete()
        else:
            (self.item(step) / manifest_file.FILE).write(b'{"claim": "of a dead process"}')

    @invariant()
    def nothing_is_left_that_no_step_needs(self):
        if not self.managers:
            return
        self.settle()
        half = {int(name) for name in self.place.folders()} - {*self.disk}
        assert all(not (self.place / str(n) / marks.COMMIT_MARK).exists for n in half)


def _copy(source: Location, target: Location) -> None:
    for each in source.list():
        (target / each.below(source)).write(each.read())


def sizes(examples: int, **options: Any) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        **options,
    )


@pytest.fixture
def served(gs):
    RetentionInStore.url = gs.url


# The same examples each time; `python -m tests.campaigns.machine --profile any-order` tries others.
FEW = sizes(5, derandomize=True)


@pytest.mark.slow
class TestRetention(Retention.TestCase):
    settings = FEW


@pytest.mark.slow
@pytest.mark.usefixtures("served")
class TestRetentionInStore(RetentionInStore.TestCase):
    settings = FEW


@pytest.mark.slow
class TestRetentionOfReferences(RetentionOfReferences.TestCase):
    settings = FEW


def test_nothing_builds_on_a_step_that_waits_to_be_deleted(tmp_path, monkeypatch):
    """A step may be restored that a manager is to delete, and gone once the next one is saved."""
    monkeypatch.setattr(links, "can_link", lambda _: False)
    keep = adacheck.KeepLineage(LatestN(1))
    handler = adacheck.AdaCheckHandler(RECORDER, max_deltas=1, keep_lineage=keep)
    slow = threading.Event()
    options = {"preservation_policy": keep, "enable_background_delete": True}
    state = START
    with support.manager_of(tmp_path, handler, **options) as manager:
        deleter = manager._checkpoint_deleter._standard_deleter
        delete = deleter.delete
        monkeypatch.setattr(deleter, "delete", lambda step: slow.wait(60) and delete(step))
        args = adacheck.RestoreArgs(support.abstract(START))
        for step in (1, 2, 3, 4):
            if step == 4:
                state = manager.restore(1, args=args)
            state = train_step(state, gradients(step))
            manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
        slow.set()
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        assert list(manager.all_steps()) == [4]
        found = manager.restore(4, args=args)
        support.assert_same_bits(found, support.host_copy(state))


@pytest.mark.slow
def test_nothing_builds_on_a_step_that_is_half_deleted(tmp_path, monkeypatch):
    """Of a directory that is being deleted, what tells Orbax that it is a step may go first."""
    monkeypatch.setattr(links, "can_link", lambda _: False)
    keep = adacheck.KeepLineage(LatestN(1))
    handler = adacheck.AdaCheckHandler(RECORDER, max_deltas=1, keep_lineage=keep)
    args, state = adacheck.RestoreArgs(support.abstract(START)), START
    with support.manager_of(tmp_path, handler, preservation_policy=keep) as manager:
        deleter = manager._checkpoint_deleter

        def half(step):
            (tmp_path / str(step) / "_CHECKPOINT_METADATA").unlink()

        with monkeypatch.context() as patched:
            patched.setattr(deleter, "delete", half)
            for step in (1, 2, 3):
                state = train_step(state, gradients(step))
                manager.save(step, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
        state = train_step(manager.restore(1, args=args), gradients(4))
        manager.save(4, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
    shutil.rmtree(tmp_path / "1")
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        found = manager.restore(4, args=args)
        support.assert_same_bits(found, support.host_copy(state))


@pytest.mark.covering(1)
@pytest.mark.parametrize("lost", ["all", "part"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_step_that_is_deleted_while_it_is_linked_is_missed(tmp_path, monkeypatch, lost, resumes):
    def new_manager():
        return support.manager_of(tmp_path, adacheck.AdaCheckHandler(RECORDER))

    states = [START]
    for step in (1, 2, 3, 4):
        states.append(train_step(states[-1], gradients(step)))
    manager = new_manager()
    for step in (1, 2):
        manager.save(step, args=adacheck.SaveArgs(states[step]))
    manager.wait_until_finished()
    if resumes:
        manager.close()
        manager = new_manager()
        manager.restore(2, args=adacheck.RestoreArgs(support.abstract(START)))
    link = links.link_ancestors

    def late(*args):
        step = tmp_path / "2"
        shutil.rmtree(step if lost == "all" else step / "default" / folders.LINEAGE / "1" / "d")
        link(*args)

    with monkeypatch.context() as patched:
        patched.setattr(links, "link_ancestors", late)
        manager.save(3, args=adacheck.SaveArgs(states[3]))
        with pytest.raises(LineageError, match=r"step 2.* was deleted while"):
            manager.wait_until_finished()
    manager.close()
    shutil.rmtree(tmp_path / "2", ignore_errors=True)
    with new_manager() as manager:
        assert list(manager.all_steps()) == [1]
        manager.save(4, args=adacheck.SaveArgs(states[4]))
        found = manager.restore(4, args=adacheck.RestoreArgs(support.abstract(START)))
        support.assert_same_bits(found, support.host_copy(states[4]))
