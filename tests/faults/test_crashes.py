"""A save that is stopped anywhere leaves the step before it or the step itself, exact."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adacheck_jax as adacheck
from adacheck_jax.save import share
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

ROOT = Path(__file__).parents[2]
WORKER_TIMEOUT_S = 280
HUNG_S = 60
"""Python 3.11 may hang at its end in threads of Orbax's own manager: then it is killed."""


def printed_by(*arguments: Any, timeout_s: float = WORKER_TIMEOUT_S) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


class Interrupted(BaseException):
    """What a signal's handler raises in the training loop."""


def on_thread(task):
    """Runs a task on a thread that is not the main one; what it raises is raised here."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(task).result()


def close(manager):
    manager.close()


def leave_by_error(manager):
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError


def leave_by_sigterm(manager):
    def handle(*_):
        raise Interrupted

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(Interrupted), manager:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [1, 3], ids=["base", "delta"])
@pytest.mark.parametrize("leave", [close, leave_by_error, leave_by_sigterm])
def test_a_save_in_flight_is_finished_by_whoever_leaves(tmp_path, monkeypatch, leave, step):
    write = share.write

    def slowly(save, directory, layout):
        time.sleep(0.3)
        write(save, directory, layout)

    run = support.dict_run(mesh_of((4, 2)))
    manager = manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder))
    save_steps(manager, run, step - 1)
    monkeypatch.setattr(share, "write", slowly)
    expected = host_copy(run.advance())
    manager.save(step, args=adacheck.SaveArgs(run.state))
    leave(manager)
    monkeypatch.undo()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        assert manager.latest_step() == step
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(step, args=target), expected)
        saved = save_steps(manager, run, 1)
        assert_same_bits(manager.restore(step + 1, args=target), saved[step + 1])


def test_saves_from_other_threads(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    saved = {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for _ in range(3):
            on_thread(lambda: saved.update(save_steps(manager, run, 1)))
        saved |= save_steps(manager, run, 1)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    kinds = [type(each.manifest).__name__[0] for each in roots.steps_of(tmp_path)]
    assert kinds == ["B", "D", "D", "D"]


EXITS = """
import sys, time
import numpy as np
import adacheck_jax as adacheck
from tests import support
run = support.dict_run(support.mesh_of((1, 1)))
manager = support.manager_of(sys.argv[1], adacheck.AdaCheckHandler(run.recorder))
for step in range(1, 4):
    run.advance()
    np.savez(f"{sys.argv[1]}.{step}.npz", *support.host_copy(run.state))
    manager.save(step, args=adacheck.SaveArgs(run.state))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.05, marks=pytest.mark.campaign)])
def test_a_process_that_exits_without_a_word_leaves_whole_steps(tmp_path, seconds):
    """Neither close nor wait: the interpreter ends with a save in flight."""
    root = tmp_path / "root"
    with contextlib.suppress(subprocess.TimeoutExpired):
        printed_by("-c", EXITS, root, seconds, timeout_s=HUNG_S)
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        assert manager.latest_step() in (2, 3)
        for step in manager.all_steps():
            found = manager.restore(step, args=adacheck.RestoreArgs(abstract(run.state)))
            assert_same_bits(found, [*np.load(f"{root}.{step}.npz").values()])
