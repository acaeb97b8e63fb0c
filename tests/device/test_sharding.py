"""Where the boxes of a leaf lie, and who writes each."""

import math
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from adacheck_jax.device import ownership, transfer
from adacheck_jax.device.sharding import Layout, layout_of, layout_of_array
from adacheck_jax.errors import FormatError
from adacheck_jax.format import boxes
from adacheck_jax.format.boxes import Box, grid
from tests.strategies import boxes_in, cuts, elements, numbered


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"


@dataclass(frozen=True)
class OnProcesses:
    """A sharding whose devices belong to fake processes, this many devices each."""

    sharding: jax.sharding.Sharding
    devices_each: int

    def devices_indices_map(self, shape):
        return {
            FakeDevice(device.id, device.id // self.devices_each): index
            for device, index in self.sharding.devices_indices_map(shape).items()
        }


def named(mesh_shape, *spec):
    names = ("a", "b", "c")[: len(mesh_shape)]
    count = math.prod(mesh_shape)
    return NamedSharding(jax.make_mesh(mesh_shape, names, devices=jax.devices()[:count]), P(*spec))


SHARDINGS = [
    named((8,)),
    named((8,), "a"),
    named((8,), None, "a"),
    named((4, 2), "a", "b"),
    named((4, 2), "b", "a"),
    named((4, 2), ("a", "b")),
    named((4, 2), ("b", "a")),
    named((4, 2), None, "b"),
    named((2, 2, 2), "c", ("b", "a")),
    named((2, 2, 2), "b"),
    named((1, 1), "a", "b"),
]


ON_ONE = SingleDeviceSharding(jax.devices()[3])
PLACED = [(each, shape) for each in SHARDINGS for shape in [(16, 8), (8, 16, 3), (8, 0, 8)]]
PLACED += [(named((4, 2)), ()), (named((4, 2), "a"), (0, 5)), (ON_ONE, (16, 8)), (ON_ONE, ())]


@pytest.mark.parametrize(("sharding", "shape"), PLACED, ids=str)
@pytest.mark.parametrize("devices_each", [1, 2, 8])
def test_boxes_tile_the_array_and_name_every_process_that_holds_them(sharding, shape, devices_each):
    layout = layout_of(OnProcesses(sharding, devices_each), shape)
    boxes = grid(layout.cuts)
    if math.prod(shape):
        assert (sum(elements(box, shape).astype(int) for box in boxes) == 1).all()
    found = {box: set() for box in boxes}
    for device, index in sharding.devices_indices_map(shape).items():
        found[Box.from_slices(index, shape)].add(device.id // devices_each)
    assert layout.replicas == tuple(tuple(sorted(found[box])) for box in boxes)


@dataclass(frozen=True)
class OneShortShard:
    def devices_indices_map(self, shape):
        return {FakeDevice(0, 0): (slice(0, 3),)}


def test_a_sharding_that_leaves_elements_out_is_an_error():
    with pytest.raises(FormatError, match="do not tile"):
        layout_of(OneShortShard(), (4,))


def test_a_host_value_is_one_box_that_every_process_holds():
    assert layout_of_array(np.zeros((2, 3))) == Layout(((0, 2), (0, 3)), ((0,),))
    assert layout_of_array(np.zeros(())) == Layout((), ((0,),))


@st.composite
def layouts(draw):
    """Layouts of several leaves over fake processes, whether all hold all; and bytes an element."""
    every = tuple(range(draw(st.integers(1, 6))))
    is_everywhere = draw(st.booleans())
    some = st.sets(st.sampled_from(every), min_size=1).map(lambda s: tuple(sorted(s)))
    found = []
    for each in draw(st.lists(cuts(max_length=40), min_size=1, max_size=8)):
        replicas = [every if is_everywhere else draw(some) for _ in grid(each)]
        found.append(Layout(each, tuple(replicas)))
    return found, [draw(st.sampled_from([1, 2, 4, 8])) for _ in found], every, is_everywhere


@given(layouts(), st.data())
def test_every_box_has_one_owner_among_its_holders_and_who_holds_everything_has_its_share(
    drawn, data
):
    layouts, itemsizes_bytes, processes, is_everywhere = drawn
    first = data.draw(st.frozensets(st.integers(0, len(layouts) - 1)))
    shares = ownership.share_out(layouts, itemsizes_bytes, first)
    assert shares == ownership.share_out([*layouts], [*itemsizes_bytes], first)
    for share, layout in zip(shares, layouts, strict=True):
        assert share.cuts == layout.cuts  # none of them is large enough to be cut up
        assert all(map(operator.contains, layout.replicas, share.owners))
    for chosen in (first, range(len(layouts))):  # the first leaves also among themselves
        loads, largest = dict.fromkeys(processes, 0), 0
        for i in chosen:
            for owner, box in zip(shares[i].owners, grid(layouts[i].cuts), strict=True):
                loads[owner] += box.size * itemsizes_bytes[i]
                largest = max(largest, box.size * itemsizes_bytes[i])
        assert not is_everywhere or max(loads.values()) - min(loads.values()) <= largest


@st.composite
def large_layouts(draw):
    """Layouts that are worth cutting up: boxes of a megabyte and more, held by several."""
    pieces = [draw(st.integers(1, 4)) for _ in range(2)]
    lengths = [draw(st.sampled_from([96, 512, 1000, 1024])) for _ in pieces]
    each = tuple(tuple(range(0, n * k + 1, n)) for n, k in zip(lengths, pieces, strict=True))
    every = range(draw(st.integers(1, 8)))
    some = st.sets(st.sampled_from(every), min_size=1).map(lambda s: tuple(sorted(s)))
    return Layout(each, tuple(draw(some) for _ in grid(each)))


@pytest.mark.slow
@given(large_layouts(), st.sampled_from([1, 4, 16]))
def test_large_boxes_are_cut_up_among_those_who_hold_them(layout, itemsize_bytes):
    share, again = ownership.share_out([layout] * 2, [itemsize_bytes] * 2, frozenset({1}))
    pieces = list(zip(grid(share.cuts), share.owners, strict=True))
    was_cut = share.cuts != layout.cuts
    for box, holders in zip(grid(layout.cuts), layout.replicas, strict=True):
        inside = [(piece, owner) for piece, owner in pieces if box.contains(piece)]
        assert sum(piece.size for piece, _ in inside) == box.size
        assert {owner for _, owner in inside} <= set(holders)
        if was_cut:
            sizes = [sum(p.size for p, owner in inside if owner == o) for _, o in inside]
            assert max(sizes) < box.size  # nobody writes all of it
            assert min(piece.size for piece, _ in inside) * itemsize_bytes >= 1 << 20
            if len(inside) == len(holders):  # each process sees for itself whether leaves are equal
                others = zip(grid(again.cuts), again.owners, strict=True)
                assert inside == [(p, owner) for p, owner in others if box.contains(p)]


def test_a_leaf_that_everyone_holds_is_written_in_equal_parts():
    layout = Layout(((0, 4096), (0, 1024)), (tuple(range(8)),))  # 2 MiB for each
    (share,) = ownership.share_out([layout], [4], frozenset())
    assert share.owners == tuple(range(8))
    assert share.cuts == (tuple(range(0, 4097, 512)), (0, 1024))


@given(cuts(max_length=40), st.sampled_from([1, 4]), st.integers(1, 200))
def test_every_box_consists_of_whole_chunks(each, itemsize_bytes, max_bytes):
    chunk = boxes.chunk_shape(each, itemsize_bytes, max_bytes)
    assert len(chunk) == len(each)
    for points, length in zip(each, chunk, strict=True):
        assert all(point % length == 0 for point in points[:-1])
        assert length >= 1


def test_chunks_stay_below_the_bound_where_boxes_can_be_cut():
    assert boxes.chunk_shape(((0, 50257), (0, 768)), 4, 1 << 20) == (341, 768)
    assert boxes.chunk_shape(((0, 512, 1024), (0, 1024)), 4, 1 << 20) == (256, 1024)
    assert boxes.chunk_shape(((0, 4, 8, 10), (0, 3)), 4) == (4, 3)
    assert boxes.chunk_shape((), 4, 1) == ()


def parts_of(box):
    """Boxes within a box, in the same coordinates."""
    return boxes_in(box.shape).map(lambda part: part.relative_to([-start for start in box.start]))


@given(st.sampled_from(SHARDINGS), st.sampled_from([(16, 8), (8, 16, 3)]), st.data())
def test_a_box_within_a_shard_is_picked_and_staged_from_there(sharding, shape, data):
    plain = numbered(shape).astype(np.int32)
    array = jax.device_put(plain, sharding)
    shards = grid(layout_of_array(array).cuts)
    wanted = [*shards]
    for _ in range(3):
        wanted.append(data.draw(parts_of(data.draw(st.sampled_from(shards)))))
    picks = transfer.picks_of(array, [*wanted, Box.full(shape)])
    is_whole = len(shards) == 1  # else it reaches over shards, and is not picked
    assert [box for box, _, _ in picks] == wanted + [Box.full(shape)] * is_whole
    for box, position, at in picks:
        assert (np.asarray(array.addressable_data(position))[at] == plain[box.slices]).all()
    (staged,) = transfer.stage({7: array}, {7: picks}).values()
    assert staged.keys() == set(wanted)
    for box, block in staged.items():
        assert block.shape == box.shape
        assert (block == plain[box.slices]).all()


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.data())
def test_boxes_of_a_host_value_are_picked_from_it_and_copied(shape, data):
    value = numbered(shape)
    wanted = [Box.full(shape), data.draw(boxes_in(shape))]
    picks = transfer.picks_of(value, wanted)
    assert [box for box, _, _ in picks] == wanted
    (staged,) = transfer.stage({0: value}, {0: picks}).values()
    expected = {box: value[box.slices].copy() for box in wanted}
    value[...] = -1
    for box, block in expected.items():
        assert (staged[box] == block).all()


@pytest.mark.parametrize("is_read_in_place", [True, False], ids=["host", "accelerator"])
def test_an_array_is_committed_as_another_one_is(monkeypatch, is_read_in_place):
    """Wherever it lies, with all its bits; also where it may take another program."""
    monkeypatch.setattr(transfer, "on_accelerator", lambda _: not is_read_in_place)
    device = jax.devices()[2]
    with jax.enable_x64(True):
        values = [jnp.arange(5).astype(name) for name in ("int4", "float64", "bfloat16", "bool")]
        values += [jax.random.key(3), jnp.full(2, jnp.nan), jnp.uint64(7)]
        arrays = [jax.device_put(each, device) for each in values]
        with jax.default_device(device):
            loose = [transfer.keyed(jax.device_put(np.asarray(transfer.raw(x))), x) for x in values]
    made = [transfer.like(*each) for each in zip(arrays, loose, strict=True)]
    for x, y, wanted in zip(made, arrays, loose, strict=True):
        assert (x.committed, y.committed, x.devices()) == (False, True, {device})
        assert (x.dtype, x.sharding) == (wanted.dtype, wanted.sharding)
        assert np.asarray(transfer.raw(x)).tobytes() == np.asarray(transfer.raw(y)).tobytes()
    first = arrays[0]
    for other in (first, np.zeros(5), jnp.zeros(5, "int4"), first.sharding):
        assert transfer.like(first, other) is first  # committed, on the host, or elsewhere
