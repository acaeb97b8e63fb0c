"""A save that is stopped anywhere leaves the step before it or the step itself, exact."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

import pytest

import adacheck_jax as adacheck
from adacheck_jax import commit, lineage
from benchmarks import crashes
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

pytestmark = pytest.mark.campaign

HERE = Path(__file__).parent
WORKER_TIMEOUT_S = 280


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    """The library that stands between a process and its disk."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("shim") / "disk_shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "disk_shim.c"]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return library


def work(shim: Path | None, *arguments: Any) -> dict[str, Any]:
    loaded = {"LD_PRELOAD": str(shim), "DISK_SHIM": str(shim)} if shim else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash_worker", *map(str, arguments)],
        env=os.environ | loaded,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def volatile(log: Path, renamed: PurePath) -> list[str]:
    """What may be lost with the power although a directory is renamed, as its commit.

    Args:
        log: of the calls of a save.
        renamed: the directory, before it is.
    """
    files, directories = set(), set()
    for line in log.read_text().splitlines():
        call, first, second = line.split("\t")
        path, target = PurePath(first), PurePath(second)
        if call == "rename" and path == renamed:
            return sorted(str(p) for p in files | directories if p.is_relative_to(renamed))
        if call == "fsync":
            files.discard(path)
            directories.discard(path)
        elif call == "write":
            files.add(path)
        elif call in {"open", "mkdir", "unlink"}:
            directories.add(path.parent)
            if call == "unlink":
                files.discard(path)
        elif call in {"rename", "link"}:
            directories |= {path.parent, target.parent} if call == "rename" else {target.parent}
            if path in files:
                files = files - {path} | {target}
    raise AssertionError(f"{renamed} is not renamed")


@pytest.mark.parametrize(("step", "kind"), [(4, "delta"), (5, "base")])
def test_all_of_an_item_is_durable_before_it_is_committed(shim, tmp_path, step, kind):
    found = work(shim, "log", step, tmp_path, "auto")
    assert found["kind"] == kind
    suffix = ".orbax-checkpoint-tmp"
    item = tmp_path / "root" / f"{step}{suffix}" / f"default{suffix}"
    left = volatile(tmp_path / "log" / "log", item)
    # Orbax's own, and written last; what it holds does not matter.
    assert set(left) <= {str(item), str(item / "commit_success.txt")}


def check_failures(found: dict[str, Any], minimum: int) -> None:
    assert found["problems"] == []
    assert found["tried"] >= minimum
    assert found["raised"] >= 0.8 * found["tried"]  # a link that fails is a copy, and no error


# A few of all calls here; every one of them takes minutes: leave the last number out.
@pytest.mark.parametrize("step", [4, 5])
def test_a_crash_at_any_call_leaves_the_step_before_or_the_step(shim, tmp_path, step):
    found = work(shim, "copies", step, tmp_path, "auto", 40)
    assert found["problems"] == []
    assert found["tried"] >= 4
    assert 0 < found["had_step"] < found["tried"]


@pytest.mark.parametrize("step", [4, 5])
def test_a_call_that_fails_fails_the_save_alone(shim, tmp_path, step):
    check_failures(work(shim, "fail", step, tmp_path, "auto", 61), 4)


@pytest.mark.parametrize("step", [4, 5])
def test_an_operation_that_fails_fails_the_save_alone(tmp_path, step):
    check_failures(work(None, "fail", step, tmp_path, "auto", 41), 2)


def test_killed_processes_lose_nothing(tmp_path):
    # In a process of its own, which has started no JAX: it forks.
    command = [sys.executable, "-m", "benchmarks.crashes", "--directory", tmp_path / "run"]
    done = subprocess.run(
        [*command, "--kills", "5"],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert "committed steps lost                      0" in done.stdout


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


@pytest.mark.parametrize("step", [1, 3], ids=["base", "delta"])
@pytest.mark.parametrize("leave", [close, leave_by_error, leave_by_sigterm])
def test_a_save_in_flight_is_finished_by_whoever_leaves(tmp_path, monkeypatch, leave, step):
    write = commit.Save.write

    def slowly(self, directory):
        time.sleep(0.3)
        write(self, directory)

    run = support.dict_run(mesh_of((4, 2)))
    manager = manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder))
    save_steps(manager, run, step - 1)
    monkeypatch.setattr(commit.Save, "write", slowly)
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
    kinds = [type(each.manifest).__name__[0] for each in lineage.steps_of(tmp_path)]
    assert kinds == ["B", "D", "D", "D"]


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_process_that_exits_without_a_word_leaves_whole_steps(tmp_path, seconds):
    """Neither close nor wait: the interpreter ends with a save in flight."""
    script = (
        "import sys, time; from pathlib import Path; from benchmarks.crashes import *\n"
        "run = Run(); manager = run.open_manager(Path(sys.argv[1])); state = run.new_state()\n"
        "for step in range(1, 4):\n"
        "    state = run.advance(state, step); manager.save(step, args=adacheck.SaveArgs(state))\n"
        "    print(step, digest(state), flush=True)\n"
        "time.sleep(float(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, str(seconds)],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_S,
        check=False,
    )
    digests = {int(s): d for s, d in (line.split() for line in done.stdout.splitlines())}
    assert len(digests) == 3, done.stderr[-5000:]
    run = crashes.Run()
    with run.open_manager(tmp_path) as manager:
        assert manager.latest_step() in (2, 3)
        for step in manager.all_steps():
            assert crashes.digest(run.restore(manager, step)) == digests[step]
