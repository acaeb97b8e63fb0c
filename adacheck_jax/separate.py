"""The update as a program of its own: exact replay for updates that reduce over elements.

The bits of a sum depend on how the compiler arranged the program that it is part of. An update with
sums inside (adafactor, muon, lamb, clipping inside the recorder) therefore replays exactly only if
training runs the very program that replay will run: same inputs, same shardings, nothing else.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from adacheck_jax import replay, staging
from adacheck_jax.errors import RecorderError
from adacheck_jax.recorder import (
    TAKE_ARGUMENT,
    InnerElsewhere,
    Probe,
    Recorder,
    RecorderState,
    UpdateSignature,
    abstract,
)
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)


class SeparateUpdate:
    """``tx.update`` and ``optax.apply_updates`` in two programs: up to the record, and from it on.

    Made by :func:`separate_update`.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = optax.with_extra_args_support(tx)
        _announce(tx)
        self._known: dict[Any, tuple[Callable[..., Any], replay.UpdateFunction]] = {}

    def __call__(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Applies one update.

        Args:
            grads: gradients, as for ``tx.update``.
            opt_state: the optimizer state; donated.
            params: the params; donated.
            **extra_args: arrays, as for ``tx.update``.

        Returns:
            The new params and optimizer state, sharded like the former ones.

        Raises:
            RecorderError: called inside ``jax.jit``, or ``tx`` does not end in a Recorder.
        """
        arguments = (grads, opt_state, params, extra_args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            raise RecorderError(
                "separate_update was called inside a compiled function, so that its update would "
                "become part of that program. Compile the gradients alone, and call it outside."
            )
        inner = _node_of(opt_state).adacheck_inner
        rest = _with_inner(opt_state, InnerElsewhere())
        key = (jax.tree.structure(arguments), *map(_signature, jax.tree.leaves(arguments)))
        if key not in self._known:
            self._known[key] = self._compile(grads, rest, params, extra_args, inner)
        take, fold = self._known[key]
        rest = take(grads, rest, params, extra_args)
        node = _node_of(rest)
        inputs = _unshared(params, inner)
        consumed = [jax.tree.leaves(each) for each in (node.adacheck_record, node.adacheck_extra)]
        after = fold(*inputs, *consumed)
        new_params, new_inner = (
            jax.tree.unflatten(jax.tree.structure(tree), leaves)
            for tree, leaves in zip((params, inner), _keyed(params, inner, after), strict=True)
        )
        return new_params, _with_inner(rest, new_inner)

    def _compile(
        self, grads: PyTree, rest: PyTree, params: PyTree, extra_args: Any, inner: PyTree
    ) -> tuple[Callable[..., Any], replay.UpdateFunction]:
        recorders: list[Recorder] = []

        def take(grads: PyTree, rest: PyTree, params: PyTree, extra_args: Any) -> PyTree:
            taken: list[tuple[Recorder, PyTree]] = []
            updates, after = self._tx.update(
                grads, rest, params, **extra_args, **{TAKE_ARGUMENT: taken}
            )
            if len(taken) != 1 or not _same(updates, taken[0][1]):
                raise RecorderError(
                    "expected an optimizer that ends in its one Recorder, found "
                    f"{len(taken)} of them{' and something behind it' if taken else ''}. Put the "
                    "Recorder last in the chain: optax.chain(..., recorder)."
                )
            recorders.append(taken[0][0])
            return after

        after = jax.eval_shape(take, grads, rest, params, extra_args)
        leaves = jax.tree.leaves((params, rest))
        kept = replay.common_shardings(leaves)[-len(jax.tree.leaves(rest)) :]
        shardings = jax.tree.unflatten(jax.tree.structure(after), kept)
        recorder = recorders[0]
        recorder.separate = True
        extra = _node_of(after).adacheck_extra
        trees = (jax.tree.map(abstract, tree) for tree in (params, inner, extra))
        function = replay.update_function(recorder, UpdateSignature(*trees))
        leaves = [jax.tree.leaves(each) for each in (params, inner)]
        node = _node_of(after)
        consumed = [jax.tree.leaves(each) for each in (node.adacheck_record, node.adacheck_extra)]
        specs = [list(map(_raw_spec, each)) for each in (*leaves, *consumed)]
        here = replay.platform()
        exported = replay.from_bytes(replay.export(function, specs, (here,))[here])
        taking: Any = jax.jit(take, out_shardings=shardings, donate_argnums=1)
        return taking, replay.compile_fold(exported, *(map(staging.raw, each) for each in leaves))


def separate_update(tx: optax.GradientTransformation) -> SeparateUpdate:
    """Makes an update that runs as a program of its own, so that any update replays exactly.

    Example, for an optimizer with sums inside::

        recorder = adacheck.Recorder(optax.contrib.muon(1e-3))
        tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)
        update = adacheck.separate_update(tx)

        loss, grads = gradients(state, batch)  # compiled, ends in jax.value_and_grad
        params, opt_state = update(grads, state.opt_state, state.params)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    Args:
        tx: an optax transformation that ends in a :class:`~adacheck_jax.Recorder`.

    Returns:
        ``update(grads, opt_state, params, **extra_args) -> (params, opt_state)``, to be called
        outside ``jax.jit``. It donates ``opt_state`` and ``params``.
    """
    return SeparateUpdate(tx)


def _announce(tx: optax.GradientTransformation) -> None:
    """Tells the recorder before its first update, so that a state saved before it is no surprise.

    Where something around the recorder does not let this through, the first update tells it.
    """
    probe: Any = Probe()
    try:
        tx.init(probe)
    except Exception as error:
        _log.debug("The recorder is found at the first update: %s", error)
    for recorder in probe.recorders:
        recorder.separate = True


def _is_node(tree: Any) -> bool:
    return isinstance(tree, RecorderState)


def _node_of(opt_state: PyTree) -> RecorderState:
    nodes = [each for each in jax.tree.leaves(opt_state, is_leaf=_is_node) if _is_node(each)]
    if len(nodes) != 1:
        raise RecorderError(
            f"expected an optimizer state with one Recorder's state in it, found {len(nodes)} in "
            f"{type(opt_state).__name__}. Give the state that tx.init made, of an optimizer that "
            "ends in a Recorder."
        )
    return nodes[0]


def _with_inner(opt_state: PyTree, inner: PyTree) -> PyTree:
    def put(each: Any) -> Any:
        return each._replace(adacheck_inner=inner) if _is_node(each) else each

    return jax.tree.map(put, opt_state, is_leaf=_is_node)


def _same(a: PyTree, b: PyTree) -> bool:
    ours, theirs = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, leaf.sharding)
    spec = abstract(leaf)
    return (spec.shape, spec.dtype, None)


def _raw_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(staging.raw, leaf) if staging.is_key(leaf) else abstract(leaf)


def _unshared(params: PyTree, inner: PyTree) -> list[list[Any]]:
    """Plain leaves that may be donated: a buffer that occurs twice is copied."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        leaf = staging.raw(leaf)
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return [[own(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, inner)]


def _keyed(params: PyTree, inner: PyTree, after: Any) -> Any:
    """The new leaves, typed keys where the former ones were."""

    def like(old: Any, new: Any) -> Any:
        if not staging.is_key(old):
            return new
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))

    return [
        [like(*pair) for pair in zip(jax.tree.leaves(tree), leaves, strict=True)]
        for tree, leaves in zip((params, inner), after, strict=True)
    ]
