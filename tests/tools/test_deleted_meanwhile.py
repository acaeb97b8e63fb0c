"""Commands beside a deletion: none says of a step that goes while it is read that it is damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import adacheck_jax as adacheck
from adacheck_jax.store.steps import deletion
from adacheck_jax.store.storage.posix import Posix
from adacheck_jax.tools import audit, recompute, verification
from adacheck_jax.tools.history.log import log
from adacheck_jax.tools.history.walk import Walk
from tests import support
from tests.campaigns import beside

LOOKS = ("read", "kind", "stat", "list", "folders", "described", "check_plain")
"""Ways in which the library looks at a file or a directory."""
STEP = 3
"""The step that is deleted: a delta whose base has a directory, and no step builds on it."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A root with the steps base 1, deltas 2 and 3, base 4, and delta 5."""
    root = tmp_path_factory.mktemp("saved") / "root"
    support.saved_run(root, 5, (1, 1), max_deltas=2)
    assert support.kinds_of(root) == "BDDBD"
    return root


class Deletion:
    """A manager's deletion of a step, which begins at a look at its files, and ends while we wait.

    Args:
        monkeypatch: puts the deletion into the library's looks.
        directory: directory of the step.
        at: number of the look at which it begins, from 0; -1 for no deletion.
    """

    def __init__(self, monkeypatch: Any, directory: Path, at: int) -> None:
        self._directory, self._at = directory, at
        self.looks, self._has_begun = 0, False
        for name in LOOKS:
            monkeypatch.setattr(Posix, name, self._looking(getattr(Posix, name)))
        monkeypatch.setattr(deletion.time, "sleep", lambda _: self._end())

    def _looking(self, look: Any) -> Any:
        def looking(storage: Posix, key: str, *args: Any, **kwargs: Any) -> Any:
            if key.startswith(str(self._directory)):
                if self.looks == self._at:
                    self._begin()
                self.looks += 1
            return look(storage, key, *args, **kwargs)

        return looking

    def _begin(self) -> None:
        self._has_begun = True
        for number, path in enumerate(sorted(self._directory.rglob("*"))):
            if path.is_file() and number % 2:
                path.unlink()

    def _end(self) -> None:
        if self._has_begun:
            shutil.rmtree(self._directory, ignore_errors=True)


def looks_of(verb: str, saved: Path, tmp_path: Path) -> int:
    """Number of looks at a step that a command takes."""
    root = linked(saved, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        deletion = Deletion(patch, root / str(STEP), at=-1)
        found = beside.attempt(verb, root, tmp_path / "out", STEP)
        assert found.is_right, found.told
    return deletion.looks


def linked(saved: Path, root: Path) -> Path:
    """A copy of a root: other names of its files."""
    shutil.copytree(saved, root, copy_function=os.link)
    return root


QUICK = 2
"""Deletions of a command that the quick tests try, evenly spread."""


@pytest.mark.parametrize("verb", beside.VERBS)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.campaign), False])
def test_a_step_that_goes_is_told_as_such(tmp_path, saved, verb, every):
    count = looks_of(verb, saved, tmp_path)
    assert count
    for at in range(0, count, 1 if every else -(-count // QUICK)):
        root = linked(saved, tmp_path / f"root{at}")
        with pytest.MonkeyPatch.context() as patch:
            Deletion(patch, root / str(STEP), at)
            found = beside.attempt(verb, root, tmp_path / "out", STEP)
        assert found.is_right, (at, found)


def deleting(function: Any, directory: Path) -> Any:
    """A function before whose first call a directory is deleted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(directory, ignore_errors=True)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        (verification.volume_reader, "fingerprint_of_array", {"read_data": True}),
        (recompute, "base_leaves", {"replay": True}),
    ],
    ids=["data", "replay"],
)
def test_a_step_is_not_damaged_because_another_was_deleted(
    tmp_path, monkeypatch, saved, module, name, wanted
):
    root = linked(saved, tmp_path / "root")
    monkeypatch.setattr(module, name, deleting(getattr(module, name), root / "1"))
    report = audit.verify_root(root, **wanted)
    assert [(each.step, each.damage) for each in report.steps] == [(n, ()) for n in (2, 3, 4, 5)]
    assert report.deleted == (1,)


@pytest.mark.parametrize(("gone", "missing"), [(1, ()), (2, ()), (3, (3,)), (4, ()), (5, (5,))])
def test_a_log_has_every_step_that_something_holds(tmp_path, saved, gone, missing):
    root = linked(saved, tmp_path / "root")
    with contextlib.closing(Walk(saved)) as walk:
        whole = log(walk)
    with contextlib.closing(Walk(root)) as walk:
        shutil.rmtree(root / str(gone))
        found = log(walk)
    expected = [replace(row, metrics={}) for row in whole.steps if row.step not in missing]
    for row in expected:  # nothing tells the change since a step that is gone
        if row.step - 1 in missing:
            expected[expected.index(row)] = replace(row, update_norm=None)
    assert [*found.steps] == expected
    assert (found.deleted, found.recorded_count) == (missing, 5)


def test_the_newest_restorable_step_is_not_one_that_goes(tmp_path, monkeypatch, caplog, saved):
    root = linked(saved, tmp_path / "root")
    check = verification.check
    monkeypatch.setattr(verification, "check", deleting(check, root / "5"))
    assert adacheck.latest_restorable(root) == 4
    assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]
