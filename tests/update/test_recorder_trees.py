"""A Recorder as a pytree, and the trees that it takes where stock optax takes them."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from adacheck_jax import Recorder, separate_update
from adacheck_jax.errors import RecorderError
from adacheck_jax.update import binding
from tests.support import assert_same_bits
from tests.update.replaying import bind, expected_of, replay

PARAMS = {"kernel": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "bias": jnp.ones(3)}


def through_a_tree(recorder):
    leaves, treedef = jax.tree.flatten({"tx": recorder})
    return jax.tree.unflatten(treedef, leaves)["tx"]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tree": through_a_tree,
    "tree.map": lambda recorder: jax.tree.map(lambda x: x, [recorder])[0],
    "partition": lambda recorder: eqx.combine(*eqx.partition((recorder,), eqx.is_array))[0],
    "in a chain": lambda recorder: binding.recorders_of(
        copy.deepcopy(jax.tree.map(lambda x: x, optax.chain(optax.identity(), recorder)))
    )[""][0],
}


@pytest.mark.parametrize("way", COPIES)
def test_whatever_copies_a_recorder_gets_the_recorder(way):
    recorder = Recorder(optax.adamw(1e-2))
    assert COPIES[way](recorder) is recorder


def test_other_functions_make_a_stock_transformation_and_not_half_a_recorder():
    recorder, other = Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1))
    changed = recorder._replace(update=other.update)
    assert type(changed) is optax.GradientTransformationExtraArgs
    assert changed == (recorder.init, other.update)
    assert type(Recorder._make(recorder)) is optax.GradientTransformationExtraArgs


def test_a_recorder_has_no_leaves_and_two_of_them_are_different_trees():
    first, second = Recorder(optax.sgd(0.1)), Recorder(optax.sgd(0.1))
    assert jax.tree.leaves(first) == []
    assert jax.tree.structure(first) == jax.tree.structure(copy.deepcopy(first))
    assert jax.tree.structure(first) != jax.tree.structure(second)


class Net(eqx.Module):
    """Has leaves that are no params: an activation, integers, a switch."""

    layers: list
    table: jax.Array
    activation: object
    trained: bool = True

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 2)
        self.layers = [eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 2, key=keys[1])]
        self.table = jnp.arange(4)
        self.activation = jax.nn.tanh

    def __call__(self, x):
        return self.layers[1](self.activation(self.layers[0](x)))


def loss(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


X = jnp.linspace(-1.0, 1.0, 20).reshape(5, 4)


def filtered_run(tx, steps, *, as_argument):
    net = Net()
    state = tx.init(eqx.filter(net, eqx.is_inexact_array))

    def step(net, state, tx):
        grads = eqx.filter_grad(loss)(net, X)
        updates, state = tx.update(grads, state, eqx.filter(net, eqx.is_inexact_array))
        return eqx.apply_updates(net, updates), state

    jitted = eqx.filter_jit(step if as_argument else lambda *own: step(*own, tx))
    for _ in range(steps):
        net, state = jitted(net, state, *[tx] * as_argument)
    return net, state


def test_the_update_of_a_filtered_equinox_model_is_replayed():
    recorder = Recorder(optax.adamw(1e-2))
    net, state = filtered_run(recorder, 2, as_argument=True)
    next_net, next_state = filtered_run(recorder, 3, as_argument=False)
    before = {"net": eqx.filter(net, eqx.is_array), "opt": state}
    after = {"net": eqx.filter(next_net, eqx.is_array), "opt": next_state}
    found = bind(recorder, after)
    assert_same_bits(replay(found, before, after), expected_of(found, after))
    assert "net/table" not in found.params
    assert found.params[0] == "net/layers/0/weight"
    own, _ = filtered_run(optax.adamw(1e-2), 3, as_argument=True)
    for a, b in zip(after["net"].layers, own.layers, strict=True):
        assert jnp.allclose(a.weight, b.weight, rtol=1e-4, atol=1e-6)


TREES = {
    "None": {"a": jnp.ones(3), "b": None, "c": [None, jnp.ones(2)]},
    "masked": {"a": jnp.ones(3), "b": optax.MaskedNode()},
    "empty": {},
    "only None": {"a": None, "b": [None]},
    "bare": jnp.ones(3),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_trees_that_stock_optax_takes_are_taken(name, dtype):
    params = TREES[name]
    recorder, own = Recorder(optax.adamw(1e-2), dtype=dtype), optax.adamw(1e-2)
    state, own_state = recorder.init(params), own.init(params)
    assert jax.tree.structure(state.adacheck_record) == jax.tree.structure(params)
    for _ in range(2):
        outputs, state = jax.jit(recorder.update)(params, state, params)
        own_outputs, own_state = jax.jit(own.update)(params, own_state, params)
        ours, theirs = (outputs, state.adacheck_inner), (own_outputs, own_state)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert jnp.allclose(a, b, rtol=1e-2)


def test_python_numbers_are_taken_as_stock_optax_takes_them():
    recorder, params = Recorder(optax.sgd(0.5)), {"a": 1.0}
    outputs, state = recorder.update({"a": 2.0}, recorder.init(params), params)
    assert float(outputs["a"]) == -1.0
    assert float(state.adacheck_record["a"]) == 2.0


def test_a_model_that_was_not_filtered_is_an_error_that_says_how():
    with pytest.raises(RecorderError, match=r"leaf activation: .*equinox.filter"):
        Recorder(optax.sgd(0.1)).init(Net())


PARTIAL = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(0.1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PARTIAL)  # other optimizers of optax refuse such gradients
@pytest.mark.parametrize("given", [False, True])
def test_gradients_that_leave_params_out_are_recorded_and_replayed(name, given):
    """Equinox's way of freezing: the gradient of a frozen part is None, and so is its update."""
    recorder, own = Recorder(PARTIAL[name]()), PARTIAL[name]()
    params = own_params = PARAMS
    state, own_state = recorder.init(params), own.init(params)

    def stepping(tx):
        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params if given else None)
            return eqx.apply_updates(params, updates), state

        return step

    step, own_step = stepping(recorder), stepping(own)
    states = []
    for number in range(3):
        grads = {"kernel": jnp.full((4, 3), 0.3 + number), "bias": None}
        params, state = step(params, state, grads)
        own_params, own_state = own_step(own_params, own_state, grads)
        ours, theirs = (params, state.adacheck_inner), (own_params, own_state)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert jnp.allclose(params["kernel"], own_params["kernel"])
        states.append({"params": params, "opt": state})
        assert state.adacheck_record["bias"] is None
        found = bind(recorder, states[-1])
        assert found.params == ("params/bias", "params/kernel")
        assert found.record == ("opt/adacheck_record/kernel",)
    assert_same_bits(replay(found, states[1], states[2]), expected_of(found, states[2]))


