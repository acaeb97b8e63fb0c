"""The plan of a transformation: operations on whole leaves, from rules and the leaves' shapes.

A rule is applied to trees of the state: the params, and what an optimizer keeps for them. These are
found by paths and shapes alone: moments, record and master weights lie in trees whose leaves have
the paths that the params have in theirs.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adacheck_jax.errors import MismatchError, listed
from adacheck_jax.layout.operations import Kind, Operation
from adacheck_jax.layout.rules import Rule

_listed = functools.partial(listed, most=10)


class LayoutStep(NamedTuple):
    """One operation; values are numbered.

    Attributes:
        operation: the operation.
        taken: numbers of the values that it takes.
        given: numbers of the values that it gives.
    """

    operation: Operation
    taken: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """Steps that have values in common, and none with other steps.

    Attributes:
        steps: the steps, in order.
        taken: numbers of the state's leaves that they take.
        given: numbers of the new state's leaves that they give.
    """

    steps: tuple[LayoutStep, ...]
    taken: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations that give a state another layout.

    Attributes:
        kinds: shape and data type of each value.
        inputs: number of each leaf of the state, by leaf path.
        outputs: number of each leaf of the new state, by leaf path.
        steps: the operations, in order.
        trees: paths of the trees that rules were applied to.
    """

    kinds: tuple[Kind, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    steps: tuple[LayoutStep, ...]
    trees: tuple[str, ...]

    @property
    def after(self) -> dict[str, Kind]:
        """Shapes and data types of the new state's leaves, by leaf path."""
        return {path: self.kinds[value] for path, value in self.outputs.items()}

    @property
    def untouched(self) -> list[str]:
        """Leaf paths of the leaves that no rule concerns."""
        return [path for path, value in self.inputs.items() if self.outputs.get(path) == value]

    def needed_for(self, wanted: Iterable[str]) -> Plan:
        """The part of the plan that gives some leaves of the new state, by their leaf paths."""
        outputs = {path: self.outputs[path] for path in wanted}
        values, steps = set(outputs.values()), list[LayoutStep]()
        for step in reversed(self.steps):
            if not values.isdisjoint(step.given):
                steps.insert(0, step)
                values.update(step.taken)
        inputs = {path: value for path, value in self.inputs.items() if value in values}
        return Plan(self.kinds, inputs, outputs, tuple(steps), self.trees)

    def components(self) -> list[Component]:
        """The steps in components, which can be computed one after another."""
        root: dict[int, int] = {}

        def find(value: int) -> int:
            while root.setdefault(value, value) != value:
                value = root[value]
            return value

        for step in self.steps:
            first, *others = [*step.taken, *step.given]
            for other in others:
                root[find(other)] = find(first)
        groups: dict[int, list[LayoutStep]] = {}
        for step in self.steps:
            groups.setdefault(find(step.taken[0]), []).append(step)
        inputs, outputs = set(self.inputs.values()), set(self.outputs.values())
        return [
            Component(
                tuple(steps),
                tuple(v for step in steps for v in step.taken if v in inputs),
                tuple(v for step in steps for v in step.given if v in outputs),
            )
            for steps in groups.values()
        ]

    def inverted(self, component: Component) -> list[LayoutStep] | None:
        """Steps that give the leaves back which a component took; None if it may lose something."""
        steps = []
        for step in reversed(component.steps):
            inverse = step.operation.inverse([self.kinds[v] for v in step.taken])
            if inverse is None:
                return None
            steps.append(LayoutStep(inverse, step.given, step.taken))
        return steps


def plan(rules: Sequence[Rule], leaves: Mapping[str, Kind], params: Sequence[Params]) -> Plan:
    """Plan a transformation.

    Args:
        rules: the rules, applied one after another, each to what those before it left.
        leaves: shapes and data types of the state's leaves, by leaf path.
        params: the trees of params, one for each recorder.

    Raises:
        MismatchError: a rule matches nothing, cannot take what it matches, or two leaves would have
            one path; the message names the rule and the leaves.
    """
    planning = _Planning(leaves, params)
    for number, rule in enumerate(rules, 1):
        planning.add(rule, f"rule {number} ({rule})")
    return planning.plan()


class _Planning:
    """The state so far, while rules are applied."""

    def __init__(self, leaves: Mapping[str, Kind], params: Sequence[Params]) -> None:
        self._inputs = {path: k for k, path in enumerate(leaves)}
        self._kinds = [*leaves.values()]
        self._now = dict(self._inputs)
        self._steps: list[LayoutStep] = []
        found = [tree for each in params for tree in find_trees(leaves, each)]
        self._trees = tuple(dict.fromkeys(found))
        self._params = tuple(each.root for each in params)

    def plan(self) -> Plan:
        self._check_nesting()
        return Plan(tuple(self._kinds), self._inputs, self._now, tuple(self._steps), self._trees)

    def _check_nesting(self) -> None:
        """Refuse a leaf below another one: a tree cannot hold both, and one would be lost."""
        for path in self._now:
            above = (path[:k] for k, letter in enumerate(path) if letter == "/")
            if leaf := next((each for each in above if each in self._now), None):
                raise MismatchError(
                    f"expected no leaf below another one after the rules, found {leaf} and {path}. "
                    "Give one of them another path."
                )

    def add(self, rule: Rule, name: str) -> None:
        """Apply a rule to every tree that it concerns."""
        made: dict[str, int] = {}
        taken: set[str] = set()
        counts: dict[str, int] = {}
        for tree in self._concerned(rule, name):
            paths = ["/" + path for path in self._now] if rule.is_anchored else self._paths_in(tree)
            for matched, values in _matches(rule, paths, name):
                sources = [self._full(rule, tree, path) for path in matched]
                if len({*sources}) < len(sources) or not taken.isdisjoint(sources):
                    raise MismatchError(
                        f"{name}: expected to take each leaf once, found one twice among "
                        f"{_listed(sources)}."
                    )
                first = counts.setdefault(matched[0], len(sources))
                if len(sources) != first:
                    raise MismatchError(
                        f"{name}: expected {first} leaves in {tree}, as in the params, found "
                        f"{len(sources)}: {_listed(sources)}. The optimizer keeps them for some of "
                        "the params; name the trees that the rule is for (trees=[...])."
                    )
                given = self._step(rule, sources, name, tree)
                paths_given = _result_paths(rule, values, len(given))
                for inside, value in zip(paths_given, given, strict=True):
                    path = self._full(rule, tree, inside)
                    if path in made:
                        raise MismatchError(f"{name}: expected one leaf {path}, found two.")
                    made[path] = value
                taken.update(sources)
        if not made:
            here = sorted(self._paths_in(self._params[0] if self._params else ""))
            raise MismatchError(
                f"{name}: expected leaves that match, found none. The leaves of "
                f"{(self._params or ('',))[0] or 'the state'} are: {_listed(here)}."
            )
        left = {path: value for path, value in self._now.items() if path not in taken}
        if twice := sorted(made.keys() & left.keys()):
            raise MismatchError(f"{name}: leaves of that path exist already: {_listed(twice)}.")
        self._now = left | made

    def _concerned(self, rule: Rule, name: str) -> Sequence[str]:
        if rule.is_anchored:
            return [""]
        if rule.trees is None:
            return self._trees or [""]
        chosen: list[str] = []
        for tree in rule.trees:
            known = self._params if tree == "params" and tree not in self._trees else (tree,)
            if not set(known) <= set(self._trees):
                raise MismatchError(
                    f"{name}: expected trees among {_listed([*self._trees])}, found {tree!r}."
                )
            chosen += known
        return chosen

    def _paths_in(self, tree: str) -> list[str]:
        """Paths in a tree of its leaves; those of other trees inside it are left out."""
        others = [
            other
            for other in self._trees
            if other != tree and within(tree, f"{other}/x") is not None
        ]
        return [
            inside
            for path in self._now
            if (inside := within(tree, path)) is not None
            and not any(within(other, path) is not None for other in others)
        ]

    @staticmethod
    def _full(rule: Rule, tree: str, path: str) -> str:
        return path.removeprefix("/") if rule.is_anchored else _join(tree, path)

    def _step(self, rule: Rule, sources: Sequence[str], name: str, tree: str) -> tuple[int, ...]:
        """Note the operation on some leaves; the numbers of its results."""
        taken = tuple(self._now[path] for path in sources)
        kinds = [self._kinds[value] for value in taken]
        try:
            operation = rule.making(kinds)
            if operation is None:
                return taken
            if keys := [path for path, k in zip(sources, kinds, strict=True) if "<" in k.dtype]:
                raise ValueError(f"typed PRNG keys can only be renamed, and {keys[0]} is one")
            results = operation.kinds(kinds)
        except ValueError as error:
            is_like = not rule.is_anchored and tree not in self._params
            hint = " Name the trees that the rule is for (trees=[...])." if is_like else ""
            raise MismatchError(f"{name}: {_listed(sources)}: {error}.{hint}") from error
        given = tuple(range(len(self._kinds), len(self._kinds) + len(results)))
        self._kinds += results
        self._steps.append(LayoutStep(operation, taken, given))
        return given


def _result_paths(rule: Rule, values: Mapping[str, str], count: int) -> list[str]:
    """Paths of so many results, by the texts that names stand for."""
    name = rule.counts_results
    if name is None:
        return [pattern.fill(values) for pattern in rule.results]
    return [rule.results[0].fill({**values, name: str(k)}) for k in range(count)]


def _matches(
    rule: Rule, paths: Sequence[str], name: str
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The groups of leaves that a rule takes, and the text that each name stands for."""
    groups: dict[frozenset[tuple[str, str]], dict[int, str]] = {}
    for path in paths:
        for k, pattern in enumerate(rule.sources):
            values = pattern.match(path)
            if values is None:
                continue
            counted = rule.counts_sources
            place = k if counted is None else _number(values.pop(counted), path, name)
            group = groups.setdefault(frozenset(values.items()), {})
            if place in group:
                raise MismatchError(f"{name}: {group[place]} and {path} have the same place.")
            group[place] = path
    for values, group in groups.items():
        count = len(group) if rule.counts_sources is not None else len(rule.sources)
        if missing := sorted(set(range(count)).difference(group)):
            wanted = rule.sources[0 if rule.counts_sources else missing[0]]
            number = {rule.counts_sources: str(missing[0])} if rule.counts_sources else {}
            raise MismatchError(
                f"{name}: expected a leaf {wanted.fill({**dict(values), **number})} beside "
                f"{_listed([*group.values()])}, found none."
            )
        yield [group[k] for k in range(count)], dict(values)


def _number(text: str, path: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise MismatchError(f"{name}: expected a number in {path}, found {text!r}.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Params:
    """A tree of trained params in a state.

    Attributes:
        root: path of the tree; empty if the params are the whole state.
        paths: leaf paths inside the tree.
    """

    root: str
    paths: frozenset[str]


def _join(root: str, path: str) -> str:
    """The path in the state of a leaf in a tree."""
    return f"{root}/{path}" if root else path


def within(root: str, path: str) -> str | None:
    """The path in a tree of a leaf of the state; None if it lies elsewhere."""
    if not root:
        return path
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else None


def params_of(params: Sequence[str], ends: Sequence[str]) -> Params:
    """The tree of the params of a recorder, which has the paths of the tree of their gradients."""
    common: set[str] | None = None
    for end in ends:
        own = {path[: -len(end)].removesuffix("/") for path in params if _ends_with(path, end)}
        common = own if common is None else common & own
    inside = [root for root in common or () if all(within(root, p) is not None for p in params)]
    common_root = posixpath.commonpath([*map(posixpath.dirname, params)] or [""])
    root = min(inside, key=len, default=common_root)
    return Params(root, frozenset(within(root, path) or "" for path in params))


def _ends_with(path: str, end: str) -> bool:
    """True if a path ends with all segments of another one."""
    return path == end or path.endswith(f"/{end}")


def find_trees(leaves: Mapping[str, Kind], params: Params) -> list[str]:
    """Paths of the params and of all trees that are like them, the params first.

    Such a tree has a leaf for each param; or for some of them, of the same shapes (an optimizer
    that is masked).
    """
    candidates: dict[str, set[str]] = {}
    for path in leaves:
        parts = path.split("/")
        for k in range(len(parts)):
            if (end := "/".join(parts[k:])) in params.paths:
                candidates.setdefault("/".join(parts[:k]), set()).add(end)
    found = [params.root]
    for root in sorted(candidates, key=lambda each: each.count("/")):
        if any(within(tree, f"{root}/x") is not None for tree in found if tree) or root in found:
            continue
        own = {end for path in leaves if (end := within(root, path)) is not None}
        alike = all(
            leaves[_join(root, end)].shape == leaves[_join(params.root, end)].shape
            for end in candidates[root]
        )
        if own == params.paths or (alike and own == candidates[root]):
            found.append(root)
    return found
