"""Bindings: the update of each recorder, tied to the leaf paths of a saved state.

A state holds one node for each recorded optimizer (a GAN has two). A node's recorder is found by
the trees that each recorder was used with, and its params by their leaf paths and shapes
(:mod:`~adacheck_jax.update.params_search`). If either is ambiguous that is an error, and the caller
has to name it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optax

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError, first_line, listed
from adacheck_jax.update.derived import DerivedTree, bound_trees
from adacheck_jax.update.params_search import (
    LeafType,
    covering,
    leaf_types,
    matched_paths,
    named_root,
    params_roots,
    params_under,
    pick,
    quoted,
)
from adacheck_jax.update.pinning.reductions import word_count
from adacheck_jax.update.recorder import Recorder, reached_by
from adacheck_jax.update.recorder_state import RecorderNode, find_nodes, passed_key, paths_under
from adacheck_jax.update.recording.signatures import UpdateSignature

_log = logging.getLogger(__name__)

Transformation = optax.GradientTransformation | optax.MultiSteps
RecorderArgument = (
    Transformation | Sequence[Transformation] | Mapping[str, Transformation | Sequence[Any]] | None
)
"""Forms in which callers name the recorders of a state; see :func:`recorders_of`."""

Recorders = Mapping[str, tuple[Recorder, ...]]
"""Recorders by prefix of the nodes that they may have made; ``""`` is every node's prefix."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One recorder's update, tied to leaf paths of one saved state.

    Attributes:
        signature: the trees that the update takes.
        derived: the derived trees that follow from the params.
        params: leaf paths of the params, in argument order.
        inner: leaf paths of the optimizer state that the update computes, in argument order, and
            of the derived trees. Small leaves that it passes through are left out.
        record: leaf paths of the gradients, in argument order.
        extra: leaf paths of the extra arguments; of the recorded reduction results; of the consumed
            values of small leaves that the update passes through; and of the update counter, if a
            derived tree depends on it.
        count: leaf path of the update counter.
        prefix: leaf path of the recorder's node.
        recorder: the recorder whose update it is.
    """

    signature: UpdateSignature
    derived: tuple[DerivedTree, ...]
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
    """Find the recorders that a caller names.

    Args:
        argument: None; a :class:`Recorder`; an optax transformation that contains recorders, such
            as the whole chain; a sequence of those; or a mapping to any of these by leaf-path
            prefix of the optimizer state.

    Returns:
        The recorders, each once, by prefix; empty for None.

    Raises:
        RecorderError: no recorder can be found in a transformation.
        TypeError: the argument has none of these forms.
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
        return _contained(argument)
    if isinstance(argument, list | tuple):
        return tuple(dict.fromkeys(found for each in argument for found in _recorders_in(each)))
    raise TypeError(
        "expected a Recorder, an optax transformation that contains one, a list of those, or a "
        f"dictionary of those by leaf-path prefix; found {type(argument).__name__}. Build the "
        "optimizer with recorder = Recorder(tx), and give AdaCheckHandler that recorder."
    )


def _contained(tx: Transformation) -> tuple[Recorder, ...]:
    recorders, problem = reached_by(tx)
    if problem is None and recorders:
        return tuple(recorders)
    why = f", since its init failed without params ({first_line(problem)})" if problem else ""
    raise RecorderError(
        "expected a Recorder, or an optax transformation in which one can be found; found one in "
        f"which none can be found{why}. Give AdaCheckHandler the Recorder object itself: "
        "recorder = Recorder(tx); chain = optax.chain(..., recorder); AdaCheckHandler(recorder)."
    ) from problem


def bind_all(
    recorders: Recorders,
    leaves: Mapping[str, LeafType],
    params_path: str | Mapping[str, str] | None,
) -> tuple[Binding, ...]:
    """Tie every recorder's node in a state to its recorder and to the params that it updates.

    The params' root is found where ``params_path`` is None.

    Returns:
        One binding for each node that records anything, ordered by the nodes' prefixes.

    Raises:
        RecorderError: the state holds no recorder's node; or a node fits none or several of the
            recorders, or has no unambiguous params; or two nodes have the same params.
    """
    if not recorders:
        return ()
    nodes = find_nodes(list(leaves))
    if not nodes:
        raise RecorderError(
            "AdaCheckHandler has a recorder, but the saved state holds no Recorder's state. "
            "Expected the optimizer state of a chain that contains this very Recorder; found the "
            f"leaves {listed(leaves, 6)}. Save the optimizer state too, or build the handler "
            "without a recorder."
        )
    _check_prefixes(recorders, nodes, "recorder")
    if isinstance(params_path, Mapping):
        _check_prefixes(params_path, nodes, "params_path")
    elif params_path is not None and len(nodes) > 1:
        raise RecorderError(
            f"expected params_path to be a mapping, since the state holds {len(nodes)} recorders "
            f"(at {quoted(node.prefix for node in nodes)}), found {params_path!r}. Give the "
            f"params of each: params_path={{{nodes[0].prefix!r}: {params_path!r}, ...}}."
        )
    nodes = [node for node in nodes if node.record]
    found = [_recorder_of(node, recorders, leaves, len(nodes) == 1) for node in nodes]
    derived = [
        _derived_below(node, recorder, nodes, leaves)
        for node, (recorder, _) in zip(nodes, found, strict=True)
    ]
    others = {path for each in derived for paths in each.values() for path in paths.values()}
    roots = params_roots(nodes, leaves, params_path, others)
    bindings = [
        _bind_node(node, *each, roots[node.prefix], leaves, own)
        for node, each, own in zip(nodes, found, derived, strict=True)
    ]
    _check_apart(bindings)
    return tuple(bindings)


