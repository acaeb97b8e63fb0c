"""A restore into another layout: what is read for it, and the caller's leaves in the end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.wanted.targets import Target
from adacheck_jax.device import transfer
from adacheck_jax.device.trees import nested
from adacheck_jax.errors import MismatchError, listed
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, BaseManifest, Leaf
from adacheck_jax.layout import plan as layouts
from adacheck_jax.layout.operations import Kind
from adacheck_jax.layout.plan import Params, Plan, params_of, within
from adacheck_jax.layout.rules import Rule
from adacheck_jax.restore import transform
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update.recorder_state import RECORD_FIELD, is_result

_log = logging.getLogger(__name__)


class Relayout:
    """The rules of a restore, planned for the leaves of a base.

    Attributes:
        plan: operations on the leaves that are wanted.
        target: the caller's abstract state, compared with what the operations give.

    Raises:
        MismatchError: a rule does not fit the saved leaves, or the caller's state not what rules
            make of them.
    """

    def __init__(self, args: RestoreArgs, base: BaseManifest, where: AnyPath) -> None:
        every = planned(args.rules or (), base)
        specs = _transformed_leaves(every, base.leaves)
        # For a caller who names no tree: nested dictionaries.
        tree = nested({x.path: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in specs})
        self.target = Target(args, specs, tree, where)
        self._args = args
        self._given = self.target.wanted
        wanted = [path for path, leaf in self._given.items() if leaf is not ocp.PLACEHOLDER]
        self.plan = every.needed_for(path for path in wanted if path in every.outputs)
        self._specs = {leaf.path: leaf for leaf in base.leaves}
        _tell(every, base)

    @property
    def reading(self) -> RestoreArgs:
        """Arguments by which the saved leaves are read: each where the new leaf will lie."""
        if self._args.abstract_state is None:
            return dataclasses.replace(self._args, support_layout=False)
        places = transform.placements_before(self.plan, self._placements())
        asked: dict[str, Any] = dict.fromkeys(self._specs, ocp.PLACEHOLDER)
        paths = {value: path for path, value in self.plan.outputs.items()}
        for path, value in self.plan.inputs.items():
            if value in paths:  # as it is, but for its path
                asked[path] = self._given[paths[value]]
            else:
                asked[path] = _abstract(self._specs[path], places[path])
        return dataclasses.replace(
            self._args, abstract_state=asked, partial_restore=False, support_layout=False
        )

    def transformed(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The new leaves, from verified ones; both by leaf path.

        Raises:
            MismatchError: an operation loses bits, and its rule does not say that it may.
        """
        return transform.transformed(self.plan, leaves, self._placements())

    def _placements(self) -> dict[str, Any]:
        """Wanted placement of each new leaf, by leaf path."""
        return {path: transfer.placement_of(self._given[path]) for path in self.plan.outputs}


def planned(rules: Sequence[Rule], base: BaseManifest) -> Plan:
    """The plan of some rules for all leaves of a base.

    Raises:
        MismatchError: a rule does not fit the saved leaves, or gives a data type that no leaf has.
    """
    kinds = {leaf.path: Kind(*leaf.logical) for leaf in base.leaves}
    found = layouts.plan(rules, kinds, _params_trees(base))
    for path, kind in found.after.items():
        if kind.dtype not in ITEMSIZES_BYTES and found.outputs[path] >= len(kinds):
            raise MismatchError(
                f"transform: {path}: expected numpy's name of a data type that arrays have, as "
                f"bfloat16, found {kind.dtype!r}. Name another in the rule."
            )
    return found


def _params_trees(base: BaseManifest) -> list[Params]:
    """The trees of params of a base's recorders; without a recorder ``params``, or the state."""
    update = base.update
    paths = [leaf.path for leaf in base.leaves]
    if update is None or not update.params:
        inside = [end for path in paths if (end := within("params", path)) is not None]
        return [Params("params" if inside else "", frozenset(inside or paths))]
    found = []
    for k in range(len(update.counts)):
        computed, consumed = update.computed_by([k]), update.consumed_by([k])
        own = [paths[i] for i in update.params if i in computed]
        ends = [paths[i].partition(f"{RECORD_FIELD}/")[2] for i in update.record if i in consumed]
        found.append(params_of(own, [end for end in ends if end]))
    return found


def _transformed_leaves(plan: Plan, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Descriptions of the new leaves, as if each had been saved whole."""
    known = {plan.inputs[leaf.path]: leaf for leaf in leaves}
    found = []
    for path, value in plan.outputs.items():
        if value in known:
            found.append(dataclasses.replace(known[value], path=path))
        else:
            kind = plan.kinds[value]
            cuts = tuple((0, length) for length in kind.shape)
            size = ITEMSIZES_BYTES[kind.dtype]
            found.append(Leaf(path, kind.shape, kind.dtype, size, None, cuts, (0,)))
    return found


def _abstract(leaf: Leaf, place: Any) -> Any:
    """A leaf as a restore is asked for it."""
    dtype = jnp.dtype(leaf.dtype)
    if place is np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place)


def adds_up(base: BaseManifest) -> bool:
    """True if an update of a base adds up elements, whether or not the results are recorded."""
    update = base.update
    return update is not None and bool(
        update.reducing or any(is_result(base.leaves[i].path) for i in update.extra)
    )


def _tell(plan: Plan, base: BaseManifest) -> None:
    inside = [
        path
        for path in plan.untouched
        if any(within(tree, path) is not None for tree in plan.trees)
    ]
    _log.info(
        "transform: %d operations on the trees %s; as they were: %d leaves of these (%s) and %d "
        "others.",
        len(plan.steps),
        ", ".join(plan.trees),
        len(inside),
        listed(inside),
        len(plan.untouched) - len(inside),
    )
    if adds_up(base):
        _log.warning(
            "transform: the optimizer adds up elements, so a run that goes on in another layout "
            "equals one that was trained there to rounding only."
        )
