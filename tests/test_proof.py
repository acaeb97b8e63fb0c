"""A delta that replay would not reproduce is caught as it is saved, and no step is lost."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax import manifest, programs, proof, roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps


def kinds(root):
    """For each step B for a base, R for a replayed delta, D for differences alone."""
    found = [step.manifest for step in roots.steps_of(root)]
    return [
        "B" if isinstance(each, manifest.BaseManifest) else "R" if each.has_update else "D"
        for each in found
    ]


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
    # Stored whole where replay is wrong, then bit by bit: the lineage goes on.
    assert kinds(tmp_path) == ["B", "R", "D", "D"]
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
    in_pieces = proof.in_pieces
    monkeypatch.setattr(proof, "in_pieces", lambda *a: found.append(in_pieces(*a)) or found[-1])
    run = support.dict_run(mesh_of((4, 2)), dtype=jnp.bfloat16)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 6)
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R", "R"]
    assert found == [[], []]  # once a base


@pytest.mark.parametrize(("prove", "count"), [("never", 0), ("first", 1), ("every", 3)])
def test_how_often_it_is_proved(tmp_path, monkeypatch, prove, count):
    calls = []
    monkeypatch.setattr(proof, "in_pieces", lambda *a: calls.append(a) or [])
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, prove=prove)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 4)
    assert len(calls) == count


@pytest.mark.parametrize("is_whole", [False, True], ids=["in pieces", "whole"])
def test_a_proof_compiles_nothing_that_the_one_before_it_did(is_whole, tmp_path):
    tx = by_size() if is_whole else None
    run = support.dict_run(mesh_of((1, 1)), tx=tx)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=1)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 4)  # two lineages, and thus two proofs at least
        with support.compiled_programs() as compiled:
            save_steps(manager, run, 4)
    assert compiled == []


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
    assert kinds(tmp_path)[3:] == ["R", "D"]


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
        assert kinds(tmp_path) == ["B", "R"]
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(2, args=target), saved[2])


def leaf_of(index, array, cuts=None):
    cuts = cuts or tuple((0, length) for length in array.shape)
    owners = (0,) * math.prod(len(points) - 1 for points in cuts)
    dtype = str(array.dtype)
    return manifest.Leaf(f"{index}", array.shape, dtype, array.itemsize, None, cuts, owners)


def blocks_of(leaves, arguments, values):
    sites = proof.sites(leaves, arguments, 0)
    return {i: {b: values[i][b.slices] for b in boxes} for i, boxes in sites.items() if i in values}


@pytest.mark.parametrize("bound_bytes", [100, 1000, 64 * 2**20])
@pytest.mark.parametrize("columns", [(0, 5), (0, 2, 5)], ids=["whole", "cut"])
def test_pieces_of_any_size_give_the_same_verdict(bound_bytes, columns):
    def update(params, inner, record, extra):
        del extra
        moved = [m * 0.9 + r for m, r in zip(inner[:2], record, strict=True)]
        new = [p - 0.1 * m for p, m in zip(params, moved, strict=True)]
        return new, [*moved, inner[2] + 1]

    rng = np.random.default_rng(0)
    shapes = {0: (7, 5), 1: (3,), 2: (7, 5), 3: (3,), 4: (), 5: (7, 5), 6: (3,)}
    values = {i: np.array(rng.standard_normal(s), np.float32) for i, s in shapes.items()}
    leaves = [leaf_of(i, value) for i, value in values.items()]
    leaves[2] = leaf_of(
        2, values[2], ((0, 7), columns)
    )  # a moment that is cut where params are not
    arguments = [[0, 1], [2, 3, 4], [5, 6], []]
    outputs = jax.jit(update)(*[[values[i] for i in indices] for indices in arguments])
    after = dict(zip([0, 1, 2, 3, 4], map(np.array, jax.tree.leaves(outputs)), strict=True))
    before = blocks_of(leaves, arguments, values)

    def verdict():
        found = blocks_of(leaves, arguments, after)
        return proof.in_pieces(update, leaves, arguments, before, found, bound_bytes)

    assert verdict() == []
    after[3][1] = np.nextafter(after[3][1], np.float32(9))
    assert verdict() == [3]
    after[0][6, 4] = -after[0][6, 4]
    after[4] = after[4] + 1
    assert verdict() == [0, 3, 4]


def test_the_sites_of_all_processes_cover_what_each_of_them_owns():
    array = np.zeros((8, 6), np.float32)
    params = dataclasses.replace(leaf_of(0, array, ((0, 4, 8), (0, 6))), owners=(0, 1))
    moment = dataclasses.replace(leaf_of(1, array, ((0, 8), (0, 3, 6))), owners=(1, 0))
    record = dataclasses.replace(leaf_of(2, array), owners=(1,))
    leaves, arguments = [params, moment, record], [[0], [1], [2], []]
    for process in (0, 1):
        sites = proof.sites(leaves, arguments, process)
        assert sites[0] == sites[1] == sites[2]
        for leaf in leaves:
            for owned in leaf.boxes_of(process):
                inside = [site for site in sites[0] if owned.contains(site)]
                assert sum(site.size for site in inside) == owned.size


def test_a_weight_decay_mask_by_rank_is_proved(tmp_path, monkeypatch):
    """A piece has as many axes as its leaf, so that an update may look at them."""
    calls = []
    in_pieces = proof.in_pieces
    monkeypatch.setattr(proof, "in_pieces", lambda *a: calls.append(in_pieces(*a)) or calls[-1])
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    run = support.dict_run(mesh_of((2, 2)), optax.adamw(1e-2, weight_decay=0.1, mask=mask))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    assert calls == [[]]
    assert kinds(tmp_path) == ["B", "R", "R"]


def by_size():
    """Steps by the first axis where it is long, so that a piece would not be updated likewise."""

    def update(updates, state, params=None):
        del params
        rate = lambda u: -0.1 if u.shape[:1] == (support.WIDTH,) else -0.2 + 0.1 * u  # noqa: E731
        return jax.tree.map(lambda u: rate(u) * u, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def masked():
    """Steps every other row of one matrix; changes the containers that it is given in place."""

    def update(updates, state, params=None):
        del params
        mask = jnp.ones((support.WIDTH, 2 * support.WIDTH)).at[::2].set(0.0)
        updates["in"]["kernel"] = updates["in"]["kernel"] * mask
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("tx", [by_size(), masked()], ids=["shapes", "places"])
def test_an_update_that_looks_at_shapes_or_places_is_proved_whole(tmp_path, monkeypatch, tx):
    calls = []
    whole = proof.whole
    monkeypatch.setattr(proof, "whole", lambda *a: calls.append(whole(*a)) or calls[-1])
    run = support.dict_run(mesh_of((4, 2)), tx, dtype=jnp.bfloat16)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    assert calls == [[]]
    assert kinds(tmp_path) == ["B", "R", "R"]


def test_a_proof_that_takes_more_memory_than_allowed_is_left_out_and_said(tmp_path, caplog):
    run = support.dict_run(mesh_of((4, 2)), masked(), dtype=jnp.bfloat16)
    handler = adacheck.AdaCheckHandler(run.recorder, prove_bytes=1000)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, handler) as manager,
    ):
        saved = save_steps(manager, run, 3)
        target = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 2))))
        assert_same_bits(manager.restore(3, args=target), saved[3])
    assert kinds(tmp_path) == ["B", "R", "R"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "prove_bytes is 1000" in said[0]


def hidden():
    """Reads a counter that is in no state, as a callback does."""
    calls = itertools.count(1)

    def update(updates, state, params=None):
        del params
        spec = jax.ShapeDtypeStruct((), np.float32)
        factor = jax.pure_callback(lambda: np.float32(1 / next(calls)), spec)
        return jax.tree.map(lambda u: -0.1 * factor * u, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def by_closure():
    """Uses a number that the export does not see change."""
    rate = [0.1]

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -rate[0] * u, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update), rate


def test_an_update_that_reads_what_is_in_no_state_is_caught_at_the_first_delta(tmp_path):
    tx, rate = by_closure()
    run = support.dict_run(mesh_of((4, 2)), tx)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 1)
        rate[0] = 0.2  # the compiled train step keeps the old one; what is traced now does not
        saved |= save_steps(manager, run, 4)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "D", "D", "D"]
    delta = manifest.read(tmp_path / "2" / "default")
    assert "did not reproduce" in delta.problem


def test_a_callback_in_the_update_loses_no_step(tmp_path):
    run = support.dict_run(mesh_of((2, 2)), hidden())
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert "R" not in kinds(tmp_path)


def test_the_next_lineage_of_a_disproved_update_is_not_replayed_either(tmp_path):
    run = run_of(halved)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 5)
    assert kinds(tmp_path) == ["B", "R", "D", "B", "D"]
    base = manifest.read(tmp_path / "4" / "default")
    assert "did not reproduce" in base.update.problem
    assert not base.update.programs


def test_a_disproved_lineage_goes_on_after_a_restart(tmp_path):
    run = run_of(projected)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        run.state = manager.restore(3, args=adacheck.RestoreArgs(abstract(run.state)))
        saved = save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "D", "D", "D"]


def test_a_hyper_parameter_set_by_hand_between_steps_is_stored_in_the_delta(tmp_path):
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        hyper = run.state["opt_state"][1].adacheck_inner.hyperparams
        hyper["learning_rate"] = jax.device_put(jnp.float32(5e-3), hyper["learning_rate"].sharding)
        saved |= save_steps(manager, run, 3)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((4, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R", "R"]
    leaves = manifest.read(tmp_path / "1" / "default").leaves
    stored = {
        step: [leaves[i].path for i in manifest.read(tmp_path / f"{step}" / "default").stored]
        for step in (3, 4, 5)
    }
    assert [any("learning_rate" in path for path in stored[step]) for step in (3, 4, 5)] == [
        False,
        True,
        False,
    ]


def test_a_counter_set_by_hand_between_steps_makes_a_base(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        adam = run.state["opt_state"][1].adacheck_inner[0]
        reset = adam._replace(count=jax.device_put(jnp.int32(0), adam.count.sharding))
        node = run.state["opt_state"][1]
        node = node._replace(adacheck_inner=(reset, *node.adacheck_inner[1:]))
        run.state["opt_state"] = (run.state["opt_state"][0], node)
        saved |= save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((4, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R"]
    reason = manifest.read(tmp_path / "4" / "default").reason
    assert "count was changed by something else" in reason


def test_a_schedule_and_a_counter_are_no_change_by_hand(tmp_path):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50)
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(schedule))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(4, args=target), saved[4])
    assert kinds(tmp_path) == ["B", "R", "R", "R"]


def test_a_forecast_that_is_never_right_does_not_cost_a_base_a_step(tmp_path, monkeypatch):
    wrong = programs.Forecast((0,), lambda values, _extra: [values[0] + 7])
    monkeypatch.setattr(programs.Programs, "forecast", lambda *_: wrong)
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(5, args=target), saved[5])
    assert kinds(tmp_path) == ["B", "B", "R", "R", "R"]


def set_rate(run, rate):
    hyper = run.state["opt_state"][1].adacheck_inner.hyperparams
    hyper["learning_rate"] = jax.device_put(jnp.float32(rate), hyper["learning_rate"].sharding)


def test_a_hyper_parameter_set_by_hand_and_saved_before_the_next_update(tmp_path):
    """The delta without an update holds it, and the next update takes it."""
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        set_rate(run, 5e-3)
        run.count = 4
        saved[4] = host_copy(run.state)
        manager.save(4, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((4, 2))))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "R", "D", "R", "R"]


def by_fan_in():
    """Steps by a number that is made of a shape."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -0.1 * u / max(u.shape, default=1), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def test_a_constant_made_of_a_shape_is_no_fault_of_the_train_step(tmp_path, caplog):
    run = support.dict_run(mesh_of((2, 2)), by_fan_in(), dtype=jnp.bfloat16)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R"]
    assert not caplog.records


