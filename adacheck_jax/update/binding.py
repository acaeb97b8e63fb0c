"""Tie the update of each recorder to the leaf paths of a saved state.

A state holds one node for each recorded optimizer (a GAN has two). Which recorder a node is of is
told from the trees that each recorder was used with; which params it updates, from their leaf paths
and shapes. Both are errors where they cannot be told, and the caller says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optax

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError, first_line
from adacheck_jax.update.recorder import (
    Probe,
    Recorder,
    RecorderNode,
    UpdateSignature,
    find_nodes,
    passed_key,
)

_WRAPPER_SUFFIX = "/value"  # nnx.State keeps every array under one more key of this name

Transformation = optax.GradientTransformation | optax.MultiSteps
RecorderArgument = (
    Transformation | Sequence[Transformation] | Mapping[str, Transformation | Sequence[Any]] | None
)
"""The ways in which callers name the recorders of a state; see :func:`recorders_of`."""

Recorders = Mapping[str, tuple[Recorder, ...]]
"""Recorders by the prefix of the nodes that they may be of; all of them at ``""``."""


class LeafType(NamedTuple):
    """Shape and data type of one saved leaf; of a typed PRNG key as the state holds it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Binding:
    """One recorder's update, tied to leaf paths of one saved state.

    Attributes:
        signature: the trees that the update takes.
        params, inner, record, extra: leaf paths in the state, in argument order. What the update
            passes through and is small is not in ``inner``: the value that it consumed is in
            ``extra``.
        count: leaf path of the update counter.
        prefix: leaf path of the recorder's node.
        recorder: the object whose update it is.
    """

    signature: UpdateSignature
    params: tuple[str, ...]
    inner: tuple[str, ...]
    record: tuple[str, ...]
    extra: tuple[str, ...]
    count: str
    prefix: str
    recorder: Recorder = field(compare=False, repr=False)

    @property
    def explained(self) -> frozenset[str]:
        """Leaf paths that replay computes."""
        return frozenset(self.params + self.inner)

    @property
    def consumed(self) -> tuple[str, ...]:
        """Leaf paths that the update consumes, and that every delta stores."""
        return self.record + self.extra


def recorders_of(argument: RecorderArgument) -> Recorders:
    """Normalizes the ways in which a caller names the recorders of a state.

    Args:
        argument: None; a :class:`Recorder`; an optax transformation that contains recorders, such
            as the whole chain; a sequence of those; or a mapping of them by leaf-path prefix of the
            optimizer state.

    Returns:
        The recorders, each once, by prefix; empty for None.

    Raises:
        RecorderError: no recorder can be found in a transformation.
        TypeError: it is something else.
    """
    if argument is None:
        return {}
    if not isinstance(argument, Mapping):
        return {"": _recorders_in(argument)}
    if unknown := [key for key in argument if not isinstance(key, str)]:
        raise TypeError(
            f"expected recorders by leaf-path prefix of the optimizer state, found the key "
            f"{unknown[0]!r}. Give strings: {{'actor/opt_state': recorder}}."
        )
    return {key.strip("/"): _recorders_in(each) for key, each in argument.items()}


def _recorders_in(argument: Any) -> tuple[Recorder, ...]:
    if isinstance(argument, Recorder):
        return (argument,)
    if isinstance(argument, Transformation):
        return _announced(argument)
    if isinstance(argument, list | tuple):
        return tuple(dict.fromkeys(found for each in argument for found in _recorders_in(each)))
    raise TypeError(
        "expected a Recorder, an optax transformation that contains one, a list of those, or a "
        f"dictionary of those by leaf-path prefix; found {type(argument).__name__}. Build the "
        "optimizer with recorder = Recorder(tx), and give AdaCheckHandler that recorder."
    )


def _announced(tx: Transformation) -> tuple[Recorder, ...]:
    """The recorders in a transformation: each hears of its ``init``."""
    probe: Any = Probe()
    problem: Exception | None = None
    try:
        tx.init(probe)
    except Exception as error:  # it asks for the params themselves, as masks and labels do
        problem = error
    if problem is None and probe.recorders:
        return tuple(dict.fromkeys(probe.recorders))
    why = f", since its init failed without params ({first_line(problem)})" if problem else ""
    raise RecorderError(
        "expected a Recorder, or an optax transformation in which one can be found; found one in "
        f"which none can be found{why}. Give AdaCheckHandler the Recorder object itself: "
        "recorder = Recorder(tx); chain = optax.chain(..., recorder); AdaCheckHandler(recorder)."
    ) from problem


