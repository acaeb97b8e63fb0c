"""Steps are restored into other layouts: every operation, tree and kind of step, bit by bit."""

import functools
import itertools
import logging
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax import layout
from adacheck_jax.device import trees
from adacheck_jax.errors import FormatError, IntegrityError, MismatchError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import lookup
from benchmarks.redundancy import with_master_weights
from tests import support
from tests.processes import launch, leaves

LAYERS = 2


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
    params = {**layers, "table": table, "copies": jnp.ones((2, 6)) * table[0, :6]}
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


def optimizer():
    """Adam of master weights, and a moving average of what it makes."""
    adam = optax.chain(optax.adam(1e-2), optax.ema(0.9))
    return adacheck.Recorder(with_master_weights(adam))


def train_state(recorder, params):
    params = jax.tree.map(jnp.array, params)
    ema = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0), "ema": ema}


def train_step_of(recorder):
    """Element-wise gradients, zero for zeros, so that a layout changes nothing about them."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        number = state["step"].astype(jnp.float32)
        gradients = jax.tree.map(
            lambda p: (p * (0.5 + 0.01 * number)).astype(p.dtype), state["params"]
        )
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

ORIGINS = (
    *("params/", "ema/", "opt_state/adacheck_record/"),
    *(f"opt_state/adacheck_inner/{name}" for name in ("master/", "inner/0/0/mu/", "inner/0/0/nu/")),
    "opt_state/adacheck_inner/inner/1/ema/",
)
"""Where the trees are that have the params' leaves."""

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


def mesh_of(devices):
    return jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])


def sharded_abstractly(tree, mesh):
    """Every leaf cut along the first of its axes that the mesh can cut."""

    def placed(leaf):
        cut = [k for k, length in enumerate(leaf.shape) if length % mesh.size == 0]
        axes = ["x" if [k] == cut[:1] else None for k in range(leaf.ndim)]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, tree)


def restored(manager, number, rules, mesh):
    """A step in another layout, on a mesh."""
    shapes = manager.restore(number, args=adacheck.RestoreArgs(rules=rules))
    args = adacheck.RestoreArgs(sharded_abstractly(shapes, mesh), rules=rules)
    return manager.restore(number, args=args)


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory):
    """Roots of each kind of step, and their states."""
    there = {}
    for kind, (number, options) in KINDS.items():
        root = tmp_path_factory.mktemp("saved") / "run"
        manager, states = saved(root, options)
        manager.close()
        there[kind] = root, number, states[number]
    return there


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("devices", [1, 8], ids=["one device", "eight devices"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLE)
def test_every_tree_is_transformed_and_comes_back(tmp_path, saved_steps, name, kind, devices):
    rules, back = TABLE[name]
    root, number, state = saved_steps[kind]
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        found = restored(manager, number, rules, mesh_of(devices))
        assert_equal(found, manager.restore(number, args=adacheck.RestoreArgs(rules=rules)))
    changed = leaves_of(found).keys() ^ leaves_of(state).keys()
    if changed:  # every tree has changed alike
        ends = [
            {path.removeprefix(origin) for path in changed if path.startswith(origin)}
            for origin in ORIGINS
        ]
        assert ends[0]
        assert all(each == ends[0] for each in ends)
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as other:
        other.save(0, args=adacheck.SaveArgs(found))
        other.wait_until_finished()
        again = other.restore(0, args=adacheck.RestoreArgs(rules=back))
    assert_equal(again, state)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("processes", "devices", "kinds", "names"),
    [(2, 1, ["delta"], ["all at once"]), (4, 2, list(KINDS), list(TABLE))],
    ids=["one", "all"],
)
def test_several_processes_transform_as_one_does(tmp_path, processes, devices, kinds, names):
    """Kinds of steps that they saved, in their hands and in those of one process."""
    (tmp_path / "kinds").write_text("\n".join(kinds))
    (tmp_path / "names").write_text("\n".join(names))
    worker = "tests.end_to_end.layouts_worker"
    launch("layouts", processes, tmp_path / "run", tmp_path / "out", devices, worker)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for kind, name in itertools.product(kinds, names):
        with support.manager_of(tmp_path / "run" / kind, adacheck.AdaCheckHandler()) as manager:
            args = adacheck.RestoreArgs(rules=TABLE[name][0], fallback_sharding=here)
            alone = manager.restore(KINDS[kind][0], args=args)
        of_several = leaves(Path(f"{tmp_path}/out-{kind}-{name}.npz"))
        assert of_several == [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(alone)]


