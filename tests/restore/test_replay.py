"""What a restore does at a time: one program, compiled while the base is read."""

import logging
import threading

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.store import packs as arrays
from tests import support


@pytest.fixture
def saved(tmp_path):
    run = support.dict_run(support.mesh_of((2, 2)))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        states = support.save_steps(manager, run, 6)
    return tmp_path, run, states


def restore(root, run, step):
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(support.abstract(run.state)))


def test_the_update_is_compiled_once_however_many_deltas(saved):
    root, run, states = saved
    with support.compiled_programs() as compiled:
        support.assert_same_bits(restore(root, run, 6), states[6])
    assert compiled.count("jit(run)") == 1


def test_records_are_let_go_of_once_they_are_on_the_devices(saved, monkeypatch):
    """Of a long lineage a replay holds what it reads ahead, not all records."""
    root, run, states = saved
    packs, most, lock = [], [0], threading.Lock()
    hold = arrays.PackReader.hold

    def noted(pack, spans, *, what):
        hold(pack, spans, what=what)
        with lock:
            packs.append(pack)
            most[0] = max(most[0], len({id(each) for each in packs if each._held}))

    monkeypatch.setattr(arrays.PackReader, "hold", noted)
    support.assert_same_bits(restore(root, run, 6), states[6])
    assert len({id(each) for each in packs}) >= 5
    assert 1 <= most[0] <= 4  # two arrays a pack, of two deltas at once
    assert not any(each._held for each in packs)


def test_a_replay_is_logged_in_one_line(saved, caplog):
    root, run, _ = saved
    with caplog.at_level(logging.INFO, logger="adacheck_jax.restore"):
        restore(root, run, 6)
    said = [each.message for each in caplog.records if "Replaying" in each.message]
    assert said == ["Replaying 5 updates onto the base of step 1, for step 6."]


def test_an_update_of_leaves_without_elements_is_replayed(tmp_path):
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"empty": jnp.zeros((0, 3)), "some": jnp.ones((4, 3)), "none": jnp.zeros((3, 0))}
    state = {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def step(state):
        updates, opt_state = recorder.update(state["params"], state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    saved = {}
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(3):
            saved[number] = support.host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
            state = step(state)
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, handler) as manager:
        for number, expected in saved.items():
            args = adacheck.RestoreArgs(support.abstract(state))
            support.assert_same_bits(manager.restore(number, args=args), expected)
            assert handler.restored.replayed_count == number
