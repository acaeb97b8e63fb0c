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
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax import layout
from adacheck_jax.device import trees
from adacheck_jax.errors import FormatError, IntegrityError, MismatchError
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
    "split by heads": (
        [layout.split("{b}/qkv", ["{b}/q", "{b}/kv"], sizes=[8, 16], groups=4)],
        [layout.fuse(["{b}/q", "{b}/kv"], "{b}/qkv", groups=4)],
    ),
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


def under(manager, number, rules, target=None, **options):
    """A step in another layout."""
    args = adacheck.RestoreArgs(target, rules=rules, **options)
    return manager.restore(number, args=args)


def restored(manager, number, rules, mesh):
    """A step in another layout, on a mesh."""
    shapes = under(manager, number, rules)
    return under(manager, number, rules, sharded_abstractly(shapes, mesh))


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


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["all at once", "split by heads", "stack"])
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


SCAN = layout.scan_layers("block_{i}", "blocks")


@pytest.mark.slow
def test_the_save_after_a_transformed_restore_is_a_base(tmp_path):
    manager, _ = saved(tmp_path, {})
    with manager:
        shapes = under(manager, 3, SCAN)
    recorder = optimizer()
    handler = adacheck.AdaCheckHandler(recorder, **OF_PARAMS)
    with support.manager_of(tmp_path, handler) as manager:
        target = jax.eval_shape(lambda: train_state(recorder, shapes["params"]))
        state = under(manager, 3, SCAN, target)
        manager.save(4, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        assert support.kinds_of(tmp_path) == "BDDDB"
        assert_equal(manager.restore(4, args=adacheck.RestoreArgs(target)), state)


@pytest.fixture
def opened(saved_steps):
    """A manager of a delta that replays updates, the delta's number, and its state."""
    root, number, state = saved_steps["delta"]
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        yield manager, number, state


def test_replicas_that_drifted_are_averaged(opened):
    manager, number, state = opened
    found, expected = (
        leaves_of(under(manager, number, [layout.average("copies")])),
        leaves_of(state),
    )
    for origin in ORIGINS:
        path = f"{origin}copies"
        exactness = 1e-2 if found[path].dtype == jnp.bfloat16 else 1e-6
        mean = np.float64(expected[path]).mean(0)
        np.testing.assert_allclose(np.float64(found[path]), mean, rtol=exactness)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (layout.strip("table", 3), r"params/table.*lossy=True"),
        (layout.cast("table", "float8_e4m3fn"), r"params/table.*lossy=True"),
        *(
            (layout.cast("table", dtype), f"params/table.*found '{dtype}'")
            for dtype in ("float31", "object", "key<fry>", "f4")
        ),
        (
            layout.cast("table", "float64", trees=["params"]),
            r"found that jax makes float32.*jax_enable_x64",
        ),
    ],
)
def test_rules_that_lose_bits_or_name_no_type_are_refused(opened, rule, message):
    with pytest.raises(MismatchError, match=message):
        under(*opened[:2], [rule])


def test_rules_that_may_lose_bits_and_types_of_every_form(opened):
    manager, number, state = opened
    found = under(manager, number, [layout.strip("table", 3, lossy=True)])
    np.testing.assert_array_equal(found["params"]["table"], state["params"]["table"][:3])
    for dtype in (jnp.float32, np.dtype("float32"), "float32"):
        found = under(manager, number, [layout.cast("table", dtype, trees=["params"])])
        assert_equal(found["params"]["table"], np.float32(state["params"]["table"]))
        assert found["params"]["copies"].dtype == jnp.bfloat16


def test_python_numbers_are_stacked_as_arrays(tmp_path):
    state = {"params": {"a_0": 0.5, "a_1": 1.5, "n": 3, "b": True}}
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        rules = [layout.stack("a_{i}", "a"), layout.repeat("n", 2), layout.repeat("b", 2)]
        found = under(manager, 0, rules)["params"]
    assert {path: np.asarray(leaf).tolist() for path, leaf in found.items()} == {
        **{"a": [0.5, 1.5], "n": [3, 3], "b": [True, True]}
    }


def test_a_part_of_the_new_state_is_restored_and_what_rules_do_not_make_is_told(opened):
    manager, number, state = opened
    target = {"params": {"blocks": {"bias": jax.ShapeDtypeStruct((LAYERS, 8), jnp.float32)}}}
    found = under(manager, number, SCAN, target, partial_restore=True)
    expected = np.stack([state["params"][f"block_{i}"]["bias"] for i in range(LAYERS)])
    np.testing.assert_array_equal(found["params"]["blocks"]["bias"], expected)
    with pytest.raises(MismatchError, match=r"saved, not asked for .*params/blocks/"):
        under(manager, number, SCAN, state)
    with pytest.raises(MismatchError, match="rules="):
        manager.restore(number, args=adacheck.RestoreArgs({"params": state["params"]}))


def test_damage_is_found_before_a_transformation(tmp_path):
    manager, _ = saved(tmp_path, {})
    manager.close()
    for path in (tmp_path / "0" / "default").rglob("d/*"):
        path.write_bytes(support.with_flipped_data(path.read_bytes()))
    with pytest.raises((IntegrityError, FormatError)):
        support.restored(tmp_path, 3, rules=SCAN)


def test_sums_in_the_update_are_told(tmp_path, caplog):
    recorder = adacheck.Recorder(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state = {"params": initial_params()}
    state["opt_state"] = recorder.init(state["params"])
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        with caplog.at_level(logging.WARNING):
            under(manager, 0, SCAN)
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


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)


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


INPUTS = np.random.default_rng(5).standard_normal((2, 6, 16)).astype(np.float32)
MODELS = {
    "linen": (Unrolled, Scanned, "Block_{i}", "ScanBlock_0"),
    "nnx": (Loop, Scan, "layers/{i}", "layers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_layers_of_flax_are_scanned_and_unrolled(tmp_path, kind):
    unrolled, scanned, each, together = MODELS[kind]
    recorder = adacheck.Recorder(optax.adamw(1e-2))

    def state_of(model):
        if kind == "nnx":
            params = nnx.state(model(nnx.Rngs(0)), nnx.Param)
        else:
            params = jax.jit(model().init)(jax.random.key(0), INPUTS)["params"]
        return {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def step(state):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    state = state_of(unrolled)
    with support.manager_of(tmp_path / "a", adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(3):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: state_of(scanned))
        found = under(manager, 2, layout.scan_layers(each, together), target)
    if kind == "linen":
        outputs = [
            jax.jit(model().apply)({"params": own["params"]}, INPUTS)
            for model, own in ((Unrolled, state), (Scanned, found))
        ]
        np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    with support.manager_of(tmp_path / "b", adacheck.AdaCheckHandler(recorder)) as manager:
        manager.save(2, args=adacheck.SaveArgs(found))
        manager.save(3, args=adacheck.SaveArgs(step(found)))
        manager.wait_until_finished()
        target = jax.eval_shape(lambda: state_of(unrolled))
        back = layout.unroll_layers(together, each)
        assert_equal(under(manager, 2, back, target), state)
