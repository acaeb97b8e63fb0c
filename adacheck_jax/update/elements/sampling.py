"""Samples of a state, taken on its devices or by way of the host.

An update whose elements stay in their places computes an element of each leaf from the same element
of the leaves that it takes. So a sample of one save and a sample of the next, at the same places
(:mod:`~adacheck_jax.update.elements.sample_sites`), show if a replay of the update between them
gives the trained state, without a copy of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jax.sharding import Mesh

from adacheck_jax.device.loops import xla_call
from adacheck_jax.format.boxes import Box
from adacheck_jax.update.elements.pieces import VectorLayout, Vectors
from adacheck_jax.update.elements.sample_programs import (
    LoopGroup,
    Part,
    ProgramGroup,
    SampledGroup,
    SampledLeaf,
    mesh_of,
)
from adacheck_jax.update.elements.sample_sites import Sites, Starts


def _taken(flat: np.ndarray, start: int, stride: int, count: int) -> np.ndarray:
    """Elements of a flattened site, a stride apart."""
    if stride == 1:
        return flat
    return flat[np.minimum(start + np.arange(count) * stride, flat.shape[0] - 1)]


class Sample:
    """A sample of a state, which may still be on its way to the host.

    Args:
        starts: first elements of the sample.
        rows: function that waits for the vectors of a layout.
    """

    def __init__(self, starts: Starts, rows: Callable[[VectorLayout], Vectors]) -> None:
        self.starts = starts
        self._rows = rows

    def vectors(self, layout: VectorLayout) -> Vectors:
        """Wait for the elements of all leaves of a layout, as vectors with a row a device."""
        return self._rows(layout)


def from_host(arrays: Sequence[Any], sites: Sites, starts: Starts, layout: VectorLayout) -> Sample:
    """Take a sample by way of the host; waits for the arrays.

    Args:
        arrays: plain arrays, one a leaf.
        sites: places to sample.
        starts: first elements of the sample.
        layout: layout of the leaves to sample.
    """
    taken = {i: _on_host(arrays[i], i, sites, starts) for i in layout.leaves}
    return Sample(starts, functools.partial(_joined, taken))


def _on_host(array: Any, index: int, sites: Sites, starts: Starts) -> np.ndarray:
    """The sampled elements of one leaf, a row a device."""
    own, column = sites.of(index), sites.position(index)
    shards = {shard.device.id: shard for shard in getattr(array, "addressable_shards", ())}
    rows = []
    for row, device in enumerate(sites.devices):
        site = own.sites[device]
        if device in shards:
            shard = shards[device]
            box = Box.from_slices(shard.index or (), array.shape)
            block = np.asarray(shard.data)[site.relative_to(box.start).slices]
        else:
            block = np.asarray(array)[site.slices]
        rows.append(_taken(block.reshape(-1), starts[row, column], own.stride, own.count))
    return np.array(rows)


def _joined(taken: Mapping[int, np.ndarray], layout: VectorLayout) -> Vectors:
    parts: dict[str, list[np.ndarray]] = {dtype: [] for dtype in layout.lengths}
    for i in layout.leaves:
        parts[layout.dtypes[i]].append(taken[i])
    return {dtype: np.concatenate(each, axis=1) for dtype, each in parts.items()}


class Taker:
    """Takes samples of states of one structure on their devices.

    The programs need no communication. On CPU devices one calls compiled loops
    (:mod:`~adacheck_jax.device.loops.xla_call`). On others each takes a few leaves, and leaves
    that are alike share one. They are compiled in the background; :meth:`take` needs them.

    Args:
        sites: places to sample.
        layout: layout of the leaves to sample.
        arrays: plain arrays of a state, one a leaf; only their shapes and shardings are kept.
    """

    def __init__(self, sites: Sites, layout: VectorLayout, arrays: Sequence[Any]) -> None:
        self._sites, self._layout = sites, layout
        self._on_mesh: dict[Mesh, dict[int, SampledLeaf]] = {}
        self._elsewhere: list[int] = []
        for i in layout.leaves:
            mesh = mesh_of(arrays[i], sites.devices)
            if mesh is None:
                self._elsewhere.append(i)
            else:
                self._on_mesh.setdefault(mesh, {})[i] = SampledLeaf.of(arrays[i], i, sites)
        self._groups: Future[list[SampledGroup]] = Future()
        # Number of the part that has the elements of a leaf, and the first and last of them.
        self._places: dict[int, tuple[int, int, int]] = {}
        self._plans: dict[VectorLayout, dict[str, list[list[int]]]] = {}

    @property
    def is_ready(self) -> bool:
        """True if all programs are compiled."""
        return self._groups.done()

    def compile(self) -> None:
        """Compile the programs; an error is raised when one is used."""
        try:
            self._groups.set_result(self._compiled())
        except BaseException as error:
            self._groups.set_exception(error)

    def _compiled(self) -> list[SampledGroup]:
        groups: list[SampledGroup] = []
        for mesh, leaves in self._on_mesh.items():
            is_host = mesh.devices.flat[0].platform == "cpu" and xla_call.wait()
            by_loops = {i: x for i, x in leaves.items() if is_host and x.fits_loops}
            others = {i: x for i, x in leaves.items() if i not in by_loops}
            if by_loops:
                groups.append(LoopGroup(mesh, by_loops, self._sites))
            if others:
                groups.append(ProgramGroup(mesh, others, self._sites))
        parts = [leaves for group in groups for leaves in group.parts]
        for number, leaves in enumerate([*parts, *([i] for i in self._elsewhere)]):
            start = 0
            for i in leaves:
                self._places[i] = (number, start, start + self._layout.sizes[i])
                start += self._layout.sizes[i]
        return groups

    def take(self, arrays: Sequence[Any], first: Starts, second: Starts) -> tuple[Sample, Sample]:
        """Start to take two samples; the arrays may be donated at once.

        Args:
            arrays: plain arrays, one a leaf.
            first: first elements of one sample.
            second: first elements of the other sample.
        """
        groups = self._groups.result()
        pairs = [pair for group in groups for pair in group.dispatch(arrays, first, second)]
        return (
            self._sample(arrays, first, [each for each, _ in pairs]),
            self._sample(arrays, second, [each for _, each in pairs]),
        )

    def _sample(self, arrays: Sequence[Any], starts: Starts, taken: Sequence[Part]) -> Sample:
        others = [_on_host(arrays[i], i, self._sites, starts) for i in self._elsewhere]

        def rows(layout: VectorLayout) -> Vectors:
            parts = [*(part() for part in taken), *others]
            joined: Vectors = {}
            for dtype, runs in self._plan(layout).items():
                pieces = [parts[n][:, a:b] for n, a, b in runs]
                joined[dtype] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
            return joined

        return Sample(starts, rows)

    def _plan(self, layout: VectorLayout) -> Mapping[str, Sequence[Sequence[int]]]:
        """The runs of elements of all parts, one behind another, that are a layout's vectors."""
        if layout not in self._plans:
            plan: dict[str, list[list[int]]] = {dtype: [] for dtype in layout.lengths}
            for i in layout.leaves:
                runs, (number, start, stop) = plan[layout.dtypes[i]], self._places[i]
                if runs and runs[-1][0] == number and runs[-1][2] == start:
                    runs[-1][2] = stop
                else:
                    runs.append([number, start, stop])
            self._plans[layout] = plan
        return self._plans[layout]
