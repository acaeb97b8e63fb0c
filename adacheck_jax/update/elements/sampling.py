"""Samples of a state, taken on its devices or by way of the host.

An update whose elements stay in their places computes an element of each leaf from the same element
of the leaves that it takes. So a sample of one save and a sample of the next, at the same places
(:mod:`~adacheck_jax.update.elements.sample_sites`), show if a replay of the update between them
gives the trained state, without a copy of the state.

One thread in the background compiles (:meth:`Taker.compile`) and hands over one future; the thread
that saves takes samples, and whichever compares them waits for their elements. There is no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jax.sharding import Mesh

from adacheck_jax.format.boxes import Box
from adacheck_jax.update.elements.pieces import Role, Vectors
from adacheck_jax.update.elements.sample_programs import (
    MeshSampler,
    Part,
    SampledLeaf,
    sampled_mesh_of,
)
from adacheck_jax.update.elements.sample_sites import Sites, Starts


class _Places:
    """The places of each leaf's elements in parts, where those of some lie one behind another."""

    def __init__(self, parts: Iterable[Sequence[int]], sizes: Mapping[int, int]) -> None:
        self._of: dict[int, tuple[int, int, int]] = {}
        self._runs: dict[Role, list[list[int]]] = {}
        for number, leaves in enumerate(parts):
            start = 0
            for i in leaves:
                self._of[i] = (number, start, start + sizes[i])
                start += sizes[i]

    def runs(self, role: Role) -> list[list[int]]:
        """Numbers of parts, and first and last elements, which together are those of a role."""
        if role not in self._runs:
            runs = self._runs[role] = list[list[int]]()
            for number, start, stop in (self._of[i] for i in role):
                if runs and runs[-1][0] == number and runs[-1][2] == start:
                    runs[-1][2] = stop
                else:
                    runs.append([number, start, stop])
        return self._runs[role]


class Sample:
    """A sample of a state, which may still be on its way to the host."""

    def __init__(self, starts: Starts, parts: Sequence[Part], places: _Places) -> None:
        self.starts = starts
        self._parts, self._places = parts, places

    def vectors(self, roles: Iterable[Role]) -> Vectors:
        """Wait for the elements of the leaves of some roles, with a row a device."""
        parts = [part() for part in self._parts]
        vectors = {}
        for role in roles:
            pieces = [parts[n][:, start:stop] for n, start, stop in self._places.runs(role)]
            vectors[role] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        return vectors


def from_host(arrays: Sequence[Any], sites: Sites, starts: Starts, roles: Iterable[Role]) -> Sample:
    """Take a sample of the leaves of some roles by way of the host; waits for the arrays."""
    leaves = _leaves_of(roles)
    parts = [_on_host(arrays[i], i, sites, starts) for i in leaves]
    return Sample(starts, parts, _Places(([i] for i in leaves), sites.sizes))


def _leaves_of(roles: Iterable[Role]) -> list[int]:
    return [*dict.fromkeys(i for role in roles for i in role)]


def _on_host(array: Any, index: int, sites: Sites, starts: Starts) -> Part:
    """The sampled elements of one leaf, a row a device."""
    own = sites.of(index)
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
        flat = block.reshape(-1)
        if own.stride > 1:
            places = starts[row, own.column] + np.arange(own.count) * own.stride
            flat = flat[np.minimum(places, flat.shape[0] - 1)]
        rows.append(flat)
    elements = np.array(rows)
    return lambda: elements


class Taker:
    """Takes samples of the leaves of some roles, of states of one structure, on their devices.

    The programs need no communication. They are compiled in the background; :meth:`take` needs
    them. Of the arrays only shapes and shardings are kept.
    """

    def __init__(self, sites: Sites, roles: Iterable[Role], arrays: Sequence[Any]) -> None:
        self._sites = sites
        self._on_mesh: dict[Mesh, dict[int, SampledLeaf]] = {}
        self._elsewhere: list[int] = []
        for i in _leaves_of(roles):
            mesh = sampled_mesh_of(arrays[i], sites.devices)
            if mesh is None:
                self._elsewhere.append(i)
            else:
                self._on_mesh.setdefault(mesh, {})[i] = SampledLeaf.of(arrays[i], i, sites)
        self._compiled: Future[tuple[list[MeshSampler], _Places]] = Future()

    @property
    def is_ready(self) -> bool:
        """True if all programs are compiled."""
        return self._compiled.done()

    def compile(self) -> None:
        """Compile the programs; an error is raised when one is used."""
        try:
            samplers = [MeshSampler(*each, self._sites) for each in self._on_mesh.items()]
            parts = [leaves for each in samplers for leaves in each.parts]
            places = _Places([*parts, *([i] for i in self._elsewhere)], self._sites.sizes)
            self._compiled.set_result((samplers, places))
        except BaseException as error:
            self._compiled.set_exception(error)

    def fits(self, arrays: Sequence[Any]) -> bool:
        """True if arrays lie as those that the programs are compiled for."""
        return all(
            getattr(arrays[i], "sharding", None) == leaf.spec.sharding
            for leaves in self._on_mesh.values()
            for i, leaf in leaves.items()
        )

    def take(self, arrays: Sequence[Any], starts: Starts) -> Sample:
        """Start to take a sample; the arrays may be donated once it is dispatched."""
        samplers, places = self._compiled.result()
        parts = [part for each in samplers for part in each.dispatch(arrays, starts)]
        others = [_on_host(arrays[i], i, self._sites, starts) for i in self._elsewhere]
        return Sample(starts, [*parts, *others], places)
