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

from adacheck_jax import redundancy
from adacheck_jax.boxes import Box, grid
from adacheck_jax.errors import FormatError
from adacheck_jax.manifest import Leaf
from adacheck_jax.sharding import Layout, layout_of, layout_of_array
from tests.strategies import cuts, elements, shape_of


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


@given(st.data())
def test_a_plan_gives_each_stored_box_its_own_aligned_bytes(data):
    process_count = data.draw(st.integers(1, 4))
    specs = data.draw(st.lists(leaves(process_count), max_size=5))
    stored = sorted(data.draw(st.sets(st.sampled_from(range(len(specs)))))) if specs else []
    plan = redundancy.plan_delta(specs, stored, process_count)

    expected = [(i, box) for i in stored for box in grid(specs[i].cuts)]
    assert [(e.leaf, e.box) for e in plan.extents] == expected
    assert len(plan.process_bytes) == process_count
    ends = [0] * process_count
    for extent in plan.extents:
        spec = specs[extent.leaf]
        assert extent.process == spec.owners[grid(spec.cuts).index(extent.box)]
        assert extent.size_bytes == np.prod(extent.box.shape, dtype=int) * spec.itemsize_bytes
        assert extent.offset_bytes % redundancy.ALIGNMENT_BYTES == 0
        padding_bytes = extent.offset_bytes - ends[extent.process]
        assert 0 <= padding_bytes < redundancy.ALIGNMENT_BYTES
        ends[extent.process] = extent.offset_bytes + extent.size_bytes
    assert plan.process_bytes == tuple(ends)
