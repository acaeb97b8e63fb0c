"""A delta that replay does not reproduce is found before it is saved, and no step is lost."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from adacheck_jax.format import manifest
from adacheck_jax.proof import second_copy
from adacheck_jax.state import exported_update
from adacheck_jax.store.steps import manifest_file, roots
from tests import support
from tests.save import test_waiting
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps
from tests.update import test_separate


def kinds(root):
    """For each step B for a base, R for a replayed delta, D for differences alone."""
    found = [step.manifest for step in roots.steps_of(root)]
    return [
        "B" if isinstance(each, manifest.BaseManifest) else "R" if each.has_update else "D"
        for each in found
    ]


def deltas_of(root):
    """The deltas of all steps, those of recorded ones included, by step."""
    found = [step.manifest for step in roots.steps_of(root)]
    every = [
        d for each in found if not isinstance(each, manifest.BaseManifest) for d in each.deltas
    ]
    return {each.step: each for each in every}


def names(root, indices):
    """The paths of leaves, but for the record, counters and the step's number."""
    first = roots.steps_of(root)[0].manifest
    paths = [first.leaves[i].path for i in indices]
    return {path for path in paths if "record" not in path and not path.endswith(("count", "step"))}


def assert_all_restorable(root, saved, state, mesh=None):
    target = abstract(state, mesh)
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        for step, expected in saved.items():
            holder = min(each for each in manager.all_steps() if each >= step)
            options = {} if holder == step else {"step": step}
            found = manager.restore(holder, args=adacheck.RestoreArgs(target, **options))
            assert_same_bits(found, expected)


CHECKS = pytest.mark.parametrize("check", ["sample", "full"])


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


@pytest.mark.covering(1, quick=1)
@CHECKS
@pytest.mark.parametrize("train_step", [halved, projected])
def test_an_update_that_is_not_the_recorders_costs_the_leaves_that_it_changes(
    tmp_path, caplog, train_step, check
):
    run = run_of(train_step)
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, handler) as manager,
    ):
        saved = save_steps(manager, run, 4)
    assert kinds(tmp_path) == ["B", "R", "R", "R"]
    said = [r.getMessage() for r in caplog.records if "replaying the update" in r.getMessage()]
    assert len(said) == 1
    assert "params/in/kernel" in said[0]
    for step, delta in deltas_of(tmp_path).items():
        assert delta.checked == check
        assert "params/in/kernel" in names(tmp_path, delta.stored)
        assert names(tmp_path, delta.unreplayed) == names(tmp_path, delta.stored)
        if train_step is projected:
            assert names(tmp_path, delta.stored) == {"params/in/kernel"}
        caution = manifest_file.read(tmp_path / f"{step}" / "default").caution
        assert "params/in/kernel" in caution.reason
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((4, 2)))


@pytest.mark.slow
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


@pytest.mark.first(1)
@CHECKS
def test_a_correct_run_is_checked_at_every_delta(tmp_path, check, caplog):
    run = support.dict_run(mesh_of((4, 2)), dtype=jnp.bfloat16)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2, shadow=support.SHADOWS[check])
    with caplog.at_level(logging.WARNING), manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 6)
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R", "R"]
    found = deltas_of(tmp_path).values()
    assert [each.checked for each in found] == [check] * 4
    assert not any(each.unreplayed for each in found)
    assert not any(each.manifest.caution.reason for each in roots.steps_of(tmp_path))
    assert not [r for r in caplog.records if r.name.startswith("adacheck_jax")]
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_step_without_an_update_has_nothing_to_be_replayed(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 2)
        manager.save(3, args=adacheck.SaveArgs(run.state))
    found = [*deltas_of(tmp_path).values()]
    assert [each.checked for each in found] == ["full", "stored"]


