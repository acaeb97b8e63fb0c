"""Trees of a state that rules are applied to: the params, and what an optimizer keeps for them.

They are found by paths and shapes alone: an optimizer keeps its moments, its record and its master
weights in trees whose leaves have the paths that the params have in theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.layout.kinds import Kind


@dataclass(frozen=True, slots=True)
class Params:
    """A tree of trained params in a state.

    Attributes:
        root: path of the tree; empty if the params are the whole state.
        paths: leaf paths inside the tree.
    """

    root: str
    paths: frozenset[str]


def join(root: str, path: str) -> str:
    """The path in the state of a leaf in a tree."""
    return f"{root}/{path}" if root else path


def within(root: str, path: str) -> str | None:
    """The path in a tree of a leaf of the state; None if it lies elsewhere."""
    if not root:
        return path
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else None


def params_of(params: Sequence[str], ends: Sequence[str]) -> Params:
    """The tree of the params of a recorder.

    Args:
        params: leaf paths of the trained params.
        ends: paths of their gradients in the tree of the gradients, which has the params' paths.
    """
    common: set[str] | None = None
    for end in ends:
        own = {path[: -len(end)].removesuffix("/") for path in params if _ends_with(path, end)}
        common = own if common is None else common & own
    inside = [root for root in common or () if all(within(root, p) is not None for p in params)]
    root = min(inside, key=len, default=_common_root(params))
    return Params(root, frozenset(within(root, path) or "" for path in params))


def _ends_with(path: str, end: str) -> bool:
    """True if a path ends with all segments of another one."""
    return path == end or path.endswith(f"/{end}")


def _common_root(paths: Sequence[str]) -> str:
    """The path of the smallest tree that holds all leaves."""
    shared: list[str] = []
    for parts in zip(*(path.split("/")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def find(leaves: Mapping[str, Kind], params: Params) -> list[str]:
    """Paths of the params and of all trees that are like them, the params first.

    Args:
        leaves: shapes and data types of the state's leaves, by leaf path.
        params: the params.

    Returns:
        Paths of trees. Such a tree has a leaf for each param; or for some of them, of the same
        shapes (an optimizer that is masked).
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
            leaves[join(root, end)].shape == leaves[join(params.root, end)].shape
            for end in candidates[root]
        )
        if own == params.paths or (alike and own == candidates[root]):
            found.append(root)
    return found
