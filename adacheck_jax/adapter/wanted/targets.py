"""The abstract state of a restore, compared with the saved leaves."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, MismatchError, listed
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update import program as update_program
from adacheck_jax.update.recorder_state import consumed_leaf, is_result

_log = logging.getLogger(__name__)


class Target:
    """The caller's abstract state, compared with the saved leaves.

    Args:
        args: arguments of the restore.
        leaves: descriptions of the saved leaves.
        saved_tree: Orbax's metadata tree of the base.
        where: directory of the step, for messages.
        shardings_damage: damage of the file of saved shardings, None if it is whole; raised if a
            leaf has to be placed as it was saved.

    Attributes:
        wanted: the caller's leaf for each saved one, by leaf path; None if the caller named no
            tree.

    Raises:
        MismatchError: leaves do not fit; the message lists all of them.
    """

    def __init__(
        self,
        args: RestoreArgs,
        leaves: Sequence[Leaf],
        saved_tree: PyTree,
        where: AnyPath,
        shardings_damage: AdaCheckError | None = None,
    ) -> None:
        self._args, self._where = args, where
        self._shardings_damage = shardings_damage
        self._specs = {leaf.path: leaf for leaf in leaves}
        self._saved_tree = saved_tree
        self._saved, _ = trees.flatten(saved_tree)
        state: Any = args.abstract_state
        if hasattr(state, "custom_metadata"):
            state = state.tree  # the result of metadata(), which StandardRestore takes too
        self._treedef = None
        self.wanted: dict[str, Any] = dict.fromkeys(self._specs)
        self._paths = tuple(self.wanted)  # leaf paths of the returned leaves
        self._consumed: dict[str, Any] = {}
        if state is not None:
            self.wanted, self._treedef = trees.flatten(state)
            self._paths = tuple(self.wanted)
            self._consumed = {p: self.wanted.pop(p) for p in self._unsaved_copies()}
            missing = self._specs.keys() - self.wanted.keys()
            if missing:
                left_out = missing if args.partial_restore else self._left_out(missing, state)
                left_out |= missing.intersection(self._consumed)
                self.wanted |= dict.fromkeys(left_out, ocp.PLACEHOLDER)
            self._check(where)

    def _left_out(self, missing: AbstractSet[str], state: PyTree) -> AbstractSet[str]:
        """Leaf paths of saved leaves that the abstract state has no leaf for, on purpose.

        As with ``StandardRestore``, None or an empty node stands for a leaf that is left out (a
        ``MaskedNode`` of optax). A placeholder stands for all leaves below its place.
        """
        pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_empty_node)
        empty = {trees.leaf_path(keys) for keys, node in pairs if _is_empty_node(node)}
        nodes = {path for path, leaf in self.wanted.items() if leaf is ocp.PLACEHOLDER}
        return {path for path in missing if path in empty or not nodes.isdisjoint(_above(path))}

    def _unsaved_copies(self) -> list[str]:
        """Leaf paths of wanted leaves that the recorder of the saved step did not keep.

        Recorders of format version 6 kept no copy of other leaves that an update consumed; the
        originals were saved. Others kept no results of sums, or of other operations: the next
        update makes new ones.
        """

        def is_kept(path: str) -> bool:
            if is_result(path):
                shape = tuple(np.shape(self.wanted[path]))
                return path in self._specs and self._specs[path].shape == shape
            return path in self._specs or consumed_leaf(path) not in self._specs

        return [path for path in self._paths if not is_kept(path)]

    def _check(self, where: AnyPath) -> None:
        expected = {path: spec.description for path, spec in self._specs.items()}
        pairs, _ = jax.tree_util.tree_flatten_with_path(self._saved_tree, is_leaf=_is_empty_node)
        nodes = {trees.leaf_path(keys) for keys, _ in pairs} - self._specs.keys()
        nodes |= {node for path in self._specs for node in _above(path)}
        found = {
            path: self._describe(path, leaf, self._specs.get(path))
            for path, leaf in self.wanted.items()
            if leaf is not ocp.PLACEHOLDER or path not in nodes
        }
        trees.check_same_leaves(
            expected,
            found,
            where=f"{where}: the abstract state does not fit what was saved",
            remedy="Build the abstract state from the code that saved it (jax.eval_shape; numpy "
            "arrays and Python numbers themselves), mark leaves to leave out with ocp.PLACEHOLDER, "
            "leave out all that it does not have with partial_restore=True, or pass no abstract "
            "state. If the model has another layout now (scanned layers, other names), say so with "
            "RestoreArgs(rules=...).",
            words=("saved", "asked for"),
        )

    def _describe(self, path: str, leaf: Any, spec: Leaf | None) -> str:
        """Data type and shape of a wanted leaf; those of the saved leaf if they may differ."""
        is_left_out = leaf is ocp.PLACEHOLDER
        if not (is_left_out or hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            raise MismatchError(
                f"Unsupported type: leaf {path}: expected an array, a ShapeDtypeStruct, a "
                f"number or ocp.PLACEHOLDER in the abstract state, found {type(leaf).__name__}."
            )
        if spec is None:
            return ""
        if is_left_out:
            return spec.description
        dtype = str(trees.dtype_of(leaf))
        shape = tuple(np.shape(leaf))
        saved_shape, saved_dtype = spec.logical
        if trees.is_same_kind(dtype, saved_dtype):
            dtype = saved_dtype
        if not self._args.strict and len(shape) == len(saved_shape):
            shape = saved_shape
        return f"{dtype}{list(shape)}"

    def saved_placements(self, lineage: Lineage) -> dict[str, Any] | None:
        """Shardings under which replay adds up elements in the same order as training did.

        Returns:
            Saved shardings of the update's leaves, by leaf path; None if some of those devices do
            not exist here.
        """
        update = lineage.base.update
        assert update is not None
        paths = [lineage.base.leaves[i].path for i in (*update.explained, *update.consumed)]
        try:
            found = {path: self._saved_sharding(path, None) for path in paths}
        except ValueError:
            return None
        return {path: np.ndarray if s is None else s for path, s in found.items()}

    def move(self, placements: Mapping[str, Any], leaves: dict[str, Any]) -> None:
        """Place replayed leaves, by leaf path and in place, as :meth:`placements` has them."""
        for path, wanted in placements.items():
            leaf = leaves[path]
            if wanted is None or not hasattr(leaf, "dtype"):  # a Python number stays one
                continue
            if wanted is np.ndarray:
                leaves[path] = _on_host(leaf)
            elif not isinstance(leaf, jax.Array) or leaf.sharding != wanted:
                is_array = isinstance(leaf, jax.Array)
                leaves[path] = (transfer.moved if is_array else jax.device_put)(leaf, wanted)

    def taken_from_deltas(self, lineage: Lineage, placements: Mapping[str, Any]) -> set[str]:
        """Leaf paths of the leaves that a replay takes from its deltas, and nobody from the base.

        Of what updates consume these are the leaves left out, and those that the last one consumed.
        """
        update = lineage.base.update
        if update is None or not lineage.replayed_count:
            return set()
        brought, found = update.brought_by(lineage.deltas[-1]), set[str]()
        for i in update.consumed:
            spec = lineage.base.leaves[i]
            is_placed = isinstance(placements[spec.path], jax.sharding.Sharding)
            is_left_out = self.wanted[spec.path] is ocp.PLACEHOLDER
            if (is_left_out or (i in brought and is_placed)) and not spec.key_type and spec.nbytes:
                found.add(spec.path)
        return found

    def placements(self, lineage: Lineage | None = None) -> dict[str, Any]:
        """Placement of each leaf, by leaf path: a sharding, ``np.ndarray``, or None for unread."""
        update = None if lineage is None else lineage.base.update
        needed: set[int] = set()
        if lineage is not None and update is not None and lineage.replayed_count:
            needed = {*update.explained, *update.consumed}
        result = {}
        for index, (path, spec) in enumerate(self._specs.items()):
            leaf = self.wanted[path]
            if leaf is ocp.PLACEHOLDER and index not in needed:
                result[path] = None
            else:
                result[path] = self._placement(path, spec, leaf)
        return result

    def _placement(self, path: str, spec: Leaf, leaf: Any) -> Any:
        place = transfer.placement_of(leaf)
        if place is not None:
            return place if self._args.strict or place is np.ndarray else _fitting(place, spec)
        fallback = self._args.fallback_sharding
        if fallback is None and leaf is ocp.PLACEHOLDER:
            fallback = self._asked.get(spec.shape, self._asked.get(()))
        try:
            saved = self._saved_sharding(path, fallback)
        except ValueError as error:
            raise MismatchError(
                f"Topology mismatch detected: leaf {path}: it was saved on devices that do not "
                f"exist here ({error}), and the abstract state gives no sharding for it. Pass an "
                "abstract state with shardings, or RestoreArgs(fallback_sharding=...)."
            ) from error
        return np.ndarray if saved is None else _fitting(saved, spec)

    @functools.cached_property
    def _asked(self) -> dict[tuple[int, ...], jax.sharding.Sharding]:
        """Shardings asked for, by shapes: a replay may need leaves beside them, of moments."""
        placed = ((np.shape(each), transfer.placement_of(each)) for each in self.wanted.values())
        found = {x: place for x, place in placed if isinstance(place, jax.sharding.Sharding)}
        for place in [*found.values()][:1]:
            found.setdefault((), update_program.replicated(place))
        return found

    def _saved_sharding(self, path: str, fallback: Any) -> jax.sharding.Sharding | None:
        """The sharding that a leaf was saved with, by Orbax's metadata; None if on no devices.

        Raises:
            ValueError: the devices do not exist here and there is no fallback.
        """
        if self._shardings_damage is not None:
            raise self._shardings_damage
        metadata = getattr(self._saved.get(path), "sharding", None)
        try:
            return None if metadata is None else metadata.to_jax_sharding()
        except ValueError:
            if fallback is None:
                raise
            return fallback

    def converted(self, leaves: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Data types of the leaves that are cast, as saved and as asked for, by leaf path.

        Raises:
            MismatchError: integers do not fit into the type asked for, in this process.
        """
        asked = {} if self._treedef is None else self.wanted | self._consumed
        casts: dict[str, tuple[Any, Any]] = {}
        for path, wanted in asked.items():
            leaf: Any = leaves.get(path if path in leaves else consumed_leaf(path))
            dtype = _dtype(leaf, wanted)
            if dtype is not None and dtype != leaf.dtype:
                casts[path] = leaf, dtype
        transfer.expect_fitting(casts, self._where)
        self._tell_narrowed(casts)
        return {path: (str(leaf.dtype), str(dtype)) for path, (leaf, dtype) in casts.items()}

    def finish(self, leaves: Mapping[str, Any]) -> PyTree:
        """The wanted tree, in wanted types, shapes and layouts, from verified leaves by path.

        After :meth:`converted`, in all processes.
        """
        if self._treedef is None:
            return jax.tree_util.tree_map_with_path(
                lambda key_path, _: leaves.get(trees.leaf_path(key_path)),
                self._saved_tree,
                is_leaf=lambda node: node is None,  # stands for an array without elements
            )
        finished = {path: self._finish(leaves.get(path), x) for path, x in self.wanted.items()}
        for path, wanted in self._consumed.items():
            if is_result(path):
                value = jnp.zeros(np.shape(wanted), jnp.uint32)
            else:
                value = self._finish(leaves[consumed_leaf(path)], wanted)
            sharding = getattr(wanted, "sharding", None)
            finished[path] = value if sharding is None else jax.device_put(value, sharding)
        asked = self.wanted | self._consumed
        placed = (transfer.like(finished[path], asked[path]) for path in self._paths)
        return trees.unflatten(self._treedef, placed)

    def _tell_narrowed(self, casts: Mapping[str, tuple[Any, Any]]) -> None:
        """Warns where a whole state is asked for, some of it with less precision than it has."""
        if any(self.wanted.get(path) is ocp.PLACEHOLDER for path in self._paths):
            return  # params to be used, and not a run to go on with
        if narrowed := [
            f"{path} ({leaf.dtype} as {dtype})"
            for path, (leaf, dtype) in casts.items()
            if not trees.are_integers(dtype) and trees.loses(leaf.dtype, dtype)
        ]:
            _log.warning(
                "%s: the abstract state asks for less precision than was saved, so leaves (%d) "
                "are rounded: %s. To go on with the bits that were saved, ask for the types of a "
                "state that was trained: an optimizer may change those of init at its first step.",
                *(self._where, len(narrowed), listed(narrowed, 5)),
            )

    def _finish(self, value: Any, wanted: Any) -> Any:
        if wanted is ocp.PLACEHOLDER:
            return ocp.PLACEHOLDER
        if transfer.is_key(value):
            return value
        if _dtype(value, wanted) is None:
            return type(wanted)(value) if isinstance(wanted, int | float | complex) else value
        if value.shape != tuple(np.shape(wanted)):
            value = _resized(value, tuple(np.shape(wanted)), getattr(wanted, "sharding", None))
        if value.dtype != (dtype := _dtype(value, wanted)):
            value = transfer.cast(value, dtype)
        layout = getattr(wanted, "format", None) if self._args.support_layout else None
        return value if layout is None else jax.device_put(value, layout)