@pytest.mark.first(1)
@pytest.mark.parametrize("is_whole", [False, True], ids=["in pieces", "whole"])
def test_a_check_compiles_nothing_that_the_one_before_it_did(is_whole, tmp_path):
    tx = turned() if is_whole else None
    run = support.dict_run(mesh_of((1, 1)), tx=tx)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=1)
    with manager_of(tmp_path, handler) as manager:
        for _ in range(8):  # two lineages each: how far the save before has got is planned for too
            with support.compiled_programs() as compiled:
                save_steps(manager, run, 4)
            if not compiled:
                break
    assert compiled == []


@pytest.mark.first(1)
@CHECKS
def test_a_leaf_changed_by_hand_is_stored_and_replayed_again_afterwards(tmp_path, check):
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 3)
        run.state["params"]["scale"] = run.state["params"]["scale"] + 1
        saved |= save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R", "R"]
    found = deltas_of(tmp_path)
    stored = [names(tmp_path, found[step].stored) for step in (3, 4, 5, 6)]
    assert stored[0] == stored[2] == stored[3] == set()
    # It was changed after the step that was saved, so the next gradients' update began elsewhere.
    assert "params/scale" in stored[1]
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((4, 2)))


@pytest.mark.slow
@CHECKS
def test_single_elements_changed_by_hand(tmp_path, check):
    """Of a large leaf a sample may miss them; of a small one, and in full, nothing does."""
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        run.advance()
        path = "kernel" if check == "full" else "bias"
        params = run.state["params"]["in"]
        params[path] = params[path].at[(7,) * params[path].ndim].set(3.0)
        saved[3] = host_copy(run.state)
        manager.save(3, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R"]
    assert names(tmp_path, deltas_of(tmp_path)[3].stored) == {f"params/in/{path}"}
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_leaf_that_is_wrong_in_a_few_elements_is_distrusted(tmp_path):
    """A sample found one by chance: it may miss the next."""
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        for _ in range(3):
            run.advance()
            kernel = run.state["params"]["in"]["kernel"]
            run.state["params"]["in"]["kernel"] = kernel.at[:, 0].add(1.0)
            saved[run.count] = host_copy(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 1)
    index = [leaf.path for leaf in manifest_file.read(tmp_path / "1" / "default").leaves].index(
        "params/in/kernel"
    )
    found = deltas_of(tmp_path)
    assert [index in found[step].unreplayed for step in (2, 3, 4, 5, 6)] == [False, *[True] * 4]
    assert manifest_file.read(tmp_path / "6" / "default").caution.distrusted == (index,)
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.first(1)
@CHECKS
@pytest.mark.parametrize("what", ["rolled back", "swapped"])
def test_a_state_put_in_place_of_another_while_the_counter_goes_on(tmp_path, what, check):
    """Most of the bytes are wrong then, and the step is a base."""
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        old = jax.tree.map(jnp.copy, run.state)
        saved |= save_steps(manager, run, 1)
        run.advance()
        node, inner = run.state["opt_state"][1], old["opt_state"][1].adacheck_inner
        if what == "swapped":
            inner = jax.tree.map(lambda x: x[::-1] if x.ndim else x, inner)
        inner = (inner[0]._replace(count=node.adacheck_inner[0].count), *inner[1:])
        opt_state = (run.state["opt_state"][0], node._replace(adacheck_inner=inner))
        run.state = {**run.state, "params": old["params"], "opt_state": opt_state}
        saved[4] = host_copy(run.state)
        manager.save(4, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R", "R"]
    assert "does not give the state" in manifest_file.read(tmp_path / "4" / "default").reason
    assert_all_restorable(tmp_path, saved, run.state)


@CHECKS
def test_a_check_does_not_keep_a_donated_state_from_being_overwritten(tmp_path, check):
    run = support.dict_run(mesh_of((4, 2)))
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with manager_of(
        tmp_path, adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    ) as manager:
        saved = {}
        for _ in range(3):
            state = run.advance()
            saved[run.count] = host_copy(state)
            doomed = jax.tree.map(jnp.copy, state)
            manager.save(run.count, args=adacheck.SaveArgs(doomed))
            jax.block_until_ready(scramble(doomed))
        manager.wait_until_finished()
        assert kinds(tmp_path) == ["B", "R", "R"]
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(3, args=target), saved[3])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("elements", "expected"), [(4096, "full"), (4128, "sample")])
@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)])
def test_a_sample_that_takes_every_leaf_whole_is_a_full_check(tmp_path, elements, expected, mesh):
    recorder, chain = support.recorded(optax.adam(1e-2))
    params = {"wide": jnp.ones((elements // 8, 8)), "small": jnp.ones(8)}
    state = {"params": params, "opt_state": chain.init(params), "step": jnp.int32(0)}
    state = support.place(state, mesh_of(mesh))
    step = jax.jit(lambda state: plain(state, state["params"], chain))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder, shadow=None)) as manager:
        for number in range(3):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
    assert [each.checked for each in deltas_of(tmp_path).values()] == [expected] * 2


@pytest.mark.slow
def test_a_weight_decay_mask_by_rank_is_checked_by_sample(tmp_path):
    """A piece has as many axes as its leaf, so that an update may look at them."""
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    run = support.dict_run(mesh_of((2, 2)), optax.adamw(1e-2, weight_decay=0.1, mask=mask))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=None)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 3)
    assert [each.checked for each in deltas_of(tmp_path).values()] == ["sample"] * 2


