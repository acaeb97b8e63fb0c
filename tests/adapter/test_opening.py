"""Saves that Orbax begins on the manager's own thread, and the end of a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage
from tests import support

_LAST = """
import sys
import jax, jax.numpy as jnp, optax
import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage

outage.PATIENCE_S = 600.0
recorder = adacheck.Recorder(optax.adam(1e-3))
params = {"w": jnp.ones((64, 64))}
state = {"params": params, "opt_state": recorder.init(params)}


@jax.jit
def train_step(state):
    updates, opt_state = recorder.update(state["params"], state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


manager = adacheck.checkpoint_manager(sys.argv[1], recorder)
for step in range(4):
    state = train_step(state)
    assert manager.save(step, args=adacheck.SaveArgs(state))
    if step == 2:
        manager.wait_until_finished()
        manager.restore(2, args=adacheck.RestoreArgs(state))
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: Any) -> None:
    """A save of a busy machine is waited for, and the next step not kept in memory."""
    monkeypatch.setattr(outage, "PATIENCE_S", 600.0)


class Opened:
    """A run whose manager begins deltas on its own thread, where a test may stop or break them."""

    def __init__(self, root: Any, monkeypatch: Any) -> None:
        self.run = support.dict_run(support.mesh_of((1, 1)))
        self.manager = adacheck.checkpoint_manager(str(root), self.run.recorder, max_to_keep=None)
        self.error: Exception | None = None
        self.may_begin, self.threads = threading.Event(), list[str]()
        self.may_begin.set()
        inner = ocp.AsyncCheckpointer.save

        def begin(*args: Any, **kwargs: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            assert self.may_begin.wait(60)
            if self.error is not None:
                raise self.error
            return inner(*args, **kwargs)

        monkeypatch.setattr(ocp.AsyncCheckpointer, "save", begin)

    def save(self) -> Any:
        self.run.advance()
        saved = support.host_copy(self.run.state)
        assert self.manager.save(self.run.count, args=adacheck.SaveArgs(self.run.state))
        return saved

    def restored(self, step: int) -> Any:
        args = adacheck.RestoreArgs(support.abstract(self.run.state))
        return self.manager.restore(step, args=args)


@pytest.fixture
def opened(tmp_path: Any, monkeypatch: Any) -> Opened:
    return Opened(tmp_path, monkeypatch)


def test_a_delta_returns_before_orbax_has_begun_it(opened):
    with opened.manager as manager:
        opened.save()
        opened.may_begin.clear()
        saved = opened.save()  # its state may be donated, and is, by the next step
        opened.run.advance()
        opened.may_begin.set()
        assert manager.latest_step() == 2
        support.assert_same_bits(opened.restored(2), saved)
    assert opened.threads[0] == threading.current_thread().name  # of a base Orbax looks at arrays
    assert opened.threads[1] != opened.threads[0]


def test_what_is_asked_waits_until_the_save_has_begun(opened):
    with opened.manager as manager, ThreadPoolExecutor() as threads:
        opened.save()
        opened.may_begin.clear()
        opened.save()
        asked = [manager.latest_step, manager.all_steps, lambda: manager.should_save(2)]
        answers = [threads.submit(each) for each in asked]
        assert not any(each.done() for each in answers)
        opened.may_begin.set()
        assert [each.result() for each in answers] == [2, [1, 2], False]


@pytest.mark.parametrize("asks", ["save", "wait", "close"])
def test_a_save_that_orbax_could_not_begin_is_told_and_the_next_is_a_base(opened, asks):
    saved = {1: opened.save()}
    opened.error = ValueError("a mistake")
    opened.save()
    manager = opened.manager
    ask = {"save": opened.save, "wait": manager.wait_until_finished, "close": manager.close}
    with pytest.raises(ValueError, match="a mistake") as caught:
        ask[asks]()
    nor = ["Nor is step 3, whose save tells it: save it again."] if asks == "save" else []
    assert caught.value.__notes__ == ["Step 2 is not saved.", *nor]
    opened.error = None
    if asks != "close":
        manager.wait_until_finished()  # told once
        if asks == "save":
            saved[3] = support.host_copy(opened.run.state)
            assert manager.save(3, args=adacheck.SaveArgs(opened.run.state))
        while opened.run.count < 4:
            state = opened.save()
            saved[opened.run.count] = state
        assert manager.all_steps() == [1, 3, 4]
        for step, expected in saved.items():
            support.assert_same_bits(opened.restored(step), expected)
        assert manager.handler.restored.replayed_count == 1
    manager.close()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_save_that_storage_refused_to_begin_is_made_again(opened, monkeypatch, is_interrupted):
    with opened.manager as manager:
        opened.save()
        opened.error = OSError(5, "Input/output error")
        saved = opened.save()
        manager._opener.wait()
        if is_interrupted:
            with monkeypatch.context() as patch:

                def interrupted(_longest_s: float | None = None) -> None:
                    raise KeyboardInterrupt

                patch.setattr(manager._ending, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    manager.wait_until_finished()
        opened.error = None
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        support.assert_same_bits(opened.restored(2), saved)


@pytest.mark.parametrize("call", ["wait_until_finished", "close", "save", "restore"])
def test_a_callback_cannot_wait_for_the_save_that_it_is_told_of(tmp_path, call, caplog):
    run = support.dict_run(support.mesh_of((1, 1)))
    calls = {
        "save": lambda: manager.save(9, args=adacheck.SaveArgs(run.state)),
        "restore": lambda: manager.restore(1),
    }

    def on_save(_report: Any) -> None:
        calls.get(call, getattr(manager, call))()

    manager = adacheck.checkpoint_manager(str(tmp_path), run.recorder, on_save=on_save)
    with manager:
        for _ in range(3):
            run.advance()
            assert manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
    assert f"expected {call}(" in caplog.text
    assert "outside on_save" in caplog.text


@pytest.mark.slow
def test_a_process_that_ends_behind_a_save_has_saved_it_and_printed_nothing(tmp_path):
    command = [sys.executable, "-c", _LAST, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    said = (ended.stdout + ended.stderr).splitlines()
    assert [line for line in said if not line.startswith("WARNING:absl:")] == []  # Orbax's own
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 3
