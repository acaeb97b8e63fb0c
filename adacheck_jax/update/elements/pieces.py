"""An update that leaves elements in their places, evaluated on samples of all leaves at once.

Leaves that go through the same operations are concatenated and computed together, so that hundreds
of leaves take a handful of operations. The operations are those of the update's own jaxpr, mapped
over rows of elements: a pinned update gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.format.fingerprint import words_of
from adacheck_jax.update.pinning.flat_jaxpr import (
    Group,
    described,
    evaluate,
    flatten,
    groups,
    without_equal_scalars,
)

ROW = 128
"""Elements of a row. XLA may compile shorter rows to other arithmetic."""

Vectors = Mapping[str, Any]
"""Samples of leaves by name of their data type: (devices, elements).

Leaves of one type are concatenated along the last axis; each device that took a sample has a row.
"""


class UnevenError(Exception):
    """The leaves of an update cannot be computed one by one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal groups of operations, which share their scalars.

    Attributes:
        group: one of the groups.
        inputs: for each input of a group the leaves that the groups take; empty for a scalar.
        outputs: for each output of a group the leaves that the groups compute.
    """

    group: Group
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def taken(self) -> list[tuple[int, ...]]:
        """The leaves that the groups take, for each input that is no scalar."""
        return [leaves for leaves in self.inputs if leaves]

    def mapped(self, values: Mapping[int, Any], arrays: Sequence[Any]) -> list[Any]:
        """Evaluate the groups on long vectors, row by row.

        Args:
            values: scalars by number; see :meth:`Pieces.scalars`.
            arrays: elements of the leaves in :attr:`taken`, in their order.

        Returns:
            Elements of the leaves in :attr:`outputs`.
        """
        length = arrays[0].shape[0]
        if not length:
            return [jnp.zeros(0, aval.dtype) for aval in self._avals()]
        ops = self.group.ops
        shapes = {ref: shape for op in ops for ref, shape in op.shapes.items()}
        rows = [
            jnp.pad(x, (0, -length % ROW)).reshape(-1, *shapes[ref])
            for ref, x in zip(self._refs(), arrays, strict=True)
        ]
        outputs = jax.vmap(lambda *each: self.evaluated(values, each))(*rows)
        return [x.reshape(-1)[:length] for x in outputs]

    def evaluated(self, values: Mapping[int, Any], arrays: Sequence[Any] = ()) -> list[Any]:
        """Evaluate one group.

        Args:
            values: scalars by number.
            arrays: a row of each input that is no scalar.
        """
        env = {**values, **dict(zip(self._refs(), arrays, strict=True))}
        evaluate(self.group.ops, env)
        return [env[ref] for ref in self.group.outputs]

    def _refs(self) -> list[int]:
        pairs = zip(self.group.inputs, self.inputs, strict=True)
        return [ref for ref, leaves in pairs if leaves]

    def _avals(self) -> list[Any]:
        known = {
            ref: aval
            for op in self.group.ops
            for ref, aval in zip(op.outputs, op.avals, strict=True)
        }
        return [known[ref] for ref in self.group.outputs]


class VectorLayout:
    """The places of leaves in vectors.

    Args:
        leaves: indices of the leaves, in order.
        dtypes: name of each leaf's data type, by leaf index.
        sizes: number of each leaf's sampled elements, by leaf index.

    Attributes:
        lengths: length of each vector, by name of its data type.
    """

    def __init__(
        self, leaves: Sequence[int], dtypes: Mapping[int, str], sizes: Mapping[int, int]
    ) -> None:
        self.leaves = tuple(leaves)
        self.dtypes, self.sizes = dtypes, sizes
        self.lengths: dict[str, int] = {}
        self._starts: dict[int, int] = {}
        for i in self.leaves:
            self._starts[i] = self.lengths.get(dtypes[i], 0)
            self.lengths[dtypes[i]] = self._starts[i] + sizes[i]

    def of(self, vectors: Vectors, leaves: Sequence[int]) -> Any:
        """The concatenated samples of some leaves of one data type."""
        vector, runs = vectors[self.dtypes[leaves[0]]], list[list[int]]()
        for i in leaves:
            start, stop = self._starts[i], self._starts[i] + self.sizes[i]
            if runs and runs[-1][1] == start:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        parts = [vector[..., start:stop] for start, stop in runs]
        if len(parts) == 1:
            return parts[0]
        join = np.concatenate if isinstance(vector, np.ndarray) else jnp.concatenate
        return join(parts, axis=-1)

    def selected(self, vectors: Vectors, other: VectorLayout) -> Vectors:
        """The vectors of another layout, of some of the leaves."""
        if other is self:
            return vectors
        by_dtype: dict[str, list[int]] = {}
        for i in other.leaves:
            by_dtype.setdefault(self.dtypes[i], []).append(i)
        return {dtype: self.of(vectors, leaves) for dtype, leaves in by_dtype.items()}


class Pieces:
    """An update over samples.

    Args:
        function: the update over flat leaves.
        specs: shapes and data types of its four lists of leaves.
        arguments: leaf indices in these lists.
        switches: an example of the update's last argument.
        sizes: number of sampled elements of each leaf, by leaf index.
        passed: indices of the leaves that the update returns unchanged.

    Attributes:
        before: layout of the leaves that the update computes.
        after: layout of all leaves.
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
        rows = [[jax.ShapeDtypeStruct(_row_of(x.shape), x.dtype) for x in each] for each in specs]
        closed, whole = (jax.make_jaxpr(function)(*each, switches) for each in (rows, specs))
        flat = flatten(closed.jaxpr)
        if described(flat) != described(flatten(whole.jaxpr)):
            raise UnevenError("the update looks at the shapes of what it takes")
        flat = without_equal_scalars(flat)
        indices = [i for each in arguments for i in each]
        explained = [*arguments[0], *arguments[1]]
        consts, inputs = flat.inputs[: len(closed.consts)], flat.inputs[len(closed.consts) :]
        self._consts = dict(zip(consts, closed.consts, strict=True))
        self._switches = inputs[-1]
        self._leaf_of = dict(zip(inputs[:-1], indices, strict=True))
        leaves = [spec for each in specs for spec in each]
        dtypes = {i: str(spec.dtype) for i, spec in zip(indices, leaves, strict=True)}
        self._scalars = {i for i, spec in zip(indices, leaves, strict=True) if not spec.shape}
        self._result_of: dict[int, int] = {}
        for leaf, ref in zip(explained, flat.outputs, strict=True):
            if ref in self._result_of or not isinstance(ref, int):
                raise UnevenError("two leaves come out of one operation, or one of none")
            if ref not in self._leaf_of:
                self._result_of[ref] = leaf
        variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        avals = {ref: v.aval for ref, v in zip(flat.inputs, variables, strict=True)}
        for op in flat.ops:
            avals |= dict(zip(op.outputs, op.avals, strict=True))
        every = self._batched(groups(flat), avals, sizes)
        self.batches = [batch for batch in every if any(batch.inputs)]
        self._of_scalars = [batch for batch in every if not any(batch.inputs)]
        ordered: dict[int, None] = {}
        for batch in every:
            for each in (*batch.inputs, *batch.outputs):
                ordered |= dict.fromkeys(each)
        ordered |= dict.fromkeys(indices)
        computed = frozenset(explained).difference(passed)
        self.before = VectorLayout([i for i in ordered if i in computed], dtypes, sizes)
        self.after = VectorLayout([*ordered], dtypes, sizes)

    def _batched(
        self, found: Sequence[Group], avals: Mapping[int, Any], sizes: Mapping[int, int]
    ) -> list[Batch]:
        alike: dict[Any, list[Group]] = {}
        for number, group in enumerate(found):
            kinds = tuple((avals[i].shape, avals[i].dtype) for i in group.inputs)
            shared = tuple(i for i in group.inputs if not avals[i].shape)
            for ref in group.inputs:
                if avals[ref].shape and ref not in self._leaf_of and ref != self._switches:
                    raise UnevenError("an array that is no leaf takes part")
            if any(avals[i].shape for i in group.inputs if i != self._switches):
                for ref in group.outputs:
                    if ref not in self._result_of or not avals[ref].shape:
                        raise UnevenError("what comes out of a leaf is no leaf")
                known = self._leaf_of | self._result_of
                refs = [i for i in (*group.inputs, *group.outputs) if i in known and avals[i].shape]
                if len({sizes[known[i]] for i in refs}) > 1:
                    raise UnevenError("one operation takes leaves of several sizes")
                key = (group.key([None] * len(group.ops)), kinds, shared)
            else:
                key = number
            alike.setdefault(key, []).append(group)

        def leaves(groups: Sequence[Group], refs: Sequence[int]) -> tuple[int, ...]:
            if not avals[refs[0]].shape or refs[0] == self._switches:
                return ()
            known = self._leaf_of | self._result_of
            return tuple(known[ref] for ref in refs)

        return [
            Batch(
                each[0],
                tuple(leaves(each, refs) for refs in zip(*(g.inputs for g in each), strict=True)),
                tuple(leaves(each, refs) for refs in zip(*(g.outputs for g in each), strict=True)),
            )
            for each in alike.values()
        ]

    def __call__(self, before: Vectors, after: Vectors, switches: Any) -> list[Any]:
        """Compute samples of the state after the update.

        Args:
            before: samples, in the layout :attr:`before`, of the state before the update.
            after: samples, in the layout :attr:`after`, of the state after it: leaves that the
                update consumes or passes through are taken from these.
            switches: the update's last argument.

        Returns:
            Samples in parts, for :meth:`wrong`.
        """
        return jax.vmap(self._row, in_axes=(0, 0, None))(before, after, switches)

    def _row(self, before: Vectors, after: Vectors, switches: Any) -> list[Any]:
        """The samples that one device computes."""
        computed = frozenset(self.before.leaves)

        def taken(leaves: Sequence[int]) -> Any:
            if leaves[0] in computed:
                return self.before.of(before, leaves)
            return self.after.of(after, leaves)

        scalars = {leaf: taken([leaf]).reshape(()) for leaf in self.scalar_leaves}
        computed_scalars, values = self.scalars(scalars, switches)
        results: list[Any] = []
        for batch in self.batches:
            results += batch.mapped(values, [taken(leaves) for leaves in batch.taken])
        return results + [x.reshape(1) for x in computed_scalars.values()]

    @property
    def scalar_leaves(self) -> list[int]:
        """Indices of the scalars that the update takes."""
        return [leaf for leaf in self._leaf_of.values() if leaf in self._scalars]

    def scalars_behind(self) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
        """The scalars of the state that other scalars, and arrays, are computed from.

        Returns:
            For each computed scalar the scalar leaves that it depends on; and those that some array
            depends on.
        """
        behind: dict[int, frozenset[int]] = {}
        for ref, leaf in self._leaf_of.items():
            if leaf in self._scalars:
                behind[ref] = frozenset([leaf])

        def of(refs: Sequence[Any]) -> frozenset[int]:
            known = [behind[ref] for ref in refs if isinstance(ref, int) and ref in behind]
            return frozenset[int]().union(*known)

        for batch in self._of_scalars:
            for op in batch.group.ops:
                behind |= dict.fromkeys(op.outputs, of(op.inputs))
        scalars = {leaf: of([ref]) for ref, leaf in self._result_of.items()}
        arrays = of([ref for batch in self.batches for ref in batch.group.inputs])
        return {i: each for i, each in scalars.items() if i in self._scalars}, arrays

    def scalars(
        self, given: Mapping[int, Any], switches: Any
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Compute all that depends on scalars alone.

        Args:
            given: values of the :attr:`scalar_leaves`.
            switches: the update's last argument.

        Returns:
            The scalars of the state after the update, by leaf index; and what batches take.
        """
        env: dict[int, Any] = {**self._consts, self._switches: switches}
        for ref, leaf in self._leaf_of.items():
            if leaf in self._scalars:
                env[ref] = given[leaf]
        for batch in self._of_scalars:
            env |= zip(batch.group.outputs, batch.evaluated(env), strict=True)
        pairs = self._result_of.items()
        return {leaf: env[ref] for ref, leaf in pairs if leaf in self._scalars}, env

    def wrong(self, results: Sequence[Any], after: Vectors) -> dict[int, float]:
        """Compare computed samples with the state.

        Args:
            results: results of a call.
            after: the same samples as in that call, on the host.

        Returns:
            The share of sampled elements that differ, by index of each leaf that does.
        """
        parts = [leaves for batch in self.batches for leaves in batch.outputs]
        parts += [(leaf,) for leaf in self._result_of.values() if leaf in self._scalars]
        found = {}
        for leaves, result in zip(parts, results, strict=True):
            a, b = np.asarray(result), self.after.of(after, leaves)
            if np.array_equal(_words(a), _words(b)):
                continue
            start = 0
            for i in leaves:
                stop = start + self.after.sizes[i]
                differ = np.any(_words(a[:, start:stop]) != _words(b[:, start:stop]), axis=1)
                if differ.any():
                    found[i] = float(differ.mean())
                start = stop
        return found


def _row_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a row of a leaf: its number of axes, with :data:`ROW` elements along the last."""
    return (*(1,) * (len(shape) - 1), ROW) if shape else ()


def _words(elements: np.ndarray) -> np.ndarray:
    """The bits of some elements as words, a row for each element."""
    words = words_of(np.ascontiguousarray(elements))
    return words.reshape(elements.size, words.size // elements.size if elements.size else 1)
