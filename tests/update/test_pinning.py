"""Pinned updates: the same bits in every program, each operation rounded as it is written."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adacheck_jax as adacheck
from adacheck_jax import Recorder
from adacheck_jax.store.steps import roots
from adacheck_jax.update import exactness, exported_program
from adacheck_jax.update import program as update_program
from adacheck_jax.update.exactness import Level
from adacheck_jax.update.pinning.fence import can_fence, fence, zero_of
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from tests import support
from tests.strategies import any_bits
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps
from tests.update.replaying import bind, lists_of

ZERO = np.zeros((), np.uint32)
FLOATS = [
    *(jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.float8_e4m3fn, jnp.float8_e5m2),
    *(jnp.float8_e4m3b11fnuz, jnp.float8_e5m2fnuz, jnp.float8_e3m4, jnp.float8_e8m0fnu),
]


def values_of(dtype):
    """Elements of every kind: all of a short type, and random bits of a long one."""
    size = np.dtype(dtype).itemsize
    if size <= 2:
        return np.arange(1 << 8 * size, dtype=f"u{size}").view(dtype)
    return any_bits(np.random.default_rng(0), (1 << 16,), dtype)


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
def test_a_fence_changes_no_bit_and_a_canonical_one_only_those_of_nans(dtype):
    if dtype is jnp.float8_e5m2fnuz and "use_fusion_emitters=false" in os.environ["XLA_FLAGS"]:
        pytest.skip("XLA's other emitters round subnormal numbers of this type")
    with jax.enable_x64(dtype == jnp.float64):
        x = jnp.asarray(values_of(dtype))
        assert can_fence(x.dtype)
        plain, canonical = jax.jit(lambda x, z: (fence(x, z), fence(x, z, canonical=True)))(x, ZERO)
        np.testing.assert_array_equal(bits(plain), bits(x))
        is_nan = np.not_equal(x, x)
        np.testing.assert_array_equal(bits(canonical)[~is_nan], bits(x)[~is_nan])
        assert np.isnan(np.asarray(canonical)[is_nan].astype(np.float32)).all()
        assert len(set(bits(canonical)[is_nan].tolist())) == 1


def test_what_is_no_floating_point_number_passes():
    key = jax.random.key(0)
    for value in (jnp.arange(3), jnp.bool_(1), jnp.complex64(1j), key):
        assert fence(value, ZERO) is value


def test_two_fences_in_a_row_are_not_cancelled():
    def apart(z, a, b, c):
        return fence(fence(a * b, z) * 1.0, z) + c

    a, b, c = np.random.default_rng(0).standard_normal((3, 1 << 16)).astype(np.float32)
    found = jax.jit(apart)(ZERO, a, b, c)
    np.testing.assert_array_equal(bits(found), bits(a * b + c))


@pytest.mark.slow
def test_a_hyper_gradient_goes_through_an_update():
    params = {"w": jnp.linspace(-1.0, 1.0, 96), "b": jnp.ones(3)}

    def after(rate, tx_of):
        tx = tx_of(optax.inject_hyperparams(optax.adamw)(rate))
        state, current = tx.init(params), params
        for _ in range(2):
            grads = jax.tree.map(jnp.cos, current)
            updates, state = tx.update(grads, state, current)
            current = optax.apply_updates(current, updates)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(current))

    for derive in (jax.grad, jax.jacfwd):
        expected = derive(functools.partial(after, tx_of=lambda tx: tx))(0.1)
        assert abs(expected) > 1.0
        found = derive(functools.partial(after, tx_of=Recorder))(0.1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@jax.custom_jvp
def doubled(x):
    return jnp.round(x) * 2.0


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), tangents[0] * 2.0


@jax.custom_vjp
def tripled(x):
    return jnp.round(x) * 3.0


tripled.defvjp(lambda x: (tripled(x), ()), lambda _, g: (g * 3.0,))


def test_rules_of_derivatives_are_kept():
    pinned = PinnedFunction(lambda x: doubled(x) + tripled(x))
    x = jnp.linspace(0.1, 2.0, 8)
    np.testing.assert_array_equal(pinned(ZERO, x), doubled(x) + tripled(x))
    np.testing.assert_array_equal(jax.grad(lambda x: pinned(ZERO, x).sum())(x), np.full(8, 5.0))


def test_it_works_through_calls_loops_and_branches():
    def function(x, n):
        inner = jax.jit(lambda a: jax.checkpoint(jnp.sin)(a) * 3.0)
        y = jax.lax.cond(n > 1, lambda a: a * 2.0 + 1.0, lambda a: a / 3.0, inner(x))
        y, _ = jax.lax.scan(lambda c, r: (c * r + x, c), y, jnp.array([0.3, 0.7]))
        _, y = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x + y), (0, y))
        return {"y": jnp.where(y > 0, y, jax.nn.sigmoid(y)), "n": n, "x": x}

    pinned = PinnedFunction(function)
    x, n = jnp.linspace(-1.0, 1.0, 8), jnp.int32(3)
    expected = function(x, n)
    for run in (pinned, jax.jit(pinned)):
        found = run(ZERO, x, n)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-6)
    assert pinned(ZERO, x, n)["x"] is x
    assert pinned.known(x, n)[0] == {"y": None, "n": 1, "x": 0}
    batched = jax.vmap(lambda x, c: pinned(zero_of(c), x, n)["y"])(x[:, None], jnp.arange(8))
    np.testing.assert_array_equal(batched[:, 0], pinned(ZERO, x, n)["y"])


def test_operations_are_rounded_as_they_are_written():
    """Against numpy, which does one after the other."""
    x, y, s = np.random.default_rng(1).standard_normal((3, 1 << 14)).astype(np.float32)
    s = np.float32(0.37)

    def function(x, y, s):
        return x * y + s * x, (x * 0.3) * 0.7 - y, x / s, x * x * x + y, jnp.sqrt(x * x) + x * y

    found = jax.jit(PinnedFunction(function))(ZERO, x, y, s)
    expected = (
        *(x * y + s * x, (x * np.float32(0.3)) * np.float32(0.7) - y),
        *(x * (np.float32(1) / s), x * x * x + y, np.sqrt(x * x) + x * y),
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_a_short_type_keeps_no_digits_that_it_has_not():
    x, y = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1 << 14)), jnp.bfloat16)

    def function(x, y):
        return (x * y + x).astype(jnp.float32), jnp.exp(x).astype(jnp.float32)

    found = jax.jit(PinnedFunction(function))(ZERO, x, y)
    product = np.asarray(x * y)
    np.testing.assert_array_equal(found[0], np.asarray(jnp.asarray(product) + x, np.float32))
    np.testing.assert_array_equal(found[1], np.asarray(jnp.exp(x), np.float32))


def test_nans_are_one_whatever_their_signs_and_digits():
    nans = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32).view(np.float32)
    found = jax.jit(PinnedFunction(lambda x: (x + 1.0, -x, x * x[::-1])))(ZERO, nans)
    assert len({int(each) for leaf in found for each in bits(leaf)}) == 1


def test_equal_leaves_share_one_function():
    tx = optax.adamw(1e-3)
    params = {f"{i}": jnp.ones((4, 4)) for i in range(20)}
    state = tx.init(params)
    pinned = PinnedFunction(tx.update)
    jaxpr = jax.make_jaxpr(lambda z: pinned(z, params, state, params))(jnp.uint32(0)).jaxpr
    calls = [each.params["jaxpr"] for each in jaxpr.eqns if each.primitive.name == "jit"]
    assert len(calls) == 20
    assert len(set(map(id, calls))) == 1


def test_an_update_outside_of_jit_is_traced_once():
    traces = []

    def update(updates, state, params=None):
        traces.append(1)
        return jax.tree.map(lambda u: u * 0.1, updates), state

    recorder = Recorder(optax.GradientTransformation(lambda _: (), update))
    params = {"w": jnp.ones(128)}
    state = recorder.init(params)
    for _ in range(3):
        _, state = recorder.update(params, state, params)
    assert len(traces) == 1


WAYS = {
    "jit": jax.jit,
    "plain": lambda step: step,
    "vmap": lambda step: (
        lambda *args: jax.tree.map(
            lambda x: x[0], jax.vmap(step)(*jax.tree.map(lambda x: jnp.stack([x, x]), args))
        )
    ),
    "grad": lambda step: lambda *args: _value_beside_a_gradient(step, *args),
    "scan": lambda step: (
        lambda *args: jax.tree.map(
            lambda x: x[0],
            jax.lax.scan(lambda _, x: (0, step(*x)), 0, jax.tree.map(lambda x: x[None], args))[1],
        )
    ),
}
"""Ways to run a train step that contains an update."""
UPDATES = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 9)),
    "rprop": lambda: optax.rprop(1e-2),
    "when finite": lambda: optax.apply_if_finite(optax.rmsprop(1e-2), 3),  # a conditional
}


def _value_beside_a_gradient(step, grads, *rest):
    def loss(grads):
        result = step(grads, *rest)
        return sum(jnp.sum(x) for x in jax.tree.leaves(result[0])), result

    return jax.grad(loss, has_aux=True)(grads)[1]


@pytest.mark.covering(1, quick=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", UPDATES)
def test_inside_disable_jit_an_update_has_the_bits_of_a_compiled_one(name, way):
    recorder = adacheck.Recorder(UPDATES[name]())
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((8, 8), np.float32)), "b": jnp.zeros(8)}
    grads = jax.tree.map(lambda p: p - 0.25, params)

    def step(grads, state, params):
        updates, state = recorder.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = grads, recorder.init(params), params
    arguments = grads, *reversed(jax.jit(step)(*arguments))  # moments that are not zero
    expected = host_copy(jax.jit(step)(*arguments))
    with jax.disable_jit():
        assert_same_bits(WAYS[way](step)(*arguments), expected)


def test_what_is_closed_over_in_a_trace_is_not_kept_for_the_next():
    def step(rate, x):
        recorder.rate = rate
        return recorder.update(x, state, x)[0]

    def update(updates, state, params=None):
        return updates * recorder.rate, state

    recorder = Recorder(optax.GradientTransformation(lambda _: (), update))
    recorder.rate = 0.0
    x = jnp.ones(128)
    state = recorder.init(x)
    recorder._pinned = PinnedFunction(recorder._updated)  # as if init had not traced it
    for rate in (2.0, 3.0):
        np.testing.assert_array_equal(jax.jit(step)(jnp.float32(rate), x), np.full(128, rate))


def levels(function, *arguments):
    found = exactness.of(function, arguments, pinned=True)
    return list(found.levels), found.primitives


def test_what_cannot_be_pinned_counts_as_a_sum():
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    z = jax.ShapeDtypeStruct((8, 4), jnp.complex64)
    assert levels(jnp.arctan, x) == ([Level.ORDER], ("atan",))
    assert levels(lambda x: jax.lax.lgamma(x) + 1, x) == ([Level.ORDER], ("lgamma",))
    assert levels(lambda z: z * z, z) == ([Level.ORDER], ("mul",))
    assert levels(lambda x: (x * jnp.sqrt(x), jnp.sum(x)), x)[0] == [Level.ELEMENT, Level.ORDER]
    assert levels(lambda x: jnp.sum(x.reshape(-1)[:1]), x)[0] == [Level.PLACE]
    assert exactness.of(jnp.arctan, [x]).levels == (Level.ELEMENT,)


@pytest.mark.first(1, slow=3)
@pytest.mark.parametrize("how", ["jit", "shard_map", "pmap"])
def test_a_replayed_update_has_every_bit_of_the_trained_one(how):
    """On one device, of a data-parallel run; its gradients end in element-wise operations."""
    recorder, mesh = Recorder(optax.adamw(1e-2)), mesh_of((8,))

    def loss(params, x):
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return jnp.mean((support.forward(params, x) - x) ** 2) + 0.003 * decay

    def step(params, state, x):
        grads = jax.tree.map(lambda g: g * 0.37, jax.grad(loss)(params, x))
        if how != "jit":
            grads = jax.lax.pmean(grads, "data")
        updates, state = recorder.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def mapped(params, state, x):
        if how == "jit":
            return jax.jit(step)(params, state, x)
        if how == "shard_map":
            specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
            return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))(
                params, state, x
            )
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), (params, state))
        found = jax.pmap(step, axis_name="data")(*copies, x[:, None])
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), found)

    params = support.initial_params()
    state = recorder.init(params)
    bound = bind(recorder, {"params": params, "opt": state})
    update = jax.jit(update_program.update_function(recorder, bound.signature))
    for number in range(3):
        x = np.random.default_rng(number).standard_normal((8, support.WIDTH)).astype(np.float32)
        before = jax.tree.map(np.asarray, lists_of(bound, {"params": params, "opt": state}))[:2]
        params, state = mapped(params, state, jnp.asarray(x))
        after = jax.tree.map(np.asarray, lists_of(bound, {"params": params, "opt": state}))
        assert_same_bits(update(*before, *after[2:], ZERO), host_copy(after[:2]))


def test_small_leaves_that_pass_through_are_recorded_as_they_were_consumed():
    recorder = Recorder(optax.inject_hyperparams(optax.sgd)(0.5))
    params = {"w": jnp.ones(96)}
    state = recorder.init(params)
    assert jax.tree.leaves(Recorder(optax.adamw(1e-3)).init(params).adacheck_passed) == []
    update = jax.jit(recorder.update, donate_argnums=1)  # no buffer may be in the state twice
    for rate in (0.5, 0.25):
        state.adacheck_inner.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(params, state, params)
        assert float(state.adacheck_passed["hyperparams.learning_rate"]) == rate
        np.testing.assert_array_equal(updates["w"], np.full(96, -rate, np.float32))
        state.adacheck_inner.hyperparams["learning_rate"] = jnp.float32(9.0)  # for the next one
        assert float(state.adacheck_passed["hyperparams.learning_rate"]) == rate


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_an_unjitted_update_keeps_its_shardings(axis_type):
    mesh = mesh_of((4, 2), axis_type)
    place = NamedSharding(mesh, P("data", "model"))
    params = {"w": jax.device_put(jnp.ones((16, 32)), place)}
    recorder = Recorder(optax.adamw(1e-2))
    updates, state = recorder.update(params, recorder.init(params), params)
    assert updates["w"].sharding.is_equivalent_to(place, 2)
    assert state.adacheck_inner[0].mu["w"].sharding.is_equivalent_to(place, 2)


def test_a_program_of_an_earlier_release_is_called_without_a_zero():
    def old(params, inner, record, extra):
        return [params[0] - record[0]], list(inner)

    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    data = jax.export.export(jax.jit(old))([spec], [spec], [spec], []).serialize()
    one = jnp.ones(4)
    after = exported_program.load_own(bytes(data))(
        [one], [one], [one], [], update_program.switches(1)
    )
    assert_same_bits(after, [np.zeros(4, np.float32), np.ones(4, np.float32)])


@pytest.mark.slow
def test_deltas_saved_under_an_explicit_mesh_restore_on_fewer_devices(tmp_path):
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        run = support.dict_run(mesh)
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
    steps = list(roots.steps_of(tmp_path))
    assert steps[-1].manifest.has_update
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for other in (mesh_of((1, 1)), mesh_of((2, 2), AxisType.Explicit)):
            target = adacheck.RestoreArgs(abstract(run.state, other))
            assert_same_bits(manager.restore(2, args=target), saved[2])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)])
def test_a_replay_takes_the_trace_of_the_training_on_any_mesh(shape):
    """A value that the update reads besides its arguments is the one that was trained with."""
    factor = [2.0]
    pinned = PinnedFunction(lambda x: factor[0] * x)
    placed = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh_of(shape), P("data")))
    jax.jit(lambda x: pinned(ZERO, x))(placed)
    factor[0] = 3.0
    replayed = jax.jit(lambda x: pinned.replaying(ZERO, None, (), x))(np.ones((4, 2), np.float32))
    np.testing.assert_array_equal(replayed, np.full((4, 2), 2.0))
