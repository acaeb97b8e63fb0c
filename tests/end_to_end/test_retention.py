"""Whatever is deleted, each step that the manager lists restores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

import adacheck_jax as adacheck
from adacheck_jax.errors import LineageError
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import manifest_file, roots
from tests import support
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps


@pytest.fixture
def no_hard_links(monkeypatch):
    """A file system that refuses hard links, as object stores do."""

    def refuse(*_args, **_kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def restore_all(root: Path, run: support.Run, saved: dict) -> list[int]:
    """Restores every step that a fresh manager lists, and compares its bits."""
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        steps = list(manager.all_steps())
        for step in steps:
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), saved[step])
    return steps


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_to_keep": 2}, [7, 8]),
        ({"preservation_policy": LatestN(2)}, [7, 8]),
        ({"max_to_keep": 2, "keep_period": 3}, [3, 6, 7, 8]),
        ({"preservation_policy": EveryNSteps(4)}, [4, 8]),
        ({"max_to_keep": 1, "todelete_subdir": "trash"}, [8]),
    ],
)
def test_with_hard_links_any_retention_policy_keeps_every_listed_step(tmp_path, options, kept):
    run = support.dict_run(mesh_of((4, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=20)
    with manager_of(tmp_path, handler, **options) as manager:
        saved = save_steps(manager, run, 8)
    assert restore_all(tmp_path, run, saved) == kept


def test_deleting_any_older_steps_by_hand_harms_no_other(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
    for step in (1, 3):
        shutil.rmtree(tmp_path / str(step))
    assert restore_all(tmp_path, run, saved) == [2, 4, 5]


def test_a_step_copied_out_of_its_root_restores_alone(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path / "run", adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
    shutil.copytree(tmp_path / "run" / "4", tmp_path / "elsewhere" / "4")
    shutil.rmtree(tmp_path / "run")
    assert restore_all(tmp_path / "elsewhere", run, saved) == [4]


def test_a_lineage_goes_on_while_its_older_steps_are_deleted(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, max_to_keep=1) as manager:
        saved = save_steps(manager, run, 6)
    last = manifest_file.read(tmp_path / "6" / "default")
    assert isinstance(last, manifest.DeltaManifest)
    assert last.depth == 5
    assert restore_all(tmp_path, run, saved) == [6]


def test_deleting_the_parent_by_hand_makes_the_next_save_a_base(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        shutil.rmtree(tmp_path / "3")
        saved |= save_steps(manager, run, 2)
    assert isinstance(manifest_file.read(tmp_path / "4" / "default"), manifest.BaseManifest)
    assert restore_all(tmp_path, run, saved) == [1, 2, 4, 5]


@pytest.mark.usefixtures("no_hard_links")
class TestReferences:
    """Without hard links, deltas refer to other steps."""

    def test_without_the_policy_every_step_is_a_base_and_it_is_said_once(self, tmp_path, caplog):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 4)
        assert all(
            isinstance(step.manifest, manifest.BaseManifest) for step in roots.steps_of(tmp_path)
        )
        assert sum("KeepLineage" in record.getMessage() for record in caplog.records) == 1
        assert restore_all(tmp_path, run, saved) == [1, 2, 3, 4]

    def test_keep_lineage_keeps_ancestors(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(LatestN(2))
        handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=3, keep_lineage=keep)
        with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
            saved = save_steps(manager, run, 7)
        # Bases are 1 and 5: the two latest steps, and what they build on.
        assert restore_all(tmp_path, run, saved) == [5, 6, 7]

    def test_keep_lineage_keeps_the_newest_step_for_the_next_one(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(EveryNSteps(5))
        handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=3, keep_lineage=keep)
        with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
            saved = save_steps(manager, run, 7)
        assert restore_all(tmp_path, run, saved) == [5, 6, 7]
        assert isinstance(manifest_file.read(tmp_path / "7" / "default"), manifest.DeltaManifest)

    def test_keep_lineage_inside_another_policy_is_refused(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(LatestN(2))
        outer = AnyPreservationPolicy([keep, EveryNSteps(5)])
        handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
        with (
            manager_of(tmp_path, handler, preservation_policy=outer) as manager,
            pytest.raises(ValueError, match="KeepLineage around all other policies, found it insi"),
        ):
            save_steps(manager, run, 1)

    def test_another_policy_in_its_place_is_refused(self):
        with pytest.raises(ValueError, match=r"keep_lineage to be a KeepLineage, found .*LatestN"):
            adacheck.AdaCheckHandler(keep_lineage=LatestN(2))

    def test_keep_lineage_forgets_the_steps_that_are_gone(self):
        keep, steps = adacheck.KeepLineage(LatestN(3)), []
        for step in range(3000):
            if step % 5:
                keep.note(step, step - 1)
            steps.append(SimpleNamespace(step=step, metrics=None))
            kept = keep.should_preserve(steps, context=None)
            assert [keep.lets_go(each.step) for each in steps] == [not each for each in kept]
            steps = [each for each, is_kept in zip(steps, kept, strict=True) if is_kept]
            oldest = max(0, step - 2)
            assert [each.step for each in steps] == [*range(oldest - oldest % 5, step + 1)]
        assert len(keep._parents) < 10
        assert len(keep._let_go) <= 1000

    @pytest.mark.slow
    def test_keep_lineage_knows_the_steps_of_an_earlier_process(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        for _ in range(2):
            keep = adacheck.KeepLineage(LatestN(1))
            handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
            with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
                if manager.latest_step() is not None:
                    target = adacheck.RestoreArgs(abstract(run.state))
                    run.state = manager.restore(manager.latest_step(), args=target)
                saved = save_steps(manager, run, 2)
        assert isinstance(manifest_file.read(tmp_path / "4" / "default"), manifest.DeltaManifest)
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            assert list(manager.all_steps()) == [1, 2, 3, 4]
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(4, args=target), saved[4])

    def test_a_missing_ancestor_is_named_and_so_are_the_steps_that_can_be_had(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(LatestN(9))
        handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2, keep_lineage=keep)
        with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
            save_steps(manager, run, 5)
        shutil.rmtree(tmp_path / "2")
        with (
            ocp.CheckpointManager(tmp_path) as manager,
            pytest.raises(LineageError, match=r"step 3 builds on step 2.*1, 4, 5"),
        ):
            manager.restore(3)

    def test_a_replaced_ancestor_is_not_mistaken_for_the_one_that_was(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(LatestN(9))
        handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
        with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
            save_steps(manager, run, 3)
        other = support.dict_run(mesh_of((4, 2)))
        other.advance()
        with manager_of(tmp_path / "other", adacheck.AdaCheckHandler()) as manager:
            save_steps(manager, other, 1)
        shutil.rmtree(tmp_path / "2")
        shutil.copytree(tmp_path / "other" / "2", tmp_path / "2")
        with (
            ocp.CheckpointManager(tmp_path) as manager,
            pytest.raises(LineageError, match="replaced"),
        ):
            manager.restore(3)
