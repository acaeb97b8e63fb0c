"""Derived trees: what follows from the params after every update, such as a moving average.

A derived tree lies beside the optimizer in the state, and is computed from the new params and its
own last value. It is pinned as an update is, and replayed behind the update that made the params.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError
from adacheck_jax.update.params_search import LeafType, matched_paths
from adacheck_jax.update.pinning.fence import fence
from adacheck_jax.update.pinning.flat_jaxpr import flatten
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from adacheck_jax.update.recording.signatures import abstract

_log = logging.getLogger(__name__)

DerivedFunction = Callable[[PyTree, PyTree, Any], PyTree]
"""``(params, old, count) -> new``: new params, the last value, and the number of updates so far.

The number is 1 after the first update; behind 2**31 - 1 it is 1 again.
"""

COUNT = jax.ShapeDtypeStruct((), jnp.int32)
"""Type of the update counter."""


@dataclass(frozen=True, slots=True)
class DerivedTree:
    """The tree of one derived value.

    Attributes:
        name: name by which the Recorder knows it.
        treedef: its tree definition.
        types: shape and data type of each leaf.
        uses_count: True if the next value depends on the number of updates, once that is known.
    """

    name: str
    treedef: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    uses_count: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, name: str, tree: PyTree) -> DerivedTree:
        """The tree of arrays or abstract arrays."""
        leaves, treedef = jax.tree.flatten(tree)
        return cls(name, treedef, tuple(map(abstract, leaves)))

    @property
    def abstract(self) -> PyTree:
        """The tree of abstract arrays."""
        return self.treedef.unflatten(self.types)


class Derived:
    """One function of params and its own last value, with the same bits wherever it is compiled.

    Args:
        name: name by which the Recorder knows it.
        function: the function.
        pin: True to round every operation as it is written.

    Attributes:
        learned: trees that it was called with, unless :attr:`guessed` before; the last one last.
        guessed: trees that were found to fit before it was called.
    """

    def __init__(self, name: str, function: DerivedFunction, *, pin: bool) -> None:
        self.name = name
        self.learned: list[DerivedTree] = []
        self.guessed: set[DerivedTree] = set()
        self._function, self._pin = function, pin
        self._pinned = PinnedFunction(self._typed)

    def __call__(self, zero: Any, params: PyTree, old: PyTree, count: Any) -> PyTree:
        """The next value, from new params, the last value and the number of updates so far.

        Raises:
            RecorderError: the function returns another tree, or other shapes, than it takes.
        """
        if not self._pin:
            return self._typed(params, old, count)
        # What computed the params must not reach into this function, and each result needs an
        # operation of its own: a copy of the params would otherwise be the params themselves.
        params, old = jax.tree.map(lambda x: fence(jnp.asarray(x), zero), (params, old))
        return self._pinned(zero, params, old, count)

    def learn(self, old: PyTree) -> None:
        """Note a tree that it is called with."""
        tree = DerivedTree.of(self.name, old)
        if tree not in self.guessed and tree not in self.learned:
            self.learned.append(tree)

    def uses_count(self, params: PyTree, tree: DerivedTree) -> bool:
        """True if the next value depends on the number of updates.

        Raises:
            Exception: the function does not take these trees.
        """
        flat = flatten(jax.make_jaxpr(self._typed)(params, tree.abstract, COUNT).jaxpr)
        count = flat.inputs[-1]
        return count in flat.outputs or any(count in op.shapes for op in flat.ops)

    def _typed(self, params: PyTree, old: PyTree, count: Any) -> PyTree:
        """The function, with the data types of the last value, as ``apply_updates`` keeps them."""
        new = self._function(params, old, count)
        treedef, found = jax.tree.structure(old), jax.tree.structure(new)
        shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (old, new)]
        if found != treedef or shapes[0] != shapes[1]:
            raise RecorderError(
                f"expected the function of the derived tree {self.name!r} to return the tree and "
                f"the shapes that it takes, {treedef} of {shapes[0]}, found {found} of {shapes[1]}."
            )
        return jax.tree.map(lambda x, o: jnp.asarray(x).astype(o.dtype), new, old)


def bound_trees(
    known: Mapping[str, Derived],
    params: PyTree,
    below: Mapping[str, Mapping[str, str]],
    leaves: Mapping[str, LeafType],
) -> dict[DerivedTree, tuple[str, ...]]:
    """The trees of derived values in a saved state, which holds leaves and no trees.

    Returns:
        Leaf paths in the state of each tree that was found. A tree is one that the function was
        called with; before that, the params' tree, or nested dictionaries, if the function takes
        them. Without any of these the value's leaves are not replayed.
    """
    found = {}
    for name, available in below.items():
        own = known[name]
        types = {path: leaves[full] for path, full in available.items()}
        for tree in [*own.learned[::-1], *_guesses(name, params, types)]:
            relative, _ = trees.flatten(tree.abstract)
            paths = matched_paths([*relative], available)
            same = len(paths) == len(relative) and all(
                leaves[paths[path]] == (leaf.shape, str(leaf.dtype))
                for path, leaf in relative.items()
            )
            if not same:
                continue
            try:
                uses_count = own.uses_count(params, tree)
            except Exception as error:  # it is the caller's function
                _log.debug("The derived tree %r is no %s: %s", name, tree.treedef, error)
                continue
            if tree not in own.learned:
                own.guessed.add(tree)
            found[dataclasses.replace(tree, uses_count=uses_count)] = tuple(paths.values())
            break
        else:
            _log.info("The derived tree %r is stored until derive() was called with it.", name)
    return found


def _guesses(name: str, params: PyTree, types: Mapping[str, LeafType]) -> list[DerivedTree]:
    """Trees that a derived value may have, from the leaves below its root."""
    guesses = []
    relative, treedef = trees.flatten(params)
    paths = matched_paths([*relative], {path: path for path in types})
    if len(paths) == len(relative):
        like = [_spec(types[path]) for path in paths.values()]
        guesses.append(DerivedTree.of(name, treedef.unflatten(like)))
    if "" not in types:
        nested = trees.nested({path: _spec(each) for path, each in types.items()})
        guesses.append(DerivedTree.of(name, nested))
    return guesses


def _spec(each: LeafType) -> Any:
    try:
        return jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype))
    except TypeError:  # a typed PRNG key
        return None
