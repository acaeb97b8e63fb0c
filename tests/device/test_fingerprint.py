import contextlib
import math
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from adacheck_jax.device import fingerprint, shard_sums, sharding, transfer
from adacheck_jax.device.loops import xla_call
from adacheck_jax.format import byte_loops
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.fingerprint import combine
from tests import support
from tests.strategies import cuts, shape_of

SIGNED = ["int2", "int4", "int8", "int16", "int32", "int64"]
INTEGERS = ["bool", *SIGNED, *(f"u{name}" for name in SIGNED)]
FLOATS = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
SMALL_FLOATS = [
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
NARROW = {"int2", "int4", "uint2", "uint4", "float4_e2m1fn"}
SHAPES = [
    *((), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4), (1025,), (5000,), (2049, 3), (3, 2049)),
    *((300, 257), (1, 1030, 2)),
]
OF_ALL_SHAPES = {"int4", "uint8", "bfloat16", "float32", "complex128"}
WHOLE_BYTES = ["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64", "complex128"]


@pytest.fixture(params=["loops", "xla"])
def engine(request, monkeypatch):
    """What sums up on the devices, which are CPU devices here: loops that XLA calls, or XLA."""
    assert xla_call.wait()
    if request.param == "xla":
        monkeypatch.setattr(xla_call, "is_ready", lambda: False)
    return request.param


