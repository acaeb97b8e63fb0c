"""The params that a follower wants: their leaves, on devices and in data types of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import transfer, trees
from adacheck_jax.errors import MismatchError
from adacheck_jax.publish.records import Leaves
from adacheck_jax.publish.weights import Weights


class FollowedParams:
    """The params that a follower wants.

    Args:
        abstract_params: abstract arrays, or arrays, of the wanted shapes, data types and shardings;
            without a sharding they go to the first device.

    Raises:
        MismatchError: a leaf is no array.
    """

    def __init__(self, abstract_params: Any) -> None:
        named, self._treedef = trees.flatten(abstract_params)
        self.wanted = {path: _abstract(path, leaf) for path, leaf in named.items()}

    def check(self, leaves: Leaves, where: object) -> None:
        """Compares what is wanted with what was published: paths, shapes and kinds of numbers.

        Raises:
            MismatchError: they differ.
        """
        published = {each.path: each.dtype for each in leaves.leaves}

        def described(path: str, dtype: str, shape: Sequence[int]) -> str:
            own = published.get(path, dtype)
            return f"{own if trees.is_same_kind(dtype, own) else dtype}{[*shape]}"

        trees.check_same_leaves(
            {each.path: described(each.path, each.dtype, each.shape) for each in leaves.leaves},
            {path: described(path, str(x.dtype), x.shape) for path, x in self.wanted.items()},
            where=f"{where}: published params, and those to follow them",
            remedy="Follow with the params' own paths and shapes, and types of their kinds.",
            words=("published", "asked for"),
        )

    def placed(self, weights: Weights, indices: Collection[int]) -> dict[int, jax.Array]:
        """Some leaves on their devices, in the data types that they were published in."""
        chosen, kinds = [*indices], []
        for index in chosen:
            leaf = weights.leaves.leaves[index]
            sharding = self.wanted[leaf.path].sharding
            kinds.append(jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding))
        # Copies: on CPU devices the arrays live in the memory that they are given.
        made = transfer.place_all(kinds, lambda i, box: np.array(weights.block(chosen[i], box)))
        return dict(zip(chosen, made, strict=True))

    def cast(self, path: str, array: jax.Array) -> jax.Array:
        """An array in the data type that is wanted.

        Raises:
            MismatchError: integers do not fit into it.
        """
        wanted = self.wanted[path]
        if array.dtype == wanted.dtype:
            return array
        transfer.expect_fitting({path: (array, wanted.dtype)}, "published params")
        return jax.device_put(array.astype(wanted.dtype), wanted.sharding)

    def tree(self, leaves: Mapping[str, jax.Array]) -> Any:
        """The pytree of the params.

        Args:
            leaves: arrays by leaf path.
        """
        return trees.unflatten(self._treedef, [leaves[path] for path in self.wanted])


def _abstract(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise MismatchError(
            f"{path}: expected an abstract array of numbers, found {type(leaf).__name__}. Give "
            "jax.ShapeDtypeStruct with a sharding for each leaf."
        )
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
