"""Reports, events and log lines by which a training run is watched."""

from __future__ import annotations

import errno
import logging
import threading

import pytest
from jax import monitoring
from jax._src import monitoring as listeners  # there is no public way to take one listener away

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.restore import progress
from adacheck_jax.save import commit
from adacheck_jax.store.steps import folders
from tests import support
from tests.support import manager_of, mesh_of, save_steps

LOGGER = "adacheck_jax.adapter.reports"


@pytest.fixture
def run():
    return support.dict_run(mesh_of((2, 2)))


@pytest.fixture
def events():
    """Events of this library, as a listener is told of them."""
    told: list[tuple[str, float | None, dict[str, str | int]]] = []

    def listen(name, value=None, **labels):
        if name.startswith("/adacheck/"):
            told.append((name, value, labels))

    monitoring.register_event_listener(listen)
    monitoring.register_event_duration_secs_listener(listen)
    monitoring.register_scalar_listener(listen)
    yield told
    listeners.unregister_event_listener(listen)
    listeners.unregister_event_duration_listener(listen)
    listeners.unregister_scalar_listener(listen)


def test_saves_are_told_to_a_callback_to_monitoring_and_to_the_log(tmp_path, run, events, caplog):
    told, threads = [], set()

    def on_save(report):
        told.append(report)
        threads.add(threading.current_thread())

    handler = adacheck.AdaCheckHandler(run.recorder, on_save=on_save)
    assert handler.last_save is None
    with caplog.at_level(logging.INFO, LOGGER), manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 2)
        for step in (3, 4):
            assert handler.record_step(run.advance(), step)
        assert handler.last_save.step == 2
        save_steps(manager, run, 1)
        assert handler.last_save == told[-1]
    assert [(x.step, x.kind, x.parent, x.deferred) for x in told] == [
        (1, "base", None, ()),
        (2, "delta", 1, ()),
        (5, "delta", 2, (3, 4)),
    ]
    assert [x.checked for x in told] == [None, "full", "full"]
    assert threading.main_thread() not in threads
    lines = [x.message for x in caplog.records if x.name == LOGGER]
    for each, line in zip(told, lines, strict=True):
        item, kind = tmp_path / str(each.step) / "default", {"kind": each.kind}
        assert 0 <= folders.new_bytes(item) - each.new_bytes < 1000  # what Orbax marks it with
        assert each.reason
        assert 0 < each.blocking_s <= each.durable_s
        assert 0 <= each.check_s <= each.durable_s
        assert f": {each.kind} ({each.reason}), {each.new_bytes:,} bytes, blocked " in line
        assert events[:6] == [
            ("/adacheck/save/committed", None, kind),
            ("/adacheck/save/blocking_duration_secs", each.blocking_s, kind),
            ("/adacheck/save/check_duration_secs", each.check_s, kind),
            ("/adacheck/save/durable_duration_secs", each.durable_s, kind),
            ("/adacheck/save/steps", 1 + len(each.deferred), kind),
            ("/adacheck/save/new_bytes", each.new_bytes, kind),
        ]
        del events[:6]
    assert not events
    assert lines[-1].startswith("step 5 with 3 to 4: delta (")
    assert lines[-1].endswith("checked: full")


def test_monitoring_is_told_of_restores(tmp_path, run, events):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
        events.clear()
        manager.restore(3, args=adacheck.RestoreArgs(support.abstract(run.state)))
    values = {name.removeprefix("/adacheck/restore/"): value for name, value, _ in events}
    assert values.pop("replayed_count") == 2
    total_s, parts = values.pop("duration_secs"), ("base", "replay", "compile_wait")
    assert values.keys() == {f"{each}_duration_secs" for each in parts}
    assert all(0 <= each <= total_s for each in values.values())


def test_a_save_that_fails_is_not_reported(tmp_path, run, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "no space left on device")

    told = []
    handler = adacheck.AdaCheckHandler(run.recorder, on_save=told.append)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 1)
        with monkeypatch.context() as patch:
            patch.setattr(commit, "_delta_manifest", full)
            with pytest.raises(StorageError):
                save_steps(manager, run, 1)
        assert [x.step for x in told] == [1]
        assert handler.last_save == told[-1]


@pytest.mark.parametrize("who", ["on_save", "a listener"])
def test_an_error_of_who_is_told_fails_no_save_and_is_logged_once(tmp_path, run, caplog, who):
    told = []

    def on_save(report):
        told.append(report.step)
        if who == "on_save":
            raise ZeroDivisionError(f"step {report.step}")

    def listen(name, **labels):
        if who == "a listener" and name.startswith("/adacheck/"):
            raise ZeroDivisionError(name)

    handler = adacheck.AdaCheckHandler(run.recorder, on_save=on_save)
    monitoring.register_event_listener(listen)
    try:
        with caplog.at_level(logging.ERROR, LOGGER), manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 3)
    finally:
        listeners.unregister_event_listener(listen)
    support.assert_steps(tmp_path, saved, run.state)
    assert told == [1, 2, 3]
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.exc_info[0] is ZeroDivisionError
    assert who != "on_save" or "on_save raised" in record.message
    assert who != "on_save" or str(record.exc_info[1]) == "step 1"


def test_a_long_replay_tells_how_far_it_is(tmp_path, run, caplog, monkeypatch):
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 4)
        monkeypatch.setattr(progress, "EVERY_S", 0.0)
        with caplog.at_level(logging.INFO, progress.__name__):
            manager.restore(4, args=adacheck.RestoreArgs(support.abstract(run.state)))
    lines = [each.message for each in caplog.records if "deltas" in each.message]
    assert [line.rsplit(", ", 1)[0] for line in lines[-3:]] == [
        f"restoring step 4: replayed {done} of 3 deltas" for done in (0, 1, 2)
    ]
    assert all(line.endswith(" MB") for line in lines[-3:])
