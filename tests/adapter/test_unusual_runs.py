"""One handler in unusual company: several items, managers, runs, and users' odd habits."""

from __future__ import annotations

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import lookup, manifest_file, roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps


def is_delta(directory):
    return isinstance(manifest_file.read(directory), manifest.DeltaManifest)


def test_one_handler_serves_two_items_of_a_step(tmp_path):
    runs = {"gen": support.dict_run(mesh_of((2, 2))), "disc": support.dict_run(mesh_of((2, 2)))}
    runs["disc"].recorder = runs["gen"].recorder
    runs["disc"].state = runs["gen"].state
    runs["disc"].train_step = runs["gen"].train_step
    runs["disc"].count = 50
    runs["disc"].state = jax.tree.map(jnp.copy, runs["gen"].state)
    handler = adacheck.AdaCheckHandler(runs["gen"].recorder)
    with manager_of(tmp_path, {"gen": handler, "disc": handler}) as manager:
        for step in range(3):
            states = {name: adacheck.SaveArgs(run.advance()) for name, run in runs.items()}
            manager.save(step, args=ocp.args.Composite(**states))
        manager.wait_until_finished()
        for name, run in runs.items():
            assert is_delta(tmp_path / "2" / name)
            args = ocp.args.Composite(**{name: adacheck.RestoreArgs(abstract(run.state))})
            assert_same_bits(manager.restore(2, args=args)[name], host_copy(run.state))


@pytest.mark.slow
def test_one_handler_serves_two_managers_at_once(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path / "a", handler) as a, manager_of(tmp_path / "b", handler) as b:
        for step in range(2):
            run.advance()
            a.save(step, args=adacheck.SaveArgs(run.state))
            b.save(step, args=adacheck.SaveArgs(run.state))
        for manager in (a, b):
            manager.wait_until_finished()
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(1, args=target), host_copy(run.state))
    assert is_delta(tmp_path / "a" / "1" / "default")
    assert is_delta(tmp_path / "b" / "1" / "default")


def test_a_handler_outlives_its_manager(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    for _ in range(2):
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 2)
    with manager_of(tmp_path, handler) as manager:
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(4, args=target), saved[4])


def test_another_run_beside_this_one_is_no_parent(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with ocp.AsyncCheckpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
        checkpointer.save(tmp_path / "run_1" / "step_0", args=adacheck.SaveArgs(run.state))
        checkpointer.wait_until_finished()
        run.state = jax.tree.map(lambda x: x + 0, run.state)
        run.state["params"] = jax.tree.map(lambda x: x * 2, run.state["params"])
        run.advance()
        checkpointer.save(tmp_path / "run_2" / "step_1", args=adacheck.SaveArgs(run.state))
        checkpointer.wait_until_finished()
        target = adacheck.RestoreArgs(abstract(run.state))
        restored = checkpointer.restore(tmp_path / "run_2" / "step_1", args=target)
    assert not is_delta(tmp_path / "run_2" / "step_1")
    assert_same_bits(restored, host_copy(run.state))


def test_the_steps_number_is_in_the_steps_own_name(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with ocp.AsyncCheckpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
        for step in range(3):
            path = tmp_path / "run_3" / f"step_{step}"
            checkpointer.save(path, args=adacheck.SaveArgs(run.advance()))
        checkpointer.wait_until_finished()
    assert [s.step for s in roots.steps_of(tmp_path / "run_3")] == [0, 1, 2]
    assert is_delta(tmp_path / "run_3" / "step_2")


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{"step_prefix": "ckpt"}, {"step_format_fixed_length": 6}])
def test_a_managers_own_names_for_steps(tmp_path, options):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder), **options) as manager:
        saved = save_steps(manager, run, 3)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(3, args=target), saved[3])
    assert [s.step for s in roots.steps_of(tmp_path)] == [1, 2, 3]


def test_an_item_with_a_number_in_its_name(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, {"state_7": adacheck.AdaCheckHandler(run.recorder)}) as manager:
        for step in (1, 2):
            args = ocp.args.Composite(state_7=adacheck.SaveArgs(run.advance()))
            manager.save(step, args=args)
        manager.wait_until_finished()
    assert [s.step for s in roots.steps_of(tmp_path)] == [1, 2]
    assert is_delta(tmp_path / "2" / "state_7")


def test_looking_at_an_older_step_does_not_end_the_lineage(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(2, args=target), saved[2])
        saved |= save_steps(manager, run, 1)
        assert_same_bits(manager.restore(5, args=target), saved[5])
    assert is_delta(tmp_path / "5" / "default")


def test_going_back_to_an_older_step_goes_on_from_there(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 4)
        run.state = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state)))
        run.count = 10
        saved = save_steps(manager, run, 2)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(12, args=target), saved[12])
    assert not is_delta(tmp_path / "11" / "default")  # the shadow cannot go back
    assert is_delta(tmp_path / "12" / "default")