@st.composite
def rule_sets(draw):
    """Rules that lose nothing, drawn at random, and those that undo them."""
    shapes = {path: leaf.shape for path, leaf in leaves_of(initial_params()).items()}
    rules, back, names = [], [], itertools.count()

    def add(rule, undo, changes):
        for gone in taken:
            del shapes[gone]
        shapes.update(changes)
        rules.append(rule)
        back.insert(0, undo)

    for _ in range(draw(st.integers(1, 6))):
        path = draw(st.sampled_from(sorted(shapes)))
        shape, to = shapes[path], f"new/{next(names)}"
        axis = draw(st.integers(0, len(shape) - 1))
        alike = [other for other in sorted(shapes) if shapes[other] == shape and other != path]
        taken = [path]
        kind = draw(st.sampled_from(["rename", "transpose", "pad", "repeat", "split", "together"]))
        if kind == "rename":
            add(layout.rename(path, to), layout.rename(to, path), {to: shape})
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            undo = layout.transpose(path, list(np.argsort(order)))
            add(layout.transpose(path, order), undo, {path: tuple(shape[k] for k in order)})
        elif kind == "pad":
            longer = shape[axis] + draw(st.integers(0, 3))
            changed = {path: (*shape[:axis], longer, *shape[axis + 1 :])}
            undo = layout.strip(path, shape[axis], axis=axis)
            add(layout.pad(path, longer, axis=axis), undo, changed)
        elif kind == "repeat":
            changed = {path: (*shape[:axis], 2, *shape[axis:])}
            undo = layout.average(path, axis=axis)
            add(layout.repeat(path, 2, axis=axis), undo, changed)
        elif kind == "split" and shape[axis] % 2 == 0:
            half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
            parts = [f"{to}/a", f"{to}/b"]
            groups = draw(st.sampled_from([g for g in (1, 2) if half[axis] % g == 0]))
            undo = layout.fuse(parts, path, axis=axis, groups=groups)
            rule = layout.split(path, parts, axis=axis, groups=groups)
            add(rule, undo, dict.fromkeys(parts, half))
        elif kind == "together" and alike:
            other = draw(st.sampled_from(alike))
            taken = [path, other]
            longer = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
            undo = layout.split(to, [path, other], axis=axis)
            add(layout.fuse([path, other], to, axis=axis), undo, {to: longer})
    return rules, back


