"""An update that leaves elements in their places, on samples of all leaves at once.

Leaves that go through the same operations are put one behind the other and computed together: of
hundreds of leaves a handful of operations is left. They are those of the update's own jaxpr, mapped
over rows of elements, so that their bits are those of the update wherever it is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device.fingerprint import words_of
from adacheck_jax.update.pinning.flat_jaxpr import Group, flatten, groups

ROW = 128
"""Elements of a row. XLA may compile shorter ones to other arithmetic."""

Vectors = Mapping[str, Any]
"""Samples of leaves, those of one data type one behind the other, along the last axis; by the
type's name. The first axis has a row for each device that took a sample."""


class UnevenError(Exception):
    """An update whose leaves cannot be computed apart."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Groups of operations that are equal, and share their scalars.

    Attributes:
        group: one of them.
        inputs: for each of its inputs the leaves that all of them take; none for a scalar.
        outputs: for each of its outputs the leaves that all of them compute.
    """

    group: Group
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


class Order:
    """The places of leaves in vectors.

    Args:
        order: the leaves.
        dtypes: name of the data type of each.
        sizes: sampled elements of each.
    """

    def __init__(
        self, order: Sequence[int], dtypes: Mapping[int, str], sizes: Mapping[int, int]
    ) -> None:
        self.leaves = tuple(order)
        self.dtypes, self.sizes = dtypes, sizes
        self.lengths: dict[str, int] = {}
        self._starts: dict[int, int] = {}
        for i in self.leaves:
            self._starts[i] = self.lengths.get(dtypes[i], 0)
            self.lengths[dtypes[i]] = self._starts[i] + sizes[i]

    def of(self, vectors: Vectors, leaves: Sequence[int]) -> Any:
        """The samples of some leaves of one data type, one behind the other."""
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

    def chosen(self, vectors: Vectors, other: Order) -> Vectors:
        """The vectors of another order of some of the leaves."""
        if other is self:
            return vectors
        by_dtype: dict[str, list[int]] = {}
        for i in other.leaves:
            by_dtype.setdefault(self.dtypes[i], []).append(i)
        return {dtype: self.of(vectors, leaves) for dtype, leaves in by_dtype.items()}


