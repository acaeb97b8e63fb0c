"""Steps that Orbax does not rename but marks: the protocol of object stores, on a local root."""

import dataclasses

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import LineageError
from adacheck_jax.store.steps import lookup, marks, roots
from adacheck_jax.tools import audit
from tests import support
from tests.adapter.test_doors import COMMIT_FILE, commit_file_class
from tests.support import (
    abstract,
    assert_same_bits,
    dict_run,
    host_copy,
    kinds_of,
    mesh_of,
    save_steps,
)

MARK = "commit_success.txt"


def manager_of(root, handler, **options):
    return support.manager_of(root, handler, **(options or {"atomicity_options": COMMIT_FILE}))


@pytest.mark.parametrize("lost", [[MARK], [f"default/{MARK}", MARK]])
def test_a_step_whose_save_was_killed_does_not_exist(tmp_path, lost):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert all((tmp_path / "2/default" / name).exists() for name in (MARK, marks.IN_PLACE))
    for name in lost:  # written in this order, after our manifest
        (tmp_path / "3" / name).unlink()
    (tmp_path / "3/_CHECKPOINT_METADATA").touch()
    assert adacheck.latest_restorable(tmp_path) == 2
    assert kinds_of(tmp_path) == "BD"
    report = audit.verify_root(tmp_path)
    assert [step.step for step in report.steps] == [1, 2]
    assert [(each.path, each.is_temporary) for each in report.leftovers] == [("3", True)]
    handler = adacheck.AdaCheckHandler(run.recorder)
    with pytest.raises(LineageError, match="expected a step that Orbax has committed"):
        handler.restore(tmp_path / "3/default")
    args = adacheck.RestoreArgs(abstract(run.state), skip_damaged=True)
    assert_same_bits(handler.restore(tmp_path / "3/default", args), saved[2])
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        assert manager.all_steps() == [1, 2]  # Orbax removes what was not committed
        run.state, run.count = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state))), 2
        again = save_steps(manager, run, 1)
        assert_same_bits(again[3], saved[3])
    assert kinds_of(tmp_path) == "BDD"


def test_a_step_that_orbax_did_not_commit_is_no_parent(tmp_path, monkeypatch):
    class Failing(commit_file_class()):
        fails = False

        async def finalize(self):
            if self.fails and self.get().name == "default":
                raise OSError("no space left on device")
            await super().finalize()

    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, temporary_path_class=Failing) as manager:
        save_steps(manager, run, 1)
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(OSError, match="no space left"):
            save_steps(manager, run, 1)
        assert adacheck.latest_restorable(tmp_path) == 1
        monkeypatch.setattr(Failing, "fails", False)
        save_steps(manager, run, 2)
    assert [step.step for step in roots.steps_of(tmp_path)] == [1, 3, 4]
    assert kinds_of(tmp_path) == "BBD"


def test_a_parent_that_is_referred_to_is_committed_too(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    keep = adacheck.KeepLineage(ocp.checkpoint_managers.LatestN(9))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    options = {"atomicity_options": COMMIT_FILE, "preservation_policy": keep}
    with support.without_links(), manager_of(tmp_path, handler, **options) as manager:
        save_steps(manager, run, 2)
    assert kinds_of(tmp_path) == "BD"
    (tmp_path / "1" / MARK).unlink()
    with pytest.raises(LineageError, match=r"/1/default: expected a step that Orbax"):
        lookup.resolve(tmp_path / "2/default")


def test_numbers_in_names_of_items_and_directories(tmp_path):
    """They are no step numbers; and an item that was copied elsewhere is whole."""
    run = dict_run(mesh_of((1, 1)))
    handlers = {"ema_2": adacheck.AdaCheckHandler(run.recorder)}
    options = {"atomicity_options": COMMIT_FILE, "step_prefix": "at"}
    with manager_of(tmp_path, handlers, **options) as manager:
        for step in (10, 20):
            args = ocp.args.Composite(ema_2=adacheck.SaveArgs(run.advance()))
            manager.save(step, args=args)
    found = roots.steps_of(tmp_path, "ema_2")
    assert [each.step for each in found] == [10, 20]
    assert found[-1].directory == tmp_path / "at_20" / "ema_2"
    assert kinds_of(tmp_path) == "BD"
    with support.manager_of(tmp_path / "root", adacheck.AdaCheckHandler()) as manager:
        manager.save(5, args=adacheck.SaveArgs({"x": jnp.arange(3.0)}))
    (tmp_path / "copies").mkdir()
    item = (tmp_path / "root/5/default").rename(tmp_path / "copies/best")
    assert_same_bits(adacheck.AdaCheckHandler().restore(item), host_copy(jnp.arange(3.0)))
    assert dataclasses.astuple(roots.place_of(item)) == ((tmp_path / "copies", None), None)
