"""Places at which a state is sampled: small leaves whole, of large ones elements a stride apart.

Each device samples a box that it holds of all leaves of one shape, however each of them was cut:
nothing crosses between devices, and each device gives one row of the sample. The first element of a
large leaf changes from save to save. A change of as many neighbours as the stride is long is always
met.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from adacheck_jax.device.sharding import boxes_by_device
from adacheck_jax.format.boxes import Box

WHOLE_ELEMENTS = 4096
"""Elements of the largest leaf that is sampled whole."""
SAMPLE_ELEMENTS = 1024
"""Elements of a larger leaf that all devices together sample."""
_MIN_ROW = 128
"""Elements of a larger leaf that each device samples at least."""
_THINNED = 4
"""Of a leaf that is compared whole later, one in so many of these elements is taken."""

Starts = np.ndarray
"""First sampled element of each device of this process and each shape: int32 (rows, shapes)."""


@dataclass(frozen=True, slots=True)
class SampledShape:
    """The sampling of all leaves of one shape.

    Attributes:
        column: position of the shape among those of a state.
        sites: for each device, by id, a box that it holds of each of these leaves.
        stride: distance between the elements taken of a site, counted row by row.
        count: number of elements taken; past the end of a site its last one is taken again.
        first: first element of each device, by id, for small leaves: devices with the same site
            may take turns. None to draw each at random.
    """

    column: int
    sites: Mapping[int, Box]
    stride: int
    count: int
    first: Mapping[int, int] | None


class Sites:
    """Places at which the leaves of one structure are sampled.

    Args:
        indices: indices of the leaves that an update takes or computes.
        arrays: plain arrays of a state, one a leaf; only their shapes and shardings are read.
        in_turns: True if devices that hold the same box of a small leaf take it whole together;
            False if each does by itself, since their bits may differ.
        whole: indices of leaves that each device takes whole.

    Attributes:
        devices: ids of the devices of this process that sample, one row each.
        shapes: the sampling of each shape.
        uncovered: indices of the leaves of which some part is sampled nowhere, since no device
            holds that part of all leaves of its shape.
    """

    def __init__(
        self,
        indices: Sequence[int],
        arrays: Sequence[Any],
        *,
        in_turns: bool = True,
        whole: Collection[int] = (),
    ) -> None:
        boxes = {i: boxes_held(arrays[i]) for i in indices}
        everywhere: list[Any] = max((list(each) for each in boxes.values()), key=len, default=[])
        process = jax.process_index()
        self._every_device = [d.id for d in everywhere]
        self.devices = [d.id for d in everywhere if d.process_index == process]
        by_shape: dict[Any, list[int]] = {}
        for i in indices:
            by_shape.setdefault((tuple(arrays[i].shape), i in whole), []).append(i)
        self.shapes: list[SampledShape] = []
        self._shape_of: dict[int, SampledShape] = {}
        uncovered: set[int] = set()
        for (shape, is_whole), members in by_shape.items():
            sites = {d.id: _common([boxes[i].get(d) for i in members], shape) for d in everywhere}
            found = {site for site in sites.values() if site is not None}
            sizes = {site.shape for site in found}
            if None in sites.values() or len(sizes) != 1:
                uncovered.update(members)
                sites = dict.fromkeys(sites, _nothing_of(shape))
            elif sum(site.size for site in found) < math.prod(shape):
                uncovered.update(members)
            known, column = cast(dict[int, Box], sites), len(self.shapes)
            if is_whole:
                size = next((box.size for box in known.values()), math.prod(shape))
                taken = SampledShape(column, known, 1, size, dict.fromkeys(known, 0))
            else:
                taken = _sampled_shape(column, known, math.prod(shape), in_turns=in_turns)
            self.shapes.append(taken)
            self._shape_of |= dict.fromkeys(members, taken)
        self.uncovered = frozenset(uncovered)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sites):
            return NotImplemented
        return (self._every_device, self._shape_of) == (other._every_device, other._shape_of)

    __hash__ = None  # type: ignore[assignment]

    def thinned(self) -> Sites:
        """The same places, but of each large leaf a fourth of the elements."""
        thinner = copy.copy(self)
        thinner.shapes = [_thinned(each) for each in self.shapes]
        thinner._shape_of = {i: thinner.shapes[x.column] for i, x in self._shape_of.items()}
        return thinner

    @property
    def sizes(self) -> dict[int, int]:
        """Number of elements of each leaf in a row of a sample, by leaf index."""
        return {i: each.count for i, each in self._shape_of.items()}

    def starts_at(self, number: int) -> Starts:
        """The first elements of one sample."""
        starts = np.zeros((len(self.devices), len(self.shapes)), np.int32)
        for row, device in enumerate(self.devices):
            random = np.random.default_rng([number, device])
            drawn = random.integers([each.stride for each in self.shapes])
            for n, each in enumerate(self.shapes):
                starts[row, n] = drawn[n] if each.first is None else each.first[device]
        return starts

    def of(self, index: int) -> SampledShape:
        """The sampling of a leaf and of all others of its shape."""
        return self._shape_of[index]


def boxes_held(array: Any) -> Mapping[Any, Box]:
    """The box that each device holds of an array, in any of its memories; none of a numpy array."""
    is_placed = isinstance(array, jax.Array)
    return boxes_by_device(array.sharding, tuple(array.shape)) if is_placed else {}


def _common(boxes: Sequence[Box | None], shape: tuple[int, ...]) -> Box | None:
    """The intersection of some boxes, None if it is empty; a box that is None leaves out none."""
    if not math.prod(shape):
        return _nothing_of(shape)
    common: Box | None = Box.full(shape)
    for box in boxes:
        if box is not None and common is not None:
            common = common.intersect(box)
    return common


def _nothing_of(shape: tuple[int, ...]) -> Box:
    """A box without elements."""
    return Box((0,) * len(shape), (0,) * len(shape))


def _sampled_shape(
    column: int, sites: dict[int, Box], elements: int, *, in_turns: bool
) -> SampledShape:
    site = next(iter(sites.values()), Box((), ()))
    if elements <= WHOLE_ELEMENTS:
        sharing: dict[Box, list[int]] = {}
        for device in sorted(sites):
            sharing.setdefault(sites[device], []).append(device)
        stride = max(1, min(site.size, *map(len, sharing.values()))) if sharing and in_turns else 1
        first = {d: n % stride for each in sharing.values() for n, d in enumerate(each)}
        return SampledShape(column, sites, stride, -(-site.size // stride), first)
    if not site.size:
        return SampledShape(column, sites, 1, 0, None)
    wanted = min(site.size, max(_MIN_ROW, SAMPLE_ELEMENTS // max(1, len(sites))))
    return _a_stride_apart(column, sites, site.size // wanted)


def _thinned(taken: SampledShape) -> SampledShape:
    if taken.first is not None or not taken.count:
        return taken
    return _a_stride_apart(taken.column, taken.sites, taken.stride * _THINNED)


def _a_stride_apart(column: int, sites: Mapping[int, Box], stride: int) -> SampledShape:
    """Elements of sites of one shape that lie at most a stride apart."""
    site = next(iter(sites.values()), Box((), ()))
    stride = min(stride, site.size)
    while stride > 1 and math.gcd(stride, site.shape[-1]) > 1:  # else some columns are never met
        stride -= 1
    return SampledShape(column, sites, stride, -(-site.size // stride), None)