def _above(path: str) -> Iterator[str]:
    """Paths of the nodes that a leaf lies below."""
    return itertools.accumulate(path.split("/")[:-1], "{}/{}".format)


def _is_empty_node(node: Any) -> bool:
    """True if a tree is a node without children: None, or an empty container."""
    return not jax.tree.leaves(node, is_leaf=lambda each: each is not node)


def _on_host(leaf: Any) -> Any:
    """A whole leaf as a host value, also if other processes hold parts of it."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable:
        whole = jax.jit(lambda x: x, out_shardings=update_program.replicated(leaf.sharding))(leaf)
        leaf = whole.addressable_data(0)
    return np.asarray(leaf)


def _dtype(value: Any, wanted: Any) -> Any:
    """Data type that a leaf is returned in; None if it keeps its own, or becomes a number."""
    is_number = isinstance(wanted, int | float | complex)
    if is_number or wanted is ocp.PLACEHOLDER or not hasattr(value, "dtype"):
        return None
    if transfer.is_key(value):
        return value.dtype
    dtype = trees.dtype_of(wanted)
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(value, jax.Array) else dtype


def _fitting(sharding: jax.sharding.Sharding, spec: Leaf) -> jax.sharding.Sharding:
    """The sharding itself, or a replicated one if it cannot cut the saved shape."""
    try:
        sharding.shard_shape(spec.logical[0])
    except ValueError:
        return update_program.replicated(sharding)
    return sharding


def _resized(value: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    """Truncate or pad with zeros, as Orbax does for ``strict=False``."""

    def resize(x: Any, pad: Any = jnp.pad) -> Any:
        x = x[tuple(slice(0, n) for n in shape)]
        return pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])

    if not isinstance(value, jax.Array):
        return resize(value, np.pad)  # jax may make no elements as wide
    return jax.jit(resize, out_shardings=sharding)(value)
