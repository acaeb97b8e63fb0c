"""Samples are alike on every mesh and by way of the host, and miss what they must."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.loops.programs import Gathering
from adacheck_jax.update.elements.sample_sites import SAMPLE_ELEMENTS, WHOLE_ELEMENTS, Sites
from adacheck_jax.update.elements.sampling import Taker, from_host
from tests.support import mesh_of

MESHES = [(1,), (8,), (4, 2)]
SHAPES = [(), (3,), (16, 8), (64, 32), (128, 128), (5000,), (8, 40, 32), (0, 4)]


def placed(value, mesh, is_cut):
    """A leaf cut along the first axes that the mesh divides, or replicated."""
    axes = [None] * value.ndim
    for axis, name in enumerate(mesh.axis_names):
        if is_cut and axis < value.ndim and value.shape[axis] % mesh.shape[name] == 0:
            axes[axis] = name
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))


def arrays_on(mesh, dtypes=("float32", "bfloat16", "int32")):
    """Leaves of all shapes, cut and replicated; of each shape every element another one."""
    result = []
    for shape in SHAPES:
        values = np.random.default_rng(3).permutation(math.prod(shape)).reshape(shape)
        for dtype in dtypes:
            result += [
                placed(jnp.asarray(values).astype(dtype), mesh, cut) for cut in (True, False)
            ]
    return result


def samplers(arrays):
    """Places, roles of all leaves of one type and of each leaf, and what takes their samples."""
    sites = Sites(range(len(arrays)), arrays)
    alike = {}
    for i, array in enumerate(arrays):
        alike.setdefault(str(array.dtype), []).append(i)
    roles = [*dict.fromkeys([*map(tuple, alike.values()), *((i,) for i in range(len(arrays)))])]
    taker = Taker(sites, roles, arrays)
    taker.compile()
    assert taker.is_ready
    return sites, roles, taker


def assert_same_samples(arrays, numbers=(0, 1, 5)):
    """Taken on the devices and by way of the host."""
    sites, roles, taker = samplers(arrays)
    for number in numbers:
        starts, others = sites.starts_at(number), sites.starts_at(number + 1)
        samples = [(taker.take(arrays, own), own) for own in (starts, others)]
        with (gathering := Gathering()).open():
            samples.append((taker.take(arrays, starts), starts))
        gathering.dispatch()
        for sample, own in samples:
            host = from_host(arrays, sites, own, roles).vectors(roles)
            found = sample.vectors(roles)
            assert [*found] == [*host] == roles
            for role, vector in found.items():
                assert vector.dtype == arrays[role[0]].dtype
                assert vector.shape == (len(sites.devices), sum(sites.sizes[i] for i in role))
                assert np.asarray(vector).tobytes() == host[role].tobytes()


DTYPES = ("float32", "bfloat16", "int32", "bool", "complex64", "float8_e4m3fn", "int4")


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("has_loops", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_devices_and_host_take_the_same_samples(monkeypatch, shape, axis_type, has_loops):
    if not has_loops:
        monkeypatch.setattr(xla_call, "wait", lambda: False)
    assert xla_call.wait() == has_loops
    dtypes = DTYPES if shape == (1,) else ("bfloat16", "complex64", "int4")
    assert_same_samples(arrays_on(mesh_of(shape, axis_type), dtypes))


def on_one_explicit_device():
    """Its axes may have any name."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    arrays = [jnp.arange(90.0 * 80).reshape(90, 80), jnp.float32(3)]
    return jax.device_put(arrays, [NamedSharding(mesh, PartitionSpec(*x)) for x in ("d", "")])


def on_several_meshes_and_the_host():
    arrays = [*arrays_on(mesh_of((4, 2)), ("float32",)), *arrays_on(mesh_of((1,)), ("float32",))]
    return [*arrays, jnp.ones((128, 128)), jnp.arange(7), np.arange(9000.0), np.float32(3)]


def of_pmap():
    values = np.random.default_rng(0).standard_normal((8, 90, 80)).astype(np.float32)
    return [jax.pmap(jnp.sin)(values), jax.pmap(jnp.cos)(values)]


def of_64_bits():
    return arrays_on(mesh_of((4, 2)), ("float64", "int64", "complex128"))


