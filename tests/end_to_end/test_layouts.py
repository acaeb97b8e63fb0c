"""Steps are restored into other layouts: every operation, tree and kind of step, bit by bit."""

import functools
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax import layout
from adacheck_jax.device import trees
from adacheck_jax.errors import IntegrityError, MismatchError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import lineage
from tests import support

LAYERS = 4


def initial_params():
    keys = jax.random.split(jax.random.key(3), LAYERS + 1)
    layers = {
        f"block_{i}": {
            "qkv": jax.random.normal(keys[i], (8, 24)),
            "bias": jax.random.normal(keys[i], (8,)),
        }
        for i in range(LAYERS)
    }
    table = jax.random.normal(keys[-1], (10, 8))
    return {**layers, "table": table, "copies": jnp.ones((2, 6)) * table[0, :6]}


def optimizer():
    """Adam with a master copy: a moving average of the params."""
    return adacheck.Recorder(optax.chain(optax.adam(1e-2), optax.ema(0.9)))


def train_state(recorder, params):
    params = jax.tree.map(jnp.array, params)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0), "ema": half}


def train_step_of(recorder):
    """Element-wise gradients, zero for zeros, so that a layout changes nothing about them."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        number = state["step"].astype(jnp.float32)
        gradients = jax.tree.map(lambda p: p * (0.5 + 0.01 * number), state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: (e * 0.5 + p * 0.5).astype(e.dtype), state["ema"], params)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1, "ema": ema}

    return step


TABLE = {
    "rename": (
        [layout.rename("table", "vocabulary/rows")],
        [layout.rename("vocabulary/rows", "table")],
    ),
    "stack": (
        [layout.stack("block_{i}/{n}", "blocks/{n}", axis=-1)],
        [layout.unstack("blocks/{n}", "block_{i}/{n}", axis=-1)],
    ),
    "scan": (
        layout.scan_layers("block_{i}", "blocks"),
        layout.unroll_layers("blocks", "block_{i}"),
    ),
    "split": (
        [layout.split("{b}/qkv", ["{b}/q", "{b}/k", "{b}/v"])],
        [layout.fuse(["{b}/q", "{b}/k", "{b}/v"], "{b}/qkv")],
    ),
    "split by heads": (
        [layout.split("{b}/qkv", ["{b}/q", "{b}/kv"], sizes=[8, 16], groups=4)],
        [layout.fuse(["{b}/q", "{b}/kv"], "{b}/qkv", groups=4)],
    ),
    "pad": ([layout.pad("table", 16)], [layout.strip("table", 10)]),
    "transpose": ([layout.transpose("table", [1, 0])], [layout.transpose("table", [1, 0])]),
    "repeat": ([layout.repeat("table", 2, axis=1)], [layout.average("table", axis=1)]),
    "all at once": (
        [
            layout.split("{b}/qkv", ["{b}/q", "{b}/k", "{b}/v"]),
            *layout.scan_layers("block_{i}", "blocks"),
            layout.transpose("blocks/q", [0, 2, 1]),
            layout.pad("table", 16),
        ],
        [
            layout.strip("table", 10),
            layout.transpose("blocks/q", [0, 2, 1]),
            *layout.unroll_layers("blocks", "block_{i}"),
            layout.fuse(["{b}/q", "{b}/k", "{b}/v"], "{b}/qkv"),
        ],
    ),
}
"""Rules, and those that undo them."""

OF_PARAMS = {"params_path": "params"}
"""The moving average has the same paths and shapes."""

KINDS = {"base": (0, {}), "delta": (3, {}), "bit-pattern delta": (3, {"delta": "bits"})}
"""Steps that are restored, and options of the handler that saves them."""


def leaves_of(tree):
    return trees.flatten(tree)[0]


def assert_equal(found, expected):
    found, expected = leaves_of(found), leaves_of(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        assert np.asarray(found[path]).tobytes() == np.asarray(leaf).tobytes(), path


def saved(root, options, steps=4, params=None):
    """A manager of some saved steps, and their states."""
    recorder = optimizer()
    handler = adacheck.AdaCheckHandler(**(options or {"recorder": recorder, **OF_PARAMS}))
    manager = support.manager_of(root, handler)
    state, step = train_state(recorder, params or initial_params()), train_step_of(recorder)
    states = []
    for number in range(steps):
        state = step(state)
        states.append(jax.tree.map(np.asarray, state))
        manager.save(number, args=adacheck.SaveArgs(state))
    manager.wait_until_finished()
    return manager, states


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [1, 8], ids=["one device", "eight devices"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLE)
def test_every_tree_is_transformed_and_comes_back(tmp_path, name, kind, devices):
    rules, back = TABLE[name]
    number, options = KINDS[kind]
    manager, states = saved(tmp_path / "a", options)
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])

    def placed(leaf):
        cut = [k for k, length in enumerate(leaf.shape) if length % devices == 0]
        axes = ["x" if [k] == cut[:1] else None for k in range(leaf.ndim)]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args = adacheck.RestoreArgs(transform=rules)
    shapes = manager.restore(number, args=args)
    args = adacheck.RestoreArgs(jax.tree.map(placed, shapes), transform=rules)
    found = manager.restore(number, args=args)
    assert_equal(found, shapes)
    changed = leaves_of(found).keys() ^ leaves_of(states[0]).keys()
    places = ("params/", "ema/", "opt_state/adacheck_record/", "opt_state/adacheck_inner/0/0/mu/")
    if changed:  # every tree has changed alike
        ends = [{p.removeprefix(place) for p in changed if p.startswith(place)} for place in places]
        assert ends[0]
        assert all(each == ends[0] for each in ends)
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(delta="bits")) as other:
        other.save(0, args=adacheck.SaveArgs(found))
        other.wait_until_finished()
        again = other.restore(0, args=adacheck.RestoreArgs(transform=back))
    assert_equal(again, states[number])
    manager.close()


@pytest.mark.parametrize("name", ["scan", "split by heads", "transpose", "all at once"])
def test_a_run_goes_on_as_if_it_had_been_trained_in_the_new_layout(tmp_path, name):
    rules, _ = TABLE[name]
    manager, _ = saved(tmp_path / "a", {})
    with manager:
        there = manager.restore(0, args=adacheck.RestoreArgs(transform=rules))
        recorder = optimizer()
        target = jax.eval_shape(lambda p: train_state(recorder, p), there["params"])
        state = manager.restore(0, args=adacheck.RestoreArgs(target, transform=rules))
        trained_there = state
        step = train_step_of(recorder)
        for _ in range(3):
            trained_there = step(jax.tree.map(jnp.copy, trained_there))
        state = manager.restore(3, args=adacheck.RestoreArgs(target, transform=rules))
        assert_equal(state, trained_there)
    handler = adacheck.AdaCheckHandler(recorder, **OF_PARAMS)
    with support.manager_of(tmp_path / "b", handler) as other:
        for number in range(4, 24):
            state, trained_there = step(state), step(trained_there)
            other.save(number, args=adacheck.SaveArgs(state))
            assert_equal(state, trained_there)
        other.wait_until_finished()
        assert_equal(other.restore(23, args=adacheck.RestoreArgs(target)), trained_there)
        assert handler.restored.replayed_count


def test_the_save_after_a_transformed_restore_is_a_base(tmp_path):
    rules = layout.scan_layers("block_{i}", "blocks")
    manager, _ = saved(tmp_path, {})
    with manager:
        recorder = optimizer()
        shapes = manager.restore(3, args=adacheck.RestoreArgs(transform=rules))
        target = jax.eval_shape(lambda: train_state(recorder, shapes["params"]))
        state = manager.restore(3, args=adacheck.RestoreArgs(target, transform=rules))
    handler = adacheck.AdaCheckHandler(recorder, **OF_PARAMS)
    with support.manager_of(tmp_path, handler) as manager:
        state = manager.restore(3, args=adacheck.RestoreArgs(target, transform=rules))
        manager.save(4, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        assert isinstance(lineage.resolve(tmp_path / "4" / "default").manifest, BaseManifest)
        assert_equal(manager.restore(4, args=adacheck.RestoreArgs(target)), state)


def test_replicas_that_drifted_are_averaged(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        rules = [layout.average("copies")]
        found = manager.restore(3, args=adacheck.RestoreArgs(transform=rules))
    np.testing.assert_allclose(
        found["params"]["copies"], states[3]["params"]["copies"].mean(0), rtol=1e-6
    )


def test_what_would_lose_bits_is_refused_unless_it_may(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        for lossy in (layout.strip("table", 3), layout.cast("table", "bfloat16")):
            with pytest.raises(MismatchError, match=r"params/table.*lossy=True"):
                manager.restore(3, args=adacheck.RestoreArgs(transform=[lossy]))
        found = manager.restore(
            3, args=adacheck.RestoreArgs(transform=[layout.strip("table", 3, lossy=True)])
        )
        np.testing.assert_array_equal(found["params"]["table"], states[3]["params"]["table"][:3])
        rules = [layout.cast("table", "float32", trees=["ema"])]
        found = manager.restore(3, args=adacheck.RestoreArgs(transform=rules))
        assert found["ema"]["table"].dtype == np.float32
        assert found["params"]["table"].dtype == np.float32


def test_a_part_of_the_new_state_is_restored(tmp_path):
    rules = layout.scan_layers("block_{i}", "blocks")
    manager, states = saved(tmp_path, {})
    with manager:
        target = {"params": {"blocks": {"bias": jax.ShapeDtypeStruct((LAYERS, 8), jnp.float32)}}}
        args = adacheck.RestoreArgs(target, transform=rules, partial_restore=True)
        found = manager.restore(0, args=args)
    expected = np.stack([states[0]["params"][f"block_{i}"]["bias"] for i in range(LAYERS)])
    np.testing.assert_array_equal(found["params"]["blocks"]["bias"], expected)


def test_a_state_that_rules_do_not_make_is_told(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        args = adacheck.RestoreArgs(states[0], transform=layout.scan_layers("block_{i}", "blocks"))
        with pytest.raises(MismatchError, match=r"missing .*params/blocks/"):
            manager.restore(0, args=args)
        with pytest.raises(MismatchError, match="transform="):
            manager.restore(0, args=adacheck.RestoreArgs({"params": states[0]["params"]}))


def test_damage_is_found_before_a_transformation(tmp_path):
    manager, _ = saved(tmp_path, {})
    manager.close()
    for path in (tmp_path / "0" / "default").rglob("d/*"):
        path.write_bytes(support.with_flipped_data(path.read_bytes()))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as again:
        args = adacheck.RestoreArgs(transform=layout.scan_layers("block_{i}", "blocks"))
        with pytest.raises((IntegrityError, adacheck.FormatError)):
            again.restore(3, args=args)


def test_sums_in_the_update_are_told(tmp_path, caplog):
    recorder = adacheck.Recorder(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state = {"params": initial_params()}
    state["opt_state"] = recorder.init(state["params"])
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        with caplog.at_level(logging.WARNING):
            args = adacheck.RestoreArgs(transform=layout.scan_layers("block_{i}", "blocks"))
            manager.restore(0, args=args)
    assert "to rounding only" in caplog.text


class Block(nn.Module):
    """A transformer's block, as a scan calls it."""

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
        x = x + y
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x, _ = Block(name=f"Block_{i}")(x)
        return nn.Dense(5, name="head")(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = scan(name="ScanBlock_0")(x, None)
        return nn.Dense(5, name="head")(x)


def linen_state(model, recorder):
    params = model.init(jax.random.key(0), jnp.ones((2, 6, 16)))["params"]
    return {"params": params, "opt_state": recorder.init(params)}


def test_a_transformer_of_linen_is_scanned_and_unrolled(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-3))
    inputs = jax.random.normal(jax.random.key(5), (2, 6, 16))

    def step_of(model):
        @jax.jit
        def step(state):
            def loss(params):
                return jnp.mean(model.apply({"params": params}, inputs) ** 2)

            gradients = jax.grad(loss)(state["params"])
            updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

        return step

    rules = layout.scan_layers("Block_{i}", "ScanBlock_0")
    back = layout.unroll_layers("ScanBlock_0", "Block_{i}")
    state, step = linen_state(Unrolled(), recorder), step_of(Unrolled())
    with support.manager_of(tmp_path / "a", adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(3):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: linen_state(Scanned(), recorder))
        scanned = manager.restore(2, args=adacheck.RestoreArgs(target, transform=rules))
    outputs = [
        model.apply({"params": each["params"]}, inputs)
        for model, each in ((Unrolled(), state), (Scanned(), scanned))
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(2, args=adacheck.SaveArgs(scanned))
        manager.save(3, args=adacheck.SaveArgs(step_of(Scanned())(scanned)))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: linen_state(Unrolled(), recorder))
        assert_equal(manager.restore(2, args=adacheck.RestoreArgs(target, transform=back)), state)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Loop(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(8, 2, rngs=rngs)


class Scan(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layer(rngs):
            return Layer(rngs)

        self.layers = layer(rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)


def test_layers_of_nnx_are_scanned_and_unrolled(tmp_path):
    recorder = adacheck.Recorder(optax.adam(1e-2))

    def state_of(kind):
        params = nnx.state(kind(nnx.Rngs(0)), nnx.Param)
        return {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def step(state):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    state = state_of(Loop)
    with support.manager_of(tmp_path / "a", adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(3):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: state_of(Scan))
        rules = layout.scan_layers("layers/{i}", "layers")
        scanned = manager.restore(2, args=adacheck.RestoreArgs(target, transform=rules))
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(0, args=adacheck.SaveArgs(scanned))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: state_of(Loop))
        rules = layout.unroll_layers("layers", "layers/{i}")
        assert_equal(manager.restore(0, args=adacheck.RestoreArgs(target, transform=rules)), state)