def leaf_types(named: Mapping[str, Any]) -> dict[str, LeafType]:
    """Shape and data type of every leaf, as :func:`bind_all` takes them.

    Args:
        named: arrays, abstract arrays or scalars by leaf path.
    """
    return {
        path: LeafType(tuple(getattr(leaf, "shape", ())), str(trees.dtype_of(leaf)))
        for path, leaf in named.items()
    }


def bind_all(
    recorders: Recorders,
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
) -> tuple[Binding, ...]:
    """Ties every recorder's node in a state to its recorder, and to the params that it updates.

    Args:
        recorders: from :func:`recorders_of`.
        leaves: every leaf of the state, from :func:`leaf_types`.
        params_path: leaf path of the params' root; a mapping of them by prefix of the nodes; None
            to find them.

    Returns:
        One binding for each node that records anything, ordered by the nodes' prefixes.

    Raises:
        RecorderError: no recorder in the state, one that none or several of ``recorders`` fit, no
            one tree that must be its params, or two with the same params.
    """
    if not recorders:
        return ()
    nodes = find_nodes(list(leaves))
    if not nodes:
        raise RecorderError(
            "AdaCheckHandler has a recorder, but the saved state holds no Recorder's state. "
            "Expected the optimizer state of a chain that contains this very Recorder; found the "
            f"leaves {_few(leaves)}. Save the optimizer state too, or build the handler without "
            "a recorder."
        )
    _check_prefixes(recorders, nodes, "recorder")
    if isinstance(params_path, Mapping):
        _check_prefixes(params_path, nodes, "params_path")
    elif params_path is not None and len(nodes) > 1:
        raise RecorderError(
            f"expected params_path to be a mapping, since the state holds {len(nodes)} recorders "
            f"(at {_quoted(node.prefix for node in nodes)}), found {params_path!r}. Give the "
            f"params of each: params_path={{{nodes[0].prefix!r}: {params_path!r}, ...}}."
        )
    nodes = [node for node in nodes if node.record]
    found = [_recorder_of(node, recorders, leaves, len(nodes) == 1) for node in nodes]
    roots = _roots_of(nodes, leaves, params_path)
    bindings = [
        _bind_node(node, *each, roots[node.prefix], leaves)
        for node, each in zip(nodes, found, strict=True)
    ]
    _check_apart(bindings)
    return tuple(bindings)


def bind(recorder: Recorder, leaves: Mapping[str, LeafType], params_path: str | None) -> Binding:
    """Ties the one recorder of a state to its params, as :func:`bind_all` does.

    Args:
        recorder: the one that the optimizer was built with.
        leaves: every leaf of the state, from :func:`leaf_types`.
        params_path: leaf path of the params' root, or None to find it.

    Raises:
        RecorderError: as from :func:`bind_all`, or the state holds several recorders, or one that
            records nothing.
    """
    bindings = bind_all({"": (recorder,)}, leaves, params_path)
    if len(bindings) != 1:
        raise RecorderError(
            f"expected one Recorder that records params, found {len(bindings)} in the state "
            f"({_quoted(each.prefix for each in bindings)})."
        )
    return bindings[0]


def recorded_params(
    nodes: Sequence[RecorderNode],
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
) -> tuple[str, ...]:
    """Leaf paths of the params that records are of, found without the recorders' objects.

    Args:
        nodes: all nodes of the state.
        leaves: every leaf of the state, from :func:`leaf_types`.
        params_path: as for :func:`bind_all`.

    Raises:
        RecorderError: there is no one tree that must be the params of a node.
    """
    nodes = [node for node in nodes if node.record]
    roots = _roots_of(nodes, leaves, params_path)
    return tuple(
        path
        for node in nodes
        for path in _params_under(
            roots[node.prefix], list(node.record), list(node.record), node, leaves
        )
    )


def _bind_node(
    node: RecorderNode,
    recorder: Recorder,
    signature: UpdateSignature,
    root: str,
    leaves: Mapping[str, LeafType],
) -> Binding:
    params, inner, record, extra = (
        list(_flat(tree))
        for tree in (signature.params, signature.inner, signature.record, signature.extra)
    )
    return Binding(
        signature=signature,
        params=_params_under(root, params, record, node, leaves),
        inner=_pick(
            [path for path in inner if path not in signature.passed], node.inner, "optimizer state"
        ),
        record=_pick(record, node.record, "record"),
        extra=_pick(extra, node.extra, "extra arguments")
        + _pick([*map(passed_key, signature.passed)], node.passed, "consumed optimizer state"),
        count=node.count,
        prefix=node.prefix,
        recorder=recorder,
    )


