"""Differences between two steps, and the first step at which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """

    before: tuple[str, int]
    after: tuple[str, int]
    leaf_count: int
    differences: tuple[LeafDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    rounded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The result of ``adacheck compare``.

    Attributes:
        first, second: the two roots.
        compared_count: number of steps that both have, from the first compared one on.
        only_first, only_second: numbers of steps that one of them alone has.
        equal_until: the last step up to which every leaf of every common step has the same
            fingerprint; None if the first differs.
        step: the first step that differs; None if none does.
        differences: the leaves that differ there: gradients first, and of those with the fewest
            changed elements first.
        cause: what the differing leaves tell of where the difference comes from.
        restored_count: number of states that were restored.
    """

    first: str
    second: str
    compared_count: int
    only_first: tuple[int, ...]
    only_second: tuple[int, ...]
    equal_until: int | None
    step: int | None
    differences: tuple[LeafDifference, ...]
    cause: str
    restored_count: int


def compare_steps(before: Walk, old: int, after: Walk, new: int) -> StepComparison:
    """Compare two recorded steps, leaf by leaf.

    Leaves with the same fingerprint are equal, and steps of which all are equal are not restored.

    Raises:
        InputError: this machine cannot replay one of them.
        AdaCheckError: one of them is damaged.
    """
    kinds = [_kinds(before, old), _kinds(after, new)]
    common = [path for path, kind in kinds[0].items() if kinds[1].get(path) == kind]
    digests = [before.fingerprints(old), after.fingerprints(new)]
    found: list[LeafDifference] = []
    rounded: tuple[str, ...] = ()
    if any(digests[0][path] != digests[1][path] for path in common):
        a, b = before.at(old), after.at(new)
        found, rounded = _differences(a, b, common), tuple({*a.rounded, *b.rounded})
    last = len(_ORDER)  # the record comes last here: each step has another one
    found.sort(key=lambda x: (_ORDER[x.role] or last, -(x.relative or x.changed_share)))
    return StepComparison(
        before=(str(before.root), old),
        after=(str(after.root), new),
        leaf_count=len(common),
        differences=tuple(found),
        only_before=_only(kinds[0], kinds[1]),
        only_after=_only(kinds[1], kinds[0]),
        rounded=rounded,
    )


def _only(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{path} {kind}" for path, kind in one.items() if other.get(path) != kind)


def compare_runs(
    first: Walk,
    second: Walk,
    progress: Progress = quiet,
) -> RunComparison:
    """Find the first step at which two runs differ, and the leaves and elements that do.

    Fingerprints of all leaves are compared step by step, which reads manifests alone. The first
    step that differs is restored from both.

    Raises:
        InputError: they have no step in common, or other leaves.
        AdaCheckError: the step that differs is damaged in one of them.
    """
    steps = [{*each.steps} for each in (first, second)]
    common = sorted(steps[0] & steps[1])
    if not common:
        ends = [f"{run.root} has {run.steps[0]} to {run.steps[-1]}" for run in (first, second)]
        raise InputError(f"expected steps of both runs, found none: {', '.join(ends)}.")
    equal_until, step = None, None
    found: list[LeafDifference] = []
    for n, number in enumerate(common):
        if n % 100 == 0:
            progress(n, len(common), f"step {number}")
        _refuse_other_leaves(first, second, number)
        if first.fingerprints(number) != second.fingerprints(number):
            a, b, step = first.at(number), second.at(number), number
            found = _differences(a, b, [leaf.path for leaf in a.leaves])
            found.sort(key=lambda each: (_ORDER[each.role], each.changed_count))
            break
        equal_until = number
    return RunComparison(
        first=str(first.root),
        second=str(second.root),
        compared_count=len(common),
        only_first=tuple(sorted(steps[0] - steps[1])),
        only_second=tuple(sorted(steps[1] - steps[0])),
        equal_until=equal_until,
        step=step,
        differences=tuple(found),
        cause="" if step is None else _cause(found, is_first=equal_until is None),
        restored_count=first.restored_count + second.restored_count,
    )


_ORDER = {"record": 0, "params": 1, "optimizer state": 2, "other": 3}


def _kinds(walk: Walk, step: int) -> Mapping[str, str]:
    return {leaf.path: leaf.description for leaf in walk.lineages[step].base.leaves}


def _refuse_other_leaves(first: Walk, second: Walk, step: int) -> None:
    if first.lineages[step].base.leaves is second.lineages[step].base.leaves:
        return
    kinds = [_kinds(first, step), _kinds(second, step)]
    if kinds[0] != kinds[1]:
        other = sorted(set(kinds[0].items()) ^ set(kinds[1].items()))
        shown = ", ".join(f"{path} {kind}" for path, kind in other[:5])
        raise InputError(
            f"{first.root}, {second.root}: expected runs of the same leaves, found that only one "
            f"has, at step {step}: {shown}{', ...' if len(other) > 5 else ''}. A run in another "
            "layout is compared after adacheck transform."
        )


def _differences(a: State, b: State, paths: Sequence[str]) -> list[LeafDifference]:
    roles = roles_of(len(a.leaves), a.update)
    others = {leaf.path: array for leaf, array in zip(b.leaves, b.arrays, strict=True)}
    wanted, found = {*paths}, []
    for leaf, array, role in zip(a.leaves, a.arrays, roles, strict=True):
        if leaf.path in wanted:
            found.append(difference(array, others[leaf.path], leaf, role))
    return [each for each in found if each is not None]


def _cause(found: Sequence[LeafDifference], *, is_first: bool) -> str:
    roles = {each.role for each in found}
    if not found:
        return "the fingerprints differ and no element does: a manifest is not of its run"
    if is_first:
        return "they differ from the first step that both have: what came before cannot be told"
    if "record" in roles:
        return (
            "the gradients that the update took differ, and before this step all was the same: "
            "the batch, or the forward and backward computation"
        )
    if roles & {"params", "optimizer state"}:
        return (
            "the gradients are the same, and the state before was: the update, or something that "
            "changed the state after it"
        )
    return "only leaves that no update computes differ"
