"""The params of each recorder in a saved state, found by leaf paths, shapes and data types.

Knows the nodes of recorders and the types of leaves, and no recorder object.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from adacheck_jax.device import trees
from adacheck_jax.errors import RecorderError, listed
from adacheck_jax.update.recorder_state import RecorderNode, paths_under

_WRAPPER_SUFFIX = "/value"  # nnx.State keeps every array under one more key of this name


class LeafType(NamedTuple):
    """Shape and data type of one saved leaf; a typed PRNG key has its key type."""

    shape: tuple[int, ...]
    dtype: str


def leaf_types(named: Mapping[str, Any]) -> dict[str, LeafType]:
    """Shape and data type of every array, abstract array or scalar, by leaf path."""
    return {
        path: LeafType(tuple(getattr(leaf, "shape", ())), str(trees.dtype_of(leaf)))
        for path, leaf in named.items()
    }


def recorded_params(
    nodes: Sequence[RecorderNode],
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
) -> tuple[str, ...]:
    """Leaf paths of the params whose gradients are recorded; see :func:`params_roots`.

    Raises:
        RecorderError: the params of a node are ambiguous, or there are none.
    """
    nodes = [node for node in nodes if node.record]
    roots = params_roots(nodes, leaves, params_path)
    return tuple(
        path
        for node in nodes
        for path in params_under(
            roots[node.prefix], list(node.record), list(node.record), node, leaves
        )
    )


def params_roots(
    nodes: Sequence[RecorderNode],
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
    others: Collection[str] = (),
) -> dict[str, str]:
    """Leaf path of the root of each node's params, by the node's prefix.

    A subtree that must be the params of one node is a candidate for no other.

    Raises:
        RecorderError: the params of a node are ambiguous, or there are none.
    """
    named = params_path if isinstance(params_path, Mapping) else {"": params_path}
    roots = {node.prefix: covering(named, node.prefix) for node in nodes}
    roots = {prefix: str(root) for prefix, root in roots.items() if root is not None}
    waiting = [node for node in nodes if node.prefix not in roots]
    candidates = {node.prefix: _candidates(node, nodes, leaves) for node in waiting}
    taken = {path for n in nodes if n.prefix in roots for path in _below(roots[n.prefix], n)}
    taken |= {*others}
    while waiting:
        for node in waiting:
            free = [r for r in candidates[node.prefix] if taken.isdisjoint(_below(r, node))]
            left = _nearest(node, free or candidates[node.prefix])
            if len(left) == 1:
                break
        else:
            raise _ambiguous(waiting[0], candidates[waiting[0].prefix], len(nodes))
        roots[node.prefix] = left[0]
        taken.update(_below(left[0], node))
        waiting.remove(node)
    return roots


def _below(root: str, node: RecorderNode) -> list[str]:
    return [_join(root, path) if path else root for path in node.record]


def _ambiguous(node: RecorderNode, candidates: list[str], node_count: int) -> RecorderError:
    found = quoted(candidates) or "none"
    argument = f"{{{node.prefix!r}: ...}}" if node_count > 1 else "..."
    return RecorderError(
        f"expected one subtree with the {len(node.record)} leaf paths and shapes that the Recorder "
        f"at {node.prefix!r} records; found {found}. Say which of them the optimizer updates: "
        f"AdaCheckHandler(recorder, params_path={argument})."
    )


def _candidates(
    node: RecorderNode, nodes: Sequence[RecorderNode], leaves: Mapping[str, LeafType]
) -> list[str]:
    """Every subtree outside all recorders that has the record's leaf paths and shapes.

    Gradients that a ``MultiSteps`` around a recorder accumulates are none.
    """
    wanted = {path: leaves[full].shape for path, full in node.record.items()}
    sample = max(wanted, key=lambda path: path.count("/"))
    inside = {_join(each.prefix, "") for each in nodes} - {""}
    around = [each.prefix.partition("inner_opt_state") for each in nodes]
    inside |= {f"{above}acc_grads/" for above, field, _ in around if field}
    whole = any(not each.prefix for each in nodes)  # the state is the node
    found = []
    for path in leaves:
        if whole or path.startswith(tuple(inside)) or not _ends_with(path, sample):
            continue
        root = path.removesuffix(sample).removesuffix("/")
        types = [leaves.get(path) for path in _below(root, node)]
        if all(
            each is not None and each.shape == shape
            for each, shape in zip(types, wanted.values(), strict=True)
        ):
            found.append(root)
    return found


def _nearest(node: RecorderNode, candidates: list[str]) -> list[str]:
    """The candidate beside the node, if all have one name (``actor/params``, ``critic/params``).

    Candidates of different names stay: ``opt_state/acc_grads`` may lie nearer than ``params``.
    """
    if len(candidates) < 2:
        return candidates
    shared = {root: _shared_count(root, node.prefix) for root in candidates}
    nearest = max(candidates, key=lambda root: shared[root])
    name = "/".join(nearest.split("/")[shared[nearest] :])
    others = [root for root in candidates if root is not nearest]
    if name and all(shared[r] < shared[nearest] and _ends_with(r, name) for r in others):
        return [nearest]
    return candidates


def _shared_count(a: str, b: str) -> int:
    """Number of components that two leaf paths share, from the root on."""
    pairs = zip(a.split("/"), b.split("/"), strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _ends_with(path: str, end: str) -> bool:
    return not end or path == end or path.endswith(f"/{end}")


def named_root(
    name: str, node: RecorderNode, nodes: Sequence[RecorderNode], leaves: Iterable[str]
) -> str | None:
    """Leaf path of the subtree outside all recorders that has a name, nearest to a node.

    Returns:
        The path; None if there is no such subtree.

    Raises:
        RecorderError: several such subtrees are equally near.
    """
    inside, shared = tuple(_join(each.prefix, "") for each in nodes), dict[str, float]()
    for path in leaves:
        above = itertools.accumulate(path.split("/"), _join)
        root = next((each for each in above if _ends_with(each, name)), None)
        if root is not None and not path.startswith(inside):
            shared[root] = math.inf if root == name else _shared_count(root, node.prefix)
    nearest = [root for root, count in shared.items() if count == max(shared.values())]
    if len(nearest) > 1:
        raise RecorderError(
            f"expected one subtree {name!r} for the Recorder at {node.prefix!r}, found "
            f"{quoted(nearest)}. Name it by more of its leaf path: Recorder(tx, derived="
            f"{{{nearest[0]!r}: ...}})."
        )
    return nearest[0] if nearest else None


def params_under(
    root: str,
    relative: Sequence[str],
    recorded: Sequence[str],
    node: RecorderNode,
    leaves: Mapping[str, LeafType],
) -> tuple[str, ...]:
    """Leaf paths of a node's params, from the paths of params and gradients below their root.

    Raises:
        RecorderError: a param is missing, or has another shape than its gradient.
    """
    if not (available := paths_under(root, leaves)):
        raise RecorderError(trees.nothing_under(root, leaves))
    params = dict(zip(relative, pick(relative, available, "params"), strict=True))
    for path, record in zip(recorded, pick(recorded, node.record, "record"), strict=True):
        found, expected = leaves[params[path]].shape, leaves[record].shape
        if found != expected:
            raise RecorderError(
                f"expected the params under {root!r} to have the shapes that the Recorder records, "
                f"found {params[path]} of shape {found} for a record of shape {expected}. "
                "Name the trained params with params_path."
            )
    return tuple(params.values())


def pick(relative: Sequence[str], available: Mapping[str, str], what: str) -> tuple[str, ...]:
    """Leaf paths in a state for paths relative to a tree; an error names those that it lacks."""
    matched = matched_paths(relative, available)
    missing = [path for path in relative if path not in matched]
    if missing:
        raise RecorderError(
            f"{len(missing)} leaves of the {what} that the update takes are not in the saved "
            f"state: expected {listed(missing, 6)}; found {listed(available, 6)}. Save the whole "
            "train state, or name the params with params_path."
        )
    return tuple(matched[path] for path in relative)


def matched_paths(relative: Sequence[str], available: Mapping[str, str]) -> dict[str, str]:
    """Leaf path in a state for each relative path that it has.

    A path of the state may also differ from the relative one by nnx's wrapper alone.
    """
    same = set(relative)
    plain = {_plain(path): full for path, full in available.items() if path not in same}
    matched = {path: available.get(path) or plain.get(_plain(path)) for path in relative}
    return {path: full for path, full in matched.items() if full is not None}


def _plain(path: str) -> str:
    return path.removesuffix(_WRAPPER_SUFFIX)


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path


def covering(by_prefix: Mapping[str, Any], prefix: str) -> Any:
    """The value of the longest key that a node's prefix begins with; None without such a key."""
    keys = [key for key in by_prefix if not key or f"{prefix}/".startswith(f"{key}/")]
    return by_prefix[max(keys, key=len)] if keys else None


def quoted(names: Iterable[str]) -> str:
    """Sorted names in quotes, for a message."""
    return ", ".join(repr(name) for name in sorted(names))