def _recorder_of(
    node: RecorderNode, recorders: Recorders, leaves: Mapping[str, LeafType], is_only: bool
) -> tuple[Recorder, UpdateSignature]:
    """The one recorder whose trees fit a node best, and those trees.

    Of the only node in a state some optimizer state may be missing, to be told of by its leaves.
    """
    offered = _covering(recorders, node.prefix) or ()
    fitting: list[tuple[tuple[bool, bool], Recorder, UpdateSignature]] = []
    for recorder in offered:
        for signature in recorder.signatures:
            record = _fit(signature.record, node.record, leaves)
            if record is None:
                continue
            inner = _fit(signature.inner, node.inner, leaves)
            if inner is None and not is_only:
                continue
            fitting.append(((inner is not None, bool(record and inner)), recorder, signature))
    best = max((rank for rank, _, _ in fitting), default=None)
    found = [(recorder, signature) for rank, recorder, signature in fitting if rank == best]
    if not found:
        known = [signature for recorder in offered for signature in recorder.signatures]
        if leaves[node.count].shape:
            raise RecorderError(
                f"the Recorder at {node.prefix!r} has {leaves[node.count].shape} update counters: "
                "its state was made or returned by jax.vmap or jax.pmap. Save one copy of a "
                "replicated state (jax.tree.map(lambda x: x[0], state)); members of a population "
                "are saved by AdaCheckHandler(delta='bits'), without a recorder."
            )
        if any(_is_per_example(signature, node, leaves) for signature in known):
            raise RecorderError(
                f"the Recorder at {node.prefix!r} records gradients of single examples: each has "
                "one axis more than its param, as optax.contrib.differentially_private_aggregate "
                "takes them. Put the Recorder after the aggregation, with nothing but the "
                "optimizer in it: "
                "optax.chain(differentially_private_aggregate(...), Recorder(optax.sgd(...)))."
            )
        count = len(known)
        raise RecorderError(
            f"the Recorder given to AdaCheckHandler has not seen the {len(node.record)} params "
            f"that are recorded at {node.prefix!r}; the {len(offered)} recorders given for it have "
            f"seen {count} other trees. Build the optimizer with the same Recorder object that the "
            "handler gets, create or abstractly create (jax.eval_shape) its state before saving or "
            "restoring, and give the handler the recorders of all optimizers in the state."
        )
    if any(recorder is not found[0][0] for recorder, _ in found):
        raise RecorderError(
            f"expected one Recorder whose params and optimizer state are those at {node.prefix!r}, "
            f"found {len(dict.fromkeys(recorder for recorder, _ in found))} that fit equally. Say "
            f"which one it is: AdaCheckHandler({{{node.prefix!r}: recorder, ...}})."
        )
    return found[0]


def _is_per_example(
    signature: UpdateSignature, node: RecorderNode, leaves: Mapping[str, LeafType]
) -> bool:
    params = _flat(signature.params)
    found = _matched([*params], node.record)
    return len(params) == len(node.record) == len(found) and all(
        leaves[found[path]].shape[1:] == leaf.shape and leaves[found[path]].shape != leaf.shape
        for path, leaf in params.items()
    )


def _fit(tree: PyTree, places: Mapping[str, str], leaves: Mapping[str, LeafType]) -> bool | None:
    """Whether the data types of a tree are those found; None where paths or shapes are not."""
    wanted = leaf_types(_flat(tree))
    found = _matched(list(wanted), places)
    if not len(wanted) == len(found) == len(places):
        return None
    if any(leaves[found[path]].shape != each.shape for path, each in wanted.items()):
        return None
    return all(leaves[found[path]].dtype == each.dtype for path, each in wanted.items())


def _flat(tree: PyTree) -> dict[str, Any]:
    return trees.flatten(tree)[0]


def _covering(by_prefix: Mapping[str, Any], prefix: str) -> Any:
    """The value of the longest key that a node's prefix begins with; None if there is none."""
    keys = [key for key in by_prefix if not key or f"{prefix}/".startswith(f"{key}/")]
    return by_prefix[max(keys, key=len)] if keys else None


def _check_prefixes(
    by_prefix: Mapping[str, Any], nodes: Sequence[RecorderNode], argument: str
) -> None:
    for key in by_prefix:
        if not any(_covering({key: True}, node.prefix) for node in nodes):
            raise RecorderError(
                f"expected {argument} by leaf-path prefix of a recorder's state, found the key "
                f"{key!r}; the state holds recorders at {_quoted(node.prefix for node in nodes)}."
            )


