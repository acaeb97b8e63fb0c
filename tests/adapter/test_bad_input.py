"""What a save refuses, before it writes anything."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.extend.random import define_prng_impl

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.store.steps.roots import steps_of
from tests.support import (
    assert_same_bits,
    dict_run,
    manager_of,
    mesh_of,
    save_steps,
)

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


def other_key():
    """A typed key of an implementation that is not JAX's own."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.uint32)  # noqa: E731
    made = define_prng_impl(
        key_shape=(2,),
        seed=lambda _: zeros(2),
        split=lambda _, shape: zeros(*shape, 2),
        random_bits=lambda _, bits, shape: zeros(*shape),
        fold_in=lambda key, _: key,
        name="other",
        tag="other",
    )
    return jax.random.wrap_key_data(zeros(2), impl=made)


BAD_STATES = {
    "donated": (
        donated_state,
        r"2 leaves \(key, x\): expected arrays, found that they were donated",
    ),
    "nothing": (lambda: None, "expected a pytree with arrays in it, found NoneType"),
    "unnamed": (lambda: {"": X, "a": X}, 'found a leaf under the key ""'),
    "traced": (traced_state, "leaf x: expected an array, found a tracer"),
    "text": (lambda: {"x": X, "name": "adam"}, "Unsupported type: leaf name: .* found a str"),
    "texts": (lambda: {"x": np.array(["a"])}, "Unsupported type: leaf x: .* an array of <U1"),
    "wide": (lambda: {"x": X, "n": 2**70}, f"leaf n: .* found the number {2**70}"),
    "key": (lambda: {"x": X, "key": other_key()}, "leaf key: .* found an array of key<other>"),
} | {
    name: (
        functools.partial(dict, x=X, bad=leaf),
        rf"leaf bad: expected an array .* found .* {name}",
    )
    for name, leaf in {
        "float8_e4m3": np.zeros(3, jnp.float8_e4m3),
        "float6_e2m3fn": np.zeros((), "float6_e2m3fn"),
        "float128": np.longdouble(1) / 3,
        "complex256": np.ones(2, np.clongdouble),
        r"\|V4": np.zeros(2, "V4"),
        r"\|V3": np.void(b"abc"),
        "object": np.array(None),
        "datetime64": np.zeros(2, "datetime64[s]"),
        "timedelta64": np.timedelta64(1, "s"),
        "StringDType": np.array(["a"], np.dtypes.StringDType()),
        r"\(numpy.record, ": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        "MaskedArray": np.ma.array([1.0, 2.0], mask=[False, True]),
        r"\[\('float0'": np.zeros(3, jax.dtypes.float0),
        "number 1j": 1j,
    }.items()
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


@pytest.mark.parametrize(
    ("leaf", "dtype", "message"),
    [
        (np.ones(2), np.longdouble, "Unsupported type: leaf x: .* found an array of float128"),
        (
            np.array([1, 300]),
            np.int8,
            r"save_args: .* x: 300 \(int64 as int8\)\. Nothing was saved",
        ),
        (jnp.array([-5, 1]), jnp.uint32, r"x: -5 \(int32 as uint32\)"),
        (300, np.uint8, r"x: 300 \(int64 as uint8\)"),
        (jax.random.key(0), jnp.bfloat16, "leaf x: expected SaveArgs without dtype"),
    ],
)
def test_casts_at_a_save_that_would_lose_more_than_precision(tmp_path, leaf, dtype, message):
    state, casts = {"x": leaf, "y": X}, {"x": ocp.SaveArgs(dtype=dtype), "y": None}
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        with pytest.raises(MismatchError, match=message):
            manager.save(1, args=adacheck.SaveArgs(state, save_args=casts))
        fitting = {**state, "x": np.array([1, 100])}, {**casts, "x": ocp.SaveArgs(dtype=np.int8)}
        manager.save(2, args=adacheck.SaveArgs(*fitting[:1], save_args=fitting[1]))
        manager.wait_until_finished()
        assert_same_bits(manager.restore(2)["x"], [np.array([1, 100], np.int8)])
    assert [step.step for step in steps_of(tmp_path)] == [2]


def test_arguments_and_states_in_each_others_place(tmp_path):
    run = dict_run(mesh_of((1, 1)))
    args = adacheck.RestoreArgs(run.state)
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        handler = manager.handler
        for has_base in (False, True):
            with pytest.raises(ValueError, match=r"record_step\(state, step\), found .*2, a d"):
                handler.record_step(2, run.state)
            with pytest.raises(ValueError, match=r"expected a step number, .*found a dict"):
                manager.save(run.state, args=adacheck.SaveArgs(run.state))
            if not has_base:
                save_steps(manager, run, 1)
        for act in (
            lambda: manager.restore_newest(args),
            lambda: manager.restore(run.count, args=adacheck.RestoreArgs(args)),
            lambda: handler.record_step(adacheck.SaveArgs(run.state)),
        ):
            with pytest.raises(MismatchError, match=r"expected a state, found .*give the state"):
                act()


NO_NUMBERS = [-1, 2.5, 3.0, "3", True, 2**70, jnp.ones(2)]


@pytest.mark.parametrize("step", NO_NUMBERS, ids=str)
def test_what_is_no_step_number(tmp_path, step):
    """To arguments, to a handler, and to the managers that this library makes."""
    handler, args = adacheck.AdaCheckHandler(), adacheck.SaveArgs({"x": X})
    wrong = pytest.raises(ValueError, match="expected a step number")
    with manager_of(tmp_path, handler) as manager:
        with wrong:
            manager.save(1, args=adacheck.SaveArgs({"x": X}, step=step))
        with wrong:
            handler.record_step({"x": X}, step)
    with adacheck.checkpoint_manager(tmp_path / "own") as manager, wrong:
        manager.save(step, args=args)
    assert adacheck.latest_restorable(tmp_path) is None


@pytest.mark.parametrize("step", [-3, 2**63])
def test_a_directory_whose_number_is_no_step_number(tmp_path, step):
    wrong = pytest.raises(ValueError, match=f"found {step}. Nothing was saved")
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        with wrong:
            manager.save(step, args=adacheck.SaveArgs({"x": X}), force=True)
        manager.save(3, args=adacheck.SaveArgs({"x": X}))
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    assert adacheck.latest_restorable(tmp_path) == 3
    with adacheck.v1.checkpointer(tmp_path / "v1") as checkpointer:
        with wrong:
            checkpointer.save(step, {"x": X})
        checkpointer.save(0, {"x": X})
        assert [each.step for each in checkpointer.checkpoints] == [0]


def test_arguments_that_are_given_twice_or_not_known():
    with pytest.raises(ValueError, match="state or item, which are the same"):
        adacheck.SaveArgs({"a": 1}, item={"a": 1})
    with pytest.raises(TypeError, match="legacy_transform_fn"):
        adacheck.RestoreArgs({"x": X}, legacy_transform_fn=print)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            ({"ocdbt_target_data_file_size": size}, ValueError, "data_file_size, an integer")
            for size in (-1, 1.5, True, 1 << 63)
        ),
        *(
            ({"custom_metadata": {"a": each}}, MismatchError, "custom_metadata: expected JSON")
            for each in (object(), jnp.ones(3))
        ),
        ({"save_args": {"x": ocp.SaveArgs(shard_axes=(0,))}}, MismatchError, "x: SaveArgs.shard_a"),
        ({"save_args": {"x": ocp.SaveArgs(aggregate=True)}}, MismatchError, "x: SaveArgs.aggregat"),
    ],
)
def test_arguments_of_a_save_that_are_refused_leave_nothing_behind(
    tmp_path, options, error, message
):
    """Also where an event loop runs already."""

    async def cell():
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            args = adacheck.SaveArgs({"x": X}, **options)
            with pytest.raises(error, match=message):
                checkpointer.save(tmp_path / "1", args=args)

    asyncio.run(cell())
    assert not (tmp_path / "1").exists()