def test_deleting_later_steps_to_go_back_is_no_warning(tmp_path, caplog):
    handler = adacheck.AdaCheckHandler(delta="bits")
    states = [{"x": jnp.arange(9.0) + step} for step in range(4)]
    with manager_of(tmp_path, handler) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=adacheck.SaveArgs(states[step]))
        manager.wait_until_finished()
        manager.restore(1, args=adacheck.RestoreArgs(states[1]))
        for step in (3, 2):
            manager.delete(step)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="adacheck_jax.save.line.parents"):
            manager.save(2, args=adacheck.SaveArgs(states[2]))
            manager.wait_until_finished()
        own = [x for x in caplog.records if x.name.startswith("adacheck_jax")]
        found = manager.restore(2, args=adacheck.RestoreArgs(states[2]))
    assert not [x for x in own if x.levelno >= logging.WARNING]
    told = [x.getMessage() for x in own]
    assert "Step 3 was deleted; the next step does not build on it." in told
    assert_same_bits(found, host_copy(states[2]))


def test_deleting_the_parent_while_a_delta_is_saved(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        manager.save(3, args=adacheck.SaveArgs(run.advance()))
        manager.wait_until_finished()
        saved[3] = host_copy(run.state)
        manager.delete(1)
        shutil.rmtree(tmp_path / "2")
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(3, args=target), saved[3])


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "metadata", [{2: "a", 10: "b"}, {"nested": {1: [1, 2]}}, [1], "text", None]
)
def test_custom_metadata_of_any_json(tmp_path, metadata):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in (1, 2):
            args = adacheck.SaveArgs(run.advance(), custom_metadata=metadata)
            manager.save(step, args=args)
        manager.wait_until_finished()
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(2, args=target), host_copy(run.state))
        found = [manager.item_metadata(step).custom_metadata for step in (1, 2)]
    assert found[0] == found[1]


def test_custom_metadata_that_is_no_json_is_refused(tmp_path):
    with (
        manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager,
        pytest.raises(MismatchError, match="custom_metadata"),
    ):
        manager.save(1, args=adacheck.SaveArgs({"x": jnp.ones(2)}, custom_metadata={"x": object()}))


def simple_run(params, tx):
    """Gradients come from outside: XLA:CPU would fuse their computation into the update."""
    recorder = adacheck.Recorder(tx)
    state = {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def update(state, grads):
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }

    def step(state, _data):
        return update(state, jax.tree.map(lambda p: jnp.sin(p * 10), state["params"]))

    return support.Run(recorder, state, step)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "params",
    [
        {"a": jnp.ones(16), "a/value": jnp.full(16, 2.0)},
        {"value": jnp.ones(16), "value/value": jnp.full(16, 2.0)},
        jnp.linspace(0.0, 1.0, 16),
        {"layers": [jnp.ones(16), (jnp.full(16, 2.0), {"w": jnp.full((4, 16), 3.0)})]},
        {"tied": jnp.ones(16), "half": jnp.ones(16, jnp.bfloat16)},
    ],
    ids=["a and a/value", "value/value", "bare array", "nested", "mixed types"],
)
def test_params_of_odd_shapes_and_names(tmp_path, params):
    run = simple_run(params, optax.adam(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)
    assert is_delta(tmp_path / "3" / "default")


def test_64_bit_types_enabled_around_the_training_alone(tmp_path):
    with jax.enable_x64(True):
        run = simple_run({"w": jnp.linspace(0.0, 1.0, 64, dtype=jnp.float64)}, optax.adam(1e-2))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 3)
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(3, args=target), saved[3])
    assert is_delta(tmp_path / "3" / "default")


def test_64_bit_types_enabled_around_recorded_steps_alone(tmp_path):
    """They are checked on another thread, which does not inherit the setting."""
    with jax.enable_x64(True):
        run = simple_run({"w": jnp.linspace(0.0, 1.0, 64, dtype=jnp.float64)}, optax.adam(1e-2))
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler) as manager:
            save_steps(manager, run, 2)
            saved = {}
            for step in (3, 4):
                assert handler.record_step(run.advance(), step)
                saved[step] = host_copy(run.state)
            saved |= save_steps(manager, run, 1)
            for step, expected in saved.items():
                target = adacheck.RestoreArgs(abstract(run.state), step=step)
                assert_same_bits(manager.restore(5, args=target), expected)


@pytest.mark.slow
def test_a_random_key_in_the_optimizers_state_is_replayed(tmp_path):
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    run = simple_run({"w": jnp.linspace(0.0, 1.0, 64)}, tx)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(3, args=target), saved[3])
    assert lookup.resolve(tmp_path / "3" / "default").manifest.has_update


def test_committing_what_was_not_begun_is_an_error(tmp_path):
    with pytest.raises(adacheck.AdaCheckError, match="expected to commit a save"):
        adacheck.AdaCheckHandler().finalize(epath.Path(tmp_path / "1"))


def test_a_leaf_on_one_device_beside_a_mesh_saved_twice(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    state = {**run.advance(), "rng": jax.device_put(np.arange(4), jax.devices()[0])}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in (1, 2):
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        target = adacheck.RestoreArgs(abstract(state))
        assert_same_bits(manager.restore(2, args=target), host_copy(state))
    assert is_delta(tmp_path / "2" / "default")
