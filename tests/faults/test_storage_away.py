"""Storage that refuses or hangs: training goes on, and what was reported as saved is written."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.path import async_path, deleter

import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.errors import StorageError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.plan import situation
from adacheck_jax.save import pending, share
from adacheck_jax.save.line import backlog
from adacheck_jax.store import claims
from adacheck_jax.store.packs import writer
from adacheck_jax.store.steps import manifest_file
from tests import support
from tests.save.loop import Loop as Saving
from tests.save.loop import holders, manifest_of

POINTS: dict[str, tuple[Any, str]] = {
    "rename": (async_path, "rename"),
    "pack": (writer, "write_pack"),
    "mkdir": (async_path, "mkdir"),
    "claim": (claims, "_take"),
    "manifest": (manifest_file, "write"),
}


class Storage:
    """Storage that may be away at one point of each save."""

    def __init__(self, monkeypatch: Any, point: str, mode: str) -> None:
        self.mode, self.is_away, self.refused = mode, False, 0
        self._back, self.asked = threading.Event(), threading.Event()
        module, name = POINTS[point]
        inner = getattr(module, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self._ask()
            return inner(*args, **kwargs)

        async def outer_async(*args: Any, **kwargs: Any) -> Any:
            await asyncio.to_thread(self._ask)
            return await inner(*args, **kwargs)

        is_async = asyncio.iscoroutinefunction(inner)
        monkeypatch.setattr(module, name, outer_async if is_async else outer)

    def _ask(self) -> None:
        if not self.is_away:
            return
        self.asked.set()
        if self.mode == "hang":
            assert self._back.wait(120)
            return
        self.refused += 1
        raise OSError(errno.EIO, "Input/output error")

    def leave(self) -> None:
        self._back.clear()
        self.asked.clear()
        self.is_away = True

    def come_back(self) -> None:
        self.is_away = False
        self._back.set()


class Clock:
    """A clock of the policy that a test moves."""

    def __init__(self, manager: Any) -> None:
        self.s = 0.0
        manager._sink.acknowledged.outage._clock = self

    def __call__(self) -> float:
        return self.s


class Loop(Saving):
    """A loop whose manager keeps what storage refuses."""

    def __init__(self, root: Any, kept: int | None = None, **options: Any) -> None:
        self._kept = kept
        super().__init__(root, **options)

    def open(self) -> None:
        self.manager: Any = adacheck.checkpoint_manager(
            str(self.root), self.run.recorder, max_to_keep=self._kept, **self.options
        )
        self.handler, self.clock = self.manager.handler, Clock(self.manager)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.train()
            self.put()

    def until_away(self, storage: Storage, count: int = 2) -> None:
        """Saves some steps, and one more into a storage that is away by then."""
        self.save(count)
        storage.leave()
        self.step()
        if storage.mode == "refuse":
            self.until_failed()
        else:
            assert storage.asked.wait(60)

    @property
    def kept(self) -> list[int]:
        return [*self.manager._sink.acknowledged.lag.steps]

    def until_failed(self) -> None:
        """Waits until Orbax has given up the save in flight."""
        self.manager._opener.wait()
        if (thread := self.manager._finalize_thread.get()) is not None:
            threading.Thread.join(thread, 60)

    def held(self, lost: tuple[int, ...] = ()) -> dict[int, list[int]]:
        """Restores every step; gives those that each directory holds."""
        for step in lost:
            del self.states[step]
        self.verify()
        where = holders(self.root)
        return {n: sorted(x for x in where if where[x] == n) for n in sorted({*where.values()})}


def joined(held: dict[int, list[int]]) -> list[list[int]]:
    """The steps of each directory that holds several."""
    return [every for every in held.values() if len(every) > 1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(outage, "PATIENCE_S", 60.0)
    monkeypatch.setattr(outage, "CLOSING_S", 0.0)
    monkeypatch.setattr("orbax.checkpoint._src.multihost.multihost._DEFAULT_BARRIER_TIMEOUT", 5)


@pytest.mark.slow
@pytest.mark.first(2, slow=5)
@pytest.mark.parametrize("point", POINTS)
def test_what_storage_refuses_is_written_when_it_is_back(point, tmp_path, monkeypatch, caplog):
    storage, loop = Storage(monkeypatch, point, "refuse"), Loop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage, 3)
        loop.step(3)  # no try is due
        assert storage.refused == 1
        assert loop.kept == [4, 5, 6, 7]
        loop.clock.s += 60
        loop.step()  # a try, which is refused too
        loop.until_failed()
        loop.step()
        assert storage.refused == 2
        assert loop.kept == [4, 5, 6, 7, 8, 9]
        storage.come_back()
        loop.clock.s += 60
        loop.step()  # writes step 4
        loop.until_failed()
        loop.step(2)
        manager.wait_until_finished()
    assert joined(loop.held()) == [[5, 6], [7, 8, 9, 10], [11, 12]]
    assert "Storage has refused steps" in caplog.text
    assert "Storage answers again" in caplog.text
    assert caplog.text.count("Storage has refused steps") == 3


@pytest.mark.first(2, slow=5)
@pytest.mark.parametrize("point", POINTS)
def test_what_hangs_does_not_stop_the_loop(point, tmp_path, monkeypatch, caplog):
    storage, loop = Storage(monkeypatch, point, "hang"), Loop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage, 3)
        loop.clock.s += 61
        loop.step(6)
        assert loop.kept == [5, 6, 7, 8, 9, 10]
        assert manager.latest_step() == 4  # in flight
        storage.come_back()
        loop.until_failed()
        loop.step()
        manager.wait_until_finished()
    assert joined(loop.held()) == [[5, 6], [7, 8, 9, 10]]
    assert caplog.text.count("A save has not ended for 61 s (storage is slow, or does not") == 1


def test_a_save_that_waits_for_its_check_does_not_blame_storage(tmp_path, monkeypatch, caplog):
    loop, go_on, prove = Loop(tmp_path), threading.Event(), pending.Pending._prove
    waits, clock = threading.Event(), itertools.count(0, 61)

    def held(step: pending.Pending, *args: Any) -> None:
        if step.step == 2:
            waits.set()
            assert go_on.wait(120)
        prove(step, *args)

    monkeypatch.setattr(pending.Pending, "_prove", held)
    with loop.manager as manager:
        loop.step()
        manager.wait_until_finished()
        loop.step()
        assert waits.wait(60)
        found = manager._sink.acknowledged.lag
        assert found.is_computing
        go_on.set()
        manager.wait_until_finished()
        assert not manager._sink.acknowledged.lag.is_computing
    away = outage.Outage(lambda: next(clock))
    away.begin()
    away.hang()
    away.tell(found)
    assert "(its check has not ended; programs for it are compiled at first)" in caplog.text


@pytest.mark.slow
@pytest.mark.first(1, slow=6)
@pytest.mark.parametrize("first", [5, 1])
@pytest.mark.parametrize("point", ["rename", "manifest", "claim"])
def test_a_base_is_written_again_too(point, first, tmp_path, monkeypatch):
    """By then its state was donated."""
    storage, loop = Storage(monkeypatch, point, "refuse"), Loop(tmp_path, max_deltas=3)
    with loop.manager as manager:
        if first > 1:
            loop.step(first - 1)
            manager.wait_until_finished()
        storage.leave()
        loop.step()
        loop.until_failed()
        loop.step(5)
        assert loop.kept == [*range(first, first + 6)]
        storage.come_back()
        manager.wait_until_finished()
        assert not loop.kept
        loop.step(2)
    held = loop.held()
    assert held[first] == [first]
    kept = [each for each in held if first < each <= first + 5]
    assert [x for each in kept for x in held[each]] == [*range(first + 1, first + 6)]
    assert not any(isinstance(manifest_of(tmp_path, each), BaseManifest) for each in kept)
    assert isinstance(manifest_of(tmp_path, first), BaseManifest)
    assert isinstance(manifest_of(tmp_path, first + 6), BaseManifest)


@pytest.fixture
def another_part_fails(monkeypatch):
    """Has a part of Orbax's of the first base be refused, once the share is being written."""
    begun, write = threading.Event(), StockCheckpoints.write

    class Refused(ocp.Future):
        def result(self, timeout: float | None = None) -> Any:
            assert begun.wait(60)
            raise OSError(errno.EIO, "Input/output error")

    async def refusing(*args: Any) -> Any:
        futures, entries = await write(*args)
        return ([] if begun.is_set() else [Refused()]) + futures, entries

    monkeypatch.setattr(StockCheckpoints, "write", refusing)
    return begun


