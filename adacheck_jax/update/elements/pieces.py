"""An update that leaves elements in their places, evaluated on samples of all leaves at once.

Leaves that go through the same operations are concatenated and computed together, so that hundreds
of leaves take a handful of operations. The operations are those of the update's own jaxpr, mapped
over rows of elements: a pinned update gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.format.fingerprint import words_of
from adacheck_jax.update.elements.row_program import ROW, UnevenError, row_program
from adacheck_jax.update.pinning.flat_jaxpr import Group, evaluate, groups

Role = tuple[int, ...]
"""Indices of leaves of one data type that play the same part in equal operations.

Of a number, its own index alone.
"""
Vectors = Mapping[Role, Any]
"""Samples of the leaves of each role, one behind another: (devices, elements).

Each device that took a sample has a row.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal groups of operations, which share their scalars.

    Attributes:
        group: one of the groups.
        inputs: role of each input of a group; empty for a scalar.
        outputs: role of each output of a group; empty for a scalar.
    """

    group: Group
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]

    @property
    def taken(self) -> list[Role]:
        """The roles of the inputs that are no scalars."""
        return [role for role in self.inputs if role]

    @property
    def shared(self) -> list[int]:
        """Numbers of the scalars that all groups take."""
        pairs = zip(self.group.inputs, self.inputs, strict=True)
        return [ref for ref, role in pairs if not role]

    def mapped(self, values: Mapping[int, Any], arrays: Sequence[Any]) -> list[Any]:
        """Evaluate the groups on long vectors, row by row.

        Returns:
            Elements of the leaves in :attr:`outputs`.
        """
        length = arrays[0].shape[0]
        count = -(-length // ROW)
        shapes = {ref: shape for op in self.group.ops for ref, shape in op.shapes.items()}
        if any(0 in shapes[ref] for ref in self._refs()):  # there is nothing to compute
            ops = self.group.ops
            avals = {i: x for op in ops for i, x in zip(op.outputs, op.avals, strict=True)}
            return [jnp.zeros(length, avals[ref].dtype) for ref in self.group.outputs]
        rows = [
            jnp.pad(x, (0, count * ROW - length)).reshape(count, *shapes[ref])
            for ref, x in zip(self._refs(), arrays, strict=True)
        ]
        outputs = jax.vmap(lambda *each: self.evaluated(values, each))(*rows)
        return [x.reshape(-1)[:length] for x in outputs]

    def evaluated(self, values: Mapping[int, Any], arrays: Sequence[Any] = ()) -> list[Any]:
        """Evaluate one group, from scalars by number and a row of each input that is no scalar."""
        env = {**values, **dict(zip(self._refs(), arrays, strict=True))}
        evaluate(self.group.ops, env)
        return [env[ref] for ref in self.group.outputs]

    def _refs(self) -> list[int]:
        pairs = zip(self.group.inputs, self.inputs, strict=True)
        return [ref for ref, role in pairs if role]


class Pieces:
    """An update over samples.

    ``function`` is the update over four lists of flat leaves, of the shapes in ``specs`` and the
    leaf indices in ``arguments``; ``sizes`` are numbers of sampled elements by leaf index.

    Attributes:
        leaves: indices of all leaves, in order.
        specs: shape and data type of each leaf.
        computed: indices of the leaves that the update computes.
        before: roles of which a sample of the state before the update is needed.
        after: roles of which one of the state after it is needed.
        batches: operations on arrays; each array is taken and computed by one batch alone.

    Raises:
        UnevenError: a leaf depends on another one by more than scalars, or the update on shapes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Sequence[jax.ShapeDtypeStruct]],
        arguments: Sequence[Sequence[int]],
        switches: Any,
        sizes: Mapping[int, int],
        passed: Collection[int] = (),
    ) -> None:
        indices = [i for each in arguments for i in each]
        program = row_program(function, specs, switches)
        flat, avals = program.flat, program.avals
        of_inputs = zip(program.inputs[:-1], indices, strict=True)
        self._words = {leaf for ref, leaf in of_inputs if ref in program.words}
        if any(sizes[i] != spec.size for i, spec in _pairs(arguments, specs) if i in self._words):
            raise UnevenError("not every device has all results of sums")
        explained = [*arguments[0], *arguments[1]]
        self.specs = dict(_pairs(arguments, specs))
        self._sizes = sizes
        consts = flat.inputs[: len(program.consts)]
        self._consts = dict(zip(consts, program.consts, strict=True))
        self._switches = program.inputs[-1]
        self._leaf_of = dict(zip(program.inputs[:-1], indices, strict=True))
        self._result_of: dict[int, int] = {}
        for leaf, ref in zip(explained, flat.outputs, strict=True):
            if not isinstance(ref, int) or ref in self._result_of:
                raise UnevenError("two leaves come out of one operation, or one of none")
            if ref not in self._leaf_of:
                self._result_of[ref] = leaf
        self.leaves = tuple(dict.fromkeys(indices))
        self.computed = frozenset(explained).difference(passed)
        every = self._batched(groups(flat), avals)
        self.batches = [batch for batch in every if any(batch.inputs)]
        self._of_scalars = [batch for batch in every if not any(batch.inputs)]
        roles = dict.fromkeys(
            role for batch in self.batches for role in (*batch.taken, *batch.outputs)
        )
        roles |= dict.fromkeys((i,) for i in self.leaves if self._is_scalar(i))
        self.before = [role for role in roles if role[0] in self.computed]
        self.after = [*roles]

    def resized(self, sizes: Mapping[int, int]) -> Pieces | None:
        """The same on samples of other sizes; None where one operation takes several sizes then."""
        for batch in self.batches:
            for leaves in zip(*batch.taken, *filter(None, batch.outputs), strict=True):
                if len({sizes[i] for i in leaves}) > 1:
                    return None
        resized = copy.copy(self)
        resized._sizes = sizes
        return resized

    def _is_scalar(self, leaf: int) -> bool:
        """True for a number, and for the results of sums, which every device has."""
        return not self.specs[leaf].shape or leaf in self._words

    def _batched(self, every: Sequence[Group], avals: Mapping[int, Any]) -> list[Batch]:
        """Equal groups together, whose leaves of one role are all computed, or none."""
        leaf_of = self._leaf_of | self._result_of
        shared_arrays = {ref for ref, leaf in self._leaf_of.items() if leaf in self._words}
        shared_arrays.add(self._switches)
        alike: dict[Any, list[Group]] = {}
        for number, group in enumerate(every):
            arrays = [ref for ref in group.inputs if avals[ref].shape and ref not in shared_arrays]
            if not arrays:
                alike[number] = [group]
                continue
            if any(ref not in self._leaf_of for ref in arrays):
                raise UnevenError("an array that is no leaf takes part")
            if any(ref not in self._result_of or not avals[ref].shape for ref in group.outputs):
                raise UnevenError("what comes out of a leaf is no leaf")
            leaves = [leaf_of[ref] for ref in (*arrays, *group.outputs)]
            if len({self._sizes[i] for i in leaves}) > 1:
                raise UnevenError("one operation takes leaves of several sizes")
            kinds = tuple((avals[i].shape, avals[i].dtype) for i in group.inputs)
            shared = tuple(i for i in group.inputs if not avals[i].shape)
            key = (
                *(group.key([None] * len(group.ops)), kinds, shared),
                tuple(i in self.computed for i in leaves),
            )
            alike.setdefault(key, []).append(group)

        def role(refs: Sequence[int]) -> Role:
            is_shared = not avals[refs[0]].shape or refs[0] in shared_arrays
            return () if is_shared else tuple(leaf_of[ref] for ref in refs)

        return [
            Batch(
                equal[0],
                tuple(map(role, zip(*(each.inputs for each in equal), strict=True))),
                tuple(map(role, zip(*(each.outputs for each in equal), strict=True))),
            )
            for equal in alike.values()
        ]

    def abstract_samples(self, rows: int) -> list[Vectors]:
        """Abstract samples that a call takes, of so many devices."""
        return [
            {
                role: jax.ShapeDtypeStruct(
                    (rows, sum(self._sizes[i] for i in role)), self.specs[role[0]].dtype
                )
                for role in roles
            }
            for roles in (self.before, self.after)
        ]

    def __call__(self, before: Vectors, after: Vectors, switches: Any) -> Vectors:
        """Compute samples of the state after the update.

        Args:
            before: samples of :attr:`before`, of the state before the update.
            after: samples of :attr:`after`, of the state after it: leaves that the update consumes
                or passes through are taken from these.
            switches: the update's last argument.
        """
        return jax.vmap(self._row, in_axes=(0, 0, None))(before, after, switches)

    def _row(self, before: Vectors, after: Vectors, switches: Any) -> Vectors:
        """The samples that one device computes."""
        given = {**after, **before}
        scalars = {i: given[i,].reshape(self.specs[i].shape) for i in self.scalar_leaves}
        computed, values = self.scalars(scalars, switches)
        results: dict[Role, Any] = {(leaf,): x.reshape(1) for leaf, x in computed.items()}
        for batch in self.batches:
            arrays = batch.mapped(values, [given[role] for role in batch.taken])
            results.update(zip(batch.outputs, arrays, strict=True))
        return results

    @property
    def scalar_leaves(self) -> list[int]:
        """Indices of the scalars that the update takes, and of the results of sums."""
        return [leaf for leaf in self._leaf_of.values() if self._is_scalar(leaf)]

    def scalars_behind(self) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
        """The scalars of the state that other scalars, and arrays, are computed from.

        Returns:
            For each computed scalar the scalar leaves that it depends on; and those that some array
            depends on.
        """
        behind: dict[int, frozenset[int]] = {}
        for ref, leaf in self._leaf_of.items():
            if self._is_scalar(leaf):
                behind[ref] = frozenset([leaf])

        def of(refs: Sequence[Any]) -> frozenset[int]:
            known = [behind[ref] for ref in refs if isinstance(ref, int) and ref in behind]
            return frozenset[int]().union(*known)

        for batch in self._of_scalars:
            for op in batch.group.ops:
                behind |= dict.fromkeys(op.outputs, of(op.inputs))
        scalars = {leaf: of([ref]) for ref, leaf in self._result_of.items()}
        arrays = of([ref for batch in self.batches for ref in batch.group.inputs])
        return {i: each for i, each in scalars.items() if self._is_scalar(i)}, arrays

    def scalars(
        self, given: Mapping[int, Any], switches: Any
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Compute all that depends on scalars alone.

        Returns:
            The scalars of the state after the update, by leaf index; and what batches take.
        """
        env: dict[int, Any] = {**self._consts, self._switches: switches}
        for ref, leaf in self._leaf_of.items():
            if self._is_scalar(leaf):
                env[ref] = given[leaf]
        for batch in self._of_scalars:
            env |= zip(batch.group.outputs, batch.evaluated(env), strict=True)
        pairs = self._result_of.items()
        return {leaf: env[ref] for ref, leaf in pairs if self._is_scalar(leaf)}, env

    def wrong(self, results: Vectors, after: Vectors) -> dict[int, float]:
        """Compare computed samples with those of the state, on the host.

        Returns:
            The share of sampled elements that differ, by index of each leaf that does.
        """
        found = {}
        for role, result in results.items():
            a, b = np.asarray(result), after[role]
            if np.array_equal(_words(a), _words(b)):
                continue
            start = 0
            for i in role:
                stop = start + self._sizes[i]
                differ = np.any(_words(a[:, start:stop]) != _words(b[:, start:stop]), axis=1)
                if differ.any():
                    found[i] = float(differ.mean())
                start = stop
        return found


def _pairs(arguments: Sequence[Sequence[int]], specs: Sequence[Sequence[Any]]) -> list[Any]:
    """Each leaf index with the leaf's shape and data type."""
    return [pair for each in zip(arguments, specs, strict=True) for pair in zip(*each, strict=True)]


def _words(elements: np.ndarray) -> np.ndarray:
    """The bits of some elements as words, a row for each element."""
    words = words_of(np.ascontiguousarray(elements))
    return words.reshape(elements.size, words.size // elements.size if elements.size else 1)
