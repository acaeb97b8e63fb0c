"""What saves would cost: against hand-made sums, against the planner, and against real saves."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, RecorderError
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.tools.plan import redundancy_report
from tests import support

BFLOAT16 = jnp.bfloat16
LEFT_TO_THE_COMPILER = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))


NAMES = ("a", "b", "c")


@st.composite
def placements(draw, mesh_shape):
    """A PartitionSpec, its names in any order, and a shape that it cuts, empty axes among them."""
    rank = draw(st.integers(0, 3))
    sizes = dict(zip(NAMES, mesh_shape, strict=False))
    dealt = [[] for _ in range(rank)]
    for name in draw(st.permutations([*sizes])):
        draw(st.sampled_from([*dealt, []])).append(name)
    entries = [names[0] if len(names) == 1 else tuple(names) or None for names in dealt]
    shape = [math.prod(sizes[n] for n in names) * draw(st.integers(0, 3)) for names in dealt]
    return P(*entries), tuple(shape)


def spec_of(shape, dtype, mesh, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def on_mesh(tree, mesh, *spec):
    """Matrices are cut as told, everything else lies everywhere."""
    return jax.tree.map(
        lambda x: spec_of(x.shape, x.dtype, mesh, *(spec if len(x.shape) == 2 else ())), tree
    )


def too_many_axes():
    """An abstract leaf as other libraries make them; jax.ShapeDtypeStruct refuses this itself."""
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P(None, "x"))
    return types.SimpleNamespace(shape=(8,), dtype=np.dtype(np.float32), sharding=sharding)


def momentum_state(shape=(6, 4), dtype=None):
    """Params and one moment in float32, a bias of 4, and a step."""
    recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9), dtype=dtype)
    params = {
        "w": jax.ShapeDtypeStruct(shape, jnp.float32),
        "b": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    opt_state = jax.eval_shape(recorder.init, params)
    return {
        "params": params,
        "opt": opt_state,
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }, recorder


def test_a_small_example_by_hand():
    """4 devices, 2 a process. A matrix of 24 in quarters; a bias of 4 and 2 counters everywhere."""
    state, recorder = momentum_state((8, 3), dtype=BFLOAT16)
    state = on_mesh(state, AbstractMesh((4,), ("x",)), "x")
    report = redundancy_report(state, recorder, devices_per_process=2, max_deltas=3)
    params_bytes, step_bytes = (24 + 4) * 4, 4
    record_bytes, count_bytes = (24 + 4) * 2, 4
    assert (report.device_count, report.process_count, report.leaf_count) == (4, 2, 8)
    assert report.state_bytes == 2 * params_bytes + step_bytes
    assert report.held_bytes == 2 * (24 + 4 * 4) * 4 + 4 * step_bytes
    assert report.base_bytes == report.state_bytes + record_bytes + count_bytes
    assert report.computed_bytes == 2 * params_bytes
    assert report.record_bytes == record_bytes
    assert report.other_bytes == step_bytes + count_bytes
    assert report.delta_bytes == record_bytes + step_bytes + count_bytes
    assert report.amortised_bytes == (288 + 3 * 64) / 4
    assert report.memory_bytes == 2 * 288 // 2 + 3 * 64 // 2
    assert report.sampled_memory_bytes == 2 * 288 // 2 + 2 * 64 // 2
    assert report.program_bytes == 200_000_000 + 8 * 400_000
    assert report.disk_bytes == 2 * 288 + 3 * 64


@pytest.mark.first(1)
@pytest.mark.parametrize("make", [support.dict_run, support.linen_run, support.nnx_run])
def test_a_real_base_and_delta_store_the_leaves_that_were_foreseen(make, tmp_path):
    run = make(support.mesh_of((4, 2)))
    report = redundancy_report(support.abstract(run.state), run.recorder)
    assert report == redundancy_report(run.state), "fields of the state tell of the Recorder too"
    assert report.state_bytes == report.computed_bytes + report.other_bytes - 4  # the count
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        support.save_steps(manager, run, 3)
    base = manifest_file.read(tmp_path / "1" / "default")
    delta = manifest_file.read(tmp_path / "3" / "default")
    assert isinstance(delta, manifest.DeltaManifest)

    def stored_bytes(indices):
        leaves = [base.leaves[i] for i in indices]
        return sum(math.prod(leaf.shape) * leaf.itemsize_bytes for leaf in leaves)

    assert stored_bytes(range(len(base.leaves))) == report.base_bytes
    # of an nnx state some leaves that no update computes did not change, and so are not stored
    least_bytes = report.record_bytes if make is support.nnx_run else report.delta_bytes
    assert least_bytes <= stored_bytes(delta.stored) <= report.delta_bytes


@given(st.sampled_from([(8,), (4, 2), (2, 1, 3)]), st.data())
def test_every_shard_of_real_arrays_is_counted(mesh_shape, data):
    names, count = ("a", "b", "c")[: len(mesh_shape)], math.prod(mesh_shape)
    kinds = (AxisType.Explicit,) * len(mesh_shape)
    mesh = jax.make_mesh(mesh_shape, names, axis_types=kinds, devices=jax.devices()[:count])
    drawn = data.draw(st.lists(placements(mesh_shape), min_size=1, max_size=3))
    state = [
        jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
        for spec, shape in drawn
    ]
    report = redundancy_report(state)
    shards = [shard.data.nbytes for array in state for shard in array.addressable_shards]
    assert report.held_bytes == sum(shards)
    assert report.state_bytes == sum(array.nbytes for array in state)


def test_declared_extra_arguments_are_part_of_the_record():
    recorder = adacheck.Recorder(optax.sgd(0.1), extra_args={"value": jnp.zeros(3)})
    params = {"w": jax.ShapeDtypeStruct((5,), jnp.float32)}
    state = {"params": params, "opt": jax.eval_shape(recorder.init, params)}
    for known in (recorder, None):
        report = redundancy_report(state, known)
        assert (report.record_bytes, report.other_bytes) == (5 * 4 + 3 * 4, 4)
        assert report.state_bytes == 5 * 4


def key_spec(count, impl, mesh, *spec):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), count))
    return spec_of(keys.shape, keys.dtype, mesh, *spec)


X16 = AbstractMesh((16,), ("x",))
MANY = AbstractMesh((512, 8), ("x", "y"))


@pytest.mark.parametrize(
    ("state", "state_bytes", "held_bytes", "processes"),
    [
        ({"none": spec_of((0, 8), jnp.float32, X16)}, 0, 0, 2),
        ({"w": spec_of((16,), jnp.int8, X16), "step": 7, "x": np.zeros(3)}, 48, None, 2),
        ({"k": key_spec(16, "threefry2x32", X16, "x")}, 128, 128, 2),
        ({"k": key_spec(16, "rbg", X16)}, 256, 4096, 2),
        ({"k": jax.random.split(jax.random.key(0), 3)}, 24, 24, 1),
        ({"w": jax.ShapeDtypeStruct((5,), jnp.float32)}, 20, 20, 1),
        ({"w": spec_of((4096, 64), BFLOAT16, MANY, ("y", "x"))}, 2**19, 2**19, 512),
        ({"w": spec_of((4096, 64), BFLOAT16, MANY, "y")}, 2**19, 2**28, 512),
    ],
    ids=str,
)
def test_without_a_recorder_every_leaf_counts_and_nothing_is_said_of_deltas(
    state, state_bytes, held_bytes, processes
):
    report = redundancy_report(state)
    assert (report.state_bytes, report.base_bytes) == (state_bytes, state_bytes)
    if held_bytes is not None:
        assert report.held_bytes == held_bytes
    assert report.process_count == processes
    for name in ("record", "computed", "other", "amortised", "delta"):
        assert getattr(report, f"{name}_bytes") is None


def test_scalars_need_no_sharding_since_jax_gives_them_none():
    mesh = AbstractMesh((16,), ("x",), axis_types=(AxisType.Explicit,))
    recorder = adacheck.Recorder(optax.adam(0.1))
    params = {"w": spec_of((64,), jnp.float32, mesh, "x")}
    with jax.sharding.use_abstract_mesh(mesh):
        opt_state = jax.eval_shape(recorder.init, params)
    assert any(leaf.sharding is None for leaf in jax.tree.leaves(opt_state))
    report = redundancy_report({"params": params, "opt": opt_state}, recorder)
    assert report.delta_bytes == 64 * 4 + 4
    assert report.held_bytes == report.state_bytes == 3 * 64 * 4 + 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "expected a state with arrays in it, found dict"),
        (None, "expected a state with arrays in it, found NoneType"),
        ({"a": "text"}, "leaf a: expected an array .* found str"),
        ({"a": np.array(["x"])}, "leaf a: expected an array .* found <U1"),
        ({"a": {"b": object()}, "c": jnp.int8}, "leaf a/b: expected an array .* found object"),
        (
            {"a": spec_of((16,), jnp.float32, X16), "b": jax.ShapeDtypeStruct((8,), jnp.float32)},
            "leaf b: expected a sharding, as other leaves have one; 1 of 2 leaves have none",
        ),
        ({"a": spec_of((7,), jnp.float32, X16, "x")}, r"a: expected a sharding .* shape \(7,\)"),
        ({"a": too_many_axes()}, r"leaf a: expected a sharding that fits its shape \(8,\)"),
        (
            {"a": spec_of((8,), jnp.float32, LEFT_TO_THE_COMPILER, P.UNCONSTRAINED)},
            "leaves it to the compiler",
        ),
    ],
)
def test_what_cannot_be_counted_is_named(state, message):
    with pytest.raises(FormatError, match=message):
        redundancy_report(state)


def test_two_trees_that_may_be_the_params_have_to_be_told_apart():
    state, recorder = momentum_state()
    state["average"] = state["params"]
    for known in (recorder, None):
        with pytest.raises(RecorderError, match="Say which of them"):
            redundancy_report(state, known)
        report = redundancy_report(state, known, params_path="params")
        assert report.other_bytes == 28 * 4 + 4 + 4  # the average, the step and the count


@pytest.mark.parametrize("wrong", [{"devices_per_process": 0}, {"max_deltas": -1}])
def test_counts_below_their_least_are_errors(wrong):
    with pytest.raises(ValueError, match="expected devices_per_process"):
        redundancy_report({"a": np.zeros(3)}, **wrong)