def test_nothing_of_a_save_that_failed_is_written_once_it_is_made_again(
    tmp_path, monkeypatch, another_part_fails
):
    """Orbax gives up at the first error, while other parts of the save are being written."""
    inner, strays = share._write, list[Path]()

    def slow(save: Any, directory: Any, layout: Any) -> Any:
        if not another_part_fails.is_set():
            another_part_fails.set()
            for n in range(100):
                time.sleep(0.01)
                stray = Path(str(directory), f"stray-{n}")
                stray.mkdir(parents=True)
                strays.append(stray)
        return inner(save, directory, layout)

    monkeypatch.setattr(share, "_write", slow)
    loop = Loop(tmp_path)
    with loop.manager as manager:
        loop.step()
        loop.until_failed()
        loop.step(2)
        manager.wait_until_finished()
        assert len(strays) == 100
        assert not [*tmp_path.rglob("stray-*")]
    assert loop.held().keys() == {1, 3}


def test_a_save_that_another_part_refused_is_lost_if_its_share_is_wrong(
    tmp_path, monkeypatch, another_part_fails
):
    """It would be wrong again: of what the share found out the refusal must not make a retry."""

    def wrong(*_: Any) -> Any:
        another_part_fails.set()
        time.sleep(0.5)
        raise claims.TakenError("expected one writer, found another")

    monkeypatch.setattr(share, "_write", wrong)
    loop = Loop(tmp_path)
    with loop.manager as manager:
        loop.step()
        loop.until_failed()
        with pytest.raises(OSError, match="Input/output") as raised:
            manager.wait_until_finished()
        assert "Step 1 is not saved." in raised.value.__notes__
        assert not loop.kept


