"""A delta that replay would not reproduce is caught as it is saved, and no step is lost."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax import lineage, manifest, programs, proof
from adacheck_jax.boxes import Box
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps


def kinds(root):
    return [type(step.manifest).__name__[0] for step in lineage.steps_of(root)]


def run_of(train_step, tx=None, *, jit=True):
    """A run on one device whose train step is given: (state, grads, chain) -> state."""
    recorder, chain = support.recorded(tx)
    params = support.initial_params()
    state = {"params": params, "opt_state": chain.init(params), "step": jnp.int32(0)}

    def step(state, data):
        x, y = data
        loss = lambda p: jnp.mean((support.forward(p, x) - y) ** 2)  # noqa: E731
        return train_step(state, jax.grad(loss)(state["params"]), chain)

    return support.Run(recorder, state, jax.jit(step) if jit else step)


def plain(state, grads, chain):
    updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def halved(state, grads, chain):
    """Something after the recorder changes what it returned."""
    updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], jax.tree.map(lambda u: u / 2, updates))
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def projected(state, grads, chain):
    """Params are changed after the update: here one leaf is clamped."""
    state = plain(state, grads, chain)
    state["params"]["in"]["kernel"] = jnp.clip(state["params"]["in"]["kernel"], -0.1, 0.1)
    return state


@pytest.mark.parametrize("train_step", [halved, projected])
def test_an_update_that_is_not_the_recorders_is_caught_at_the_first_delta(
    tmp_path, caplog, train_step
):
    run = run_of(train_step)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        saved = save_steps(manager, run, 4)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((4, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "D", "B", "B"]
    said = [r.getMessage() for r in caplog.records if "did not reproduce" in r.getMessage()]
    assert len(said) == 1
    assert "params/in/kernel" in said[0]
    delta = manifest.read(tmp_path / "2" / "default")
    paths = [leaf.path for leaf in manifest.read(tmp_path / "1" / "default").leaves]
    assert "params/in/kernel" in {paths[i] for i in delta.stored}
    if train_step is projected:
        assert "params/out/kernel" not in {paths[i] for i in delta.stored}


def test_an_update_that_is_not_compiled_as_one_program_loses_no_step(tmp_path):
    run = run_of(plain, jit=False)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)


def test_params_changed_after_a_restore_are_caught(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        state = manager.restore(3, args=adacheck.RestoreArgs(abstract(run.state)))
        state["params"]["out"]["kernel"] = state["params"]["out"]["kernel"] * 1.5
        run.state = state
        saved = save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)


def test_a_correct_run_is_proved_and_goes_on_with_deltas(tmp_path, monkeypatch):
    found = []
    mismatches = proof.mismatches
    monkeypatch.setattr(proof, "mismatches", lambda *a: found.append(mismatches(*a)) or found[-1])
    run = support.dict_run(mesh_of((4, 2)), dtype=jnp.bfloat16)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 6)
    assert kinds(tmp_path) == ["B", "D", "D", "B", "D", "D"]
    assert found == [[], []]  # once a base


@pytest.mark.parametrize(("prove", "count"), [("never", 0), ("first", 1), ("every", 3)])
def test_how_often_it_is_proved(tmp_path, monkeypatch, prove, count):
    calls = []
    monkeypatch.setattr(proof, "mismatches", lambda *a: calls.append(a) or [])
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, prove=prove)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 4)
    assert len(calls) == count


def test_a_later_change_by_hand_is_caught_by_proving_every_delta(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, prove="every")
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
        run.state["params"]["scale"] = run.state["params"]["scale"] + 1
        saved = save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path)[3:] == ["D", "B"]


def test_a_proof_does_not_keep_a_donated_state_from_being_overwritten(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = {}
        for _ in range(2):
            state = run.advance()
            saved[run.count] = host_copy(state)
            doomed = jax.tree.map(jnp.copy, state)
            manager.save(run.count, args=adacheck.SaveArgs(doomed))
            jax.block_until_ready(scramble(doomed))
        manager.wait_until_finished()
        assert kinds(tmp_path) == ["B", "D"]
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(2, args=target), saved[2])


@pytest.mark.parametrize("pieces_bytes", [100, 1000, 64 * 2**20])
def test_pieces_of_any_size_give_the_same_verdict(monkeypatch, pieces_bytes):
    monkeypatch.setattr(proof, "PIECES_BYTES", pieces_bytes)

    def update(params, inner, record, extra):
        del extra
        moved = [m * 0.9 + r for m, r in zip(inner[:2], record, strict=True)]
        new = [p - 0.1 * m for p, m in zip(params, moved, strict=True)]
        return new, [*moved, inner[2] + 1]

    rng = np.random.default_rng(0)
    shapes = {0: (7, 5), 1: (3,), 2: (7, 5), 3: (3,), 4: (), 5: (7, 5), 6: (3,)}
    values = {i: rng.standard_normal(s).astype(np.float32) for i, s in shapes.items()}
    arguments = [[0, 1], [2, 3, 4], [5, 6], []]
    outputs = jax.jit(update)(*[[values[i] for i in indices] for indices in arguments])
    after = dict(zip([0, 1, 2, 3, 4], map(np.array, jax.tree.leaves(outputs)), strict=True))
    box = {i: Box.full(shape) for i, shape in shapes.items()}
    before_blocks = {i: {box[i]: value} for i, value in values.items()}

    def verdict():
        after_blocks = {i: {box[i]: value} for i, value in after.items()}
        return proof.mismatches(update, arguments, before_blocks, after_blocks, shapes)

    assert verdict() == []
    after[3][1] = np.nextafter(after[3][1], np.float32(9))
    assert verdict() == [3]
    after[0][6, 4] = -after[0][6, 4]
    after[4] = after[4] + 1
    assert verdict() == [0, 3, 4]


def test_an_update_that_looks_at_shapes_is_proved_on_whole_leaves():
    mask = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    def update(params, inner, record, extra):
        del inner, extra
        return [params[0] - record[0] * mask], []

    values = {0: np.ones((3, 2), np.float32), 1: np.full((3, 2), 0.5, np.float32)}
    box = Box.full((3, 2))
    before = {i: {box: value} for i, value in values.items()}
    right = {0: {box: np.asarray(1 - 0.5 * mask)}}
    wrong = {0: {box: np.zeros((3, 2), np.float32)}}
    shapes = {0: (3, 2), 1: (3, 2)}
    assert proof.mismatches(update, [[0], [], [1], []], before, right, shapes) == []
    assert proof.mismatches(update, [[0], [], [1], []], before, wrong, shapes) == [0]


def test_a_hyper_parameter_set_by_hand_between_steps_makes_a_base(tmp_path):
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        hyper = run.state["opt_state"][1].adacheck_inner.hyperparams
        hyper["learning_rate"] = jax.device_put(jnp.float32(5e-3), hyper["learning_rate"].sharding)
        saved |= save_steps(manager, run, 3)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((4, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "D", "D", "B", "D", "D"]
    reason = manifest.read(tmp_path / "4" / "default").reason
    assert "learning_rate was changed by something else" in reason


def test_a_schedule_and_a_counter_are_no_change_by_hand(tmp_path):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50)
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(schedule))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(4, args=target), saved[4])
    assert kinds(tmp_path) == ["B", "D", "D", "D"]


def test_a_forecast_that_is_never_right_does_not_cost_a_base_a_step(tmp_path, monkeypatch):
    wrong = programs.Forecast((0,), lambda values, _extra: [values[0] + 7])
    monkeypatch.setattr(programs.Programs, "forecast", lambda *_: wrong)
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(5, args=target), saved[5])
    assert kinds(tmp_path) == ["B", "B", "D", "D", "D"]