@pytest.mark.slow
@settings(max_examples=max(2, settings().max_examples // 5))  # each saves and restores
@given(rule_sets(), st.sampled_from(sorted(KINDS)), st.sampled_from([1, 2, 8]))
def test_rules_drawn_at_random_come_back(tmp_path_factory, saved_steps, drawn, kind, devices):
    rules, back = drawn
    root, number, state = saved_steps[kind]
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        found = restored(manager, number, rules, mesh_of(devices)) if rules else state
    there = tmp_path_factory.mktemp("drawn")
    with support.manager_of(there, adacheck.AdaCheckHandler(delta="bits")) as other:
        other.save(0, args=adacheck.SaveArgs(found))
        other.wait_until_finished()
        args = adacheck.RestoreArgs(rules=back) if back else adacheck.RestoreArgs()
        assert_equal(other.restore(0, args=args), state)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["all at once", "scan", "split by heads", "transpose"])
def test_a_run_goes_on_as_if_it_had_been_trained_in_the_new_layout(tmp_path, name):
    rules, _ = TABLE[name]
    manager, _ = saved(tmp_path / "a", {})
    with manager:
        there = manager.restore(0, args=adacheck.RestoreArgs(rules=rules))
        recorder = optimizer()
        target = jax.eval_shape(lambda p: train_state(recorder, p), there["params"])
        state = manager.restore(0, args=adacheck.RestoreArgs(target, rules=rules))
        trained_there = state
        step = train_step_of(recorder)
        for _ in range(3):
            trained_there = step(jax.tree.map(jnp.copy, trained_there))
        state = manager.restore(3, args=adacheck.RestoreArgs(target, rules=rules))
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


@pytest.mark.slow
def test_the_save_after_a_transformed_restore_is_a_base(tmp_path):
    rules = layout.scan_layers("block_{i}", "blocks")
    manager, _ = saved(tmp_path, {})
    with manager:
        recorder = optimizer()
        shapes = manager.restore(3, args=adacheck.RestoreArgs(rules=rules))
        target = jax.eval_shape(lambda: train_state(recorder, shapes["params"]))
        state = manager.restore(3, args=adacheck.RestoreArgs(target, rules=rules))
    handler = adacheck.AdaCheckHandler(recorder, **OF_PARAMS)
    with support.manager_of(tmp_path, handler) as manager:
        state = manager.restore(3, args=adacheck.RestoreArgs(target, rules=rules))
        manager.save(4, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        assert isinstance(lookup.resolve(tmp_path / "4" / "default").manifest, BaseManifest)
        assert_equal(manager.restore(4, args=adacheck.RestoreArgs(target)), state)


def test_replicas_that_drifted_are_averaged(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        rules = [layout.average("copies")]
        found = manager.restore(3, args=adacheck.RestoreArgs(rules=rules))
    found, expected = leaves_of(found), leaves_of(states[3])
    for origin in ORIGINS:
        path = f"{origin}copies"
        exactness = 1e-2 if found[path].dtype == jnp.bfloat16 else 1e-6
        mean = np.float64(expected[path]).mean(0)
        np.testing.assert_allclose(np.float64(found[path]), mean, rtol=exactness)


def test_what_would_lose_bits_is_refused_unless_it_may(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        for lossy in (layout.strip("table", 3), layout.cast("table", "float8_e4m3fn")):
            with pytest.raises(MismatchError, match=r"params/table.*lossy=True"):
                manager.restore(3, args=adacheck.RestoreArgs(rules=[lossy]))
        found = manager.restore(
            3, args=adacheck.RestoreArgs(rules=[layout.strip("table", 3, lossy=True)])
        )
        np.testing.assert_array_equal(found["params"]["table"], states[3]["params"]["table"][:3])
        rules = [layout.cast("table", "float32", trees=["params"])]
        found = manager.restore(3, args=adacheck.RestoreArgs(rules=rules))
        assert found["params"]["table"].dtype == np.float32
        assert found["params"]["copies"].dtype == jnp.bfloat16


def test_data_types_are_what_the_rule_says_or_refused(tmp_path):
    manager, states = saved(tmp_path, {"delta": "bits"})
    with manager:
        for dtype in ("float31", "object", "key<fry>", "f4"):
            with pytest.raises(MismatchError, match=f"params/table.*found '{dtype}'"):
                manager.restore(3, args=adacheck.RestoreArgs(rules=[layout.cast("table", dtype)]))
        for dtype in (jnp.float32, np.dtype("float32"), "float32"):
            rules = [layout.cast("table", dtype, trees=["params"])]
            found = manager.restore(3, args=adacheck.RestoreArgs(rules=rules))
            expected = np.float32(states[3]["params"]["table"])
            assert_equal(found["params"]["table"], expected)
        rules = [layout.cast("table", "float64", trees=["params"])]
        with pytest.raises(MismatchError, match=r"found that jax makes float32.*jax_enable_x64"):
            manager.restore(3, args=adacheck.RestoreArgs(rules=rules))


def test_python_numbers_are_stacked_as_arrays(tmp_path):
    state = {"params": {"a_0": 0.5, "a_1": 1.5, "n": 3, "b": True}}
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        rules = [layout.stack("a_{i}", "a"), layout.repeat("n", 2), layout.repeat("b", 2)]
        found = manager.restore(0, args=adacheck.RestoreArgs(rules=rules))["params"]
    assert {path: np.asarray(leaf).tolist() for path, leaf in found.items()} == {
        **{"a": [0.5, 1.5], "n": [3, 3], "b": [True, True]}
    }


def test_a_part_of_the_new_state_is_restored(tmp_path):
    rules = layout.scan_layers("block_{i}", "blocks")
    manager, states = saved(tmp_path, {})
    with manager:
        target = {"params": {"blocks": {"bias": jax.ShapeDtypeStruct((LAYERS, 8), jnp.float32)}}}
        args = adacheck.RestoreArgs(target, rules=rules, partial_restore=True)
        found = manager.restore(0, args=args)
    expected = np.stack([states[0]["params"][f"block_{i}"]["bias"] for i in range(LAYERS)])
    np.testing.assert_array_equal(found["params"]["blocks"]["bias"], expected)


def test_a_state_that_rules_do_not_make_is_told(tmp_path):
    manager, states = saved(tmp_path, {})
    with manager:
        args = adacheck.RestoreArgs(states[0], rules=layout.scan_layers("block_{i}", "blocks"))
        with pytest.raises(MismatchError, match=r"saved, not asked for .*params/blocks/"):
            manager.restore(0, args=args)
        with pytest.raises(MismatchError, match="rules="):
            manager.restore(0, args=adacheck.RestoreArgs({"params": states[0]["params"]}))


def test_damage_is_found_before_a_transformation(tmp_path):
    manager, _ = saved(tmp_path, {})
    manager.close()
    for path in (tmp_path / "0" / "default").rglob("d/*"):
        path.write_bytes(support.with_flipped_data(path.read_bytes()))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as again:
        args = adacheck.RestoreArgs(rules=layout.scan_layers("block_{i}", "blocks"))
        with pytest.raises((IntegrityError, FormatError)):
            again.restore(3, args=args)


def test_sums_in_the_update_are_told(tmp_path, caplog):
    recorder = adacheck.Recorder(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state = {"params": initial_params()}
    state["opt_state"] = recorder.init(state["params"])
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        with caplog.at_level(logging.WARNING):
            args = adacheck.RestoreArgs(rules=layout.scan_layers("block_{i}", "blocks"))
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
        for i in range(2):
            x, _ = Block(name=f"Block_{i}")(x)
        return nn.Dense(5, name="head")(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="ScanBlock_0")(x, None)
        return nn.Dense(5, name="head")(x)


def linen_state(model, recorder):
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((2, 6, 16)))["params"]
    return {"params": params, "opt_state": recorder.init(params)}


@pytest.mark.slow
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
        scanned = manager.restore(2, args=adacheck.RestoreArgs(target, rules=rules))
    outputs = [
        jax.jit(model.apply)({"params": each["params"]}, inputs)
        for model, each in ((Unrolled(), state), (Scanned(), scanned))
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(2, args=adacheck.SaveArgs(scanned))
        manager.save(3, args=adacheck.SaveArgs(step_of(Scanned())(scanned)))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: linen_state(Unrolled(), recorder))
        assert_equal(manager.restore(2, args=adacheck.RestoreArgs(target, rules=back)), state)


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


@pytest.mark.slow
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
        scanned = manager.restore(2, args=adacheck.RestoreArgs(target, rules=rules))
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(0, args=adacheck.SaveArgs(scanned))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: state_of(Loop))
        rules = layout.unroll_layers("layers", "layers/{i}")
        assert_equal(manager.restore(0, args=adacheck.RestoreArgs(target, rules=rules)), state)