@pytest.mark.slow
def test_a_full_disk_takes_what_has_room(tmp_path, monkeypatch):
    write, room = manifest_file.write, [9]
    storage, loop = Storage(monkeypatch, "manifest", "refuse"), Loop(tmp_path)

    def write_while_there_is_room(directory: Any, manifest: Any, claim: Any) -> Any:
        room[0] -= len(getattr(manifest, "recorded", ())) + 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, manifest, claim)

    with loop.manager as manager:
        loop.until_away(storage)
        loop.step(20)
        monkeypatch.setattr(manifest_file, "write", write_while_there_is_room)
        with pytest.raises(
            StorageError, match=r"No space .* Steps that are not written: 10 to 23\. They"
        ):
            manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 5, 9]
        room[0] = 100
        manager.wait_until_finished()
    assert joined(loop.held()) == [[4, 5], [*range(6, 10)], [*range(10, 18)], [*range(18, 24)]]


def test_no_step_stays_that_retention_let_go(tmp_path, monkeypatch):
    """Orbax forgets a step that a save was to delete, also if that save fails."""
    storage, loop = Storage(monkeypatch, "manifest", "refuse"), Loop(tmp_path, kept=3)
    with loop.manager as manager:
        loop.step(4)
        loop.until_away(storage, 2)
        storage.come_back()
        loop.clock.s += 60
        for _ in range(6):
            loop.step()
            loop.until_failed()
        manager.wait_until_finished()
        on_disk = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
        assert on_disk == manager.all_steps()


def test_an_old_step_that_cannot_be_deleted_is_deleted_later(tmp_path, monkeypatch, caplog):
    """The step that was saved has its name by then."""
    loop = Loop(tmp_path, kept=3)

    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with loop.manager as manager:
        loop.step(6)
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(deleter.StandardCheckpointDeleter, "delete", refused)
            loop.step()
            manager.wait_until_finished()
        assert "earlier steps could not be deleted" in caplog.text
        assert not loop.kept
        loop.step(3)
        manager.wait_until_finished()
        on_disk = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
        assert on_disk == manager.all_steps() == [8, 9, 10]


def test_a_manager_that_is_closed_writes_what_is_in_memory(tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path)
    monkeypatch.setattr(outage, "CLOSING_S", 60.0)
    monkeypatch.setattr(outage, "RETRY_S", 0.01)
    with loop.manager:
        loop.until_away(storage)
        loop.step(3)
        threading.Thread(target=lambda: storage.asked.wait(60) and storage.come_back()).start()
        storage.asked.clear()
    assert loop.held()


