"""Reports of a run: what is gathered from its root."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.filesize import decimal

import adacheck_jax as adacheck
from adacheck_jax.tools.history.differences import relative_change
from adacheck_jax.tools.history.log import log
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.report.gather import gather
from adacheck_jax.tools.report.page import page_of
from adacheck_jax.tools.steps import InputError
from tests.tools.small_run import STEPS, trained
from tests.tools.test_history import in_tree


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root, states = trained(tmp_path_factory)
    return root, states, gather(root)


def files_of(root: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in root.rglob("*")}


def test_every_recorded_step_is_in_the_report(run):
    _, states, report = run
    assert [*report.kept] == list(range(STEPS)) == sorted(states)
    assert report.held == {3: 5, 4: 5}  # deferred steps
    rows = {row.step: row for row in report.summary.steps}
    assert rows.keys() == {*range(STEPS)} - {3, 4}
    assert rows[5].recorded == (3, 4)
    assert rows[7].metrics == {"loss": 1 / 8}
    assert len(report.verified.steps) == STEPS - 2
    assert report.damage == {}
    bases = sum(row.kind == "base" for row in rows.values())
    assert sum(report.checked.values()) == STEPS - bases


def test_bytes_add_up_to_those_of_the_states(run):
    root, states, report = run
    state_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(states[0]))
    assert sum(report.redundancy.values()) == STEPS * state_bytes
    record = {each.path: each for each in report.leaves}["opt/adacheck_record/a/kernel"]
    assert record.delta_bytes == sum(report.checked.values()) * record.state_bytes
    leaves = Walk(root).lineage(STEPS - 1).base.leaves
    added = [leaf for leaf in leaves if re.search("adacheck_(record|passed)", leaf.path)]
    whole = sum(leaf.nbytes for leaf in leaves)
    assert 0 < sum(leaf.nbytes for leaf in added) == whole - report.state_bytes


def test_changes_are_those_of_the_states(run):
    root, states, report = run
    assert [row.step for row in report.logs] == list(range(STEPS))
    assert report.norms_note == ""
    assert [*report.logs] == [*log(Walk(root)).steps]
    leaves = {each.path: each for each in report.leaves}
    for path in ("params/a/kernel", "params/b", "seen"):
        count = 0
        assert leaves[path].changes[0] is None
        for step in range(1, STEPS):
            old, new = (in_tree(states[each], path) for each in (step - 1, step))
            count += old.tobytes() != new.tobytes()
            wanted = np.linalg.norm((new - old).astype(np.float64)) / np.linalg.norm(old)
            assert leaves[path].changes[step] == pytest.approx(wanted)
        assert leaves[path].changed_count == count


@pytest.mark.parametrize("count", [0, 3, 100])
def test_as_many_steps_are_restored_as_asked(run, count):
    root, _, whole = run
    report = gather(root, norm_count=count)
    assert len(report.logs) == min(count, STEPS)
    if count == 3:
        assert [row.step for row in report.logs] == [3, 8, 13]  # evenly spread, the last one too
    if report.logs:
        assert [*report.logs] == [whole.logs[row.step] for row in report.logs]
    assert ("--norms" in report.norms_note) == (count < STEPS)


def test_trouble_is_told_too(run, tmp_path):
    root, _, _ = run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    (copy / "9/default/adacheck/manifest.json").write_text("{}")
    for each in (copy / "1/default/adacheck").glob("delta.*"):
        each.unlink()
    (copy / "40").mkdir()
    (copy / "40/notes.txt").write_text("not a checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(copy / "41/default", {"x": jnp.ones(3)})
    before = files_of(copy)
    report = gather(copy, norm_count=2)
    assert files_of(copy) == before
    kinds = {row.step: row.kind for row in report.summary.steps}
    assert (kinds[40], kinds[41]) == ("foreign", "stock")
    assert "manifest" in report.damage["9/default"]
    assert report.damage["1/default"]
    assert len(report.kept) >= STEPS - 6


def test_a_root_without_a_whole_step_or_with_one_without_a_recorder(tmp_path):
    handler = adacheck.AdaCheckHandler(delta="bits")
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=adacheck.SaveArgs({"w": jnp.arange(3.0)}))
    report = gather(tmp_path)
    assert report.logs[0].gradient_norm is None
    assert [(x.path, x.changed_count, x.changes) for x in report.leaves] == [("w", 0, (None,))]
    assert "stored in bases" in page_of(report)
    (tmp_path / "0/default/adacheck/manifest.json").write_text("{}")
    report = gather(tmp_path)
    assert [*report.damage] == ["0/default"]
    assert (report.leaves, report.logs, report.kept) == ((), (), ())
    assert "1 damaged" in page_of(report)
    with pytest.raises(InputError, match="expected a checkpoint root"):
        gather(tmp_path / "none")


def test_a_step_that_a_later_one_still_holds_is_not_kept(run, tmp_path):
    root, _, whole = run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "1")
    report = gather(copy, norm_count=0)
    assert report.held == {1: 1, 3: 5, 4: 5}
    assert {*whole.kept} - {*report.kept} == {1}
    # Stock Orbax would have one step less, and what is compared with it counts one less.
    full = decimal((STEPS - 1) * report.state_bytes)
    assert f"{full}: the steps that are kept" in page_of(report)


def test_a_step_that_cannot_be_restored_here_is_named(run, monkeypatch):
    root, _, _ = run
    whole = Walk.at

    def at(walk, step):
        if step == 6:
            raise InputError("no such device")
        return whole(walk, step)

    monkeypatch.setattr(Walk, "at", at)
    report = gather(root)
    assert [row.step for row in report.logs] == [n for n in range(STEPS) if n not in (6, 7)]
    assert "2 could not be restored here, such as step 6: no such device" in report.norms_note


def test_relative_changes_of_odd_leaves():
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert relative_change(ones, ones) == 0
    assert relative_change(zeros, zeros) == 0
    assert relative_change(zeros, ones) == math.inf
    assert math.isnan(relative_change(ones, np.full(4, np.nan, np.float32)))
    assert relative_change(np.arange(0), np.arange(0)) == 0
    bfloat16 = jnp.bfloat16
    assert relative_change(ones.astype(bfloat16), 2 * ones.astype(bfloat16)) == 1
