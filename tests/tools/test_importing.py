"""``import_state``: a run that stock Orbax saved goes on under a Recorder, bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.errors import MismatchError
from adacheck_jax.tools import import_state
from tests import support
from tests.support import assert_same_bits, host_copy, manager_of, mesh_of

INNER = optax.inject_hyperparams(optax.adamw)(1e-2)


def chained(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def state_of(tx: Any) -> TrainState:
    state = TrainState.create(apply_fn=support.forward, params=support.initial_params(), tx=tx)
    return support.place(state, mesh_of((4, 2)))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, data: Any) -> TrainState:
    x, y = data
    loss = lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2)  # noqa: E731
    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def read(path: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_state_is_put_into_one_with_a_recorder(on_host):
    state = train_step(state_of(chained(INNER)), support.batch(0))
    wanted = state_of(chained(adacheck.Recorder(INNER)))
    found = import_state(jax.tree.map(np.asarray, state) if on_host else state, wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_same_bits(found.params, host_copy(state.params))
    node = found.opt_state[1]
    assert_same_bits(node.adacheck_inner, host_copy(state.opt_state[1]))
    assert (int(node.adacheck_count), int(found.step)) == (0, 1)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(node.adacheck_record))
    rate = state.opt_state[1].hyperparams["learning_rate"]
    assert node.adacheck_passed["hyperparams.learning_rate"] == rate
    for leaf, place in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(place.sharding, leaf.ndim)
    places = [x for leaf in jax.tree.leaves(found) for x in _places(leaf)]
    assert len({*places}) == len(places), "two leaves of one buffer: it would be donated twice"
    assert_same_bits(import_state(found, wanted), host_copy(found))  # it has a Recorder already


def _places(leaf: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


def test_leaves_that_do_not_fit_are_named():
    old = state_of(chained(INNER))
    for inner, told in (
        (optax.sgd(1e-2, momentum=0.9), "asked for, not saved (4): opt_state/1/0/trace/in/bias"),
        (optax.adamw(1e-2), "saved, not asked for"),
        (
            optax.inject_hyperparams(optax.adamw, ["mu_dtype"])(1e-2, mu_dtype=jnp.bfloat16),
            "opt_state/1/inner_state/0/mu/in/bias: asked for bfloat16[128], saved float32[128]",
        ),
    ):
        wanted = state_of(chained(adacheck.Recorder(inner)))
        with pytest.raises(MismatchError) as error:
            import_state(old, wanted)
        assert told in str(error.value), str(error.value)


def test_numbers_keys_and_arrays_of_the_host_are_imported(tmp_path):
    recorder = adacheck.Recorder(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    plain = {
        "params": params,
        "opt": recorder.tx.init(params),
        "key": jax.random.key(5),
        "number": 7,
        "rate": 0.25,
        "host": np.arange(3.0),
        "nothing": None,
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", plain)
    wanted = {**plain, "opt": recorder.init(params), "number": jnp.int32(0)}
    wanted |= {"key": jax.random.key(0), "empty": jnp.zeros((0, 2))}
    found = import_state(read(tmp_path / "x"), wanted)
    assert (int(found["number"]), found["rate"], found["nothing"]) == (7, 0.25, None)
    assert isinstance(found["number"], jax.Array)
    assert isinstance(found["host"], np.ndarray)
    assert found["host"].tobytes() == plain["host"].tobytes()
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(plain["key"]).tolist()
    assert found["empty"].shape == (0, 2)
    assert_same_bits(found["opt"].adacheck_inner, host_copy(plain["opt"]))
    with pytest.raises(MismatchError, match=r"host: asked for float64\[4\], saved float64\[3\]"):
        import_state(plain, {**wanted, "host": np.zeros(4)})
    for number, dtype in ((3_000_000_000, jnp.int32), (-1, jnp.uint8)):
        asked = {**wanted, "number": jnp.zeros((), dtype)}
        with pytest.raises(MismatchError, match=rf"number: {number} \(int64 as {dtype.dtype}\)"):
            import_state({**plain, "number": number}, asked)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2, params)


def _kinds(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if jnp.ndim(leaf) == 2 else "other", params)


OPTIMIZERS = {
    "two recorders": lambda wrap: optax.multi_transform(
        {"matrix": wrap(optax.adam(1e-2)), "other": wrap(optax.sgd(1e-2, momentum=0.9))}, _kinds
    ),
    "chain": lambda wrap: optax.chain(optax.clip_by_global_norm(1.0), wrap(optax.adam(1e-2))),
    "several gradients": lambda wrap: wrap(
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    ),
    "masked": lambda wrap: optax.masked(wrap(optax.adam(1e-2)), _matrices),
    "parts inside": lambda wrap: wrap(
        optax.multi_transform({"matrix": optax.adam(1e-2), "other": optax.sgd(1e-2)}, _kinds)
    ),
    "hyperparams": lambda wrap: wrap(optax.inject_hyperparams(optax.adam)(1e-2)),
}
"""Optimizers, of which ``wrap`` wraps some part."""


class Net(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


def _of_nnx(tx: Any) -> tuple[Any, Any]:
    """A model and an optimizer of nnx: their state, and a step."""
    net = Net()
    definition, state = nnx.split((net, nnx.Optimizer(net, tx, wrt=nnx.Param)))

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(definition, state)
        optimizer.update(model, nnx.grad(lambda each: jnp.mean(each(x) ** 2))(model))
        return nnx.state((model, optimizer))

    return state, step


def _of_dicts(tx: Any) -> tuple[Any, Any]:
    """A dictionary of params and optax's state, and a step."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (8, 4)), "bias": jnp.ones(4)}

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss = lambda p: jnp.mean(jnp.tanh(x @ p["kernel"] + p["bias"]) ** 2)  # noqa: E731
        gradients = jax.grad(loss)(state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return {"params": params, "opt": tx.init(params)}, step


@pytest.mark.slow
@pytest.mark.first(2)
@pytest.mark.parametrize("form", [_of_dicts, _of_nnx], ids=["dicts", "nnx"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_imported_run_goes_on_as_the_run_itself(tmp_path, name, form):
    """The state of a run, without what its recorders keep, is saved by stock Orbax and imported."""
    recorders: list[Any] = []

    def wrap(tx: Any) -> Any:
        recorders.append(adacheck.Recorder(tx))
        return recorders[-1]

    initial, step = form(OPTIMIZERS[name](wrap))
    batches = [jax.random.normal(jax.random.key(n), (16, 8)) for n in range(7)]
    state = initial
    for x in batches[:3]:
        state = step(state, x)
    own = {p.replace("adacheck_inner/", ""): x for p, x in trees.flatten(state)[0].items()}
    plain, _ = form(OPTIMIZERS[name](lambda tx: tx))
    paths = [*trees.flatten(plain)[0]]
    assert {p for p in own if "/adacheck_" not in p} == {*paths}
    plain = jax.tree.unflatten(jax.tree.structure(plain), [own[path] for path in paths])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", plain)
    found = import_state(read(tmp_path / "plain"), initial)
    states = {}
    with manager_of(tmp_path / "run", adacheck.AdaCheckHandler(recorders)) as manager:
        manager.save(2, args=adacheck.SaveArgs(found))
        for number, x in enumerate(batches[3:], 3):
            found, state = step(found, x), step(state, x)
            states[number] = host_copy(found)
            manager.save(number, args=adacheck.SaveArgs(found))
            ours, theirs = (
                {p: x for p, x in trees.flatten(each)[0].items() if "adacheck_count" not in p}
                for each in (found, state)
            )
            assert_same_bits(ours, host_copy(theirs))
        manager.wait_until_finished()
        for number, expected in states.items():
            args = adacheck.RestoreArgs(support.abstract(found))
            assert_same_bits(manager.restore(number, args=args), expected)