class Pieces:
    """An update over samples.

    Args:
        function: the update, of flat leaves and switches.
        specs: shapes and data types of the four lists of leaves that it takes.
        arguments: the index of each of those leaves.
        switches: like those that it takes.
        sizes: sampled elements of each leaf.
        passed: leaves that it returns as it takes them.

    Attributes:
        before: the leaves that the update computes, as they lie in vectors.
        after: all leaves, likewise.

    Raises:
        UnevenError: leaves depend on others by more than scalars.
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
        rows = [[jax.ShapeDtypeStruct(row_of(x.shape), x.dtype) for x in each] for each in specs]
        closed = jax.make_jaxpr(function)(*rows, switches)
        flat = flatten(closed.jaxpr)
        indices = [i for each in arguments for i in each]
        explained = [*arguments[0], *arguments[1]]
        consts, given = flat.inputs[: len(closed.consts)], flat.inputs[len(closed.consts) :]
        self._consts = dict(zip(consts, closed.consts, strict=True))
        self._switches = given[-1]
        self._leaf_of = dict(zip(given[:-1], indices, strict=True))
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
        self._batches = self._batched(groups(flat), avals, sizes)
        order: dict[int, None] = {}
        for batch in self._batches:
            for each in (*batch.inputs, *batch.outputs):
                order |= dict.fromkeys(each)
        order |= dict.fromkeys(indices)
        computed = frozenset(explained).difference(passed)
        self.before = Order([i for i in order if i in computed], dtypes, sizes)
        self.after = Order([*order], dtypes, sizes)

    def _batched(
        self, found: Sequence[Group], avals: Mapping[int, Any], sizes: Mapping[int, int]
    ) -> list[_Batch]:
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
            _Batch(
                each[0],
                tuple(leaves(each, refs) for refs in zip(*(g.inputs for g in each), strict=True)),
                tuple(leaves(each, refs) for refs in zip(*(g.outputs for g in each), strict=True)),
            )
            for each in alike.values()
        ]

    def __call__(self, before: Vectors, after: Vectors, switches: Any) -> list[Any]:
        """Computes samples of the state that the update makes.

        Args:
            before: vectors of the leaves that it computes, as they were; see :attr:`before`.
            after: vectors of all leaves, as they are: what it consumed is taken from these, and
                what it passes through.
            switches: of the update.

        Returns:
            Samples of leaves, in parts; :meth:`wrong` knows of which.
        """
        return jax.vmap(self._row, in_axes=(0, 0, None))(before, after, switches)

    def _row(self, before: Vectors, after: Vectors, switches: Any) -> list[Any]:
        """What one device computes."""
        computed = frozenset(self.before.leaves)

        def taken(leaves: Sequence[int]) -> Any:
            if leaves[0] in computed:
                return self.before.of(before, leaves)
            return self.after.of(after, leaves)

        env: dict[int, Any] = {**self._consts, self._switches: switches}
        for ref, leaf in self._leaf_of.items():
            if leaf in self._scalars:
                env[ref] = taken([leaf]).reshape(())
        results: list[Any] = []
        for batch in self._batches:
            shared = {
                ref: env[ref]
                for ref, leaves in zip(batch.group.inputs, batch.inputs, strict=True)
                if not leaves
            }
            arrays = [taken(leaves) for leaves in batch.inputs if leaves]
            if not arrays:
                env |= zip(batch.group.outputs, _evaluated(batch, shared, []), strict=True)
                continue
            results += _mapped(batch, shared, arrays)
        return results + [env[ref].reshape(1) for ref in self._scalar_results()]

    def _scalar_results(self) -> list[int]:
        return [ref for ref, leaf in self._result_of.items() if leaf in self._scalars]

    def wrong(self, results: Sequence[Any], after: Vectors) -> dict[int, float]:
        """Compares what was computed with the state.

        Args:
            results: from a call.
            after: as it was given to it, on the host.

        Returns:
            For each leaf that differs the share of its sampled elements that do.
        """
        parts = [leaves for batch in self._batches if any(batch.inputs) for leaves in batch.outputs]
        parts += [(self._result_of[ref],) for ref in self._scalar_results()]
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


def row_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a row of a leaf: its number of axes, with all elements along the last one."""
    return (*(1,) * (len(shape) - 1), ROW) if shape else ()


def _words(elements: np.ndarray) -> np.ndarray:
    """The bits of some elements, a row for each."""
    words = words_of(np.ascontiguousarray(elements))
    return words.reshape(elements.size, words.size // elements.size if elements.size else 1)


def _mapped(batch: _Batch, shared: Mapping[int, Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a group on long vectors, row by row."""
    refs = [ref for ref, leaves in zip(batch.group.inputs, batch.inputs, strict=True) if leaves]
    length = arrays[0].shape[0]
    if not length:
        return [jnp.zeros(0, aval.dtype) for aval in _avals(batch)]
    shapes = {
        ref: shape for op in batch.group.ops for ref, shape in op.shapes.items() if ref in refs
    }
    rows = [
        jnp.pad(x, (0, -length % ROW)).reshape(-1, *shapes[ref])
        for ref, x in zip(refs, arrays, strict=True)
    ]
    outputs = jax.vmap(lambda *given: _evaluated(batch, shared, given))(*rows)
    return [x.reshape(-1)[:length] for x in outputs]


def _avals(batch: _Batch) -> list[Any]:
    known = {
        ref: aval for op in batch.group.ops for ref, aval in zip(op.outputs, op.avals, strict=True)
    }
    return [known[ref] for ref in batch.group.outputs]


def _evaluated(batch: _Batch, shared: Mapping[int, Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluates the operations of a group."""
    group = batch.group
    refs = [ref for ref, leaves in zip(group.inputs, batch.inputs, strict=True) if leaves]
    env = {**shared, **dict(zip(refs, arrays, strict=True))}
    for op in group.ops:
        with op.context():
            values = [env[ref] if isinstance(ref, int) else ref.val for ref in op.inputs]
            env |= zip(op.outputs, op.bind(values), strict=True)
    return [env[ref] for ref in group.outputs]
