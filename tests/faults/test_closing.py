"""An error under which a manager, a checkpointer or a publisher is closed stays visible."""

from __future__ import annotations

import errno
import json
import threading
import traceback
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage
from adacheck_jax.errors import StorageError
from adacheck_jax.publish import Publisher, publisher
from adacheck_jax.publish.root import Root
from tests import support
from tests.faults.test_storage_away import Loop, Storage
from tests.processes import launch
from tests.publish.states import Training

ERRORS = [ZeroDivisionError, KeyboardInterrupt, SystemExit]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(outage, "PATIENCE_S", 60.0)
    monkeypatch.setattr(outage, "CLOSING_S", 1.0)
    monkeypatch.setattr(outage, "RETRY_S", 0.01)
    monkeypatch.setattr("orbax.checkpoint._src.multihost.multihost._DEFAULT_BARRIER_TIMEOUT", 5)


def seen(
    closed: Any, error: BaseException, way: str = "with", loop: Callable[[], object] = lambda: None
) -> BaseException:
    """The error that a caller sees where one ends a loop, and something is closed."""
    try:
        if way == "with":
            with closed:
                loop()
                raise error
        try:
            loop()
            raise error
        finally:
            closed.close()
    except BaseException as found:
        return found


def shown(error: BaseException) -> list[str]:
    """Types of the errors of a traceback, the first one first."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    names = [each.split(":")[0].rsplit(".", 1)[-1] for each in lines if each[:1].isalpha()]
    return [each for each in names if each.endswith(("Error", "Exit", "Interrupt"))]


def told(found: BaseException, error: BaseException, way: str) -> str:
    """What closing told of an error that is seen."""
    assert not found.__suppress_context__
    assert shown(found)[0] == type(error).__name__
    if way == "with":
        assert (found, found.__cause__) == (error, None)
        return "\n".join(found.__notes__)
    assert found.__context__ is error
    return str(found)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    ("point", "way"), [("pack", "with"), ("mkdir", "with"), ("pack", "finally")]
)
def test_an_error_of_the_loop_is_seen(way, point, kind, tmp_path, monkeypatch, caplog):
    storage, loop, error = (
        Storage(monkeypatch, point, "refuse"),
        Loop(tmp_path),
        kind("of the loop"),
    )
    loop.until_away(storage)
    loop.step(2)
    refused = storage.refused
    said = told(found := seen(loop.manager, error, way), error, way)
    assert storage.refused == refused + 1, "it is tried once"
    assert "Input/output error" in said
    assert "Steps that are not written: 3 to 5. They are lost" in said
    assert ".. " not in said
    if way == "with":
        assert f"{kind.__name__} ended a block; while it was closed: " in caplog.text
    else:
        assert shown(found)[1:] == ["OSError", "StorageError", "StorageError"]
    storage.come_back()
    loop.held(lost=(3, 4, 5))


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["orderly", "an error"])
def test_no_step_is_lost_that_storage_takes_while_the_manager_is_closed(error, tmp_path):
    loop = Loop(tmp_path)

    def steps() -> None:
        loop.step(2)
        assert loop.keep(3) == "rrr"

    if error is None:
        with loop.manager:
            steps()
    else:
        assert seen(loop.manager, error, loop=steps) is error
        assert not hasattr(error, "__notes__")
    assert loop.held()[5] == [3, 4, 5]


def test_an_orderly_end_inside_a_handler_waits_as_any_other(tmp_path, monkeypatch):
    """An error that was met before the block began is not its own."""
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path)
    monkeypatch.setattr(outage, "CLOSING_S", 60.0)
    ask, tries = storage._ask, iter(range(4))

    def back_later() -> None:
        if next(tries, 4) == 3:
            storage.come_back()
        ask()

    try:
        raise LookupError("no such module")
    except LookupError:
        with loop.manager:
            loop.until_away(storage)
            loop.step(2)
            monkeypatch.setattr(storage, "_ask", back_later)
    assert not [*tries], "it was tried several times"
    loop.held()


@pytest.mark.parametrize("way", ["with", "finally"])
@pytest.mark.parametrize("mode", ["refuse", "hang"])
def test_storage_that_hangs_does_not_hold_an_error_up(mode, way, tmp_path, monkeypatch):
    """Also where it refused before."""
    storage, loop, error = Storage(monkeypatch, "pack", mode), Loop(tmp_path), ZeroDivisionError()
    loop.until_away(storage)
    if mode == "hang":
        loop.clock.s += 61
        loop.step(2)
    storage.mode = "hang"
    monkeypatch.setattr(outage, "PATIENCE_S", 0.0)
    monkeypatch.setattr(outage, "_SLOWER", 0.0)
    said = told(seen(loop.manager, error, way), error, way)
    behind = ", and steps in memory: 4 to 5" if mode == "hang" else ""
    assert f"the save of step 3 to end, found it goes on{behind}. The manager is not" in said
    storage.come_back()
    loop.manager.close()
    loop.held()


@pytest.mark.parametrize("mode", ["refuse", "hang"])
def test_a_manager_that_keeps_nothing_in_memory(mode, tmp_path, monkeypatch):
    storage, run = Storage(monkeypatch, "manifest", mode), support.dict_run(support.mesh_of((1, 1)))
    items, error = {"notes": ocp.JsonCheckpointHandler()}, ZeroDivisionError()
    manager = adacheck.checkpoint_manager(tmp_path, run.recorder, items=items)
    args = {"state": adacheck.SaveArgs(run.advance()), "notes": ocp.args.JsonSave({})}
    storage.leave()
    manager.save(1, args=ocp.args.Composite(**args))
    assert storage.asked.wait(60)
    monkeypatch.setattr(outage, "PATIENCE_S", 0.0 if mode == "hang" else 60.0)
    said = told(seen(manager, error), error, "with")
    assert ("it goes on" if mode == "hang" else "Input/output") in said
    storage.come_back()
    if mode == "hang":
        manager.close()
        assert (tmp_path / "1").exists()


def test_of_two_errors_at_once_none_is_lost(tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path)

    def failing() -> None:
        raise StorageError("the handler cannot be closed") from OSError(errno.EIO, "Input/output")

    loop.until_away(storage)
    monkeypatch.setattr(loop.manager.handler, "close", failing)
    with pytest.raises(StorageError, match="They are lost") as raised:
        loop.manager.close()
    assert "the handler cannot be closed" in raised.value.__notes__[0]


@pytest.mark.parametrize("way", ["with", "finally"])
def test_an_error_that_goes_back_to_the_same_refusal(way, tmp_path, monkeypatch):
    storage, loop = Storage(monkeypatch, "pack", "refuse"), Loop(tmp_path)
    loop.until_away(storage)
    with pytest.raises(StorageError, match="They are in memory") as kept:
        loop.manager.wait_until_finished()
    found = seen(loop.manager, kept.value, way)
    assert shown(found)[:3] == ["OSError", "StorageError", "StorageError"]
    assert "They are in memory" in "".join(traceback.format_exception(found))
    assert ("They are lost" in str(found)) == (way == "finally")


@pytest.mark.parametrize("way", ["with", "finally"])
@pytest.mark.parametrize("mode", ["refuse", "hang"])
def test_a_checkpointer_of_v1(mode, way, tmp_path, monkeypatch):
    storage, run = Storage(monkeypatch, "manifest", mode), support.dict_run(support.mesh_of((1, 1)))
    checkpointer, error = adacheck.v1.checkpointer(tmp_path, run.recorder), ZeroDivisionError()
    storage.leave()
    checkpointer.save_async(1, run.advance())
    assert storage.asked.wait(60)
    monkeypatch.setattr(outage, "PATIENCE_S", 0.0 if mode == "hang" else 60.0)
    said = told(seen(checkpointer, error, way), error, way)
    assert ("it goes on" if mode == "hang" else "Input/output error") in said
    storage.come_back()
    if mode == "hang":
        checkpointer.close()
        assert [each.step for each in checkpointer.checkpoints] == [1]


@pytest.mark.parametrize("way", ["with", "finally"])
@pytest.mark.parametrize("mode", ["refuse", "hang"])
def test_a_publisher(mode, way, tmp_path, monkeypatch):
    back, store, error = threading.Event(), Root.store, ZeroDivisionError()
    made = Publisher(tmp_path)

    def away(*args: Any) -> Any:
        if mode == "refuse":
            raise OSError(errno.ENOSPC, "No space left on device")
        assert back.wait(60)
        return store(*args)

    monkeypatch.setattr(Root, "store", away)
    monkeypatch.setattr(publisher, "_HASTE_S", 0.0 if mode == "hang" else 60.0)
    made.publish(Training().params(), version=0)
    said = told(seen(made, error, way), error, way)
    back.set()
    assert ("No space" if mode == "refuse" else "storage does not answer") in said


@pytest.mark.slow
@pytest.mark.parametrize("where", ["all", "1"])
def test_an_error_of_one_process_or_of_all_is_seen_there(where, tmp_path):
    mode = f"pack-{where}-refuse-raise"
    launch(mode, 2, tmp_path / "root", tmp_path / "out", 1, "tests.faults.away_worker")
    for n in range(2):
        errors = json.loads((tmp_path / f"out-found{n}").read_text())["errors"]
        assert "Steps that are not written: 3 to 8. They are lost" in errors["loop"]
        if n or where == "all":
            assert "ZeroDivisionError: of the loop\nWhile it was closed: " in errors["loop"]
        else:
            assert "DifferingCallsError: " in errors["9"]
