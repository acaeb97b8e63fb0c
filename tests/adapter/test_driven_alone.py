"""A handler that no checkpointer and no manager drives: save, finalize, restore."""

import asyncio
import uuid

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, LineageError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import marks, roots
from adacheck_jax.tools import audit
from tests.support import abstract, assert_same_bits, dict_run, host_copy, mesh_of

COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


def saved_sync(handler, directory, state):
    handler.save(directory, args=adacheck.SaveArgs(state))


def saved_async(handler, directory, state):
    async def begun():
        return await handler.async_save(directory, args=adacheck.SaveArgs(state))

    for future in asyncio.run(begun()):
        future.result()


def small_state(first=0.0):
    return {"x": first + jnp.arange(3.0)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("makes_directory", [True, False], ids=["existing", "missing"])
@pytest.mark.parametrize("save", [saved_sync, saved_async], ids=["sync", "async"])
def test_finalize_commits(tmp_path, save, makes_directory):
    directory = epath.Path(tmp_path / "of a user")
    if makes_directory:
        directory.mkdir()
    handler = adacheck.AdaCheckHandler()
    state = small_state()
    save(handler, directory, state)
    with pytest.raises((LineageError, FormatError)):
        adacheck.AdaCheckHandler().restore(directory)
    handler.finalize(directory)
    for each in (handler, adacheck.AdaCheckHandler()):
        assert_same_bits(each.restore(directory), host_copy(state))
        assert_same_bits(each.restore(directory, adacheck.RestoreArgs(state)), host_copy(state))
    assert handler.metadata(directory).tree["x"].shape == (3,)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_same_bits(checkpointer.restore(directory), host_copy(state))


def test_steps_of_a_run_are_deltas(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    saved = {}
    for step in (1, 2, 3):
        saved[step] = host_copy(run.advance())
        saved_sync(handler, epath.Path(tmp_path / str(step)), run.state)
        handler.finalize(epath.Path(tmp_path / str(step)))
    kinds = [(step.step, type(step.manifest)) for step in roots.steps_of(tmp_path)]
    assert kinds == [(1, BaseManifest), (2, DeltaManifest), (3, DeltaManifest)]
    assert adacheck.latest_restorable(tmp_path) == 3
    assert not audit.verify_root(tmp_path).damaged_count
    other = adacheck.AdaCheckHandler()
    for step, bits in saved.items():
        args = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(other.restore(tmp_path / str(step), args), bits)


def test_a_second_save_into_a_directory_is_not_committed_by_the_first(tmp_path):
    directory = epath.Path(tmp_path / "5")
    handler = adacheck.AdaCheckHandler()
    saved_sync(handler, directory, small_state())
    handler.finalize(directory)
    saved_sync(handler, directory, small_state(7.0))
    assert not marks.is_committed(directory)
    handler.finalize(directory)
    assert_same_bits(handler.restore(directory), host_copy(small_state(7.0)))


@pytest.mark.parametrize("name", ["5", "5/state", "of a user"])
def test_in_an_object_store(gcs, name):
    root = epath.Path(f"{gcs.url}/{uuid.uuid4().hex}")
    handler = adacheck.AdaCheckHandler()
    state = small_state()
    saved_sync(handler, root / name, state)
    with pytest.raises(LineageError, match="call its finalize"):
        handler.restore(root / name)
    handler.finalize(root / name)
    assert_same_bits(adacheck.AdaCheckHandler().restore(root / name), host_copy(state))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("driver", ["checkpointer", "manager"])
def test_a_step_that_orbax_marks_is_not_committed_before(tmp_path, monkeypatch, driver, is_async):
    committed, finalize = [], adacheck.AdaCheckHandler.finalize

    def watched(self, directory):
        finalize(self, directory)
        committed.append(marks.is_committed(directory))

    monkeypatch.setattr(adacheck.AdaCheckHandler, "finalize", watched)
    handler = adacheck.AdaCheckHandler()
    state, options = small_state(), {"atomicity_options": COMMIT_FILE}
    if driver == "checkpointer":
        kind = ocp.AsyncCheckpointer if is_async else ocp.Checkpointer
        with kind(handler, **options) as checkpointer:
            checkpointer.save(tmp_path / "of a user", args=adacheck.SaveArgs(state))
            if is_async:
                checkpointer.wait_until_finished()
            found = checkpointer.restore(tmp_path / "of a user")
    else:
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async, **options)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler, options=options) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            found = manager.restore(1, args=adacheck.RestoreArgs(state))
    assert committed == [False]
    assert_same_bits(found, host_copy(state))
    assert not [*tmp_path.rglob(marks.FINALIZED)]