@pytest.mark.parametrize("mode", ["refuse", "hang"])
@pytest.mark.parametrize("is_free", [True, False])
def test_where_memory_is_full_a_save_waits_or_raises(mode, is_free, tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", mode), Loop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage)
        loop.clock.s += 61
        loop.step()
        own_bytes = manager._sink.acknowledged.lag.taken_bytes
        monkeypatch.setattr(situation, "_LEAST_BYTES", 0)
        base_bytes = situation.sizes_of(manager._sink.acknowledged.lag.plan.structure).base_bytes
        free_bytes = 2 * base_bytes if is_free else 0  # room for a base, or none
        monkeypatch.setattr(backlog, "free_bytes", lambda: free_bytes)
        loop.step(base_bytes // own_bytes - 1 if is_free else 1)  # of the room the next one learns
        assert manager._sink.acknowledged.lag.taken_bytes <= max(base_bytes, 2 * own_bytes)
        if mode == "hang":
            threading.Timer(0.2, storage.come_back).start()
            loop.step()
        else:
            count = loop.number
            with pytest.raises(
                StorageError, match=f"Steps that are not written: 3 to {count}\\. They are in"
            ):
                loop.step()
            del loop.states[count + 1]
            storage.come_back()
            loop.step()  # does not follow by one update
            assert not loop.kept
    loop.held()


def test_steps_that_are_not_one_update_apart_are_not_kept(tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", "hang"), Loop(tmp_path)
    with loop.manager:
        loop.until_away(storage)
        loop.clock.s += 61
        loop.train()
        threading.Timer(0.2, storage.come_back).start()
        loop.step()
        assert not loop.kept
    assert isinstance(manifest_of(tmp_path, 5), BaseManifest)
    loop.held()


def test_a_policy_decides_first(tmp_path, monkeypatch):
    storage = Storage(monkeypatch, "pack", "refuse")
    loop = Loop(tmp_path, options=ocp.CheckpointManagerOptions(save_interval_steps=2))
    with loop.manager as manager:
        for step in range(1, 9):
            if step == 3:
                manager.wait_until_finished()
                storage.leave()
            state = loop.train()
            loop.note()
            is_due = step % 2 == 0 or step == 1  # a first save is always due
            if not is_due:
                assert manager.handler.record_step(state, step)
            assert manager.save(step, args=adacheck.SaveArgs(state)) == is_due
            loop.until_failed()
        storage.come_back()
    loop.held()


def test_metrics_are_not_left_out(tmp_path, monkeypatch):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path, options=options)
    with loop.manager as manager:
        for step in range(1, 6):
            state = loop.train()
            if step == 3:
                manager.wait_until_finished()
                storage.leave()
            args: Any = {"args": adacheck.SaveArgs(state), "metrics": {"loss": 1.0}}
            if step == 4:
                loop.until_failed()
                storage.come_back()
                with pytest.raises(StorageError, match="Input/output error"):
                    manager.save(step, **args)
                continue
            assert manager.save(step, **args)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 5]


ITEMS = ("params", "opt_state")


class TrainerLoop(Loop):
    """A loop as a trainer has it, with a manager of two items that was plugged in."""

    def open(self) -> None:
        handlers = {name: ocp.StandardCheckpointHandler() for name in ITEMS}
        with adacheck.plug_in(self.run.recorder):
            self.manager = ocp.CheckpointManager(self.root, item_handlers=handlers)
        self.handler, self.clock = self.manager.handler, Clock(self.manager)

    def put(self, **options: Any) -> None:
        self.states[self.number] = support.host_copy([self.run.state[name] for name in ITEMS])
        args: Any = {name: ocp.args.StandardSave(self.run.state[name]) for name in ITEMS}
        args = ocp.args.Composite(**args)
        assert self.manager.save(self.number, args=args, custom_metadata={}, **options)


@pytest.mark.parametrize("mode", ["refuse", "hang"])
def test_a_trainer_with_two_items_goes_on(mode, tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", mode), TrainerLoop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage, 3)
        loop.clock.s += 1 if mode == "refuse" else 61
        loop.step(3)
        assert loop.kept == ([4, 5, 6, 7] if mode == "refuse" else [5, 6, 7])
        storage.come_back()
        loop.until_failed()
        loop.clock.s += 60
        loop.step()
        params = ocp.args.StandardSave(loop.train()["params"])
        manager.save(loop.number, args=ocp.args.Composite(params=params))
        manager.wait_until_finished()
    assert holders(tmp_path).keys() == {*loop.states, loop.number}
    loop.open()
    with loop.manager as manager:
        for step, expected in loop.states.items():
            number = None if manager.all_steps().count(step) else step
            wanted = {name: adacheck.RestoreArgs(loop.run.state[name], number) for name in ITEMS}
            found = manager.restore(holders(tmp_path)[step], args=ocp.args.Composite(**wanted))
            support.assert_same_bits([found[name] for name in ITEMS], expected)


def test_a_refused_step_may_be_saved_again_with_another_state(tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage)
        storage.come_back()
        loop.run.advance()
        loop.note()
        assert not manager.save(3, args=adacheck.SaveArgs(loop.run.state))
        assert manager.save(3, args=adacheck.SaveArgs(loop.run.state), force=True)
    loop.held()


def test_what_follows_a_save_that_is_lost_is_named(tmp_path, monkeypatch):
    """Storage was not the reason that it failed."""
    storage, loop = Storage(monkeypatch, "pack", "hang"), Loop(tmp_path)
    with loop.manager as manager:
        loop.until_away(storage)
        loop.clock.s += 61
        loop.step(2)

        def broken(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError("a mistake")

        with monkeypatch.context() as patch:
            patch.setattr("adacheck_jax.save.commit._committed", broken)
            storage.come_back()
            loop.until_failed()
        loop.train()
        with pytest.raises(
            StorageError, match=r"a mistake Step 3 is not saved, nor .* steps 4 to 5, wh"
        ):
            manager.save(6, args=adacheck.SaveArgs(loop.run.state))
        loop.step(2)
    loop.held(lost=(3, 4, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("gs", 403),
        pytest.param("s3", 403, marks=pytest.mark.campaign),
        pytest.param("s3", 503, marks=pytest.mark.campaign),  # clients try for half a minute
    ],
)
def test_a_bucket_that_refuses(kind, status, request, monkeypatch):
    store = request.getfixturevalue(kind)
    loop = Loop(f"{store.url}/away{status}", max_deltas=3)
    try:
        with loop.manager as manager:
            loop.step(2)
            manager.wait_until_finished()
            for _ in range(2):  # a delta, and then a base
                store.proxy.refuse = lambda method, path: status if method in ("POST", "PUT") else 0
                loop.step()
                thread = threading.Timer(1.0, store.proxy.reset)
                thread.start()
                loop.step(3)
                thread.join()
                loop.until_failed()
                loop.clock.s += 60
                loop.step()
                loop.until_failed()
                loop.step()
                manager.wait_until_finished()
                loop.step()
        loop.held()
    finally:
        store.proxy.reset()


def test_a_look_that_hangs_does_not_stop_the_loop(tmp_path, monkeypatch):
    """What the loop's own thread would ask of the disk."""
    loop, back, asked = Loop(tmp_path), threading.Event(), []
    with loop.manager as manager:
        loop.step(2)
        manager.wait_until_finished()

        def hangs(look: Callable[[], bool]) -> Any:
            asked.append(1)
            return keeping_asked(lambda: back.wait(60) and look())

        keeping_asked = outage._asked
        monkeypatch.setattr(outage, "_asked", hangs)
        monkeypatch.setattr(outage, "PATIENCE_S", 0.1)
        loop.step(5)
        assert (loop.kept, len(asked)) == ([3, 4, 5, 6, 7], 1)
        back.set()
        assert manager._sink._look is not None
        manager._sink._look._look.result(60)
        loop.step()
        manager.wait_until_finished()
    assert joined(loop.held()) == [[3, 4], [5, 6, 7, 8]]


def test_nothing_of_a_step_that_has_its_name_stays_in_memory(tmp_path):
    loop = Loop(tmp_path)
    with loop.manager as manager:
        for _ in range(3):
            loop.step()
            manager.wait_until_finished()
            only = manager.handler.run.lines.only
            assert only is not None
            saved = only[1]._planner.line.saved
            assert saved is not None
            assert saved.save is not None
            assert saved.save.base is None
            assert not saved.save.own.is_in_memory


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_step_is_lost(seed, tmp_path, monkeypatch):
    """Saves and records while one point or another refuses or hangs, in any order."""
    chance = random.Random(seed)
    monkeypatch.setattr(outage, "PATIENCE_S", 0.0)
    monkeypatch.setattr(outage, "_SLOWER", 0.0)
    storages = [Storage(monkeypatch, point, "") for point in POINTS]
    loop = Loop(tmp_path, **chance.choice([{}, {"max_deltas": 3}]))
    for _ in range(60):
        loop.clock.s += chance.choice([0, 1, 10])
        event = chance.choices(["save", "record", "leave", "back", "wait"], [12, 3, 3, 3, 1])[0]
        is_away = any(each.is_away for each in storages)
        if event == "save":
            loop.step()
        elif event == "record":
            loop.keep()
        elif event == "leave" and not is_away and loop.states:
            storage = chance.choice(storages)
            storage.mode = chance.choice(["refuse", "hang"])
            storage.leave()
        elif event == "back":
            for each in storages:
                each.come_back()
        elif event == "wait" and not is_away:
            loop.manager.wait_until_finished()
    for each in storages:
        each.come_back()
    loop.manager.close()
    loop.held()
