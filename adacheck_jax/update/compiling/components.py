"""An update cut into components that share nothing but scalars; equal components are found.

The leaves of an element-wise update are computed apart from each other, and many of them alike. A
compiler takes as long for each of a hundred equal leaves as for the first, so equal components had
better be compiled once. This module plans the cut, from the operations alone;
:mod:`~adacheck_jax.update.compiling.cut_program` makes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

_SMALL_COUNT = 16
"""Elements of the largest value that components share."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operation of a program.

    Attributes:
        key: all that it does, but for its operands.
        operands, results: numbers of values.
    """

    key: Hashable
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A program as a list of operations; its values are numbered, the arguments first.

    Attributes:
        arguments: number of arguments.
        shared: arguments that components may share.
        types: type of each value.
        counts: number of elements of each value.
        nodes: operations, in an order in which they can be run.
        returned: values that it returns.
    """

    arguments: int
    shared: frozenset[int]
    types: Sequence[Hashable]
    counts: Sequence[int]
    nodes: Sequence[Node]
    returned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """Operations that share nothing but scalars with others.

    Attributes:
        nodes: positions of the operations.
        inputs: arguments of the program that it takes.
        scalars: shared values that it takes.
        outputs: values that it computes for the program's results.
        kind: equal in components that compute the same.
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Cut:
    """A program, cut.

    Attributes:
        shared: the operations that compute what the components share.
        components: all others.
    """

    shared: Component
    components: tuple[Component, ...]


class _Place(Enum):
    """Where a value is computed: once for all, wherever it is used, or in one component."""

    SHARED = 1
    COPIED = 2
    OWN = 3


def plan(graph: Graph) -> Cut | None:
    """Cut a program; None if it does not fall into components, or no two of them are equal."""
    places, roots = _placed(graph)
    returned = [places[value] for value in graph.returned]
    is_plain = len(set(graph.returned)) == len(returned) and min(graph.returned, default=0) >= 0
    if not is_plain or _Place.COPIED in returned:
        return None
    if any(value < graph.arguments for value in graph.returned):
        return None  # donated where it is taken, and returned
    makers = {value: n for n, node in enumerate(graph.nodes) for value in node.results}
    own: dict[int, list[int]] = {}
    for n, node in enumerate(graph.nodes):
        if any(places[value] is _Place.OWN for value in (*node.operands, *node.results)):
            values = (*node.operands, *node.results)
            root = next(_root(roots, v) for v in values if places[v] is _Place.OWN)
            own.setdefault(root, []).append(n)
    outputs: dict[int, list[int]] = {}
    for value, place in zip(graph.returned, returned, strict=True):
        if place is _Place.OWN:
            outputs.setdefault(_root(roots, value), []).append(value)
    components = [
        _component(graph, places, makers, own[root], outputs[root])
        for root in own
        if root in outputs
    ]
    if 2 * len({each.kind for each in components}) > len(components):
        return None
    wanted = [v for each in components for v in each.scalars if v >= graph.arguments]
    wanted += [v for v in graph.returned if places[v] is _Place.SHARED]
    nodes = [n for n, node in enumerate(graph.nodes) if places[node.results[0]] is _Place.SHARED]
    shared = _component(graph, places, makers, nodes, [*dict.fromkeys(wanted)])
    return Cut(shared, tuple(components))


def _placed(graph: Graph) -> tuple[list[_Place], list[int]]:
    """The place of each value, and the forest whose trees are the components."""
    places = [
        _Place.SHARED if value in graph.shared else _Place.OWN for value in range(graph.arguments)
    ]
    places += [_Place.COPIED] * (len(graph.types) - graph.arguments)
    roots = list(range(len(graph.types)))
    for node in graph.nodes:
        taken = {places[value] for value in node.operands}
        place = _Place.COPIED  # made of constants, or too large to be shared
        if _Place.OWN in taken or not node.results:
            place = _Place.OWN
        elif _Place.SHARED in taken and all(graph.counts[v] <= _SMALL_COUNT for v in node.results):
            place = _Place.SHARED
        for value in node.results:
            places[value] = place
        if place is _Place.OWN:
            values = [v for v in (*node.operands, *node.results) if places[v] is _Place.OWN]
            for value in values[1:]:
                roots[_root(roots, value)] = _root(roots, values[0])
    return places, roots


def _root(roots: list[int], value: int) -> int:
    while roots[value] != value:
        roots[value] = roots[roots[value]]
        value = roots[value]
    return value


def _component(
    graph: Graph,
    places: Sequence[_Place],
    makers: dict[int, int],
    nodes: Sequence[int],
    outputs: Sequence[int],
) -> Component:
    """Some operations, those that they need a copy of, and what all of these take."""
    chosen, waiting = set(nodes), [*nodes]
    while waiting:
        for value in graph.nodes[waiting.pop()].operands:
            maker = makers.get(value)
            if maker is not None and places[value] is _Place.COPIED and maker not in chosen:
                chosen.add(maker)
                waiting.append(maker)
    # Copied ones first: in equal components they would else stand between others in other ways.
    ordered = [*sorted(chosen.difference(nodes)), *sorted(nodes)]
    made = {value for n in ordered for value in graph.nodes[n].results}
    taken = dict.fromkeys(v for n in ordered for v in graph.nodes[n].operands if v not in made)
    inputs = sorted(v for v in taken if places[v] is _Place.OWN)
    scalars = [v for v in taken if places[v] is not _Place.OWN]
    local: dict[int, int] = {}
    for value in (*inputs, *scalars, *(v for n in ordered for v in graph.nodes[n].results)):
        local[value] = len(local)
    kind = (
        tuple(graph.types[v] for v in (*inputs, *scalars)),
        tuple((graph.nodes[n].key, *(local[v] for v in graph.nodes[n].operands)) for n in ordered),
        tuple(local[v] for v in outputs),
    )
    return Component(tuple(ordered), tuple(inputs), tuple(scalars), tuple(outputs), kind)