def random_bits(shape, dtype, seed=0):
    """An array of this type with random bits: NaNs, infinities and denormals included."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype.name and dtype.kind == "V":
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        return rng.integers(low, high + 1, shape).astype(dtype)
    size = int(np.prod(shape))
    data = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    if dtype.name.startswith("float4"):
        data &= 0xF
    return data.view(dtype).reshape(shape)


def of_parts(array, boxes):
    """The fingerprint of a whole array from those of boxes that tile it."""
    return combine([fingerprint_of(array[b.slices], b.start) for b in boxes])


def device_sums(arrays):
    return shard_sums.Summing(arrays).dispatch(arrays)


def of_arrays(arrays):
    """Whole fingerprints by the device engine, whatever the devices: one replica of each box."""
    found = device_sums(dict(enumerate(arrays)))()
    totals = []
    for i, array in enumerate(arrays):
        held = sharding.holders_of(array.sharding, array.shape)
        totals.append(combine([found[i][each[0].device] for each in held.values()]))
    return totals


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *SMALL_FLOATS])
def test_host_and_device_agree_on_every_data_type_and_shape(dtype, engine):
    shapes = SHAPES if dtype in OF_ALL_SHAPES else [(), (0,), (3, 500)]
    arrays = [random_bits(shape, dtype) for shape in shapes]
    with jax.enable_x64(True):
        on_device = [jnp.asarray(array) for array in arrays]
    assert all(array.dtype == dtype for array in on_device)
    if engine == "loops" and dtype in NARROW:  # what shares a byte on a device is not for them
        assert not any(map(fingerprint.hashes_on_device, on_device))
    else:
        assert of_arrays(on_device) == [fingerprint_of(array) for array in arrays]


@pytest.mark.parametrize("wide", [False, True])
def test_the_value_is_the_formula_that_the_format_names(wide):
    """Wide elements count as words along a further axis."""
    array = random_bits((3, 550) if wide else (3, 2050), "float64" if wide else "uint32")
    words, expected = array.view(np.uint32).reshape(3, 550, 2) if wide else array, 0
    for place, word in np.ndenumerate(words):
        expected += math.prod(weight(*each) for each in enumerate(place)) * int(word)
    assert fingerprint_of(array) == expected % 2**64


def weight(axis, position):
    """Two rounds of SplitMix64 in plain Python: within a run of 1024, and of the run."""
    product = 1
    for level, part in enumerate((position % 1024, position // 1024)):
        z = part * 0x9E3779B97F4A7C15 + (2 * axis + level + 1) * 0xD1342543DE82EF95
        z %= 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        product *= (z ^ (z >> 31)) | 1
    return product


@st.composite
def long_cuts(draw):
    """Cut points of an axis of several runs, beside others that are not cut."""
    points = [(0, n) for n in draw(st.sampled_from([(), (1,), (3,), (300,)]))]
    inner = sorted(draw(st.sets(st.integers(1, 6000), min_size=1, max_size=4)))
    points.insert(draw(st.integers(0, len(points))), (0, *inner))
    return tuple(points)


@given(st.one_of(cuts(max_length=40), long_cuts()), st.sampled_from(WHOLE_BYTES))
def test_parts_of_any_grid_add_up_to_the_whole(cuts, dtype):
    array = random_bits(shape_of(cuts), dtype)
    assert of_parts(array, grid(cuts)) == fingerprint_of(array)


@given(cuts(max_length=8), st.sampled_from(WHOLE_BYTES), st.data())
def test_any_flipped_bit_changes_the_value(cuts, dtype, data):
    shape = tuple(max(1, n) for n in shape_of(cuts))
    array = random_bits(shape, dtype)
    changed = array.copy()
    raw = changed.reshape(-1).view(np.uint8)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint_of(changed) != fingerprint_of(array)


def test_a_view_that_is_not_contiguous_has_the_value_of_its_copy():
    array = random_bits((40, 60, 2), "float64")
    for view in (array[::2, 5:], array.T, np.asfortranarray(array)):
        assert fingerprint_of(view) == fingerprint_of(view.copy(order="C"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("mesh_shape", "specs"),
    [
        ((8,), [P(), P("a"), P(None, "a")]),
        ((4, 2), [P("a", "b"), P("b", "a"), P(("a", "b")), P(None, "b"), P("a")]),
        ((2, 2, 2), [P("a", ("b", "c")), P("c"), P(("c", "a"), "b")]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.usefixtures("engine")
def test_the_value_is_the_same_under_every_sharding(mesh_shape, specs, dtype, axis_type):
    array = random_bits((16, 2048), dtype)
    names = ("a", "b", "c")[: len(mesh_shape)]
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(axis_type,) * len(names))
    sharded = [jax.device_put(array, NamedSharding(mesh, spec)) for spec in specs]
    assert of_arrays(sharded) == [fingerprint_of(array)] * len(specs)


def some_arrays(width=24):
    """Arrays on two meshes of other devices, axis types and orders, and on one device."""
    devices = jax.devices()
    four = jax.make_mesh(
        (2, 2), ("a", "b"), devices=devices[5:1:-1], axis_types=(AxisType.Auto,) * 2
    )
    eight = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    places = [
        NamedSharding(four, P("b", "a")),
        NamedSharding(eight, P(None, "x")),
        NamedSharding(four, P(("b", "a"))),
        NamedSharding(eight, P()),
        SingleDeviceSharding(devices[6]),
    ]
    return [jax.device_put(random_bits((16, width), "float32", i), s) for i, s in enumerate(places)]


@pytest.mark.parametrize("shape", [None, (8,), (2, 4)], ids=str)
@pytest.mark.usefixtures("engine")
def test_arrays_on_several_sets_of_devices_are_fingerprinted_at_once(shape):
    """Whatever mesh the caller has set."""
    arrays, ambient = some_arrays(), contextlib.nullcontext()
    if shape is not None:
        ambient = jax.set_mesh(support.mesh_of(shape))
    with ambient:
        assert of_arrays(arrays) == [fingerprint_of(np.asarray(array)) for array in arrays]


@pytest.mark.usefixtures("engine")
def test_shards_of_unequal_shapes_are_fingerprinted_one_by_one():
    """No sharding of jax makes them today, so this array only looks like one."""
    array = random_bits((16, 6), "bfloat16")
    shards = [
        SimpleNamespace(index=(slice(a, b), slice(None)), device=device, data=data)
        for (a, b), device in zip([(0, 1), (1, 5), (5, 16)], jax.devices(), strict=False)
        for data in [jax.device_put(array[a:b], device)]
    ]
    uneven = SimpleNamespace(
        shape=array.shape,
        dtype=array.dtype,
        sharding=SimpleNamespace(device_set={*jax.devices()}, is_fully_addressable=False),
        addressable_shards=shards,
    )
    sums = device_sums({5: uneven})()[5]
    assert combine(list(sums.values())) == fingerprint_of(array)
    assert list(sums) == [0, 1, 2]


@pytest.mark.usefixtures("engine")
def test_a_second_save_compiles_nothing(caplog):
    with jax.log_compiles():  # of shapes that no other test has compiled
        of_arrays(some_arrays(width=40))
        assert any("ompil" in record.message for record in caplog.records)
        again = some_arrays(width=40)
        caplog.clear()
        of_arrays(again)
    assert [record.message for record in caplog.records if "ompil" in record.message] == []


def picks_of(arrays):
    """Picks of all boxes, by leaf index."""
    return {i: transfer.picks_of(x, sharding.distinct_boxes(x)) for i, x in arrays.items()}


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_parts_take_of_replicas_that_differ_the_one_that_is_staged(monkeypatch, on_device):
    """Otherwise a step whose replicas differ could not be verified when it is restored."""
    monkeypatch.setattr(fingerprint, "hashes_on_device", lambda array: on_device)
    mesh = jax.make_mesh((2, 4), ("a", "b"), devices=jax.devices()[::-1])
    array = jax.make_array_from_single_device_arrays(
        (8,),
        NamedSharding(mesh, P("a")),
        [
            jax.device_put(random_bits((4,), "float32", i), d)
            for i, d in enumerate(mesh.devices.flat)
        ],
    )
    boxes = sharding.distinct_boxes(array)
    picks = {0: transfer.picks_of(array, boxes[1:])}
    (block,) = transfer.stage({0: array}, picks)[0].values()
    parts = fingerprint.Contributions({0: array}, picks, every_replica=True)
    array.delete()
    assert parts.sums() == {0: fingerprint_of(block, boxes[1].start)}
    assert {box: len(each) for box, each in parts.replicas[0].items()} == dict.fromkeys(boxes, 4)
    assert len({total for each in parts.replicas[0].values() for total in each.values()}) == 8


def test_the_engines_find_the_same_sums_of_replicas(monkeypatch):
    arrays = dict(enumerate(some_arrays()))
    picks, found = picks_of(arrays), []
    for on_device in (False, True):
        monkeypatch.setattr(fingerprint, "hashes_on_device", lambda array, each=on_device: each)
        parts = fingerprint.Contributions(arrays, picks, every_replica=True)
        found.append((parts.sums(), parts.replicas))
    assert found[0] == found[1]
    assert found[0][1].keys() == {3}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_leaf_of_which_a_process_has_nothing_is_nothing(on_device, monkeypatch):
    """All processes report of all leaves; the sums of some add up to those of the others."""
    monkeypatch.setattr(fingerprint, "hashes_on_device", lambda _: on_device)
    arrays = {0: jnp.arange(8.0), 1: jnp.ones(3)}
    picks = picks_of(arrays)
    every = fingerprint.Contributions(arrays, picks).sums()
    assert fingerprint.Contributions(arrays, {**picks, 0: ()}).sums() == {**every, 0: 0}


def test_no_replica_is_hashed_twice(monkeypatch):
    array = jax.device_put(jnp.arange(64.0), NamedSharding(jax.make_mesh((8,), ("x",)), P()))
    picks, calls = picks_of({0: array}), []
    monkeypatch.setattr(fingerprint, "hashes_on_device", lambda _: False)
    summed = byte_loops.Fingerprints
    monkeypatch.setattr(byte_loops, "Fingerprints", lambda x: calls.extend(x) or summed(x))
    for every_replica, count in ((False, 1), (True, 8)):
        calls.clear()
        fingerprint.Contributions({0: array}, picks, every_replica=every_replica).sums()
        assert len(calls) == count


def test_the_guard_waits_for_a_replica_that_is_just_being_taken(monkeypatch):
    """Else the caller donates what the thread that sums up is about to read."""
    mesh = support.mesh_of((4, 2))
    whole = NamedSharding(mesh, P())
    array = jax.device_put(np.arange(128, dtype=np.float32), whole)
    pick = (Box.full((128,)), 0, (slice(0, 128),))
    parts = fingerprint.Contributions(
        {0: array},
        {0: [pick]},
        every_replica=True,
        copied={0: array},
        summing=shard_sums.Summing({}),
    )
    taking, go_on, take = threading.Event(), threading.Event(), transfer.Staged.__getitem__

    def slowly(staged, index):
        if staged is parts._others and threading.current_thread().name == "sums":
            taking.set()
            assert go_on.wait(60)
        return take(staged, index)

    monkeypatch.setattr(transfer.Staged, "__getitem__", slowly)
    sums = threading.Thread(target=parts.sums, name="sums")
    sums.start()
    assert taking.wait(60)
    guard = threading.Thread(target=parts.wait)
    guard.start()
    guard.join(0.2)
    assert guard.is_alive()
    go_on.set()
    guard.join(60)
    sums.join(60)
    assert not guard.is_alive()
    assert len(parts.replicas[0][pick[0]]) == 8
