"""Whatever is deleted, each step that the manager lists restores."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

import adacheck_jax as adacheck
from adacheck_jax.errors import LineageError
from tests import support
from tests.support import assert_steps, kinds_of, manager_of, mesh_of, save_steps


@pytest.fixture
def no_hard_links():
    """A file system that refuses hard links, as object stores do."""
    with support.without_links():
        yield


def test_deleting_any_older_steps_by_hand_harms_no_other(tmp_path):
    """Also where a step is taken out of its root; without its parent the next save is a base."""
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path / "run", adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
        for step in (1, 3, 5):
            shutil.rmtree(tmp_path / "run" / str(step))
        saved |= save_steps(manager, run, 2)
    assert kinds_of(tmp_path / "run") == "DDBD"
    assert_steps(tmp_path / "run", {step: saved[step] for step in (2, 4, 6, 7)}, run.state)
    shutil.copytree(tmp_path / "run" / "4", tmp_path / "elsewhere" / "4")
    shutil.rmtree(tmp_path / "run")
    assert_steps(tmp_path / "elsewhere", {4: saved[4]}, run.state)


def kept_run(root, policy, steps, **options):
    """A run whose handler and manager keep the ancestors of what a policy keeps."""
    run, keep = support.dict_run(mesh_of((4, 2))), adacheck.KeepLineage(policy)
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep, **options)
    with manager_of(root, handler, preservation_policy=keep) as manager:
        return run, save_steps(manager, run, steps)


@pytest.mark.usefixtures("no_hard_links")
class TestReferences:
    """Without hard links, deltas refer to other steps."""

    def test_without_the_policy_every_step_is_a_base_and_it_is_said_once(self, tmp_path, caplog):
        run, saved = support.saved_run(tmp_path, 3)
        assert kinds_of(tmp_path) == "BBB"
        assert sum("KeepLineage" in record.getMessage() for record in caplog.records) == 1
        assert_steps(tmp_path, saved, run.state)

    @pytest.mark.parametrize("policy", [LatestN(2), EveryNSteps(5)], ids=["latest", "every fifth"])
    def test_keep_lineage_keeps_ancestors(self, tmp_path, policy):
        """Bases are 1 and 5; the newest step is kept for the next one, and what it builds on."""
        run, saved = kept_run(tmp_path, policy, 7, max_deltas=3)
        assert kinds_of(tmp_path) == "BDD"
        assert_steps(tmp_path, {step: saved[step] for step in (5, 6, 7)}, run.state)

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

    def test_a_missing_ancestor_is_named_and_so_are_the_steps_that_can_be_had(self, tmp_path):
        """And one that was replaced is not mistaken for the one that was."""
        kept_run(tmp_path, LatestN(9), 5, max_deltas=2)
        other = support.dict_run(mesh_of((4, 2)))
        other.advance()
        with manager_of(tmp_path / "other", adacheck.AdaCheckHandler()) as manager:
            save_steps(manager, other, 1)
        for named in (r"step 3 builds on step 2.*1, 4, 5", "replaced"):
            if named == "replaced":
                shutil.copytree(tmp_path / "other" / "2", tmp_path / "2")
            else:
                shutil.rmtree(tmp_path / "2")
            with (
                ocp.CheckpointManager(tmp_path) as manager,
                pytest.raises(LineageError, match=named),
            ):
                manager.restore(3)
