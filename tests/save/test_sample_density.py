"""Where a shadow compares all of a step, a sample takes fewer elements; else it takes them all."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import adacheck_jax as adacheck
from adacheck_jax.memory import shadow, shadow_state
from adacheck_jax.proof import checker
from adacheck_jax.proof.sample import Sampling
from adacheck_jax.save.line import planner
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update.binding import recorders_of
from tests.support import assert_same_bits, host_copy, manager_of

SHAPE = (1000, 512)


class Run:
    """adam over a matrix, a large vector and a number."""

    def __init__(self):
        self.recorder = adacheck.Recorder(optax.adam(1e-2))
        large = jnp.linspace(0.5, 2.0, SHAPE[0] * SHAPE[1]).reshape(SHAPE)
        params = {"w": large, "v": jnp.linspace(-1.0, 1.0, 6007), "s": jnp.ones(())}
        self.state = {"params": params, "opt": self.recorder.init(params)}

        @jax.jit
        def step(state):
            gradient = jax.tree.map(jnp.sin, state["params"])
            updates, opt = self.recorder.update(gradient, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

        self.step = step

    def advance(self):
        self.state = jax.block_until_ready(self.step(self.state))

    def edit_row(self, row):
        params = self.state["params"]
        params["w"] = jax.block_until_ready(params["w"].at[row].add(1.0))


def sampling_of(run, proves):
    """Where the states of a run are taken apart, its first state, and what samples them."""
    run.advance()
    snapshots = Snapshots(recorders_of(run.recorder), None)
    snapshot = snapshots.take(run.state)
    update = ExportedUpdates("auto").of(snapshot.structure)
    return snapshots, snapshot, Sampling(snapshot.structure, update, update.pieces, proves)


def until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def taken(witness):
    """Elements that a witness has of all arrays together."""
    samples, sample = witness.kept
    vectors = sample.vectors(samples._pieces.before)
    return sum(each.shape[1] for each in vectors.values() if each.shape[1] > 1)


def test_a_sample_is_thinned_while_the_next_step_is_proved_and_finds_what_is_wrong():
    run, proves = Run(), [False]
    snapshots, snapshot, sampling = sampling_of(run, lambda: proves[0])
    before = sampling.witness(snapshot.arrays, 1)
    until(lambda: sampling.is_ready)
    dense, counts = taken(before), []
    for number, proves[0] in enumerate([False, True, True, True, False, False], 2):
        run.advance()
        arrays = snapshots.take(run.state).arrays
        check = sampling.begin(before, arrays, number, lambda: {})
        assert check.findings((0,)) == {}
        edited = [x + 1 if x.shape == SHAPE else x for x in arrays]
        wrong = sampling.begin(before, edited, number, lambda: {}).findings((0,))
        assert {snapshot.structure.leaves[i].shape for i in wrong} == {SHAPE}
        assert not any(checker.is_sparse(snapshot.structure, i, x) for i, x in wrong.items())
        before = check.witness()
        if proves[0]:
            until(lambda: sampling._made[True].is_ready)
        counts.append(taken(before))
    assert counts[0] == counts[1] == dense  # the second began to compile
    assert counts[4:] == [dense, dense]
    assert len({*counts[2:4]}) == 1
    assert counts[2] == pytest.approx(dense / 4, rel=0.05)


def test_until_a_shadow_is_there_the_thin_programs_compute_dense_samples():
    run, proves = Run(), [None]
    snapshots, snapshot, sampling = sampling_of(run, lambda: proves[0])
    before = sampling.witness(snapshot.arrays, 1)  # from the host
    dense = taken(before)
    until(lambda: sampling._made[True].is_ready)
    assert not sampling.is_ready  # the next one waits for its state
    assert sampling._made[False].replay is sampling._made[True].replay
    counts = []
    for number, proves[0] in enumerate([True, True, None, None, None, False], 2):
        run.advance()
        arrays = snapshots.take(run.state).arrays
        edited = [x + 1 if x.shape == SHAPE else x for x in arrays]
        wrong = sampling.begin(before, edited, number, lambda: {}).findings((0,))
        assert {snapshot.structure.leaves[i].shape for i in wrong} == {SHAPE}
        check = sampling.begin(before, arrays, number, lambda: {})
        assert check.findings((0,)) == {}
        before = check.witness()
        counts.append(taken(before))
    assert counts == [counts[0], counts[0], *[dense] * 4]
    assert counts[0] == pytest.approx(dense / 4, rel=0.05)
    until(lambda: sampling.is_ready)


def test_where_the_shadow_takes_no_state_the_first_step_is_sampled_densely(tmp_path, monkeypatch):
    may_fail = threading.Event()

    def fail(*args):
        assert may_fail.wait(60)
        raise MemoryError

    monkeypatch.setattr(shadow_state.ShadowState, "_load", fail)
    run, saved = Run(), {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(1, 5):
            run.advance()
            if step > 1:
                run.edit_row(130 * step)  # which a thin sample of the second step misses
            saved[step] = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            if step > 1:
                may_fail.set()
    args = adacheck.RestoreArgs(jax.tree.map(np.asarray, run.state))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step, expected in saved.items():
            assert_same_bits(manager.restore(step, args=args), expected)


@pytest.mark.parametrize("own", [adacheck.Shadow(bytes=1), None])
def test_without_a_shadow_an_edited_row_is_always_found_and_stored(tmp_path, own):
    run, saved = Run(), {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, shadow=own)) as manager:
        for step in range(1, 9):
            run.advance()
            if step > 3:
                run.edit_row(100 * step)
            saved[step] = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
    args = adacheck.RestoreArgs(jax.tree.map(np.asarray, run.state))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step, expected in saved.items():
            assert_same_bits(manager.restore(step, args=args), expected)


def test_a_state_that_was_moved_to_other_memory_is_saved(tmp_path):
    run, saved = Run(), {}
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=None)
    with manager_of(tmp_path, handler) as manager:
        for step in range(1, 12):
            run.advance()
            if step > 8:  # programs that take samples are compiled for the memory before
                away = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
                run.state = jax.device_put(run.state, away) if step < 11 else run.state
            saved[step] = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            if step == 3:
                (line,) = handler.run.lines._savers.values()
                until(lambda: line._planner._checker[2].is_ready)  # noqa: B023
            run.state = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), run.state)
    args = adacheck.RestoreArgs(jax.tree.map(np.asarray, run.state))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step, expected in saved.items():
            assert_same_bits(manager.restore(step, args=args), expected)


def test_a_run_in_which_something_was_found_samples_all_again(monkeypatch):
    own = object.__new__(planner.Planner)
    own._shadow, own.distrust = shadow.ShadowThread(None), planner.Distrust()
    assert not own._proves()  # it follows nothing yet
    monkeypatch.setattr(shadow.ShadowThread, "proves", True)
    assert own._proves()
    own.distrust.learn("a leaf was edited")
    assert not own._proves()
