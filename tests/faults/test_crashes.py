"""A save that is stopped anywhere leaves the step before it or the step itself, exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import pytest

import adacheck_jax as adacheck
from adacheck_jax.save import share
from adacheck_jax.store.steps import roots
from tests import support
from tests.campaigns import crashes, shim
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

ROOT = Path(__file__).parents[2]
WORKER_TIMEOUT_S = 280


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """What stands between a process and its disk."""
    library = shim.build(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("needs Linux and a C compiler")
    return library


def printed_by(*arguments: Any, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def operations(library: Path | None, *arguments: Any) -> dict[str, Any]:
    """What each mode of the campaign found."""
    variables = shim.loading(library) if library else {}
    printed = printed_by("-m", "tests.campaigns.operations", *arguments, variables=variables)
    return json.loads(printed.splitlines()[-1])["modes"]


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


def check_durable(found: dict[str, Any], save: str, directory: Path) -> None:
    """All of an item was synced before the rename that commits it."""
    assert found["kind"] == save
    suffix = ".orbax-checkpoint-tmp"
    step = {"delta": 4, "base": 5}[save]
    item = directory / "root" / f"{step}{suffix}" / f"default{suffix}"
    left = volatile(directory / "log" / "log", item)
    # Orbax's own, and written last; what it holds does not matter.
    assert set(left) <= {str(item), str(item / "commit_success.txt")}


def check_failures(found: dict[str, Any], save: str, minimum: int) -> None:
    assert found["problems"] == []
    assert found["kind"] == save
    assert found["is_whole"]
    assert found["tried"] >= minimum
    # Not every one of them has to be told: old steps are deleted after the commit.
    assert found["raised"] >= 0.8 * found["tried"] - 1


# A few of all operations here; `python -m tests.campaigns.faults` tries every one of them.
@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("save", "failure"), [("delta", "once"), ("base", "full")])
def test_a_save_that_is_stopped_or_fails_at_any_call_harms_nothing(
    library, tmp_path, save, failure
):
    options = ("--save", save, "--directory", tmp_path, "--stride", 113)
    found = operations(library, "log", "stopped", failure, *options)
    check_durable(found["log"], save, tmp_path)
    stopped = found["stopped"]
    assert stopped["problems"] == []
    assert stopped["kind"] == save
    assert stopped["tried"] >= 4
    assert 0 < stopped["had_step"] < stopped["tried"]
    check_failures(found[failure], save, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "failure"),
    [("base", "once"), pytest.param("delta", "full", marks=pytest.mark.campaign)],
)
def test_an_operation_that_fails_fails_the_save_alone(tmp_path, save, failure):
    options = ("--save", save, "--directory", tmp_path, "--stride", 71)
    check_failures(operations(None, failure, *options)[failure], save, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kills"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.campaign)]
)
def test_killed_processes_lose_nothing(tmp_path, processes, kills):
    # In a process of its own, which has started no JAX: it forks.
    options = ("--json", "--processes", processes, "--kills", kills)
    printed = printed_by("-m", "tests.campaigns.crashes", "--directory", tmp_path / "run", *options)
    found = json.loads(printed)
    assert found["kills"] == kills
    assert not any(found[name] for name in ("lost", "wrong", "crashed", "failures"))
    assert found["checked"] > 0


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


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.05, marks=pytest.mark.campaign)])
def test_a_process_that_exits_without_a_word_leaves_whole_steps(tmp_path, seconds):
    """Neither close nor wait: the interpreter ends with a save in flight."""
    script = (
        "import sys, time; from pathlib import Path; from tests.campaigns.crashes import *\n"
        "run = Run(); manager = run.open_manager(Path(sys.argv[1])); state = run.new_state()\n"
        "for step in range(1, 4):\n"
        "    state = run.advance(state, step); manager.save(step, args=adacheck.SaveArgs(state))\n"
        "    print(step, digest(state), flush=True)\n"
        "time.sleep(float(sys.argv[2]))"
    )
    printed = printed_by("-c", script, tmp_path, seconds)
    digests = {int(s): d for s, d in (line.split() for line in printed.splitlines())}
    assert len(digests) == 3
    of_crashes = crashes.Run()
    with of_crashes.open_manager(tmp_path) as manager:
        assert manager.latest_step() in (2, 3)
        for step in manager.all_steps():
            assert crashes.digest(of_crashes.restore(manager, step)) == digests[step]
