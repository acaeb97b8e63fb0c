"""Where the boxes of a leaf lie, who writes each, and where it goes in the writer's pack."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from adacheck_jax import redundancy, staging
from adacheck_jax.boxes import Box, grid
from adacheck_jax.errors import FormatError
from adacheck_jax.manifest import Encoding, Leaf
from adacheck_jax.sharding import Layout, layout_of, layout_of_array
from tests.strategies import boxes_in, cuts, elements, numbered, shape_of


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


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


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda s: f"{s.mesh.shape_tuple}{s.spec}")
@pytest.mark.parametrize("shape", [(16, 8), (8, 16, 3), (8, 0, 8)], ids=str)
@pytest.mark.parametrize("devices_each", [1, 2, 8])
def test_boxes_tile_the_array_and_name_every_process_that_holds_them(sharding, shape, devices_each):
    layout = layout_of(OnProcesses(sharding, devices_each), shape)
    boxes = grid(layout.cuts)
    assert len(boxes) == len(layout.replicas)
    if math.prod(shape):
        assert (sum(elements(box, shape).astype(int) for box in boxes) == 1).all()
    holders = dict(zip(boxes, layout.replicas, strict=True))
    found = {box: set() for box in boxes}
    for device, index in sharding.devices_indices_map(shape).items():
        found[Box.from_slices(index, shape)].add(device.id // devices_each)
    assert holders == {box: tuple(sorted(processes)) for box, processes in found.items()}


@pytest.mark.parametrize(
    ("sharding", "shape", "box_count"),
    [
        (named((8,)), (16, 8), 1),
        (named((8,), "a"), (16, 8), 8),
        (named((4, 2), None, "b"), (16, 8), 2),
        (named((4, 2), "a", "b"), (16, 8), 8),
        (named((4, 2)), (), 1),
        (named((4, 2), "a"), (0, 5), 1),
        (SingleDeviceSharding(jax.devices()[3]), (16, 8), 1),
        (SingleDeviceSharding(jax.devices()[3]), (), 1),
    ],
    ids=str,
)
def test_declared_replicas_fall_together(sharding, shape, box_count):
    layout = layout_of(sharding, shape)
    assert len(grid(layout.cuts)) == box_count
    assert layout.replicas == ((0,),) * box_count


@dataclass(frozen=True)
class OneShortShard:
    def devices_indices_map(self, shape):
        return {FakeDevice(0, 0): (slice(0, 3),)}


def test_a_sharding_that_leaves_elements_out_is_an_error():
    with pytest.raises(FormatError, match="do not tile"):
        layout_of(OneShortShard(), (4,))


def test_a_host_value_is_one_box_that_the_first_process_writes():
    assert layout_of_array(np.zeros((2, 3))) == Layout(((0, 2), (0, 3)), ((0,),))
    assert layout_of_array(np.zeros(())) == Layout((), ((0,),))


@st.composite
def layouts(draw, everywhere=False):
    """Layouts of several leaves over fake processes, and bytes an element."""
    process_count = draw(st.integers(1, 6))
    every = tuple(range(process_count))
    some = st.sets(st.sampled_from(every), min_size=1).map(lambda s: tuple(sorted(s)))
    found = []
    for each in draw(st.lists(cuts(max_length=40), min_size=1, max_size=8)):
        replicas = [every if everywhere else draw(some) for _ in grid(each)]
        found.append(Layout(each, tuple(replicas)))
    itemsizes_bytes = [draw(st.sampled_from([1, 2, 4, 8])) for _ in found]
    return found, itemsizes_bytes, every


def sizes_of(layout, itemsize_bytes):
    return [box.size * itemsize_bytes for box in grid(layout.cuts)]


def loads_of(owners, layouts, itemsizes_bytes, processes):
    loads = dict.fromkeys(processes, 0)
    for each, layout, itemsize_bytes in zip(owners, layouts, itemsizes_bytes, strict=True):
        for owner, size_bytes in zip(each, sizes_of(layout, itemsize_bytes), strict=True):
            loads[owner] += size_bytes
    return loads


@given(layouts(), st.data())
def test_every_box_has_one_owner_among_its_holders(drawn, data):
    layouts, itemsizes_bytes, _ = drawn
    first = data.draw(st.frozensets(st.integers(0, len(layouts) - 1)))
    owners = redundancy.assign_owners(layouts, itemsizes_bytes, first)
    for each, layout in zip(owners, layouts, strict=True):
        assert len(each) == len(grid(layout.cuts))
        for owner, holders in zip(each, layout.replicas, strict=True):
            assert owner in holders
    assert owners == redundancy.assign_owners(list(layouts), list(itemsizes_bytes), first)


@given(layouts(everywhere=True), st.data())
def test_bytes_are_balanced_over_the_processes_that_hold_everything(drawn, data):
    layouts, itemsizes_bytes, processes = drawn
    first = data.draw(st.frozensets(st.integers(0, len(layouts) - 1)))
    owners = redundancy.assign_owners(layouts, itemsizes_bytes, first)
    for chosen in (sorted(first), range(len(layouts))):  # the first leaves also among themselves
        part = [[x[i] for i in chosen] for x in (owners, layouts, itemsizes_bytes)]
        loads = loads_of(*part, processes)
        pieces = [size for i in chosen for size in sizes_of(layouts[i], itemsizes_bytes[i])]
        assert max(loads.values()) <= sum(pieces) / len(processes) + max(pieces, default=0)


def test_equal_boxes_are_dealt_out_evenly():
    layout = Layout(((0, 1, 2, 3, 4),), ((0, 1),) * 4)
    (owners,) = redundancy.assign_owners([layout], [4], frozenset())
    assert sorted(owners) == [0, 0, 1, 1]


@st.composite
def leaves(draw, process_count):
    each = draw(cuts())
    owners = [draw(st.integers(0, process_count - 1)) for _ in grid(each)]
    itemsize_bytes = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return Leaf("a", shape_of(each), "", itemsize_bytes, None, each, tuple(owners))


letters = st.sampled_from(sorted(Encoding))


@st.composite
def deltas(draw):
    """Leaves, the indices of the stored ones, and how each process stores its boxes of them."""
    process_count = draw(st.integers(1, 4))
    specs = draw(st.lists(leaves(process_count), max_size=5))
    stored = sorted(draw(st.sets(st.sampled_from(range(len(specs)))))) if specs else []
    return specs, stored, [draw(encodings_of(stored)) for _ in range(process_count)]


def encodings_of(stored):
    return st.lists(letters, min_size=len(stored), max_size=len(stored)).map("".join)


def written_of(specs, stored, encodings):
    """Every box that is written, in order: its leaf, itself, its owner and how it is stored."""
    return [
        (index, box, process, encodings[process][position])
        for position, index in enumerate(stored)
        for box, process in zip(grid(specs[index].cuts), specs[index].owners, strict=True)
        if encodings[process][position] != Encoding.SAME
    ]


@given(deltas())
def test_a_plan_gives_each_written_box_its_own_aligned_bytes(drawn):
    specs, stored, encodings = drawn
    plan = redundancy.plan_delta(specs, stored, encodings)
    found = [(e.leaf, e.box, e.process, e.encoding) for e in plan.extents]
    assert found == written_of(specs, stored, encodings)
    ends = {is_raw: [0] * len(encodings) for is_raw in (True, False)}
    for extent in plan.extents:
        size_bytes = np.prod(extent.box.shape, dtype=int) * specs[extent.leaf].itemsize_bytes
        assert extent.size_bytes == size_bytes
        assert extent.offset_bytes % redundancy.ALIGNMENT_BYTES == 0
        end = ends[extent.encoding is Encoding.RAW]
        padding_bytes = extent.offset_bytes - end[extent.process]
        assert 0 <= padding_bytes < redundancy.ALIGNMENT_BYTES
        end[extent.process] = extent.offset_bytes + extent.size_bytes
    assert (plan.raw_bytes, plan.difference_bytes) == (tuple(ends[True]), tuple(ends[False]))


@given(deltas(), st.data())
def test_what_a_process_writes_depends_on_its_own_encodings_alone(drawn, data):
    specs, stored, encodings = drawn
    process = data.draw(st.sampled_from(range(len(encodings))))
    others = [data.draw(encodings_of(stored)) for _ in encodings]
    others[process] = encodings[process]
    one, two = (redundancy.plan_delta(specs, stored, each) for each in (encodings, others))
    parts = [
        (
            [extent for extent in plan.extents if extent.process == process],
            plan.raw_bytes[process],
            plan.difference_bytes[process],
        )
        for plan in (one, two)
    ]
    assert parts[0] == parts[1]


@given(deltas(), st.data())
def test_leaves_that_a_process_does_not_write_move_none_of_its_other_boxes(drawn, data):
    specs, stored, encodings = drawn
    process = data.draw(st.sampled_from(range(len(encodings))))
    own = [(i, x) for i, x in zip(stored, encodings[process], strict=True) if x != Encoding.SAME]
    alone = [Encoding.SAME * len(own)] * len(encodings)
    alone[process] = "".join(letter for _, letter in own)
    every = redundancy.plan_delta(specs, stored, encodings)
    few = redundancy.plan_delta(specs, [i for i, _ in own], alone)
    assert few.extents == tuple(e for e in every.extents if e.process == process)
    assert few.raw_bytes[process] == every.raw_bytes[process]
    assert few.difference_bytes[process] == every.difference_bytes[process]


def test_a_delta_in_which_nothing_changed_takes_no_bytes():
    leaf = Leaf("a", (4,), "float32", 4, None, ((0, 2, 4),), (0, 1))
    plan = redundancy.plan_delta([leaf], [0], [Encoding.SAME, Encoding.SAME])
    assert plan == redundancy.WritePlan((), (0, 0), (0, 0))


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
    picks = staging.picks_of(array, wanted)
    assert [box for box, _, _ in picks] == wanted
    for box, position, at in picks:
        assert (np.asarray(array.addressable_data(position))[at] == plain[box.slices]).all()
    (staged,) = staging.stage({7: array}, {7: picks}).values()
    assert staged.keys() == set(wanted)
    for box, block in staged.items():
        assert block.shape == box.shape
        assert (block == plain[box.slices]).all()


def test_a_box_that_reaches_over_shards_is_not_picked():
    array = jax.device_put(numbered((16, 8)), named((8,), "a"))
    within, across = Box((2, 3), (4, 5)), Box((3, 0), (5, 8))
    picks = staging.picks_of(array, [across, within, Box.full((16, 8))])
    assert picks == ((within, 1, (slice(0, 2), slice(3, 5))),)


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.data())
def test_boxes_of_a_host_value_are_picked_from_it_and_copied(shape, data):
    value = numbered(shape)
    wanted = [Box.full(shape), data.draw(boxes_in(shape))]
    picks = staging.picks_of(value, wanted)
    assert [box for box, _, _ in picks] == wanted
    (staged,) = staging.stage({0: value}, {0: picks}).values()
    expected = {box: value[box.slices].copy() for box in wanted}
    value[...] = -1
    for box, block in expected.items():
        assert (staged[box] == block).all()
