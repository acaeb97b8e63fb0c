"""What fails in one process alone is an error in all of them, and none waits for another."""

from __future__ import annotations

import json

import pytest

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
