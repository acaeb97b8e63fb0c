"""What fails in one process alone is an error in all of them, and none waits for another."""

from __future__ import annotations

import json

import pytest

from adacheck_jax.store.steps import lookup, roots
from tests.processes import launch

WORKER = "tests.end_to_end.alone_worker"


def told(mode: str, path) -> list[dict[str, str]]:
    """What each process was told, first the one that fails."""
    launch(mode, 2, path / "root", path / "out", 1, WORKER)
    found = [json.loads((path / f"out-told{process}").read_text()) for process in range(2)]
    return found if mode.endswith("0") else found[::-1]


@pytest.mark.slow
@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("mode", "kind", "text"),
    [
        ("collective-1", "IntegrityError", "it is damaged here"),
        ("base-0", "StorageError", "cannot be read now"),
        ("manifest-1", "IntegrityError", "it is damaged here"),
        ("delta-1", "IntegrityError", "it is damaged here"),
        ("once-0", "IntegrityError", "it is damaged here"),
        ("bits-1", "IntegrityError", "it is damaged here"),
        ("followed-1", "AdaCheckError", "MemoryError: too little here"),
    ],
)
def test_a_restore_that_fails_in_one_process_fails_in_all(mode, kind, text, tmp_path):
    failing, other = told(mode, tmp_path)
    assert text in failing.pop("restore")
    error = other.pop("restore")
    assert error.startswith(f"{kind}: process {mode[-1]} could not restore (")
    assert text in error
    for each in (failing, other):
        assert each.pop("restore again") == "step 3"
        assert {*each.values()} == {""}


@pytest.mark.slow
def test_what_one_process_has_damaged_all_skip(tmp_path):
    for each in told("skipped-1", tmp_path):
        assert each.pop("restore") == "step 1"
        assert each.pop("restore again") == "step 3"
        assert {*each.values()} == {""}


@pytest.mark.slow
@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("mode", "step", "error"),
    [
        ("leaf-1", 4, "AdaCheckError: process 1 could not begin to save (MismatchError: Unsup"),
        ("parent-0", 5, "StorageError: process 0 could not begin to save (StorageError: "),
        ("args-1", 4, "AdaCheckError: process 1 could not call save(4) (ValueError: expected args"),
        ("args-0", 4, "AdaCheckError: process 0 could not call save(4) (ValueError: expected args"),
    ],
)
def test_a_save_that_one_process_cannot_begin_fails_in_all(mode, step, error, tmp_path):
    failing, other = told(mode, tmp_path)
    assert "could not" not in failing.pop(f"save {step}")
    assert other.pop(f"save {step}").startswith(error)
    for each in (failing, other):
        assert each.pop("recorded") == str(mode == "parent-0")
        assert {*each.values()} == {""}


@pytest.mark.slow
def test_a_root_that_one_process_cannot_make_is_an_error_in_all(tmp_path):
    failing, other = told("root-0", tmp_path)
    assert failing.pop("manager") == "PermissionError: [Errno 13] not here"
    assert other.pop("manager") == "AdaCheckError: PermissionError: [Errno 13] not here"
    for each in (failing, other):
        assert each.pop("recorded") == "False"
        assert {*each.values()} == {""}


@pytest.mark.slow
def test_a_root_that_one_process_opens_otherwise_is_an_error_in_all(tmp_path):
    for each in told("options-1", tmp_path):
        assert "'more'" in each["manager"]
        assert each.pop("manager").startswith("DifferingCallsError: ")
        assert each.pop("recorded") == "False"
        assert {*each.values()} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["metrics-0", "metrics-1"])
def test_one_process_may_give_metrics_alone(mode, tmp_path):
    for each in told(mode, tmp_path):
        assert each.pop("recorded") == "False"
        assert {*each.values()} == {""}
    assert [each.step for each in roots.steps_of(tmp_path / "root")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["waits-0", "waits-1"])
def test_a_wait_of_one_process_alone_loses_no_step_in_memory(mode, tmp_path):
    for each in told(mode, tmp_path):
        assert each.pop("alone").startswith("DifferingCallsError: ")
        assert {*each.values()} == {""}
    saved = [each.step for each in roots.steps_of(tmp_path / "root")]
    assert saved[:3] == [1, 2, 3]
    assert lookup.resolve(tmp_path / "root" / "5" / "default").steps[-2:] == [4, 5]
