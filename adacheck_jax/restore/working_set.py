"""The leaves of one restore while deltas are folded onto them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import sharding, transfer
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.update import program as update_program


def replay_shardings(leaves: Sequence[Any], update: Update) -> dict[int, jax.sharding.Sharding]:
    """Shardings on one set of devices, where the leaves of an update lie while it is replayed.

    A compiled program wants all its arrays on the same devices, in one order, and in the memory
    that these compute in. Those of the largest leaf are taken; a leaf that lies elsewhere (a
    counter on one device, a host value) is replicated there.

    Returns:
        A sharding for each leaf that the update takes, by leaf index.
    """
    own, main = _shardings_of(leaves, update)
    orders = {i: sharding.devices_of(_plain(leaves[i])) for i in own}
    order = next((orders[i] for i, each in own.items() if each is main), ())
    return {
        i: sharding.computable(each)
        if each and orders[i] == order
        else update_program.replicated(main)
        for i, each in own.items()
    }


def apart_shardings(leaves: Sequence[Any], update: Update) -> dict[int, jax.sharding.Sharding]:
    """Shardings for replay of the leaves that some of the replaying processes do not hold.

    These are read onto them at once: a process without a leaf could not give it to the program.
    """
    own, main = _shardings_of(leaves, update)
    everyone = _processes(main)
    return {
        i: update_program.replicated(main)
        for i, each in own.items()
        if each and not everyone <= _processes(each)
    }


def _processes(sharding: jax.sharding.Sharding) -> set[int]:
    return {device.process_index for device in sharding.device_set}


def _shardings_of(
    leaves: Sequence[Any], update: Update
) -> tuple[dict[int, jax.sharding.Sharding | None], jax.sharding.Sharding]:
    """Shardings of the leaves that an update takes, and that of the largest of them."""
    touched = [*update.params, *update.inner, *update.consumed]
    own = {i: getattr(_plain(leaves[i]), "sharding", None) for i in touched}  # None on the host
    sizes = [(len(each.device_set), leaves[i].size, i) for i, each in own.items() if each]
    main: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if sizes:
        main = own[max(sizes)[-1]]
    return own, main


def _plain(leaf: Any) -> Any:
    return transfer.raw(leaf) if transfer.is_key(leaf) else leaf


def abstract_leaf(spec: Leaf, sharding: Any) -> jax.ShapeDtypeStruct:
    """A leaf that is not read, or not yet; a host value if its placement is no sharding."""
    on_devices = isinstance(sharding, jax.sharding.Sharding)
    return jax.ShapeDtypeStruct(
        spec.shape, jnp.dtype(spec.dtype), sharding=sharding if on_devices else None
    )


def is_abstract(leaf: Any) -> bool:
    """True for a leaf that was not read, of which only type and sharding are known."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


class WorkingSet:
    """The one owner of a state's leaves while deltas are folded onto them.

    A replayed update donates its leaves. So they are taken out (:meth:`take`), and its results are
    put back as the types and on the shardings of the leaves that they replace (:meth:`put_back`).
    """

    def __init__(
        self, leaves: Sequence[Any], shardings: Mapping[int, jax.sharding.Sharding]
    ) -> None:
        self._leaves = list(leaves)
        self._shardings = shardings
        self._targets: dict[int, tuple[Any, jax.sharding.Sharding | None]] = {}

    @property
    def leaves(self) -> list[Any]:
        """All leaves; None in place of one that is taken out, or as it was given."""
        return list(self._leaves)

    def __getitem__(self, index: int) -> Any:
        """One leaf; None while it is taken out, or if nobody asked for it."""
        leaf = self._leaves[index]
        return None if is_abstract(leaf) else leaf

    def __setitem__(self, index: int, leaf: Any) -> None:
        """Replace a leaf that is not taken out by one of its type and sharding."""
        self._leaves[index] = leaf

    def fill(self, index: int, array: jax.Array) -> bool:
        """Give a leaf that was not read its elements, where it is to lie; False if it was read."""
        leaf = self._leaves[index]
        if not is_abstract(leaf):
            return False
        if leaf.sharding is not None and leaf.sharding != array.sharding:
            array = _moved(array, leaf.sharding)
        self._leaves[index] = array
        return True

    def take(self, indices: Sequence[int], copied: Collection[int] = ()) -> list[jax.Array]:
        """Take leaves out, onto the shardings for replay."""
        return [self._take(index, index in copied) for index in indices]

    def _take(self, index: int, is_copied: bool) -> jax.Array:
        like, where = self._leaves[index], self._shardings[index]
        self._leaves[index] = None
        leaf = transfer.raw(like)
        target = getattr(leaf, "sharding", None)
        if isinstance(like, jax.Array):
            # The type alone: a reference to the array would keep a donated one's memory.
            like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        self._targets[index] = like, target
        placed = leaf if target == where else _moved(leaf, where)
        return jnp.copy(placed) if is_copied else placed

    def put_back(self, indices: Sequence[int], replayed: Sequence[jax.Array]) -> None:
        """Put the results of an update in the places of the leaves that were taken out."""
        for index, array in zip(indices, replayed, strict=True):
            like, target = self._targets[index]
            if target is None:
                self._leaves[index] = like_host(like, np.asarray(array))
                continue
            placed = array if target == self._shardings[index] else _moved(array, target)
            self._leaves[index] = transfer.keyed(placed, like)


def _moved(leaf: Any, where: jax.sharding.Sharding) -> jax.Array:
    """A leaf on another sharding; JAX changes devices and memory one after the other alone."""
    if isinstance(leaf, jax.Array):
        leaf = jax.device_put(leaf, sharding.computable(leaf.sharding))
        leaf = jax.device_put(leaf, sharding.computable(where))
    return jax.device_put(leaf, where)


def like_host(example: Any, value: np.ndarray) -> Any:
    """A host value of an example's type: numpy stays numpy, Python scalars stay scalars."""
    if isinstance(example, np.ndarray | np.generic):
        return value.astype(example.dtype)
    return type(example)(value)