def by_size():
    """Steps by the first axis where it is long, in other operations than where it is short."""

    def update(updates, state, params=None):
        del params
        rate = lambda u: -0.1 if u.shape[:1] == (support.WIDTH,) else -0.2 + 0.1 * u  # noqa: E731
        return jax.tree.map(lambda u: rate(u) * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_an_update_that_looks_at_shapes_is_replayed_on_samples(tmp_path):
    run = support.dict_run(mesh_of((4, 2)), by_size())
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=None)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R"]
    assert [each.checked for each in deltas_of(tmp_path).values()] == ["sample"] * 2
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((2, 2)))


def turned():
    """Steps each element by the one at the other end, too."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -0.1 * u - 0.01 * jnp.flip(u), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def masked():
    """Steps every other row of one matrix; changes the containers that it is given in place."""

    def update(updates, state, params=None):
        del params
        mask = jnp.ones((support.WIDTH, 2 * support.WIDTH)).at[::2].set(0.0)
        updates["in"]["kernel"] = updates["in"]["kernel"] * mask
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [turned(), masked()], ids=["all", "one"])
def test_an_update_that_takes_other_places_is_checked_in_full(tmp_path, tx):
    run = support.dict_run(mesh_of((4, 2)), tx, dtype=jnp.bfloat16)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R"]
    assert [each.checked for each in deltas_of(tmp_path).values()] == ["full"] * 2
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.first(1)
@pytest.mark.parametrize(("tx", "kind"), [(turned(), "D"), (masked(), "R")])
def test_what_nothing_can_check_is_stored_and_said(tmp_path, caplog, monkeypatch, tx, kind):
    """Where a sample does not tell, of all leaves or of one, and a copy would be too large."""
    monkeypatch.setattr(exported_update, "_COPIED_BYTES", 1000)
    run = support.dict_run(mesh_of((4, 2)), tx, dtype=jnp.bfloat16)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        saved = save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", kind, kind]
    found = deltas_of(tmp_path).values()
    expected = {"params/in/kernel"} if kind == "R" else set()
    assert [names(tmp_path, each.unreplayed) for each in found] == [expected] * 2
    (said,) = {x.getMessage() for x in caplog.records if x.name.startswith("adacheck_jax")}
    assert "AdaCheckHandler(shadow=Shadow(on_devices=True))" in said
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((2, 2)))


def hidden():
    """Reads a counter that is in no state, as a callback does."""
    calls = itertools.count(1)

    def update(updates, state, params=None):
        del params
        spec = jax.ShapeDtypeStruct((), np.float32)
        factor = jax.pure_callback(lambda: np.float32(1 / next(calls)), spec)
        return jax.tree.map(lambda u: -0.1 * factor * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_closure():
    """Uses a number that the export does not see change."""
    rate = [0.1]

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -rate[0] * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update), rate


@pytest.mark.parametrize("is_traced_anew", [False, True])
def test_an_update_that_reads_what_is_in_no_state_is_caught_at_the_first_delta(
    tmp_path, is_traced_anew
):
    tx, rate = by_closure()
    run = support.dict_run(mesh_of((4, 2)), tx)
    run.advance()
    rate[0] = 0.2  # the compiled train step keeps the old one, and so does its trace
    if is_traced_anew:
        step = vars(run.train_step)["__wrapped__"]
        jax.eval_shape(functools.partial(step), run.state, support.batch(0))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R"]
    found = deltas_of(tmp_path)
    wrong = {"params/in/kernel", "params/scale"} if is_traced_anew else set[str]()
    assert wrong <= names(tmp_path, found[3].unreplayed)
    assert bool(found[3].unreplayed) == is_traced_anew
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((2, 2)))


def test_the_update_of_a_first_base_is_exported_behind_its_save(tmp_path, monkeypatch):
    run, threads = support.dict_run(mesh_of((2, 2)), optax.adamw(1e-2)), []  # its own program
    export = exported_update.ExportedUpdates._export

    def noted(*args):
        threads.append(threading.current_thread().name)
        return export(*args)

    monkeypatch.setattr(exported_update.ExportedUpdates, "_export", noted)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert [name.rpartition("_")[0] for name in threads] == ["adacheck_line"]
    assert kinds(tmp_path) == ["B", "R", "R"]
    assert_all_restorable(tmp_path, saved, run.state)


def test_no_save_of_a_computed_step_compiles_on_the_callers_thread(tmp_path):
    run, compiled, inside = support.dict_run(mesh_of((2, 2)), optax.adamw(3e-3)), [], []
    caller = threading.current_thread()

    def noted(event, seconds, **_):
        if inside and threading.current_thread() is caller and "backend_compile" in event:
            compiled.append((inside[-1], seconds))

    jax.monitoring.register_event_duration_secs_listener(noted)
    try:
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            for step in range(5):
                state = jax.block_until_ready(run.advance())
                inside.append(step)
                manager.save(step, args=adacheck.SaveArgs(state))
                inside.clear()
                manager.wait_until_finished()
                support.wait_for_compilers()
    finally:
        jax.monitoring.unregister_event_duration_listener(noted)
    assert not compiled
    assert kinds(tmp_path) == ["B", *"RRRR"]


@pytest.mark.slow
def test_a_callback_in_the_update_loses_no_step(tmp_path):
    run = support.dict_run(mesh_of((2, 2)), hidden())
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert kinds(tmp_path) == ["B", "R", "R", "R"], "what the callback gave is recorded"


@pytest.mark.slow
def test_the_next_lineage_is_cautious_too(tmp_path):
    run = run_of(halved)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 5)
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R"]
    assert "params/in/kernel" in manifest_file.read(tmp_path / "4" / "default").caution.reason
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.slow
def test_caution_is_remembered_after_a_restart(tmp_path):
    run = run_of(projected)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        run.state = manager.restore(3, args=adacheck.RestoreArgs(abstract(run.state)))
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R"]
    reasons = {
        manifest_file.read(tmp_path / f"{n}" / "default").caution.reason for n in (2, 3, 4, 5)
    }
    assert len(reasons) == 1
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.slow
@pytest.mark.first(1)
@CHECKS
@pytest.mark.parametrize("when", ["before", "after", "before and after"])
def test_a_hyper_parameter_set_by_hand_costs_itself(tmp_path, caplog, when, check):
    """Set before the update it is what the update consumed; set after it, it is not."""
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(1e-2))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, handler) as manager,
    ):
        saved = save_steps(manager, run, 2)
        if "before" in when:
            set_rate(run, 5e-3)
        run.advance()
        if "after" in when:
            set_rate(run, 2e-3)
        saved[3] = host_copy(run.state)
        manager.save(3, args=adacheck.SaveArgs(run.state))
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R"]
    rate = "opt_state/1/adacheck_inner/hyperparams/learning_rate"
    found = deltas_of(tmp_path)
    stored = {
        step: {path for path in names(tmp_path, each.stored) if "adacheck_passed" not in path}
        for step, each in found.items()
    }
    assert stored[2] == stored[4] == stored[5] == set()
    assert rate in stored[3]
    assert stored[3] == {rate}
    assert not any(each.unreplayed for each in found.values())
    assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((4, 2)))


def test_a_counter_set_by_hand_between_steps_is_stored_in_the_delta(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        adam = run.state["opt_state"][1].adacheck_inner[0]
        reset = adam._replace(count=jax.device_put(jnp.int32(0), adam.count.sharding))
        node = run.state["opt_state"][1]
        node = node._replace(adacheck_inner=(reset, *node.adacheck_inner[1:]))
        run.state["opt_state"] = (run.state["opt_state"][0], node)
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "R"]
    paths = [leaf.path for leaf in manifest_file.read(tmp_path / "1" / "default").leaves]
    wrong = [paths[i] for i in deltas_of(tmp_path)[4].unreplayed]
    assert "opt_state/1/adacheck_inner/0/count" in wrong
    assert deltas_of(tmp_path)[5].unreplayed == ()
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((4, 2)))


@pytest.mark.slow
def test_a_schedule_and_a_counter_are_no_change_by_hand(tmp_path):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50)
    run = support.dict_run(mesh_of((2, 2)), optax.inject_hyperparams(optax.adamw)(schedule))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(4, args=target), saved[4])
    assert kinds(tmp_path) == ["B", "R", "R", "R"]


def set_rate(run, rate):
    hyper = run.state["opt_state"][1].adacheck_inner.hyperparams
    hyper["learning_rate"] = jax.device_put(jnp.float32(rate), hyper["learning_rate"].sharding)


@pytest.mark.slow
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

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.slow
def test_a_constant_made_of_a_shape_is_no_fault_of_the_train_step(tmp_path, caplog):
    run = support.dict_run(mesh_of((2, 2)), by_fan_in(), dtype=jnp.bfloat16)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        save_steps(manager, run, 3)
    assert kinds(tmp_path) == ["B", "R", "R"]
    assert not [each for each in caplog.records if each.name.startswith("adacheck_jax")]


@pytest.mark.slow
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


class TestRecordedSteps:
    @pytest.mark.first(1)
    @CHECKS
    def test_each_is_checked(self, tmp_path, check):
        run = support.dict_run(mesh_of((1, 1)))
        handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 1)
            for _ in range(4):
                run.advance()
                saved[run.count] = host_copy(run.state)
                assert handler.record_step(run.state)
            saved |= save_steps(manager, run, 1)
        found = deltas_of(tmp_path)
        assert {step: each.checked for step, each in found.items()} == dict.fromkeys(
            range(2, 7), check
        )
        assert_all_restorable(tmp_path, saved, run.state)

    def test_one_that_is_saved_at_once_is_checked_once(self, tmp_path, monkeypatch):
        """As recorded it is checked in the background, while the save checks it too."""
        advance = second_copy.Following._advance

        def slowly(*arguments):
            advance(*arguments)
            time.sleep(0.05)

        monkeypatch.setattr(second_copy.Following, "_advance", slowly)
        run = support.dict_run(mesh_of((1, 1)))
        handler = adacheck.AdaCheckHandler(run.recorder, shadow=adacheck.Shadow(on_devices=True))
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 1)
            for _ in range(4):
                run.advance()
                saved[run.count] = host_copy(run.state)
                assert handler.record_step(run.state, run.count)
                manager.save(run.count, args=adacheck.SaveArgs(jax.block_until_ready(run.state)))
        assert kinds(tmp_path) == ["B", "R", "R", "R", "R"]
        assert not any(each.unreplayed for each in deltas_of(tmp_path).values())
        assert_all_restorable(tmp_path, saved, run.state)

    @pytest.mark.slow
    @CHECKS
    def test_one_that_replay_gets_wrong_is_lost_once_and_said(self, tmp_path, check):
        """It is found in the background; from then on each step is checked before it is kept."""
        run, told = support.dict_run(mesh_of((1, 1))), []
        handler = adacheck.AdaCheckHandler(run.recorder, shadow=support.SHADOWS[check])
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 1)
            for _ in range(9):
                run.advance()
                if run.count % 3 == 0:
                    run.state["params"]["in"]["bias"] = run.state["params"]["in"]["bias"] + 1.0
                jax.block_until_ready(run.state)
                saved[run.count] = host_copy(run.state)
                try:
                    is_kept = handler.record_step(run.state, run.count)
                except ReplayError as error:
                    told.append(str(error))
                    is_kept = False
                if not is_kept or run.count == 10:
                    manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            kept = {*manager.all_steps(), *deltas_of(tmp_path)}
        (message,) = told
        assert "Recorded steps that are not saved: 3" in message
        assert "params/in/bias" in message
        assert {1, 2, 9, 10} <= kept  # a few steps may pass before it is found
        assert_all_restorable(tmp_path, {step: saved[step] for step in kept}, run.state)


class Changing(test_waiting.Run):
    """A training loop that doubles a leaf after the update when it is told to."""

    def _advance(self, state, rounds, is_slow):
        state = super()._advance(state, rounds, bool(is_slow))
        if is_slow == "changed":
            state["params"] = {**state["params"], "b": state["params"]["b"] * 2}
        return state


class TestWithoutWaiting:
    """A save that returned before its step was computed cannot store what a check finds."""

    @pytest.mark.slow
    def test_it_is_refused_once_and_then_the_run_is_cautious(self, tmp_path):
        run = Changing()
        with test_waiting.manager_of(tmp_path, run) as manager:
            saved = test_waiting.begin(manager, run)
            run.advance(is_slow="changed")
            test_waiting.save(manager, 4, run)
            assert run.is_computing
            with pytest.raises(ReplayError, match=r"step 4: .*params/b.*not saved"):
                manager.wait_until_finished()
            manager.reload()
            for step in (5, 6, 7, 8):
                run.advance(is_slow=True if step % 2 else "changed", rounds=test_waiting.WAITED)
                test_waiting.save(manager, step, run)
                assert not run.is_computing  # it was waited for, and compared
                saved[step] = test_waiting.bits_of(run.state)
            manager.wait_until_finished()
            assert 4 not in manager.all_steps()
            for step, bits in saved.items():
                found = manager.restore(step, args=adacheck.RestoreArgs(run.state))
                assert test_waiting.bits_of(found) == bits
        reason = manifest_file.read(tmp_path / "8" / "default").caution.reason
        assert "params/b" in reason
        self.goes_on(tmp_path, saved)

    def goes_on(self, root, saved):
        """In another process, as it were: caution is in the manifest."""
        run = Changing()
        with test_waiting.manager_of(root, run) as manager:
            run.state = manager.restore(8, args=adacheck.RestoreArgs(run.state))
            for step in (9, 10, 11):
                run.advance(is_slow="changed" if step == 11 else True, rounds=test_waiting.WAITED)
                test_waiting.save(manager, step, run)
                assert not run.is_computing
                saved[step] = test_waiting.bits_of(run.state)
            manager.wait_until_finished()
            for step in (9, 10, 11):
                found = manager.restore(step, args=adacheck.RestoreArgs(run.state))
                assert test_waiting.bits_of(found) == saved[step]
        assert test_waiting.kind_of(root, 11) is manifest.DeltaManifest

    @pytest.mark.slow
    def test_a_recorded_step_that_is_wrong_takes_no_step_before_it_along(self, tmp_path):
        run = Changing()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            saved = test_waiting.begin(manager, run)
            for step in (4, 5):
                run.advance(is_slow="changed" if step == 5 else True)
                assert handler.record_step(run.state, step)
            for _ in range(2):
                run.advance()
            jax.block_until_ready(run.state)
            with pytest.raises(ReplayError, match=r"not saved: 5, and neither is this"):
                test_waiting.save(manager, 7, run)
            test_waiting.save(manager, 8, run)
            saved[8] = test_waiting.bits_of(run.state)
            manager.wait_until_finished()
            for step, bits in saved.items():
                found = manager.restore(step, args=adacheck.RestoreArgs(run.state))
                assert test_waiting.bits_of(found) == bits


class TestSeparateUpdate:
    """The arrays that are saved are those that the replayed program returned, or are compared."""

    def run(self):
        tx = optax.inject_hyperparams(optax.adamw)(1e-2)
        return test_separate.separate_run(mesh_of((2, 2)), tx)

    def rates(self, run):
        return run.state.opt_state[1].adacheck_inner.hyperparams

    def test_by_identity(self, tmp_path):
        run = self.run()
        run.advance()
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 4)
        assert [each.checked for each in deltas_of(tmp_path).values()] == ["identity"] * 3
        assert_all_restorable(tmp_path, saved, run.state)

    @pytest.mark.slow
    def test_by_identity_after_a_restore(self, tmp_path):
        run = self.run()
        run.advance()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 2)
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            last, target = max(saved), abstract(run.state)
            run.state = manager.restore(last, args=adacheck.RestoreArgs(target))
            saved |= save_steps(manager, run, 2)
        assert kinds(tmp_path) == ["B", "R", "R", "R"]
        assert [each.checked for each in deltas_of(tmp_path).values()] == ["identity"] * 3
        assert_all_restorable(tmp_path, saved, run.state)

    @pytest.mark.first(1)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_rate_set_by_hand(self, tmp_path, when):
        run = self.run()
        run.advance()
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 3)
            if when == "after":
                run.advance()
            hyper = self.rates(run)
            sharding = hyper["learning_rate"].sharding
            hyper["learning_rate"] = jax.device_put(jnp.float32(5e-3), sharding)
            if when == "before":
                run.advance()
            saved[5] = host_copy(run.state)
            manager.save(5, args=adacheck.SaveArgs(run.state))
            saved |= save_steps(manager, run, 1)
        found = deltas_of(tmp_path)
        assert [each.checked for each in found.values()] == ["identity"] * 4
        assert not any(each.unreplayed for each in found.values())
        assert_all_restorable(tmp_path, saved, run.state)

    @pytest.mark.slow
    def test_other_arrays_are_compared_in_full_from_then_on(self, tmp_path):
        run = self.run()
        run.advance()
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 3)
            params = jax.tree.map(lambda x: x * 1.0, run.advance().params)
            params["in"]["bias"] = params["in"]["bias"] + 1.0
            run.state = run.state.replace(params=params)
            saved[5] = host_copy(run.state)
            manager.save(5, args=adacheck.SaveArgs(run.state))
            saved |= save_steps(manager, run, 3)
        assert kinds(tmp_path) == ["B", "R", "R", "B", "R", "R", "R"]
        found = deltas_of(tmp_path)
        assert [each.checked for each in found.values()] == ["identity"] * 2 + ["full"] * 3
        assert_all_restorable(tmp_path, saved, run.state)


class TestSeveralRecorders:
    """Each makes an update or none; the check replays those that did."""

    @pytest.mark.slow
    @CHECKS
    def test_updates_in_turn(self, tmp_path, check):
        recorders = {name: adacheck.Recorder(optax.sgd(1e-2)) for name in ("a", "b")}
        params = {name: {"w": jnp.ones((8, 16)) * n} for n, name in enumerate(recorders, 1)}
        state = {
            name: {"params": params[name], "opt_state": each.init(params[name])}
            for name, each in recorders.items()
        }

        @functools.partial(jax.jit, static_argnums=1)
        def step(state, names):
            state = dict(state)
            for name in names:
                own = state[name]
                grads = jax.tree.map(jnp.sin, own["params"])
                updates, opt_state = recorders[name].update(grads, own["opt_state"], own["params"])
                own_params = optax.apply_updates(own["params"], updates)
                state[name] = {"params": own_params, "opt_state": opt_state}
            return state

        saved = {}
        handler = adacheck.AdaCheckHandler(recorders, shadow=support.SHADOWS[check])
        with manager_of(tmp_path, handler) as manager:
            for number, which in enumerate(["ab", "ab", "a", "b", "", "ab", "b"]):
                state = jax.block_until_ready(step(state, tuple(which)))
                if number == 3:
                    state["b"]["params"]["w"] = state["b"]["params"]["w"].at[3].add(1.0)
                saved[number] = host_copy(state)
                manager.save(number, args=adacheck.SaveArgs(state))
        found = deltas_of(tmp_path)
        assert [each.updates for each in found.values()] == [(0, 1), (0,), (1,), (), (0, 1), (1,)]
        wrong = [names(tmp_path, each.unreplayed) for each in found.values()]
        assert wrong == [set(), set(), {"b/params/w"}, set(), set(), set()]
        assert_all_restorable(tmp_path, saved, state)


WHOLE_TREES = {
    "not pinned": (lambda: optax.sgd(0.1), {"pin": False}),
    "conditionally_transform": (
        lambda: optax.chain(
            optax.conditionally_transform(optax.scale(0.5), lambda step: step % 2 == 0),
            optax.adamw(1e-2),
        ),
        {},
    ),
    "keeps the first params": (optax.contrib.prodigy, {}),
    "keeps small first params": (optax.contrib.cocob, {}),
}


def simple_run(recorder, params):
    """A state, and a step that is compiled for wherever the state lies."""

    def step(state, number):
        grads = jax.tree.map(lambda w: w * number, state["params"])
        updates, inner = recorder.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": inner}

    return {"params": params, "opt_state": recorder.init(params)}, jax.jit(step)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", WHOLE_TREES)
def test_an_update_with_operations_over_the_whole_tree_loses_no_step(tmp_path, name):
    """One operation takes leaves of several sizes, or passes large ones through."""
    tx, options = WHOLE_TREES[name]
    recorder = adacheck.Recorder(tx(), **options)
    params = {"w": jnp.linspace(0.1, 1.0, 130), "v": jnp.ones((7, 9))}
    state, step = simple_run(recorder, params)
    saved = {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(1, 6):
            state = jax.block_until_ready(step(state, 1.0 + number))
            saved[number] = host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
    assert sorted(saved) == [step.step for step in roots.steps_of(tmp_path)]
    assert_all_restorable(tmp_path, saved, state)


@pytest.mark.slow
def test_a_state_that_moves_to_a_mesh_of_another_size_is_saved_on(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    state, step = simple_run(recorder, {"w": jnp.ones((128, 64)), "b": jnp.ones(64)})
    saved = {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(1, 8):
            if number in (1, 4):
                mesh = mesh_of((4, 2) if number == 1 else (2, 2))
                where = abstract(state, mesh)
                state = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, where)
            state = jax.block_until_ready(step(state, 0.5 * number))
            saved[number] = host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
    assert "".join(kinds(tmp_path)) == "BRRBRRR"
    assert_all_restorable(tmp_path, saved, state)


def test_nothing_is_recorded_behind_a_save_that_failed(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        old = jax.tree.map(jnp.copy, run.state)
        run.advance()
        assert handler.record_step(run.state, 3)
        run.state = old  # rolled back by one update, which is made again
        run.advance()
        assert handler.record_step(run.state, 4)
        run.advance()
        manager.save(5, args=adacheck.SaveArgs(run.state))
        with pytest.raises(adacheck.AdaCheckError, match="with it: the recorded steps 3 to 4"):
            manager.wait_until_finished()
        manager.reload()
        run.advance()
        if not handler.record_step(run.state, 6):
            saved[6] = host_copy(run.state)
            manager.save(6, args=adacheck.SaveArgs(run.state))
        run.advance()
        saved[7] = host_copy(run.state)
        manager.save(7, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        assert set(saved) <= {*manager.all_steps(), *deltas_of(tmp_path)}
    assert 6 in saved
    assert_all_restorable(tmp_path, saved, run.state)
