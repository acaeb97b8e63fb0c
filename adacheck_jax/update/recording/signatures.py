"""Trees of the updates that a recorder has seen, so that they can be traced again."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from adacheck_jax.update.pinning.reductions import Slots

_log = logging.getLogger(__name__)

_SMALL_COUNT = 64
"""Elements of the largest passed-through leaf of which the consumed value is recorded."""


@dataclass(frozen=True, eq=False)
class UpdateSignature:
    """The trees that one update takes, as ``jax.ShapeDtypeStruct`` without shardings.

    Equal to itself alone, and hashable.

    Attributes:
        params: params, as the wrapped transformation's ``update`` takes them.
        inner: the wrapped transformation's state.
        record: gradients, in the params' tree; ``None`` in places where no gradient arrives.
        extra: recorded extra arguments, by name.
        passed: leaf paths, in ``inner``, of the small leaves that the update passes through.
        reduced: reduction results that are recorded.
    """

    params: PyTree
    inner: PyTree
    record: PyTree
    extra: dict[str, Any]
    passed: tuple[str, ...] = ()
    reduced: Slots = ()

    @functools.cached_property
    def without_results(self) -> UpdateSignature:
        """The same update, which computes its sums itself."""
        return dataclasses.replace(self, reduced=()) if self.reduced else self


@dataclass(frozen=True, slots=True)
class SeparateCall:
    """One update that ran as a program of its own, by weak references to its arrays.

    Attributes:
        taken: the params and inner state that it took, in the order of their leaves.
        returned: the params and inner state that it returned, in the same order.
        digest: digest of the exported program that ran.
    """

    taken: tuple[Any, ...]
    returned: tuple[Any, ...]
    digest: str


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and data type of an array or scalar."""
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return jax.ShapeDtypeStruct(jnp.shape(value), dtype)


def passed_and_reduced(
    update: PinnedFunction, record: PyTree, inner: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[tuple[str, ...], Slots]:
    """Leaf paths of the small leaves that an update passes through, and what it records of sums."""
    try:
        (_, origins), slots = update.known(record, inner, params, extra)
    except Exception as error:  # it takes arguments that only update() gets
        _log.debug("The update is not traced at init: %s", error)
        return (), ()
    first = len(jax.tree.leaves(record))
    pairs, treedef = jax.tree_util.tree_flatten_with_path(inner)
    found = jax.tree.leaves(origins, is_leaf=_is_none)
    if treedef.num_leaves != len(found):
        return (), slots
    paths = [
        trees.leaf_path(path)
        for i, (path, leaf) in enumerate(pairs)
        if found[i] == first + i and jnp.size(leaf) <= _SMALL_COUNT
    ]
    return tuple(path for path in paths if path), slots


def whole_params(
    known: Sequence[UpdateSignature], record: PyTree, before: PyTree, params: PyTree
) -> PyTree | None:
    """The whole params' tree of gradients that leave out params (``None``) for the first time.

    Stock optimizers take such gradients, and some drop the params from their state then.

    Returns:
        The params' tree, of those that came with the gradients or of the updates seen so far; None
        if gradients of this structure are known.

    Raises:
        RecorderError: the gradients belong to other params than the state.
    """
    structure = jax.tree.structure(record)
    is_as_before = structure == jax.tree.structure(before)
    if is_as_before and any(jax.tree.structure(each.record) == structure for each in known):
        return None
    offered = [each.params for each in known]
    for whole in offered if params is None else [params, *offered]:
        if _covers(whole, record) and _covers(whole, before):
            return whole
    if is_as_before:  # another recorder made the state
        return None
    raise RecorderError(
        "expected gradients with the tree of the params that init() got, found "
        f"{structure} for {jax.tree.structure(before)}. A transformation that takes gradients of "
        "a part of its params cannot be recorded as it is: put the Recorder inside, as "
        "optax.lookahead(Recorder(fast), ...) with AdaCheckHandler(recorder, "
        "params_path='params/fast'), by the leaf path of the fast params; steps at which it "
        "synchronizes store the params."
    )


def _covers(whole: PyTree, part: PyTree) -> bool:
    """True if a tree becomes another one when some of its subtrees become None."""
    try:
        left = jax.tree.map(lambda p, w: None if p is None else w, part, whole, is_leaf=_is_none)
    except ValueError:
        return False
    return jax.tree.structure(left) == jax.tree.structure(part)


def _is_none(value: Any) -> bool:
    return value is None