def test_a_proof_that_fails_to_run_fails_no_save(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no proof today")

    monkeypatch.setattr(proof, "in_pieces", broken)
    run = support.dict_run(mesh_of((2, 2)))
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=1)) as manager,
    ):
        saved = save_steps(manager, run, 4)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(4, args=target), saved[4])
    assert kinds(tmp_path) == ["B", "R", "B", "R"]
    assert len(caplog.records) == 1
    assert "no proof today" in caplog.records[0].getMessage()


def test_what_was_left_out_of_a_restore_is_no_parent_of_a_replay(tmp_path):
    """Only params are restored, and a fresh optimizer goes on from them."""
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 1)
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        target = jax.tree.map(lambda _: ocp.PLACEHOLDER, run.state)
        target["params"] = abstract(run.state["params"])
        run.state["params"] = manager.restore(1, args=adacheck.RestoreArgs(target))["params"]
        run.advance()
        saved = save_steps(manager, run, 2)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "B", "R"]


def test_short_leaves_are_not_proved_in_the_length_of_the_longest(monkeypatch):
    sizes = {0: 10_000, 1: 9_000, 2: 1_000, 3: 900, 4: 1, 5: 0}
    groups = proof._groups(sizes)
    assert [sorted(group) for group in groups] == [[0, 1], [2, 3], [4], [5]]
    assert proof._groups({}) == []
