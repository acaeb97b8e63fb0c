"""Layouts over meshes that are not there equal those of real ones."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adacheck_jax.device.sharding import Layout, layout_of, layout_on_mesh
from adacheck_jax.format.boxes import grid
from tests.device.test_sharding import SHARDINGS, OnProcesses

MESH_SHAPES = [(1,), (8,), (4, 2), (2, 4), (3, 2), (1, 8), (2, 2, 2), (2, 1, 3)]
NAMES = ("a", "b", "c")


@st.composite
def specs(draw, mesh_shape, rank):
    """Any PartitionSpec: names alone, several in any order, None, the empty tuple, none at all."""
    names = draw(st.permutations(NAMES[: len(mesh_shape)]))
    dealt = [[] for _ in range(rank)]
    for name in names:
        draw(st.sampled_from([*dealt, []])).append(name)
    entries = []
    for each in dealt:
        plain = each[0] if len(each) == 1 and draw(st.booleans()) else tuple(each)
        entries.append(plain or draw(st.sampled_from([None, ()])))
    while entries and not entries[-1] and draw(st.booleans()):
        entries.pop()
    return P(*entries)


@st.composite
def placements(draw, mesh_shape):
    """A PartitionSpec and a shape that it can cut, empty axes among them."""
    rank = draw(st.integers(0, 3))
    spec = draw(specs(mesh_shape, rank))
    sizes = dict(zip(NAMES, mesh_shape, strict=False))
    shape = []
    for entry in (*spec, *(None,) * (rank - len(spec))):
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        shape.append(math.prod(sizes[name] for name in names) * draw(st.integers(0, 3)))
    return spec, tuple(shape)


@given(st.sampled_from(MESH_SHAPES), st.integers(1, 9), st.data())
def test_an_abstract_mesh_cuts_as_the_real_one_does(mesh_shape, devices_each, data):
    spec, shape = data.draw(placements(mesh_shape))
    names, kinds = NAMES[: len(mesh_shape)], (AxisType.Explicit,) * len(mesh_shape)
    devices = jax.devices()[: math.prod(mesh_shape)]
    real = jax.make_mesh(mesh_shape, names, axis_types=kinds, devices=devices)
    abstract = AbstractMesh(mesh_shape, names, axis_types=kinds)
    expected = layout_of(OnProcesses(NamedSharding(real, spec), devices_each), shape)
    assert layout_on_mesh(NamedSharding(abstract, spec), shape, devices_each) == expected


@pytest.mark.parametrize("real", SHARDINGS, ids=lambda s: f"{s.mesh.shape_tuple}{s.spec}")
@pytest.mark.parametrize("devices_each", [1, 2, 3])
def test_the_order_of_axes_decides_who_holds_what(real, devices_each):
    abstract = NamedSharding(real.mesh.abstract_mesh, real.spec)
    expected = layout_of(OnProcesses(real, devices_each), (16, 8))
    assert layout_on_mesh(abstract, (16, 8), devices_each) == expected


def test_axes_that_are_reduced_hold_replicas():
    mesh = AbstractMesh((2, 3), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    reduced = NamedSharding(mesh, P("b", reduced={"a"}))
    assert layout_on_mesh(reduced, (6,), 2) == layout_on_mesh(NamedSharding(mesh, P("b")), (6,), 2)


def test_consecutive_devices_belong_to_one_process():
    mesh = AbstractMesh((2, 3), ("a", "b"))
    layout = layout_on_mesh(NamedSharding(mesh, P("b")), (6,), 2)
    # b = 0 is held by devices 0 and 3, b = 1 by 1 and 4, b = 2 by 2 and 5
    assert layout == Layout(((0, 2, 4, 6),), ((0, 1), (0, 2), (1, 2)))


def test_thousands_of_devices_hold_one_box_each():
    mesh = AbstractMesh((64, 8, 8), ("a", "b", "c"))
    layout = layout_on_mesh(NamedSharding(mesh, P("c", ("a", "b"))), (16, 1024), 8)
    assert len(grid(layout.cuts)) == 4096
    assert sorted(held for (held,) in layout.replicas) == [i // 8 for i in range(4096)]


@pytest.mark.parametrize(
    ("spec", "shape", "error", "message"),
    [
        (P("a"), (7,), ValueError, "evenly divide"),  # JAX cuts nothing unevenly
        (P("a", "b"), (8,), IndexError, "index"),
        (P(P.UNCONSTRAINED), (8,), ValueError, "compiler"),
        (P("a", unreduced={"b"}), (8,), ValueError, "parts of sums"),
    ],
    ids=["uneven", "too many dimensions", "left to the compiler", "sums"],
)
def test_what_jax_cannot_place_has_no_layout(spec, shape, error, message):
    kind = AxisType.Explicit if spec.unreduced else AxisType.Auto
    sharding = NamedSharding(AbstractMesh((4, 2), ("a", "b"), axis_types=(kind, kind)), spec)
    with pytest.raises(error, match=message):
        layout_on_mesh(sharding, shape, 8)
