from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adacheck_jax import Recorder
from adacheck_jax.device import trees
from adacheck_jax.errors import RecorderError
from adacheck_jax.format import byte_loops
from adacheck_jax.update import RecorderState
from adacheck_jax.update.recorder_state import find_nodes
from tests.support import assert_same_bits, host_copy, mesh_of

PARAMS = {"kernel": jnp.linspace(-1.0, 1.0, 128).reshape(16, 8), "bias": jnp.ones(8)}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adafactor": optax.adafactor(1e-2),
}


def gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), PARAMS)


class Seen(NamedTuple):
    updates: object
    extra: object


def probe(extra=()):
    """A transformation that keeps what it was given, in float32 as most optimizers compute."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Seen(zeros, {name: jnp.zeros(()) for name in extra})

    def update(updates, state, params=None, **extra_args):
        del state, params
        seen = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        return updates, Seen(seen, {name: extra_args[name] for name in extra})

    return optax.GradientTransformationExtraArgs(init, update)


def abstract_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def node_in(state):
    """The one RecorderState inside an optimizer state."""

    def is_node(x):
        return isinstance(x, RecorderState)

    (node,) = (x for x in jax.tree.leaves(state, is_leaf=is_node) if is_node(x))
    return node


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pin", [True, False])
def test_the_update_is_that_of_the_wrapped_one_and_unpinned_bit_for_bit(name, pin):
    tx = OPTIMIZERS[name]
    recorder = Recorder(tx, pin=pin)
    state, own_state = recorder.init(PARAMS), tx.init(PARAMS)
    params = own_params = PARAMS
    for step in range(3):
        outputs, state = jax.jit(recorder.update)(gradients(step), state, params)
        own_outputs, own_state = jax.jit(tx.update)(gradients(step), own_state, own_params)
        found, expected = (outputs, state.adacheck_inner), (own_outputs, own_state)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5 if pin else 0, atol=1e-8 if pin else 0)
        assert_same_bits(state.adacheck_record, host_copy(gradients(step)))
        assert (int(state.adacheck_count), state.adacheck_count.dtype) == (step + 1, jnp.int32)
        params = optax.apply_updates(params, outputs)
        own_params = optax.apply_updates(own_params, own_outputs)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_the_wrapped_transformation_receives_what_is_recorded_in_the_params_data_type(dtype, pin):
    recorder = Recorder(probe(), dtype=dtype, pin=pin)

    @jax.jit
    def train_step(scale, state):  # a compiler may drop the rounding: it must not
        updates = jax.tree.map(lambda g: g * scale + 0.1, gradients(0))
        return recorder.update(updates, state, PARAMS)

    first = recorder.init(PARAMS)
    _, state = jax.jit(recorder.update)(gradients(0), first, PARAMS)
    assert abstract_of(state) == abstract_of(first)
    rounded = jax.tree.map(lambda g: g.astype(dtype or jnp.float32), gradients(0))
    assert_same_bits(state.adacheck_record, host_copy(rounded))
    outputs, state = train_step(1 / 3, state)
    record = state.adacheck_record
    assert {x.dtype for x in jax.tree.leaves(record)} == {jnp.dtype(dtype or jnp.float32)}
    seen = [x.astype(np.float32) for x in host_copy(record)]
    assert_same_bits(outputs, seen)
    assert_same_bits(state.adacheck_inner.updates, seen)


@pytest.mark.parametrize(("pin", "operation"), [(True, "bitcast"), (False, "optimization_barrier")])
def test_a_compiler_is_kept_from_undoing_the_rounding_of_the_record(pin, operation):
    """Not every backend makes use of its freedom to drop it, so the program is looked at."""
    recorder = Recorder(optax.identity(), dtype=jnp.bfloat16, pin=pin)
    lowered = jax.jit(recorder.update).lower(gradients(0), recorder.init(PARAMS), PARAMS)
    assert operation in lowered.as_text()


def test_gradients_of_another_data_type_than_the_params_ask_for_it():
    params = {"table": jnp.arange(4), "kernel": jnp.ones(2)}
    record = Recorder(probe(), dtype=jnp.bfloat16).init(params).adacheck_record
    assert (record["table"].dtype, record["kernel"].dtype) == (jnp.int32, jnp.bfloat16)
    halves = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients(0))
    recorder = Recorder(optax.adamw(1e-2))
    with pytest.raises(RecorderError, match=r"found bfloat16.*dtype=jnp.bfloat16"):
        recorder.update(halves, recorder.init(PARAMS), PARAMS)
    recorder = Recorder(optax.adamw(1e-2), dtype=jnp.bfloat16)
    state = recorder.init(PARAMS)
    assert abstract_of(recorder.update(halves, state, PARAMS)[1]) == abstract_of(state)


def test_declared_extra_arguments_are_recorded_and_passed_on_as_recorded():
    declared = {"value": 0.0, "scale": jnp.zeros((), jnp.bfloat16)}
    recorder = Recorder(probe(extra=declared), extra_args=declared)
    state = recorder.init(PARAMS)
    after = jax.jit(recorder.update)(gradients(0), state, PARAMS, value=2.5, scale=1 / 3)[1]
    assert_same_bits(after.adacheck_extra, [jnp.bfloat16(1 / 3), np.float32(2.5)])
    assert_same_bits(after.adacheck_inner.extra, host_copy(after.adacheck_extra))
    assert abstract_of(after.adacheck_extra) == abstract_of(state.adacheck_extra)


@pytest.mark.parametrize(
    ("declared", "given", "told"),
    [
        ({}, {"value": jnp.float32(1)}, r"'value'.*extra_args=\{'value': jnp.zeros\(\(\)\)"),
        ({"value": 0.0}, {}, r"\['value'\].*every update"),
        ({"value": 0.0}, {"value": jnp.zeros(3)}, "value"),
    ],
    ids=["undeclared", "missing", "of another shape"],
)
def test_extra_arguments_that_are_not_those_declared_are_an_error(declared, given, told):
    recorder = Recorder(optax.contrib.reduce_on_plateau(), extra_args=declared)
    with pytest.raises(RecorderError, match=told):
        recorder.update(gradients(0), recorder.init(PARAMS), PARAMS, **given)


def test_extra_arguments_that_cannot_be_consumed_are_ignored_and_functions_are_noted():
    identity = optax.identity()
    recorder = Recorder(optax.GradientTransformation(identity.init, identity.update))
    state = recorder.init(PARAMS)
    after = recorder.update(gradients(0), state, PARAMS, value=jnp.float32(1))[1]
    assert after.adacheck_extra == {}
    assert recorder.unreplayable is None
    recorder = Recorder(probe())
    recorder.update(gradients(0), recorder.init(PARAMS), PARAMS, value_fn=lambda p: 0.0)
    assert "value_fn" in recorder.unreplayable


LABELS = {"kernel": "trained", "bias": "other"}
WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, {"kernel": True, "bias": False}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"trained": tx, "other": optax.sgd(0.1)}, LABELS
    ),
    "inject_hyperparams": lambda tx: optax.chain(
        tx, optax.inject_hyperparams(optax.scale)(step_size=0.5)
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_works_inside_other_transformations_as_the_wrapped_one_does(name):
    tx = optax.adamw(1e-2)
    recorded, own = WRAPPERS[name](Recorder(tx)), WRAPPERS[name](tx)
    state, own_state = recorded.init(PARAMS), own.init(PARAMS)
    update, own_update = jax.jit(recorded.update), jax.jit(own.update)
    for step in range(4):
        outputs, after = update(gradients(step), state, PARAMS)
        own_outputs, own_state = own_update(gradients(step), own_state, PARAMS)
        for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(own_outputs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert abstract_of(after) == abstract_of(state)  # a loop can carry it
        state = after
    assert int(node_in(state).adacheck_count) == (2 if name == "MultiSteps" else 4)
    assert len(find_nodes(list(trees.flatten(state)[0]))) == 1


def test_under_multi_steps_the_record_is_the_mean_gradient_and_stays_without_an_update():
    tx = WRAPPERS["MultiSteps"](Recorder(optax.sgd(0.1)))
    state = tx.init(PARAMS)
    records = []
    for step in range(3):
        state = tx.update(gradients(step), state, PARAMS)[1]
        records.append(host_copy(node_in(state).adacheck_record))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, gradients(0), gradients(1))
    for found, expected in zip(records[1], jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert_same_bits(records[2], records[1])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_record_is_sharded_as_the_params_are(dtype, axis_type):
    mesh = mesh_of((4, 2), axis_type)
    params = {"kernel": jax.device_put(PARAMS["kernel"], NamedSharding(mesh, P("data", "model")))}
    recorder = Recorder(optax.adamw(1e-2), dtype=dtype)
    state = recorder.init(params)
    assert same_shardings(state.adacheck_record, params)

    @jax.jit
    def train_step(params, state):
        grads = jax.grad(lambda p: jnp.mean(p["kernel"] ** 4))(params)
        updates, state = recorder.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = train_step(params, state)
        assert same_shardings(state.adacheck_record, params)
        assert params["kernel"].sharding.spec == P("data", "model")


def same_shardings(tree, like):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, b.ndim) for a, b in pairs)


def prefixes(tree):
    return [node.prefix for node in find_nodes(list(trees.flatten(tree)[0]))]


def test_nodes_are_found_wherever_they_lie_ordered_by_prefix():
    assert prefixes(optax.adamw(1e-2).init(PARAMS)) == []
    recorder = Recorder(optax.sgd(0.1))
    (node,) = find_nodes(list(trees.flatten(recorder.init(jnp.ones(3)))[0]))
    assert (node.prefix, node.record) == ("", {"": "adacheck_record"})
    tx = optax.chain(Recorder(optax.identity()), Recorder(optax.sgd(0.1)))
    twice = {"b": tx.init(PARAMS), "a": tx.init(PARAMS)}
    assert prefixes(twice) == ["a/0", "a/1", "b/0", "b/1"]
    outer = Recorder(optax.chain(optax.identity(), recorder))  # the inner is a part of its update
    (node,) = find_nodes(list(trees.flatten(outer.init(PARAMS))[0]))
    assert node.prefix == ""
    assert "1/adacheck_count" in node.inner


def test_optax_finds_the_learning_rate_that_the_next_update_takes():
    recorder = Recorder(optax.inject_hyperparams(optax.adamw)(0.5))
    state = recorder.init({"w": jnp.ones(3)})
    assert optax.tree_utils.tree_get(state, "learning_rate") == 0.5
    changed = optax.tree_utils.tree_set(state, learning_rate=0.25)
    assert changed.adacheck_inner.hyperparams["learning_rate"] == 0.25
    assert changed.adacheck_passed == state.adacheck_passed


@pytest.mark.parametrize(
    ("tx", "options", "found"),
    [
        (3e-4, {}, "found float"),
        (Recorder(optax.sgd(0.1)), {}, "found a Recorder"),
        (optax.sgd(0.1), {"dtype": "bf16"}, "'bf16'"),
        (optax.sgd(0.1), {"dtype": jnp.int8}, "int8"),
    ],
)
def test_what_is_no_transformation_or_no_type_of_gradients_is_refused(tx, options, found):
    with pytest.raises(RecorderError, match=found):
        Recorder(tx, **options)


@pytest.mark.parametrize(("side", "is_begun"), [(16, False), (8192, True)])
def test_a_large_model_has_its_fingerprints_compiled_before_it_is_saved(
    side, is_begun, monkeypatch
):
    begun = list[bool]()
    monkeypatch.setattr(byte_loops._compiler, "begin", lambda: begun.append(True))
    params = {"kernel": jax.ShapeDtypeStruct((side, side), jnp.float32)}
    jax.eval_shape(Recorder(optax.sgd(0.1)).init, params)
    assert bool(begun) is is_begun


@pytest.mark.parametrize("names", [("params", "opt"), ("params", "state")])  # sorted in a dict
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("pin", [True, False])
def test_every_array_of_a_donated_state_keeps_its_memory(names, dtype, pin):
    params = {f"{i}": jnp.ones((64, 32)) for i in range(3)}
    tx = optax.chain(optax.clip(1.0), Recorder(optax.adamw(1e-3), dtype=dtype, pin=pin))

    def train(state):
        params, opt = (state[name] for name in names)
        grads = jax.tree.map(lambda x: (x * 0.1).astype(dtype or x.dtype), params)
        updates, opt = tx.update(grads, opt, params)
        return dict(zip(names, (optax.apply_updates(params, updates), opt), strict=True))

    state = dict(zip(names, (params, tx.init(params)), strict=True))
    compiled = jax.jit(train, donate_argnums=0).lower(state).compile()
    memory, size_bytes = compiled.memory_analysis(), params["0"].nbytes
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
    if pin and dtype is None:  # else gradients are made before they are widened, or apart
        assert memory.temp_size_in_bytes < size_bytes
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.ndim}
    after = [x for x in jax.tree.leaves(compiled(state)) if x.ndim]
    assert {x.unsafe_buffer_pointer() for x in after} == before


def test_a_state_that_was_updated_without_jit_can_be_donated():
    recorder = Recorder(optax.optimistic_gradient_descent(0.1))  # it keeps the gradient, too
    params = {"w": jnp.arange(8.0)}
    _, state = recorder.update(params, recorder.init(params), params)
    step = jax.jit(recorder.update, donate_argnums=1)
    _, state = step(params, state, params)
    assert_same_bits(state.adacheck_record, host_copy(params))
    assert state.adacheck_count == 2
