"""Reports of a run: what is gathered from its root."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.report import watching, ways
from adacheck_jax.tools.report.changes import MOST_COLUMNS, columns_of, evenly
from adacheck_jax.tools.report.gather import gather
from adacheck_jax.tools.report.norms import Norms, relative_change
from adacheck_jax.tools.steps import InputError
from tests.tools.test_history import STEPS, in_tree, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("report") / "run"
    states = train(root)
    return root, states, gather(root, "1.2.3")


def files_of(root: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in root.rglob("*")}


def test_every_recorded_step_has_a_row(run):
    _, states, report = run
    assert [row.step for row in report.steps] == list(range(STEPS)) == sorted(states)
    by_kind = {kind: [r.step for r in report.steps if r.kind == kind] for kind in ("deferred",)}
    assert by_kind["deferred"] == [3, 4]
    assert {row.held_by for row in report.steps if row.kind == "deferred"} == {5}
    assert report.recorded_count == STEPS
    assert report.saved_count == STEPS - 2
    assert report.newest == STEPS - 1
    assert report.steps[5].recorded == (3, 4)
    assert report.steps[7].metrics == {"loss": 1 / 8}
    waited = [row.waited_s for row in report.steps if row.kind != "deferred"]
    assert waited[0] is None
    assert all(each is not None and each >= 0 for each in waited[1:])
    assert report.verification.structure_count == STEPS - 2
    assert report.verification.damaged_count == 0
    assert sum(report.verification.at_save.values()) == sum(
        row.checked is not None for row in report.steps
    )


def test_a_report_changes_nothing_under_the_root(run):
    root, _, _ = run
    before = files_of(root)
    gather(root, "1")
    assert files_of(root) == before


def test_the_ways_of_a_leaf_add_up_to_its_bytes_at_all_steps(run):
    _, _, report = run
    for leaf in report.leaves:
        assert ways.total(leaf.ways) == leaf.leaf_bytes * STEPS
    bases = sum(row.kind == "base" for row in report.steps)
    kernel = next(leaf for leaf in report.leaves if leaf.path == "params/a/kernel")
    assert kernel.ways.stored == kernel.leaf_bytes * bases
    assert kernel.ways.replayed == kernel.leaf_bytes * (STEPS - bases)
    record = next(leaf for leaf in report.leaves if leaf.path.endswith("adacheck_record/a/kernel"))
    assert record.role == "record"
    assert record.ways.recorded == record.leaf_bytes * (STEPS - bases)
    savings = report.savings
    assert savings is not None
    assert savings.full_bytes == savings.train_state_bytes * STEPS
    assert ways.total(savings.train_state) == savings.full_bytes
    assert savings.base_bytes + savings.delta_bytes <= savings.disk_bytes


def test_changes_are_those_of_the_states(run):
    root, states, report = run
    changes = report.changes
    assert [first for first, _ in changes.columns] == list(range(STEPS))
    for path in ("params/a/kernel", "params/b", "seen"):
        row = changes.paths.index(path)
        assert changes.shares[row][0] is None
        for step in range(1, STEPS):
            old, new = (in_tree(states[each], path) for each in (step - 1, step))
            assert changes.shares[row][step] == float(old.tobytes() != new.tobytes())
            wanted = np.linalg.norm((new - old).astype(np.float64)) / np.linalg.norm(old)
            assert changes.norms[row][step] == pytest.approx(wanted)
    assert report.steps[0].changed_count is None
    walk = Walk(root)
    one, two = walk.fingerprints(6), walk.fingerprints(7)
    assert report.steps[7].changed_count == sum(one[path] != two[path] for path in one)


def test_norms_are_those_of_the_states(run):
    _, states, report = run
    assert report.norms_note == ""
    assert all(row.gradient_norm is not None for row in report.steps)
    parts = ("params/a/kernel", "params/b")
    change = [in_tree(states[8], p) - in_tree(states[7], p) for p in parts]
    wanted = math.sqrt(sum(float(np.sum(np.square(each, dtype=np.float64))) for each in change))
    assert report.steps[8].update_norm == pytest.approx(wanted)
    assert report.steps[8].learning_rate == pytest.approx(1e-2)


@pytest.mark.parametrize("count", [0, 3, 100])
def test_as_many_steps_are_restored_as_asked(run, count):
    root, _, whole = run
    report = gather(root, "1", norm_count=count)
    told = [row.step for row in report.steps if row.gradient_norm is not None]
    assert len(told) == min(count, STEPS)
    assert report.restored_count <= 2 * count
    if told:
        assert told[-1] == STEPS - 1
        assert [whole.steps[n].update_norm for n in told] == [
            report.steps[n].update_norm for n in told
        ]
    assert ("evenly" in report.norms_note) == (0 < count < STEPS)
    assert ("--norms" in report.norms_note) == (count == 0)


def test_a_later_report_restores_only_what_is_new(run, tmp_path):
    root, _, _ = run
    copy, norms = tmp_path / "run", Norms()
    shutil.copytree(root, copy)
    shutil.move(copy / "13", tmp_path / "13")
    assert gather(copy, "1", norms=norms).restored_count == STEPS - 1
    assert gather(copy, "1", norms=norms).restored_count == 0
    shutil.move(tmp_path / "13", copy / "13")
    later = gather(copy, "1", norms=norms)
    assert later.restored_count <= 2
    assert later.steps[-1].gradient_norm is not None


def test_trouble_has_rows_too(run, tmp_path):
    root, _, _ = run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    (copy / "9/default/adacheck/manifest.json").write_text("{}")
    (copy / "40").mkdir()
    (copy / "40/notes.txt").write_text("not a checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(copy / "41/default", {"x": jnp.ones(3)})
    report = gather(copy, "1")
    kinds = {row.step: row.kind for row in report.steps}
    assert (kinds[9], kinds[40], kinds[41]) == ("damaged", "foreign", "stock")
    assert "manifest" in report.steps[9].error
    assert report.verification.damaged_count >= 1
    assert report.newest == 41
    assert report.recorded_count >= STEPS - 5


def test_a_file_that_is_missing_is_damage(run, tmp_path):
    root, _, _ = run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    for each in (copy / "1/default/adacheck").glob("delta.*"):
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    report = gather(copy, "1", norm_count=0)
    assert report.steps[1].kind == "damaged"
    assert report.steps[1].error


def test_a_root_without_a_whole_step(run, tmp_path):
    root, _, _ = run
    copy = tmp_path / "run"
    shutil.copytree(root / "0", copy / "0")
    (copy / "0/default/adacheck/manifest.json").write_text("{}")
    report = gather(copy, "1")
    assert [row.kind for row in report.steps] == ["damaged"]
    assert (report.savings, report.changes, report.leaves) == (None, None, ())
    with pytest.raises(InputError, match="expected a checkpoint root"):
        gather(tmp_path / "none", "1")


def test_one_step_without_a_recorder(tmp_path):
    handler = adacheck.AdaCheckHandler(delta="bits")
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=adacheck.SaveArgs({"w": jnp.arange(3.0)}))
    report = gather(tmp_path, "1")
    (row,) = report.steps
    assert (row.kind, row.gradient_norm, row.changed_count) == ("base", None, None)
    assert report.changes.shares == ((None,),)
    assert "no update program" in report.update


def test_relative_changes_of_odd_leaves():
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert relative_change(ones, ones) == 0
    assert relative_change(zeros, zeros) == 0
    assert relative_change(zeros, ones) == math.inf
    assert math.isnan(relative_change(ones, np.full(4, np.nan, np.float32)))
    assert relative_change(np.arange(0), np.arange(0)) == 0
    bfloat16 = jnp.bfloat16
    assert relative_change(ones.astype(bfloat16), 2 * ones.astype(bfloat16)) == 1


@pytest.mark.parametrize(("count", "wanted"), [(0, []), (1, [9]), (5, [1, 3, 5, 7, 9])])
def test_steps_are_chosen_evenly(count, wanted):
    assert evenly(range(10), count) == wanted
    assert evenly(range(10), 99) == [*range(10)]


def test_columns_hold_every_step_once():
    for count in (1, MOST_COLUMNS, MOST_COLUMNS + 1, 10_007):
        columns = columns_of(range(count))
        assert [step for column in columns for step in column] == [*range(count)]
        assert len(columns) == min(count, MOST_COLUMNS)


def test_watching_tells_of_every_new_step(run, tmp_path):
    root, _, _ = run
    copy, said = tmp_path / "run", []
    copy.mkdir()
    arriving = iter(["0", "1"])

    def arrive(message: Any = None) -> None:
        said.append(message)
        name = next(arriving)
        shutil.copytree(root / name, tmp_path / name)
        (tmp_path / name).rename(copy / name)

    found = watching.reports(copy, "1", None, 0, 0.01, arrive)
    assert next(found).newest == 0  # the first look finds nothing, and tells
    assert said == ["waiting for the first step"]
    arrive()
    assert next(found).newest == 1
    with pytest.raises(InputError):
        next(watching.reports(tmp_path / "none", "1", None, 0, 0.01, arrive))
