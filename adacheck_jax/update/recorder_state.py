"""The state of a Recorder, and its leaf paths in a saved state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.update.pinning.reductions import Slots, word_count

COUNT_FIELD = "adacheck_count"
RECORD_FIELD = "adacheck_record"
EXTRA_FIELD = "adacheck_extra"
PASSED_FIELD = "adacheck_passed"
INNER_FIELD = "adacheck_inner"
REDUCED_FIELD = "adacheck_reduced"
WORDS = "words"
"""Name of the one array below ``REDUCED_FIELD``."""
LAST_COUNT = 2**31 - 1
"""The last number that an update counter has before it begins anew with 1."""


class RecorderState(NamedTuple):
    """State of a :class:`~adacheck_jax.Recorder`.

    A saved state is searched for these field names: containers such as ``nnx.State`` keep field
    names and lose types.

    Attributes:
        adacheck_count: int32 scalar, number of updates so far; 1 comes behind ``LAST_COUNT``.
        adacheck_record: gradients that the wrapped transformation received in the last update;
            shaped and sharded like the params.
        adacheck_extra: recorded extra arguments of the last update, by name.
        adacheck_passed: values that the last update consumed of small leaves that it passes
            through (a learning rate), by :func:`passed_key`.
        adacheck_inner: the wrapped transformation's own state.
        adacheck_reduced: what the last update's sums over elements gave, as one vector of uint32
            words on all devices alike; empty for an update without any.
    """

    adacheck_count: Any
    adacheck_record: PyTree
    adacheck_extra: dict[str, Any]
    adacheck_passed: dict[str, Any]
    adacheck_inner: PyTree
    adacheck_reduced: Mapping[str, Any] = {}  # never changed in place


def no_results(slots: Slots) -> dict[str, Any]:
    """``adacheck_reduced`` before the first update."""
    return {WORDS: jnp.zeros(word_count(slots), jnp.uint32)} if slots else {}


def next_counter(counter: jax.Array) -> jax.Array:
    """The update counter after one more update.

    It is never negative, as the zero of fences needs it, and is 0 before the first update alone.
    """
    one, last = (jax.lax.full_like(counter, each) for each in (1, LAST_COUNT))
    # No "and", and no bound: a compiler would know then that the counter is not negative, and the
    # fences of several updates in one program would fence nothing.
    return jax.lax.select(jax.lax.eq(counter, last), one, jax.lax.add(counter, one))


def next_count(count: int) -> int:
    """The number of updates that a counter tells after one more update."""
    return 1 if count == LAST_COUNT else count + 1


def count_of(counter: Any) -> int:
    """The number of updates that a counter tells; waits for it.

    A negative counter, which no Recorder makes, tells a large number.
    """
    return int(np.asarray(counter)) % 2**63


class InnerElsewhere(NamedTuple):
    """A stand-in for the wrapped transformation's state while only the record is taken."""


def passed_key(path: str) -> str:
    """The key in ``adacheck_passed`` for a leaf path of the wrapped state.

    One key, and not a tree of keys: ``optax.tree_utils.tree_get(state, "learning_rate")`` finds
    every leaf of that key, and must find only the learning rate that the next update takes.
    """
    return path.replace("/", ".")


def consumed_leaf(path: str) -> str:
    """The leaf path of the original of a leaf in ``adacheck_passed``; any other path as it is."""
    above, field, key = path.partition(f"/{PASSED_FIELD}/")
    return f"{above}/{INNER_FIELD}/{key.replace('.', '/')}" if field else path


def is_result(path: str) -> bool:
    """True for the leaf path of the recorded reduction results of some recorder."""
    return REDUCED_FIELD in path.split("/")


def picked(keys: Iterable[str], inner: PyTree) -> dict[str, Any]:
    """Copies of some leaves by their :func:`passed_key`, so that no buffer is donated twice."""
    leaves = {passed_key(path): leaf for path, leaf in trees.flatten(inner)[0].items()}
    return {key: jnp.copy(leaves[key]) for key in keys}


@dataclass(frozen=True, slots=True)
class RecorderNode:
    """Leaf paths of one recorder's state in a saved state.

    Attributes:
        prefix: leaf path of the node itself; empty if the state is the node.
        count: leaf path of the update counter.
        record: leaf paths of the record, by path relative to the params.
        extra: leaf paths of the recorded extra arguments, by name.
        passed: leaf paths of the recorded values of passed-through leaves, by :func:`passed_key`.
        inner: leaf paths of the wrapped transformation's state, by path relative to it.
        reduced: leaf paths of the recorded reduction results, by name.
    """

    prefix: str
    count: str
    record: dict[str, str]
    extra: dict[str, str]
    passed: dict[str, str]
    inner: dict[str, str]
    reduced: dict[str, str]


def find_nodes(paths: Sequence[str]) -> list[RecorderNode]:
    """Find the state of every recorder among all leaf paths of a saved state, ordered by prefix.

    A recorder inside the transformation of another one belongs to the outer one's update, and is
    no node.
    """
    counts = {}
    for path in paths:
        parts = path.split("/")
        if COUNT_FIELD in parts:
            above = parts[: parts.index(COUNT_FIELD)]
            if INNER_FIELD not in above:
                counts["/".join(above)] = path
    return [_node_at(prefix, counts[prefix], paths) for prefix in sorted(counts)]


def _node_at(prefix: str, count: str, paths: Sequence[str]) -> RecorderNode:
    below = f"{prefix}/" if prefix else ""
    fields = (RECORD_FIELD, EXTRA_FIELD, PASSED_FIELD, INNER_FIELD, REDUCED_FIELD)
    return RecorderNode(prefix, count, *(paths_under(f"{below}{each}", paths) for each in fields))


def paths_under(root: str, leaves: Collection[str]) -> dict[str, str]:
    """Leaf paths of a subtree in the state, by path relative to its root."""
    below = f"{root}/" if root else ""
    found = {path.removeprefix(below): path for path in leaves if path.startswith(below)}
    return found | ({"": root} if root in leaves else {})  # one bare array


def places_without_recorder(
    wanted: Mapping[str, Any], found: Collection[str]
) -> dict[str, str | None]:
    """Leaf path of each leaf of a state with Recorders in the state of a run that knew none.

    What lay at ``opt_state/1/0/mu`` has become ``opt_state/1/adacheck_inner/0/mu``.

    Args:
        wanted: leaves of the state with Recorders, abstract or not, by leaf path.
        found: leaf paths of the other state.

    Returns:
        The paths, by leaf path of the state with Recorders; None for a leaf that the other state
        need not have: a Recorder's own, and one without elements. If the other state has Recorders
        too, each leaf has its own path.
    """
    places: dict[str, str | None] = {path: path for path in wanted}
    for node in find_nodes([*wanted]):
        places |= dict.fromkeys((node.count, *node.record.values(), *node.extra.values()))
        inner = {path: consumed_leaf(path) for path in node.passed.values()}
        for path in (*inner, *node.inner.values()):
            below = inner.get(path, path).removeprefix(node.prefix).removeprefix("/")
            below = below.removeprefix(INNER_FIELD)
            places[path] = f"{node.prefix}{below}" if node.prefix else below.removeprefix("/")
    own = [path for path, place in places.items() if place != path]
    if own and all(path in found for path in own):
        places = {path: path for path in wanted}
    places |= {path: None for path in wanted if is_result(path) and path not in found}
    empty = (path for path, leaf in wanted.items() if 0 in np.shape(leaf))
    return places | dict.fromkeys(path for path in empty if places[path] not in found)
