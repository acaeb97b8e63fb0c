"""Leaves that changed from recorded step to recorded step, told by fingerprints alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.report.facts import Changes, LeafBytes

MOST_COLUMNS = 360
MOST_LEAVES = 120


def changes_of(walk: Walk, leaves: Sequence[LeafBytes]) -> tuple[Changes, dict[int, int]]:
    """Compare every recorded step with the recorded step before it.

    Args:
        walk: the run.
        leaves: its leaves, in tree order.

    Returns:
        The changes by leaf and step, and the number of changed leaves of each step that has one
        before it.
    """
    chosen = _largest(leaves)
    rows = {leaf.path: n for n, leaf in enumerate(chosen)}
    columns = columns_of(walk.steps)
    changed = [[0] * len(columns) for _ in chosen]
    known = [[0] * len(columns) for _ in chosen]
    counts: dict[int, int] = {}
    before: dict[str, int] = {}
    for number, steps in enumerate(columns):
        for step in steps:
            now = walk.fingerprints(step)
            both = [path for path in now if path in before]
            new = [path for path in both if now[path] != before[path]]
            for paths, cells in ((both, known), (new, changed)):
                for path in paths:
                    if path in rows:
                        cells[rows[path]][number] += 1
            if before:
                counts[step] = len(new)
            before = now
    shares = tuple(
        tuple(part / whole if whole else None for part, whole in zip(*cells, strict=True))
        for cells in zip(changed, known, strict=True)
    )
    return Changes(
        paths=tuple(leaf.path for leaf in chosen),
        roles=tuple(leaf.role for leaf in chosen),
        left_out=len(leaves) - len(chosen),
        columns=tuple((steps[0], steps[-1]) for steps in columns),
        shares=shares,
    ), counts


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """As many steps of a run, evenly spread over it, the last one among them.

    Args:
        steps: their numbers.
        count: the most that are wanted.
    """
    if count >= len(steps):
        return [*steps]
    return [steps[(n + 1) * len(steps) // count - 1] for n in range(count)]


def columns_of(steps: Sequence[int]) -> list[Sequence[int]]:
    """Steps by column: one each, or as many as fit into :data:`MOST_COLUMNS`."""
    count = min(len(steps), MOST_COLUMNS)
    bounds = [n * len(steps) // max(count, 1) for n in range(count + 1)]
    return [steps[a:b] for a, b in itertools.pairwise(bounds)]


def with_norms(changes: Changes, relative: Mapping[int, Mapping[str, float | None]]) -> Changes:
    """The changes with the norms of some steps.

    Args:
        changes: what fingerprints tell.
        relative: relative change of each leaf, by step and leaf path.
    """
    steps = evenly(sorted(relative), MOST_COLUMNS)
    norms = tuple(tuple(relative[step].get(path) for step in steps) for path in changes.paths)
    return Changes(
        changes.paths,
        changes.roles,
        changes.left_out,
        changes.columns,
        changes.shares,
        tuple(steps),
        norms,
    )


def _largest(leaves: Sequence[LeafBytes]) -> list[LeafBytes]:
    """The largest leaves, in tree order."""
    order = sorted(range(len(leaves)), key=lambda n: (-leaves[n].leaf_bytes, n))
    return [leaves[n] for n in sorted(order[:MOST_LEAVES])]
