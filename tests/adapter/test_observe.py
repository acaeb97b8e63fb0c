"""Reports, events and log lines by which a training run is watched."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import textwrap
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


def test_each_save_is_reported_once_it_is_committed(tmp_path, run):
    told, threads = [], set()

    def on_save(report):
        told.append(report)
        threads.add(threading.current_thread())

    handler = adacheck.AdaCheckHandler(run.recorder, on_save=on_save)
    assert handler.last_save is None
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
        assert handler.last_save == told[-1]
    assert [(x.step, x.kind, x.parent, x.deferred) for x in told] == [
        (1, "base", None, ()),
        (2, "delta", 1, ()),
        (3, "delta", 2, ()),
    ]
    assert [x.checked for x in told] == [None, "full", "full"]
    assert threading.main_thread() not in threads
    for each in told:
        item = tmp_path / str(each.step) / "default"
        assert 0 <= folders.new_bytes(item) - each.new_bytes < 1000  # what Orbax marks it with
        assert each.reason
        assert 0 < each.blocking_s <= each.durable_s
        assert 0 <= each.check_s <= each.durable_s


def test_deferred_steps_are_named_by_the_save_that_writes_them(tmp_path, run):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 1)
        for step in (2, 3):
            assert handler.record_step(run.advance(), step)
        assert handler.last_save.step == 1
        manager.save(4, args=adacheck.SaveArgs(run.advance()))
        manager.wait_until_finished()
    assert (handler.last_save.step, handler.last_save.deferred) == (4, (2, 3))


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


def test_an_error_in_the_callback_fails_no_save_and_is_logged_once(tmp_path, run, caplog):
    def on_save(report):
        raise ZeroDivisionError(f"step {report.step}")

    handler = adacheck.AdaCheckHandler(run.recorder, on_save=on_save)
    with caplog.at_level(logging.ERROR, LOGGER), manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 3)
        restored = manager.restore(3, args=adacheck.RestoreArgs(support.abstract(run.state)))
    support.assert_same_bits(restored, saved[3])
    [record] = [each for each in caplog.records if each.name == LOGGER]
    assert "on_save raised" in record.message
    assert record.exc_info[0] is ZeroDivisionError
    assert str(record.exc_info[1]) == "step 1"


def test_a_listener_that_raises_fails_no_save_and_hides_no_report(tmp_path, run, caplog):
    def listen(name, **labels):
        if name.startswith("/adacheck/"):
            raise ZeroDivisionError(name)

    told = []
    handler = adacheck.AdaCheckHandler(run.recorder, on_save=told.append)
    monitoring.register_event_listener(listen)
    try:
        with caplog.at_level(logging.ERROR, LOGGER), manager_of(tmp_path, handler) as manager:
            save_steps(manager, run, 2)
            assert manager.latest_step() == 2
    finally:
        listeners.unregister_event_listener(listen)
    assert [x.step for x in told] == [1, 2]
    assert [each.exc_info[0] for each in caplog.records] == [ZeroDivisionError]


def test_monitoring_is_told_of_saves_and_restores(tmp_path, run, events):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
        report = handler.last_save
        kind = {"kind": "delta"}
        assert [each for each in events if each[2] == kind][-6:] == [
            ("/adacheck/save/committed", None, kind),
            ("/adacheck/save/blocking_duration_secs", report.blocking_s, kind),
            ("/adacheck/save/check_duration_secs", report.check_s, kind),
            ("/adacheck/save/durable_duration_secs", report.durable_s, kind),
            ("/adacheck/save/steps", 1, kind),
            ("/adacheck/save/new_bytes", report.new_bytes, kind),
        ]
        assert len([each for each in events if each[0] == "/adacheck/save/committed"]) == 3
        events.clear()
        manager.restore(3, args=adacheck.RestoreArgs(support.abstract(run.state)))
    values = {name.removeprefix("/adacheck/restore/"): value for name, value, _ in events}
    assert values.pop("replayed_count") == 2
    total_s = values.pop("duration_secs")
    assert values.keys() == {
        "base_duration_secs",
        "replay_duration_secs",
        "compile_wait_duration_secs",
    }
    assert all(0 <= each <= total_s for each in values.values())


def test_a_save_is_one_line_in_the_log(tmp_path, run, caplog):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 2)
        with caplog.at_level(logging.INFO, "adacheck_jax"):
            save_steps(manager, run, 2)
    lines = [each.message for each in caplog.records if each.name.startswith("adacheck_jax")]
    assert [line.split(" (")[0] for line in lines] == ["step 3: delta", "step 4: delta"]
    new = f"{handler.last_save.new_bytes:,} bytes, blocked "
    assert new in lines[-1]
    assert lines[-1].endswith("checked: full")


QUIET = """
import sys
import jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp
import adacheck_jax as adacheck

recorder = adacheck.Recorder(optax.adam(1e-2))
params = {"w": jnp.ones((4, 4))}
state = {"params": params, "opt_state": recorder.init(params)}

@jax.jit
def step(state):
    updates, opt_state = recorder.update(state["params"], state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

handler = adacheck.AdaCheckHandler(recorder)
with ocp.CheckpointManager(sys.argv[1], item_handlers=handler) as manager:
    for number in range(3):
        state = step(state)
        manager.save(number, args=adacheck.SaveArgs(state))
    manager.wait_until_finished()
    manager.restore(2, args=adacheck.RestoreArgs(state))
assert handler.last_save.step == handler.restored.step == 2
"""


@pytest.mark.slow
def test_nothing_is_printed(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(QUIET), str(tmp_path / "root")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    said = (ended.stdout + ended.stderr).splitlines()
    assert [line for line in said if not line.startswith("WARNING:absl:")] == []  # Orbax's own


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
