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
from tests import support
from tests.save.loop import Loop

SHAPE = (1000, 512)


def run_of():
    """adam over a matrix, a large vector and a number."""
    recorder = adacheck.Recorder(optax.adam(1e-2))
    large = jnp.linspace(0.5, 2.0, SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    params = {"w": large, "v": jnp.linspace(-1.0, 1.0, 6007), "s": jnp.ones(())}

    @jax.jit
    def step(state):
        gradient = jax.tree.map(jnp.sin, state["params"])
        updates, opt = recorder.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    state = {"params": params, "opt": recorder.init(params)}
    return support.Run(recorder, state, lambda state, _: jax.block_until_ready(step(state)))


def edit_row(loop, row):
    loop.edit("params/w", lambda x: x.at[row].add(1.0))


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


def taken(baseline):
    """Elements that a baseline has of all arrays together."""
    samples, sample = baseline.kept
    vectors = sample.vectors(samples._pieces.before)
    return sum(each.shape[1] for each in vectors.values() if each.shape[1] > 1)


def test_a_sample_is_thinned_while_the_next_step_is_proved_and_finds_what_is_wrong():
    run, proves = run_of(), [False]
    snapshots, snapshot, sampling = sampling_of(run, lambda: proves[0])
    before = sampling.baseline(snapshot.arrays, 1)
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
        before = check.baseline()
        if proves[0]:
            until(lambda: sampling._made[True].is_ready)
        counts.append(taken(before))
    assert counts[0] == counts[1] == dense  # the second began to compile
    assert counts[4:] == [dense, dense]
    assert len({*counts[2:4]}) == 1
    assert counts[2] == pytest.approx(dense / 4, rel=0.05)


def test_until_a_shadow_is_there_the_thin_programs_compute_dense_samples():
    run, proves = run_of(), [None]
    snapshots, snapshot, sampling = sampling_of(run, lambda: proves[0])
    before = sampling.baseline(snapshot.arrays, 1)  # from the host
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
        before = check.baseline()
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
    loop = Loop(tmp_path, run_of())
    for step in range(1, 5):
        loop.train()
        if step > 1:
            edit_row(loop, 130 * step)  # which a thin sample of the second step misses
        loop.put()
        may_fail.set()  # not before the first sample is taken
    loop.check()


@pytest.mark.parametrize("own", [adacheck.Shadow(bytes=1), None])
def test_without_a_shadow_an_edited_row_is_always_found_and_stored(tmp_path, own):
    loop = Loop(tmp_path, run_of(), shadow=own)
    for step in range(1, 9):
        loop.train()
        if step > 3:
            edit_row(loop, 100 * step)
        loop.put_and_wait()
    loop.check()


def test_a_state_that_was_moved_to_other_memory_is_saved(tmp_path):
    away = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    loop = Loop(tmp_path, run_of(), shadow=None)
    for step in range(1, 12):
        loop.train()
        if 8 < step < 11:  # programs that take samples are compiled for the memory before
            loop.run.state = jax.device_put(loop.run.state, away)
        loop.put_and_wait()
        if step == 3:
            (line,) = loop.handler.run.lines._savers.values()
            until(lambda: line._planner._checker[2].is_ready)  # noqa: B023
        loop.run.state = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), loop.run.state)
    loop.check()


def test_a_run_in_which_something_was_found_samples_all_again(monkeypatch):
    own = object.__new__(planner.Planner)
    own._shadow, own.quarantine = shadow.ShadowThread(None), planner.Quarantine()
    assert not own._proves()  # it follows nothing yet
    monkeypatch.setattr(shadow.ShadowThread, "proves", True)
    assert own._proves()
    own.quarantine.learn("a leaf was edited")
    assert not own._proves()
