"""Differences between two steps, which are named or the first at which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adacheck_jax.tools.history.differences import LeafDifference, difference, roles_of
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.steps import InputError, Progress, quiet


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The result of ``adacheck diff``.

    Attributes:
        before, after: the two steps, each as root and number.
        leaf_count: number of leaves that both have.
        differences: leaves that differ; those of the largest relative change first.
        only_before, only_after: leaf paths, with their types, that only one of them has.
        rounded: leaf paths that this machine replays to rounding only.
        alike: those of them that were saved with other bits, and that it replays to the same ones.
        compared_count: number of steps that two runs have in common, of which these are the first
            that differ, or else the last; None if the steps were named.
        equal_until: the last of those before them; None if there is none.
    """

    before: tuple[str, int]
    after: tuple[str, int]
    leaf_count: int
    differences: tuple[LeafDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    rounded: tuple[str, ...]
    alike: tuple[str, ...]
    compared_count: int | None = None
    equal_until: int | None = None

    @property
    def is_equal(self) -> bool:
        """True if both have the same leaves with the same bits."""
        return not (self.differences or self.alike or self.only_before or self.only_after)


def compare_steps(before: Walk, old: int, after: Walk, new: int) -> StepComparison:
    """Compare two recorded steps, leaf by leaf.

    Leaves with the same fingerprint are equal, and steps of which all are equal are not restored.

    Raises:
        InputError: this machine cannot replay one of them.
        AdaCheckError: one of them is damaged.
    """
    kinds, others = (
        {leaf.path: leaf.description for leaf in walk.lineage(step).base.leaves}
        for walk, step in ((before, old), (after, new))
    )
    common = [path for path, kind in kinds.items() if others.get(path) == kind]
    digests = before.fingerprints(old), after.fingerprints(new)
    unequal = [path for path in common if digests[0][path] != digests[1][path]]
    found: list[LeafDifference] = []
    rounded: tuple[str, ...] = ()
    if unequal:
        a, b = before.at(old), after.at(new)
        found, rounded = _differences(a, b, common), tuple({*a.rounded, *b.rounded})
    # A difference of records came first, but between steps of other numbers: each has another one.
    order = ("record", *_ROLES) if old == new else (*_ROLES, "record")
    found.sort(key=lambda x: (order.index(x.role), -(x.relative or x.changed_share)))
    differ = {each.path for each in found}
    return StepComparison(
        before=(str(before.root), old),
        after=(str(after.root), new),
        leaf_count=len(common),
        differences=tuple(found),
        only_before=tuple(f"{x} {kind}" for x, kind in kinds.items() if others.get(x) != kind),
        only_after=tuple(f"{x} {kind}" for x, kind in others.items() if kinds.get(x) != kind),
        rounded=rounded,
        alike=tuple(path for path in unequal if path not in differ),
    )


def _differences(a: State, b: State, paths: Sequence[str]) -> list[LeafDifference]:
    roles = roles_of(len(a.leaves), a.update)
    others = {leaf.path: array for leaf, array in zip(b.leaves, b.arrays, strict=True)}
    wanted = {*paths}
    found = [
        difference(array, others[leaf.path], leaf, role)
        for leaf, array, role in zip(a.leaves, a.arrays, roles, strict=True)
        if leaf.path in wanted
    ]
    return [each for each in found if each is not None]


def compare_runs(first: Walk, second: Walk, progress: Progress = quiet) -> StepComparison:
    """Compare two runs at the first step at which they differ.

    Fingerprints of all leaves are compared step by step, which reads manifests alone. The first
    step that differs is restored from both.

    Raises:
        InputError: they have no step in common, or this machine cannot replay the one that differs.
        AdaCheckError: the step that differs is damaged in one of them.
    """
    common = sorted({*first.steps} & {*second.steps})
    if not common:
        ends = [f"{run.root} has {min(run.steps)} to {max(run.steps)}" for run in (first, second)]
        raise InputError(f"expected steps of both runs, found none: {', '.join(ends)}.")
    equal_until, step = None, common[-1]
    for n, number in enumerate(common):
        if n % 100 == 0:
            progress(n, len(common), f"step {number}")
        if first.fingerprints(number) != second.fingerprints(number):
            step = number
            break
        equal_until = number
    found = compare_steps(first, step, second, step)
    return replace(found, compared_count=len(common), equal_until=equal_until)


_ROLES = ("params", "optimizer state", "other")