def test_params_may_be_left_out_later_and_come_back():
    recorder = Recorder(optax.sgd(0.1))
    state = recorder.init(PARAMS)
    for grads in (PARAMS, {**PARAMS, "bias": None}, {**PARAMS, "kernel": None}, PARAMS):
        _, state = recorder.update(grads, state, PARAMS)
        assert jax.tree.structure(state.adacheck_record) == jax.tree.structure(grads)
        found = bind(recorder, {"params": PARAMS, "opt": state})
        assert len(found.record) == len(jax.tree.leaves(grads))


@pytest.mark.parametrize("grads", [{"kernel": jnp.ones(3)}, {**PARAMS, "more": jnp.ones(2)}, None])
def test_gradients_of_other_params_are_still_an_error(grads):
    recorder = Recorder(optax.sgd(0.1))
    if grads is None:
        grads = [PARAMS]
    with pytest.raises(RecorderError, match="the tree of the params"):
        recorder.update(grads, recorder.init(PARAMS), PARAMS)


def test_nnx_takes_a_bare_recorder():
    recorder = Recorder(optax.sgd(0.1))
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, recorder, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, 3))) ** 2))(model))

    step(model, optimizer)
    assert bind(recorder, nnx.state((model, optimizer))).recorder is recorder


def test_a_separate_update_takes_trees_with_holes():
    recorder = Recorder(optax.adamw(1e-2))
    params = {"a": jnp.ones(3), "b": None}
    own = optax.adamw(1e-2)
    expected = optax.apply_updates(params, own.update(params, own.init(params), params)[0])
    copied = jax.tree.map(jnp.copy, params)
    found, _ = separate_update(recorder)(params, recorder.init(params), copied)
    assert jnp.allclose(found["a"], expected["a"])
    assert found["b"] is None
