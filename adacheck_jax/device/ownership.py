"""The process that writes each box.

Declared replicas fall together in :mod:`~adacheck_jax.device.sharding`; here each distinct box gets
one owner. Every process computes the same owners from the same layouts, with no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adacheck_jax.device.sharding import Layout
from adacheck_jax.format.boxes import grid, largest_divisor, sizes
from adacheck_jax.format.manifest import Grid


def share_out(
    layouts: Sequence[Layout], itemsizes_bytes: Sequence[int], first: frozenset[int]
) -> list[Grid]:
    """Chooses the owner of each box, balancing bytes over processes.

    A large box that several processes hold is cut into equal pieces, if possible one for each of
    them; small boxes are not cut. Boxes and pieces with several holders are dealt out largest
    first, each to the holder with the fewest bytes so far.

    Args:
        layouts: layout of each leaf.
        itemsizes_bytes: bytes of one element of each leaf.
        first: indices of leaves that are balanced among themselves before the others: those that
            every delta writes.

    Returns:
        Boxes of each leaf, those of its layout or finer ones, and their owners.
    """
    drafts = [_cut(layout, size) for layout, size in zip(layouts, itemsizes_bytes, strict=True)]
    owners = [[0] * len(draft.replicas) for draft in drafts]
    last = max((held[-1] for draft in drafts for held in draft.replicas), default=0)
    load_bytes = np.zeros(last + 1, np.int64)
    # Equal tuples of holders are mostly one object, converted to an array once.
    arrays: dict[tuple[int, ...], np.ndarray] = {}
    for group in (first, frozenset(range(len(drafts))) - first):
        pieces = []
        for i in group:
            for place, (size, holders) in enumerate(
                zip(sizes(drafts[i].cuts), drafts[i].replicas, strict=True)
            ):
                size_bytes = size * itemsizes_bytes[i]
                owner, *others = holders
                if others:
                    pieces.append((-size_bytes, i, place))
                else:
                    owners[i][place] = owner
                    load_bytes[owner] += size_bytes
        for negative_size_bytes, i, place in sorted(pieces):
            holders = drafts[i].replicas[place]
            among = arrays.setdefault(holders, np.array(holders))
            owner = int(among[np.argmin(load_bytes[among])])
            owners[i][place] = owner
            load_bytes[owner] -= negative_size_bytes
    return [Grid(d.cuts, tuple(each)) for d, each in zip(drafts, owners, strict=True)]


_MIN_CUT_BYTES = 4 << 20
"""A box of fewer bytes is written by one process, though others hold it too."""
_MIN_PIECE_BYTES = 1 << 20


def _cut(layout: Layout, itemsize_bytes: int) -> Layout:
    """Cuts large boxes that several processes hold.

    Returns:
        A layout with finer cuts, in which the pieces of a box have different holders. Where there
        is one piece for each holder of a box, each piece gets one: leaves of one shape and sharding
        are then shared out alike, and every process sees by itself which of its pieces are equal.
    """
    fewest, size_bytes = min(map(len, layout.replicas)), next(sizes(layout.cuts)) * itemsize_bytes
    if fewest < 2 or size_bytes < _MIN_CUT_BYTES:
        return layout
    boxes = grid(layout.cuts)
    if len({box.shape for box in boxes}) > 1:
        return layout
    most = min(fewest, size_bytes // _MIN_PIECE_BYTES)
    divisors = [largest_divisor(length, most) for length in boxes[0].shape]
    count = max(divisors)
    axis = divisors.index(count)  # the first such axis, so that pieces are contiguous
    length = boxes[0].shape[axis]
    cuts = list(layout.cuts)
    cuts[axis] = tuple(range(0, layout.cuts[axis][-1] + 1, length // count))
    holders_at = {box.start: each for box, each in zip(boxes, layout.replicas, strict=True)}
    replicas = []
    for piece in grid(tuple(cuts)):
        inside = piece.start[axis] % length
        at = (*piece.start[:axis], piece.start[axis] - inside, *piece.start[axis + 1 :])
        holders = holders_at[at]
        own = inside * count // length
        replicas.append(holders[own::count])  # of no two pieces the same: nobody writes them all
    return Layout(tuple(cuts), tuple(replicas))
