"""What a save refuses, before it writes anything."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter import inputs
from adacheck_jax.errors import MismatchError
from adacheck_jax.format.manifest import ITEMSIZES_BYTES
from adacheck_jax.store.steps.roots import steps_of
from tests.support import assert_same_bits, dict_run, host_copy, manager_of, mesh_of, save_steps

X = jnp.ones(3)


def traced_state():
    found = []
    jax.jit(lambda x: found.append(x) or x)(X)
    return {"x": found[0]}


def donated_state():
    array, key = jnp.ones(3), jax.random.key(1)
    array.delete()
    key.delete()
    return {"x": array, "key": key}


BAD_STATES = {
    "donated": (
        donated_state,
        r"2 leaves \(key, x\): expected arrays, found that they were donated",
    ),
    "nothing": (lambda: None, "expected a pytree with arrays in it, found NoneType"),
    "unnamed": (lambda: {"": X, "a": X}, 'found a leaf under the key ""'),
    "traced": (traced_state, "leaf x: expected an array, found a tracer"),
    "text": (lambda: {"x": X, "name": "adam"}, "Unsupported type: leaf name: .* found str"),
    "texts": (lambda: {"x": np.array(["a"])}, "Unsupported type: leaf x: .* an array of <U1"),
    "wide": (lambda: {"x": X, "n": 2**70}, "leaf n: expected numbers of at most 64 bits"),
    "float8": (
        lambda: {"x": np.zeros(3, jnp.float8_e4m3)},
        r"leaf x: .* found float8_e4m3, .* cast it \(to float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_cannot_be_stored(tmp_path, name):
    state, message = BAD_STATES[name]
    handler = adacheck.AdaCheckHandler(delta="bits")
    with manager_of(tmp_path, handler) as manager:
        manager.save(1, args=adacheck.SaveArgs({"x": X}))
        manager.wait_until_finished()
        for act in (
            lambda: manager.save(2, args=adacheck.SaveArgs(state())),
            lambda: handler.record_step(state()),
        ):
            with pytest.raises(MismatchError, match=message):
                act()
        manager.save(3, args=adacheck.SaveArgs({"x": X}))
        manager.wait_until_finished()
        assert manager.restore(3).keys() == {"x"}
    assert [step.step for step in steps_of(tmp_path)] == [1, 3]
    assert (tmp_path / "3/default/adacheck/lineage").exists()  # a delta: nothing was given up


@pytest.mark.parametrize("has_memory", [False, True])
def test_arguments_where_a_state_is_expected(tmp_path, has_memory):
    run = dict_run(mesh_of((1, 1)))
    args = adacheck.RestoreArgs(run.state)
    shadow = adacheck.Shadow(directory=tmp_path / "memory" if has_memory else None)
    root = tmp_path / "root"
    with adacheck.checkpoint_manager(root, run.recorder, shadow=shadow) as manager:
        save_steps(manager, run, 1)
        for act in (
            lambda: manager.restore_newest(args),
            lambda: manager.restore(run.count, args=adacheck.RestoreArgs(args)),
            lambda: manager.handler.record_step(adacheck.SaveArgs(run.state)),
        ):
            with pytest.raises(MismatchError, match=r"expected a state, found .*give the state"):
                act()


@pytest.mark.parametrize("has_base", [False, True])
def test_a_step_and_a_state_that_are_swapped(tmp_path, has_base):
    run = dict_run(mesh_of((1, 1)))
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        if has_base:
            save_steps(manager, run, 1)
        with pytest.raises(ValueError, match=r"record_step\(state, step\), found .*2, a d"):
            manager.handler.record_step(2, run.state)
        with pytest.raises(ValueError, match=r"expected a step number, .*found a dict"):
            manager.save(run.state, args=adacheck.SaveArgs(run.state))


@pytest.mark.parametrize("step", [-1, 2.5, 3.0, "3", True, 2**70, jnp.ones(2)])
def test_what_is_no_step_number(tmp_path, step):
    handler = adacheck.AdaCheckHandler()
    with manager_of(tmp_path, handler) as manager:
        with pytest.raises(ValueError, match="expected a step number, an integer from 0"):
            manager.save(1, args=adacheck.SaveArgs({"x": X}, step=step))
        with pytest.raises(ValueError, match="expected a step number, an integer from 0"):
            handler.record_step({"x": X}, step)
    assert adacheck.latest_restorable(tmp_path) is None


@pytest.mark.parametrize("step", [-3, 2**63])
def test_a_directory_whose_number_is_no_step_number(tmp_path, step):
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        with pytest.raises(ValueError, match=f"found {step}. Nothing was saved; give the manager"):
            manager.save(step, args=adacheck.SaveArgs({"x": X}), force=True)
        manager.save(3, args=adacheck.SaveArgs({"x": X}))
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    assert adacheck.latest_restorable(tmp_path) == 3


def test_step_numbers_of_numpy_and_jax(tmp_path):
    assert [inputs.step_number(each) for each in (None, 0, np.int64(4), jnp.int32(5))] == [
        *(None, 0, 4, 5)
    ]
    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        save_steps(manager, run, 1)
        assert handler.record_step(run.advance(), jnp.int32(2))
        manager.save(3, args=adacheck.SaveArgs(run.advance(), step=np.int64(3)))
        manager.wait_until_finished()
    assert [step.step for step in steps_of(tmp_path)] == [1, 3]


def test_a_relative_root_may_hold_numbers_and_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"x": X, "n": 3, "key": jax.random.key(0)}
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        checkpointer.save("root/1", args=adacheck.SaveArgs(state))
        found = checkpointer.restore("root/1")
    assert_same_bits(found, host_copy(dict(sorted(state.items()))))
    with manager_of("managed", adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step in (1, 2):
            manager.save(step, args=adacheck.SaveArgs(state | {"n": step}))
        manager.wait_until_finished()
        assert manager.restore(2)["n"] == 2


@pytest.mark.slow
def test_every_other_data_type_round_trips_through_bases_and_deltas(tmp_path):
    wide = {"int64", "uint64", "float64", "complex128"}
    names = sorted(ITEMSIZES_BYTES.keys() - wide - inputs._NOT_STORABLE - {"bool"})

    def state(step):
        values = np.arange(24).reshape(4, 6) % 2 + step % 2
        leaves = {name: jnp.asarray(values, jnp.float32).astype(name) for name in names}
        nan = {
            f"host_{name}": np.full(5, 255, np.uint8).view(name) for name in names if "8_" in name
        }
        return {**leaves, **nan, "bool": jnp.arange(5) % 2 == step % 2}

    saved = {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step in (1, 2):
            saved[step] = host_copy(state(step))
            manager.save(step, args=adacheck.SaveArgs(state(step)))
        manager.wait_until_finished()
        for step, expected in saved.items():
            assert_same_bits(manager.restore(step), expected)
    assert (tmp_path / "2/default/adacheck/lineage").exists()
