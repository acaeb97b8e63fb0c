"""What fails in one process alone is an error in all of them, and none waits for another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adacheck_jax.store.steps import lookup, roots
from tests.processes import launch

WORKER = "tests.end_to_end.alone_worker"


def told(modes: str, path: Path) -> list[dict[str, str]]:
    """What each process was told."""
    launch(modes, 2, path / "root", path / "out", 1, WORKER)
    return [json.loads((path / f"out-told{process}").read_text()) for process in range(2)]


def pop(found: list[dict[str, str]], key: str, failing: int) -> tuple[str, str]:
    """What the process that fails was told, and what the other one."""
    return found[failing].pop(key), found[1 - failing].pop(key)


RESTORES = {
    "base-0": ("StorageError", "cannot be read now"),
    "manifest-1": ("IntegrityError", "it is damaged here"),
    "delta-1": ("IntegrityError", "it is damaged here"),
    "once-0": ("IntegrityError", "it is damaged here"),
    "bits-1": ("IntegrityError", "it is damaged here"),
    "followed-1": ("AdaCheckError", "MemoryError: too little here"),
    "collective-1": ("IntegrityError", "it is damaged here"),
}


@pytest.mark.slow
@pytest.mark.parametrize("modes", [[*RESTORES][:-1], ["collective-1"]], ids=["alone", "collective"])
def test_a_restore_that_fails_in_one_process_fails_in_all(modes, tmp_path):
    found = told(".".join([*modes, "skipped-1"]), tmp_path)
    for mode in modes:
        kind, text = RESTORES[mode]
        failing, other = pop(found, mode, int(mode[-1]))
        assert text in failing
        assert other.startswith(f"{kind}: process {mode[-1]} could not restore (")
        assert text in other
        assert pop(found, f"again {mode}", 0) == ("step 3", "step 3")
    for each in found:
        assert each.pop("skipped-1") == "step 1", "what one process has damaged all skip"
        assert each.pop("again skipped-1") == "step 3"
        assert {*each.values()} == {""}


SAVES = {
    "leaf-1": r"AdaCheckError: process 1 could not begin to save \(MismatchError: Unsup",
    "parent-0": r"StorageError: process 0 could not begin to save \(StorageError: ",
    "args-1": r"AdaCheckError: process 1 could not call save\(\d+\) \(ValueError: expected args",
    "args-0": r"AdaCheckError: process 0 could not call save\(\d+\) \(ValueError: expected args",
}


@pytest.mark.slow
def test_a_save_that_one_process_cannot_begin_fails_in_all(tmp_path):
    """Also a root that one cannot make, or opens otherwise; but one may give metrics alone."""
    found = told(".".join(["root-0", "options-1", "metrics-0", "metrics-1", *SAVES]), tmp_path)
    error = "PermissionError: [Errno 13] not here"
    assert pop(found, "root-0", 0) == (error, f"AdaCheckError: {error}")
    for each in pop(found, "options-1", 1):
        assert "'more'" in each
        assert each.startswith("DifferingCallsError: ")
    for mode, expected in SAVES.items():
        failing, other = pop(found, f"{mode}: save", int(mode[-1]))
        assert failing
        assert "could not" not in failing
        assert re.match(expected, other), other
    for each in found:
        told_of = [key for key in each if key.endswith(": recorded")]
        recorded = {key for key in told_of if each.pop(key) == "True"}
        assert recorded == {"parent-0: recorded"}
        assert {*each.values()} == {""}
    saved = [each.step for each in roots.steps_of(tmp_path / "root")]
    assert saved[:8] == [1, 2, 3, 4, 5, 6, 7, 9]  # 4 to 7 are those with metrics


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["waits-0", "waits-1"])
def test_a_wait_of_one_process_alone_loses_no_step_in_memory(mode, tmp_path):
    for each in told(mode, tmp_path):
        assert each.pop(mode).startswith("DifferingCallsError: ")
        assert {*each.values()} == {""}
    saved = [each.step for each in roots.steps_of(tmp_path / "root")]
    assert saved[:3] == [1, 2, 3]
    assert lookup.resolve(tmp_path / "root" / "5" / "default").steps[-2:] == [4, 5]