def _roots_of(
    nodes: Sequence[RecorderNode],
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
) -> dict[str, str]:
    """The root of each node's params, by the node's prefix.

    A subtree that must be the params of one node is none of another's.
    """
    given = params_path if isinstance(params_path, Mapping) else {"": params_path}
    roots = {node.prefix: _covering(given, node.prefix) for node in nodes}
    roots = {prefix: str(root) for prefix, root in roots.items() if root is not None}
    waiting = [node for node in nodes if node.prefix not in roots]
    candidates = {node.prefix: _candidates(node, nodes, leaves) for node in waiting}
    taken = {path for n in nodes if n.prefix in roots for path in _below(roots[n.prefix], n)}
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
    found = _quoted(candidates) or "none"
    argument = f"{{{node.prefix!r}: ...}}" if node_count > 1 else "..."
    return RecorderError(
        f"expected one subtree with the {len(node.record)} leaf paths and shapes that the Recorder "
        f"at {node.prefix!r} records; found {found}. Say which of them the optimizer updates: "
        f"AdaCheckHandler(recorder, params_path={argument})."
    )


def _candidates(
    node: RecorderNode, nodes: Sequence[RecorderNode], leaves: Mapping[str, LeafType]
) -> list[str]:
    """Every subtree outside all recorders that has the record's leaf paths and shapes."""
    wanted = {path: leaves[full].shape for path, full in node.record.items()}
    sample = max(wanted, key=lambda path: path.count("/"))
    inside = {_join(each.prefix, "") for each in nodes} - {""}
    whole = any(not each.prefix for each in nodes)  # the state is the node
    found = []
    for path in leaves:
        if whole or path.startswith(tuple(inside)) or not _ends_with(path, sample):
            continue
        root = path.removesuffix(sample).removesuffix("/")
        places = [leaves.get(path) for path in _below(root, node)]
        if all(
            place is not None and place.shape == shape
            for place, shape in zip(places, wanted.values(), strict=True)
        ):
            found.append(root)
    return found


def _nearest(node: RecorderNode, candidates: list[str]) -> list[str]:
    """Of candidates of one name (``actor/params``, ``critic/params``) the one beside the node.

    Of different names none is preferred: ``opt_state/acc_grads`` may lie nearer than ``params``.
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
    """Components of two leaf paths that are the same, from the root on."""
    ours, theirs = a.split("/"), b.split("/")
    pairs = list(zip(ours, theirs, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _ends_with(path: str, end: str) -> bool:
    return not end or path == end or path.endswith(f"/{end}")


def _params_under(
    root: str,
    relative: Sequence[str],
    recorded: Sequence[str],
    node: RecorderNode,
    leaves: Mapping[str, LeafType],
) -> tuple[str, ...]:
    below = _join(root, "")
    available = {path.removeprefix(below): path for path in leaves if path.startswith(below)}
    if root in leaves:  # one bare array
        available[""] = root
    params = dict(zip(relative, _pick(relative, available, "params"), strict=True))
    for path, record in zip(recorded, _pick(recorded, node.record, "record"), strict=True):
        found, expected = leaves[params[path]].shape, leaves[record].shape
        if found != expected:
            raise RecorderError(
                f"expected the params under {root!r} to have the shapes that the Recorder records, "
                f"found {params[path]} of shape {found} for a record of shape {expected}. "
                "Name the trained params with params_path."
            )
    return tuple(params.values())


def _check_apart(bindings: Sequence[Binding]) -> None:
    owners: dict[str, str] = {}
    for binding in bindings:
        for path in (*binding.params, *binding.inner):
            if path in owners:
                raise RecorderError(
                    f"expected recorders that update different leaves, found that those at "
                    f"{owners[path]!r} and {binding.prefix!r} both update {path}. Wrap all "
                    "transformations of the same params in one Recorder; where the params are of "
                    f"different models, say which: params_path={{{binding.prefix!r}: ...}}."
                )
            owners[path] = binding.prefix


def _pick(relative: Sequence[str], available: Mapping[str, str], what: str) -> tuple[str, ...]:
    matched = _matched(relative, available)
    missing = [path for path in relative if path not in matched]
    if missing:
        raise RecorderError(
            f"{len(missing)} leaves of the {what} that the update takes are not in the saved "
            f"state: expected {_few(missing)}; found {_few(available)}. Save the whole train "
            "state, or name the params with params_path."
        )
    return tuple(matched[path] for path in relative)


def _matched(relative: Sequence[str], available: Mapping[str, str]) -> dict[str, str]:
    """Each relative path's place: the same path, or one that differs by nnx's wrapper alone."""
    same = set(relative)
    plain = {_plain(path): full for path, full in available.items() if path not in same}
    matched = {path: available.get(path) or plain.get(_plain(path)) for path in relative}
    return {path: full for path, full in matched.items() if full is not None}


def _plain(path: str) -> str:
    return path.removesuffix(_WRAPPER_SUFFIX)


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _few(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
