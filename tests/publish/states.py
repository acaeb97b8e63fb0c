"""Params that move by small steps, as their masters in float32 do."""

from __future__ import annotations

import uuid
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import AnyPath, Location
from tests.support import mesh_of

SHAPES = {"layer/kernel": (64, 32), "layer/bias": (32,), "embedding": (128, 16), "scale": ()}


class Training:
    """Params of a training without a model.

    Args:
        seed: seed of all that is random.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._master = {k: 0.02 * self._rng.standard_normal(v) for k, v in SHAPES.items()}

    def step(self, size: float = 1e-5) -> None:
        for name, shape in SHAPES.items():
            self._master[name] = self._master[name] - size * self._rng.standard_normal(shape)

    def params(self, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
        """Params in bfloat16, the scale in float32; on one device, or on a mesh."""
        tree = nested(
            {
                k: jnp.asarray(v, jnp.float32 if k == "scale" else jnp.bfloat16)
                for k, v in self._master.items()
            }
        )
        return tree if mesh is None else jax.device_put(tree, shardings(mesh))


MOVING = {"cut": (66, 32), "large": (2048, 1200), "one": (7,), "scalar": (), "small": (16, 8)}
"""Shapes of the leaves of :func:`moving`; the large one is cut among processes that all hold it."""


def moving(version: int) -> dict[str, np.ndarray]:
    """The weights of a version: a twentieth of the elements move from one to the next."""
    found = {}
    for n, (name, shape) in enumerate(MOVING.items()):
        array = np.asarray(np.random.default_rng(n).standard_normal(shape, np.float32))
        for each in range(version):
            is_moved = np.random.default_rng([n, each]).random(shape) < 0.05
            array = np.where(is_moved, array + np.float32(1e-3), array)
        found[name] = np.asarray(array).astype(jnp.bfloat16 if n % 2 else np.float32)
    return found


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    kernel, bias = leaves["layer/kernel"], leaves["layer/bias"]
    layer = {"kernel": kernel, "bias": bias}
    return {"layer": layer, "embedding": leaves["embedding"], "scale": leaves["scale"]}


def shardings(mesh: jax.sharding.Mesh) -> Any:
    """Matrices are cut along every axis of the mesh, all else is replicated."""
    return nested(
        {
            k: NamedSharding(mesh, PartitionSpec(*mesh.axis_names if len(v) == 2 else ()))
            for k, v in SHAPES.items()
        }
    )


def abstract(mesh: jax.sharding.Mesh | None = None, dtype: Any = None) -> Any:
    """What a follower asks for: on a mesh, or on the first device."""
    placed = shardings(mesh or mesh_of((1,)))
    kinds = {k: dtype or (jnp.float32 if k == "scale" else jnp.bfloat16) for k in SHAPES}
    return jax.tree.map(
        lambda shape, kind, sharding: jax.ShapeDtypeStruct(shape, kind, sharding=sharding),
        nested(SHAPES),
        nested(kinds),
        placed,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def bits(params: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


def in_memory() -> AnyPath:
    """A root in a storage of this process."""
    return Location(KvStore(f"memory://{uuid.uuid4().hex}/root"), "weights")
