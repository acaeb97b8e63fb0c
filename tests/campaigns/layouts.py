"""Meshes of up to eight devices by name, and how leaves of any shape lie on them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

SHAPES = {
    **{"data": (8,), "sharded": (8,), "data_42": (4, 2), "sharded_42": (4, 2)},
    **{"sharded_24": (2, 4), "sharded_22": (2, 2), "explicit_42": (4, 2)},
}
"""Of each mesh; on those called ``data`` every leaf is replicated. ``one`` is a single device."""


@functools.cache
def mesh_of(layout: str) -> Mesh | None:
    """The mesh of a layout; None for one device."""
    if layout not in SHAPES:
        return None
    shape = SHAPES[layout]
    kind = AxisType.Explicit if layout.startswith("explicit") else AxisType.Auto
    devices = jax.devices()[: int(np.prod(shape))]
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def sharding_of(shape: tuple[int, ...], layout: str) -> Any:
    """Where a leaf lies: mesh axes cut the longest free axis that they divide."""
    mesh = mesh_of(layout)
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    spec: list[str | None] = [None] * len(shape)
    if not layout.startswith("data"):
        for name, length in mesh.shape.items():
            free = [
                (size, -axis)
                for axis, size in enumerate(shape)
                if spec[axis] is None and size % length == 0 and size > 8
            ]
            if free:
                spec[-max(free)[1]] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def shardings_of(tree: Any, layout: str) -> Any:
    return jax.tree.map(lambda leaf: sharding_of(tuple(leaf.shape), layout), tree)


def abstract_of(tree: Any, layout: str) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings_of(tree, layout),
    )
