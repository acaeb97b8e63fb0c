"""Every delta is proved in full by a copy of the state in host memory that follows training."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import jax.numpy as jnp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.memory import free_memory, shadow
from adacheck_jax.store.steps import roots
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support
from tests.save.test_checks import assert_all_restorable, deltas_of, kinds
from tests.support import host_copy, manager_of, mesh_of, save_steps


def checked(root):
    return [each.checked for each in deltas_of(root).values()]


MESHES = pytest.mark.parametrize("shape", [(1, 1), (4, 2)], ids=["one device", "eight devices"])


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@MESHES
def test_every_delta_is_proved_in_full(tmp_path, shape, dtype):
    run = support.dict_run(mesh_of(shape), dtype=dtype)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=3)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 6)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "B", "R"]
    assert checked(tmp_path) == ["full"] * 4
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((2, 2)))


def test_a_resumed_run_is_followed_from_the_step_that_was_restored(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 2)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        run.state = manager.restore(2, args=adacheck.RestoreArgs(support.abstract(run.state)))
        saved = save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R"]
    assert checked(tmp_path) == ["full"] * 3
    assert_all_restorable(tmp_path, saved, run.state)


def test_recorded_steps_are_proved_and_may_be_saved_again(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        for _ in range(3):
            run.advance()
            saved[run.count] = host_copy(run.state)
            assert handler.record_step(run.state, run.count)
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 1)
    assert checked(tmp_path) == ["full"] * 5
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_step_without_an_update_is_followed(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        saved[3] = host_copy(run.state)
        manager.save(3, args=adacheck.SaveArgs(run.state))
        run.count = 3
        saved |= save_steps(manager, run, 1)
    assert checked(tmp_path) == ["full", "stored", "full"]
    assert_all_restorable(tmp_path, saved, run.state)


def test_one_element_changed_by_hand_is_refused_and_the_leaf_is_stored_from_then_on(tmp_path):
    """A sample takes one element of eight here: nothing but the shadow sees all of these."""
    run = support.dict_run(mesh_of((1, 1)))
    saved, lost = {}, []
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(1, 13):
            run.advance()
            if step >= 4:
                kernel = run.state["params"]["in"]["kernel"]
                run.state["params"]["in"]["kernel"] = kernel.at[step, 2 * step].add(1e-3)
            expected = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            try:
                manager.wait_until_finished()
                saved[step] = expected
            except ReplayError as error:
                lost.append(str(error))
    assert len(lost) <= 1
    assert all("params/in/kernel" in each for each in lost)
    first = roots.steps_of(tmp_path)[0].manifest
    assert isinstance(first, BaseManifest)
    index = [leaf.path for leaf in first.leaves].index("params/in/kernel")
    assert all(index in each.unreplayed for step, each in deltas_of(tmp_path).items() if step > 5)
    assert checked(tmp_path)[-1] == "full"
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.parametrize("shadow", [adacheck.Shadow(bytes=1000), None])
def test_without_room_for_it_a_sample_is_compared(tmp_path, shadow, caplog):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=shadow)
    with caplog.at_level(logging.INFO), manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
    assert checked(tmp_path) == ["sample"] * 2
    told = [r for r in caplog.records if "Shadow(bytes=" in r.getMessage()]
    assert len(told) == (shadow is not None)


def test_a_shadow_that_fails_costs_no_step(tmp_path, monkeypatch, caplog):
    run = support.dict_run(mesh_of((1, 1)))

    def fails(self, updates, **_):
        raise MemoryError("no memory")

    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=3)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        with monkeypatch.context() as patch:
            patch.setattr(HostFold, "advance", fails)
            saved |= save_steps(manager, run, 2)
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "B", "R"]
    assert checked(tmp_path) == ["full", "sample", "sample", "full"]
    assert [r for r in caplog.records if "no memory" in r.getMessage()]
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_on_other_platforms_a_difference_may_be_the_arithmetic_of_the_host(platform, monkeypatch):
    monkeypatch.setattr(shadow.update_program, "platform", lambda: platform)
    assert shadow.Proof(shadow.ShadowThread(None), object(), lambda _: Future()).is_trusted() is (
        platform == "cpu"
    )


def test_free_memory_is_a_number_of_bytes():
    assert 2**20 < free_memory.free_bytes() < 2**50


def test_after_recorded_steps_that_are_wrong_deltas_are_proved_in_full_again(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        run.advance()
        saved[3] = host_copy(run.state)
        assert handler.record_step(run.state, 3)
        run.advance()
        kernel = run.state["params"]["in"]["kernel"]
        run.state["params"]["in"]["kernel"] = kernel.at[3, 7].add(1e-3)
        is_found_later = handler.record_step(run.state, 4)  # else it was found at once
        run.advance()
        if is_found_later:
            manager.wait_until_finished()  # so that it is known by the save
            with pytest.raises(ReplayError, match="params/in/kernel"):
                manager.save(5, args=adacheck.SaveArgs(run.state))
        saved[5] = host_copy(run.state)
        manager.save(5, args=adacheck.SaveArgs(run.state))
        run.count = 5
        saved |= save_steps(manager, run, 3)
    assert set(checked(tmp_path)) <= {"full", "stored"}
    assert checked(tmp_path)[-3:] == ["full"] * 3
    assert_all_restorable(tmp_path, saved, run.state)