@pytest.mark.parametrize(
    "made",
    [
        *(on_one_explicit_device, on_several_meshes_and_the_host, of_pmap),
        pytest.param(of_64_bits, marks=pytest.mark.slow),
    ],
)
def test_leaves_of_any_kind_are_sampled_where_they_lie(made):
    with jax.enable_x64(made is of_64_bits):
        assert_same_samples(made())


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_small_leaves_are_sampled_whole_and_every_leaf_of_a_shape_at_the_same_places(shape):
    mesh = mesh_of(shape)
    arrays = arrays_on(mesh, ("float32", "int32"))
    sites, roles, taker = samplers(arrays)
    starts = sites.starts_at(4)
    vectors = taker.take(arrays, starts).vectors(roles)
    seen = {}
    for i, array in enumerate(arrays):
        values = vectors[i,]
        assert seen.setdefault(array.shape, values.tolist()) == values.tolist()
        if 0 < array.size <= WHOLE_ELEMENTS:
            assert {*values.reshape(-1).tolist()} >= {*range(array.size)}
        elif array.size:
            assert len({*values.reshape(-1).tolist()}) >= min(SAMPLE_ELEMENTS, array.size) * 0.9
    assert not sites.uncovered


def test_leaves_that_no_device_holds_alike_are_told():
    mesh = mesh_of((8,))
    by_rows = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, PartitionSpec("data")))
    by_columns = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, PartitionSpec(None, "data")))
    assert Sites([0, 1], [by_rows, by_columns]).uncovered == {0, 1}
    assert not Sites([0, 1], [by_rows, by_rows]).uncovered


def test_a_sample_is_of_the_state_that_it_was_taken_of_though_that_is_donated():
    arrays = [jnp.arange(20_000.0), jnp.zeros(3)]
    sites, roles, taker = samplers(arrays)
    starts = sites.starts_at(1)
    expected = from_host(arrays, sites, starts, [(0,)]).vectors([(0,)])[0,].copy()
    sample = taker.take(arrays, starts)
    scramble = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    jax.block_until_ready([scramble(x) for x in arrays])
    assert np.asarray(sample.vectors(roles)[0,]).tobytes() == expected.tobytes()


def sampled(sites, shape, number):
    """The elements of one leaf that a sample holds, as a mask."""
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    vector = from_host([values], sites, sites.starts_at(number), [(0,)]).vectors([(0,)])[0,]
    mask = np.zeros(math.prod(shape), bool)
    mask[vector.reshape(-1)] = True
    return mask


LARGE = st.sampled_from([(300, 300), (90_000,), (20, 30, 150), (5000,), (4, 65, 37)])


def sites_of(shape):
    return Sites([0], [jax.device_put(np.zeros(shape, np.int32), jax.devices()[0])])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**30), LARGE, st.booleans())
def test_as_many_neighbours_as_the_stride_are_always_met(seed, shape, is_thinned):
    sites = sites_of(shape).thinned() if is_thinned else sites_of(shape)
    (own,) = sites.shapes
    mask = sampled(sites, shape, seed)
    places = np.flatnonzero(mask)
    least = SAMPLE_ELEMENTS // 4 if is_thinned else SAMPLE_ELEMENTS
    assert least <= mask.sum() <= 2 * least
    assert np.diff(places).max() <= own.stride
    assert places[0] < own.stride
    assert places[-1] >= mask.size - own.stride


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([(5000,), (90, 80), (300, 70)]))
def test_an_element_is_missed_as_often_as_was_computed(seed, shape):
    """It is met with a probability of one to the stride."""
    sites, trials = sites_of(shape), 400
    (own,) = sites.shapes
    counts = sum(sampled(sites, shape, seed + number) for number in range(trials))[:-1]
    chance = 1 / own.stride
    spread = math.sqrt(trials * chance * (1 - chance))
    assert np.abs(counts - trials * chance).max() <= 6 * spread


def test_starts_depend_on_the_number_alone():
    one, two = (sites_of((300, 300)) for _ in range(2))
    assert one.starts_at(7).tolist() == two.starts_at(7).tolist()
    assert len({one.starts_at(number)[0, 0] for number in range(20)}) > 10


def test_thinned_places_are_fewer_of_large_leaves_alone_and_leave_the_others_as_they_are():
    arrays = arrays_on(mesh_of((4, 2)))
    sites = Sites(range(len(arrays)), arrays)
    before, thinned = sites.sizes, sites.thinned()
    for i, array in enumerate(arrays):
        is_large = array.size > WHOLE_ELEMENTS
        assert thinned.sizes[i] < before[i] if is_large else thinned.sizes[i] == before[i]
    assert sites.sizes == before
    assert thinned != sites
    starts = thinned.starts_at(3)
    roles = [(i,) for i in range(len(arrays))]
    vectors = from_host(arrays, thinned, starts, roles).vectors(roles)
    assert {i: vectors[i,].shape[1] for i in before} == thinned.sizes