def _bind_node(
    node: RecorderNode,
    recorder: Recorder,
    signature: UpdateSignature,
    root: str,
    leaves: Mapping[str, LeafType],
    derived: Mapping[str, Mapping[str, str]],
) -> Binding:
    params, inner, record, extra = (
        list(_flat(tree))
        for tree in (signature.params, signature.inner, signature.record, signature.extra)
    )
    followed = bound_trees(recorder.derived, signature.params, derived, leaves)
    # Without them (a checkpoint of an earlier release, an update as its own program) sums are
    # computed where the update is.
    reduced = tuple(node.reduced.values())
    shapes = [leaves[path].shape for path in reduced]
    if recorder.separate or shapes != [(word_count(signature.reduced),)]:
        signature, reduced = signature.without_results, ()
    return Binding(
        signature=signature,
        derived=tuple(followed),
        params=params_under(root, params, record, node, leaves),
        inner=pick(
            [path for path in inner if path not in signature.passed], node.inner, "optimizer state"
        )
        + tuple(path for paths in followed.values() for path in paths),
        record=pick(record, node.record, "record"),
        extra=pick(extra, node.extra, "extra arguments")
        + reduced
        + pick([*map(passed_key, signature.passed)], node.passed, "consumed optimizer state")
        + ((node.count,) if any(tree.uses_count for tree in followed) else ()),
        count=node.count,
        prefix=node.prefix,
        recorder=recorder,
    )


def _derived_below(
    node: RecorderNode,
    recorder: Recorder,
    nodes: Sequence[RecorderNode],
    leaves: Mapping[str, LeafType],
) -> dict[str, dict[str, str]]:
    """Leaf paths below each derived tree of a recorder, by path relative to the tree, by name.

    What an update with a program of its own makes is not computed in the program of its replay.
    """
    if recorder.separate:
        return {}
    found = {}
    for name in recorder.derived:
        root = named_root(name, node, nodes, leaves)
        if root is None:
            _log.warning(
                "The Recorder at %r has a derived tree %r, but the saved state has no such leaf "
                "path: %s. Name it as the saved state does.",
                *(node.prefix, name, listed(leaves, 6)),
            )
        else:
            found[name] = paths_under(root, leaves)
    return found


def _recorder_of(
    node: RecorderNode, recorders: Recorders, leaves: Mapping[str, LeafType], is_only: bool
) -> tuple[Recorder, UpdateSignature]:
    """The one recorder whose trees fit a node best, and these trees.

    The only node of a state may lack some optimizer state: a later error names the missing leaves.
    """
    offered = covering(recorders, node.prefix) or ()
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
        seen = f"only {len(known)} other trees of params" if known else "no params at all"
        raise RecorderError(
            f"the Recorder given to AdaCheckHandler has not seen the {len(node.record)} params "
            f"that are recorded at {node.prefix!r}; it has seen {seen}. Build the optimizer with "
            "the same Recorder object that the handler gets, create or abstractly create "
            "(jax.eval_shape) its state before saving or restoring, and give the handler the "
            "recorders of all optimizers in the state."
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
    found = matched_paths([*params], node.record)
    return len(params) == len(node.record) == len(found) and all(
        leaves[found[path]].shape[1:] == leaf.shape and leaves[found[path]].shape != leaf.shape
        for path, leaf in params.items()
    )


def _fit(tree: PyTree, paths: Mapping[str, str], leaves: Mapping[str, LeafType]) -> bool | None:
    """True if a tree has the data types of a state's leaves; None if its paths or shapes differ."""
    wanted = leaf_types(_flat(tree))
    found = matched_paths(list(wanted), paths)
    if not len(wanted) == len(found) == len(paths):
        return None
    if any(leaves[found[path]].shape != each.shape for path, each in wanted.items()):
        return None
    return all(leaves[found[path]].dtype == each.dtype for path, each in wanted.items())


def _check_prefixes(
    by_prefix: Mapping[str, Any], nodes: Sequence[RecorderNode], argument: str
) -> None:
    for key in by_prefix:
        if not any(covering({key: True}, node.prefix) for node in nodes):
            raise RecorderError(
                f"expected {argument} by leaf-path prefix of a recorder's state, found the key "
                f"{key!r}; the state holds recorders at {quoted(node.prefix for node in nodes)}."
            )


def _check_apart(bindings: Sequence[Binding]) -> None:
    owners: dict[str, str] = {}
    for binding in bindings:
        for path in (*binding.params, *binding.inner):
            if path in owners:
                raise RecorderError(
                    f"expected recorders that update different leaves, found that those at "
                    f"{owners[path]!r} and {binding.prefix!r} both update {path}. Wrap all "
                    "transformations of the same params in one Recorder; where the params are of "
                    f"different models, say which: params_path={{{binding.prefix!r}: ...}}; of "
                    "optimizers with losses of their own record one, or use delta='bits' without."
                )
            owners[path] = binding.prefix


def _flat(tree: PyTree) -> dict[str, Any]:
    return trees.flatten(tree)[0]
