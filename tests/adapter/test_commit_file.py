"""Steps that Orbax does not rename but marks: the protocol of object stores, on a local root."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import LineageError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import lookup, marks, roots
from adacheck_jax.tools import audit
from tests.support import abstract, assert_same_bits, dict_run, host_copy, mesh_of, save_steps

BY_MODE = {
    "atomicity_options": ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
}
MARK = "commit_success.txt"


def by_class():
    from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath  # no public name

    return {"temporary_path_class": CommitFileTemporaryPath}


def manager_of(root, handler, **options):
    options = ocp.CheckpointManagerOptions(**(options or BY_MODE))
    return ocp.CheckpointManager(root, item_handlers=handler, options=options)


def saved_run(root, steps=3, **options):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder), **options) as manager:
        saved = save_steps(manager, run, steps)
    return run, saved


def kinds_of(root):
    return [(step.step, type(step.manifest)) for step in roots.steps_of(Path(root))]


BASE_AND_DELTAS = [(1, BaseManifest), (2, DeltaManifest), (3, DeltaManifest)]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [BY_MODE, by_class()], ids=["mode", "class"])
def test_steps_are_deltas_under_their_numbers(tmp_path, options):
    run, saved = saved_run(tmp_path, **options)
    assert kinds_of(tmp_path) == BASE_AND_DELTAS
    assert all((tmp_path / "2/default" / name).exists() for name in (MARK, marks.IN_PLACE))
    assert adacheck.latest_restorable(tmp_path) == 3
    assert not audit.verify_root(tmp_path).damaged_count
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder), **options) as manager:
        args = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(2, args=args), saved[2])
        run.state = manager.restore(3, args=args)
        assert_same_bits(run.state, saved[3])
        save_steps(manager, run, 1)
    assert kinds_of(tmp_path)[-1] == (4, DeltaManifest)


def test_items_beside_ours_and_numbers_in_their_names(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    options = ocp.CheckpointManagerOptions(step_prefix="at", **BY_MODE)
    handlers = {
        "ema_2": adacheck.AdaCheckHandler(run.recorder),
        "meta": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers, options=options) as manager:
        for step in (10, 20):
            state = adacheck.SaveArgs(run.advance())
            args = ocp.args.Composite(ema_2=state, meta=ocp.args.JsonSave({"at": step}))
            manager.save(step, args=args)
    assert kinds_of(tmp_path) == [(10, BaseManifest), (20, DeltaManifest)]
    assert roots.steps_of(tmp_path, "ema_2")[-1].directory == tmp_path / "at_20" / "ema_2"


def test_a_checkpointer_of_its_own(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with ocp.AsyncCheckpointer(handler, **by_class()) as checkpointer:
        for _ in range(2):
            run.advance()
            saved = host_copy(run.state)
            checkpointer.save(tmp_path / f"run_7/{run.count}", args=adacheck.SaveArgs(run.state))
            checkpointer.wait_until_finished()
        args = adacheck.RestoreArgs(abstract(run.state))
        state = checkpointer.restore(tmp_path / "run_7/2", args=args)
    assert kinds_of(tmp_path / "run_7") == BASE_AND_DELTAS[:2]
    assert_same_bits(state, saved)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("lost", [[MARK], [f"default/{MARK}", MARK]])
def test_a_step_whose_save_was_killed_does_not_exist(tmp_path, lost):
    run, saved = saved_run(tmp_path)
    for name in lost:  # written in this order, after our manifest
        (tmp_path / "3" / name).unlink()
    (tmp_path / "3/_CHECKPOINT_METADATA").touch()
    assert adacheck.latest_restorable(tmp_path) == 2
    assert kinds_of(tmp_path) == BASE_AND_DELTAS[:2]
    report = audit.verify_root(tmp_path)
    assert [step.step for step in report.steps] == [1, 2]
    assert [(each.path, each.is_temporary) for each in report.leftovers] == [("3", True)]
    handler = adacheck.AdaCheckHandler(run.recorder)
    with pytest.raises(LineageError, match="expected a step that Orbax has committed"):
        handler.restore(tmp_path / "3/default")
    args = adacheck.RestoreArgs(abstract(run.state), skip_damaged=True)
    state = handler.restore(tmp_path / "3/default", args)
    assert_same_bits(state, saved[2])
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        assert manager.all_steps() == [1, 2]  # Orbax removes what was not committed
        run.state, run.count = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state))), 2
        again = save_steps(manager, run, 1)
        assert_same_bits(again[3], saved[3])
    assert kinds_of(tmp_path) == BASE_AND_DELTAS


def test_a_step_that_orbax_did_not_commit_is_no_parent(tmp_path, monkeypatch):
    class Failing(by_class()["temporary_path_class"]):
        fails = False

        async def finalize(self):
            if self.fails and self.get().name == "default":
                raise OSError("no space left on device")
            await super().finalize()

    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    manager = manager_of(tmp_path, handler, temporary_path_class=Failing)
    save_steps(manager, run, 1)
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(OSError, match="no space left"):
        save_steps(manager, run, 1)
    assert adacheck.latest_restorable(tmp_path) == 1
    monkeypatch.setattr(Failing, "fails", False)
    save_steps(manager, run, 2)
    manager.close()
    assert kinds_of(tmp_path) == [(1, BaseManifest), (3, BaseManifest), (4, DeltaManifest)]


def test_a_parent_that_is_referred_to_is_committed_too(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    keep = adacheck.KeepLineage(ocp.checkpoint_managers.LatestN(9))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    saver_options = {**BY_MODE, "preservation_policy": keep}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adacheck_jax.store.links.can_link", lambda _: False)
        with manager_of(tmp_path, handler, **saver_options) as manager:
            save_steps(manager, run, 2)
    assert kinds_of(tmp_path) == BASE_AND_DELTAS[:2]
    (tmp_path / "1" / MARK).unlink()
    with pytest.raises(LineageError, match=r"/1/default: expected a step that Orbax"):
        lookup.resolve(tmp_path / "2/default")


def test_an_item_that_was_copied_elsewhere_is_whole(tmp_path):
    state = {"x": jax.device_put(jnp.arange(3.0))}
    with manager_of(tmp_path / "root", adacheck.AdaCheckHandler()) as manager:
        manager.save(5, args=adacheck.SaveArgs(state))
    (tmp_path / "copies").mkdir()
    item = (tmp_path / "root/5/default").rename(tmp_path / "copies/best")
    assert_same_bits(adacheck.AdaCheckHandler().restore(item), host_copy(state))
    assert dataclasses.astuple(roots.place_of(item)) == ((tmp_path / "copies", None), None)
