"""The update as a program of its own: exact replay for updates that reduce over elements.

The bits of a sum depend on the whole program around it. An update with sums inside (adafactor,
muon, lamb, clipping inside the recorder) therefore replays exactly only if training runs the very
program that a restore runs: same inputs, same shardings, nothing else.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.device import jax_settings, transfer, trees
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError, expect_callable
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from adacheck_jax.update.pinning.fence import zero_of
from adacheck_jax.update.recorder import TAKE_ARGUMENT, Recorder, reached_by
from adacheck_jax.update.recorder_state import InnerElsewhere, RecorderState, passed_key, picked
from adacheck_jax.update.recording.signatures import SeparateCall, UpdateSignature, abstract

_Compiled = tuple[Callable[..., Any], update_program.UpdateFunction, Recorder, str]
"""Programs that take the record and update the state; their recorder; the second one's digest."""


class SeparateUpdate:
    """``tx.update`` and ``optax.apply_updates`` as two programs, the second from the record on.

    Made by :func:`separate_update`.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        expect_callable(tx, "an optax transformation that ends in a Recorder", "update")
        self._tx = optax.with_extra_args_support(tx)
        # A state may be saved before the first update. What the probe does not reach it marks.
        for recorder in reached_by(tx)[0]:
            recorder.separate = True
        self._compiled: dict[Any, _Compiled] = {}

    @jax_settings.compiled()
    def __call__(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Apply one update.

        Args:
            grads: gradients, as ``tx.update`` takes them.
            opt_state: the optimizer state; donated. Or an ``nnx.Optimizer`` of ``tx``.
            params: the params; donated. With an ``nnx.Optimizer`` the model, which is updated.
            **extra_args: arrays, as ``tx.update`` takes them.

        Returns:
            The new params and optimizer state, sharded like the former ones.

        Raises:
            RecorderError: called inside ``jax.jit``, or ``tx`` does not end in a Recorder.
        """
        if hasattr(opt_state, "opt_state") and type(opt_state).__module__.startswith("flax.nnx"):
            return self._of_nnx(grads, opt_state, params, extra_args)
        arguments = (grads, opt_state, params, extra_args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            raise RecorderError(
                "separate_update was called inside a compiled function, so that its update would "
                "become part of that program. Compile the gradients alone, and call it outside."
            )
        before = _node_of(opt_state)
        is_passed = _is_passed(before)
        inner = _placed(before.adacheck_inner, is_passed, params)
        rest = _with(
            opt_state, before._replace(adacheck_passed={}, adacheck_inner=InnerElsewhere())
        )
        arithmetic = Arithmetic.current()
        described = map(_signature, jax.tree.leaves(arguments))
        key = (jax.tree.structure(arguments), arithmetic, *described)
        if key not in self._compiled:
            self._compiled[key] = self._compile(grads, rest, params, extra_args, inner, is_passed)
        take, update, recorder, digest = self._compiled[key]
        rest, zero = take(grads, rest, params, extra_args)
        node = _node_of(rest)
        computed, passed = _parted(inner, is_passed)
        taken = tuple(map(weakref.ref, [*jax.tree.leaves(params), *computed]))
        old_params, old_inner = _unshared(jax.tree.leaves(params), computed)
        after = update(old_params, old_inner, *_consumed(node, passed), zero)
        new_params = [*map(transfer.keyed, after[0], jax.tree.leaves(params))]
        new_computed = [*map(transfer.keyed, after[1], computed)]
        returned = tuple(map(weakref.ref, [*new_params, *new_computed]))
        recorder.last_call = SeparateCall(taken, returned, digest)
        recorder.arithmetic = arithmetic
        new_leaves = update_program.joined(is_passed, new_computed, passed)
        node = node._replace(
            adacheck_passed=picked(before.adacheck_passed, inner),
            adacheck_inner=jax.tree.unflatten(jax.tree.structure(inner), new_leaves),
        )
        return jax.tree.unflatten(jax.tree.structure(params), new_params), _with(rest, node)

    def _of_nnx(
        self, grads: PyTree, optimizer: Any, model: Any, extra_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """As ``optimizer.update(model, grads)``."""
        from flax import nnx  # it is there: the optimizer is its own

        given = (nnx.state(grads, optimizer.wrt), optimizer.opt_state)
        arrays = map(nnx.as_pure, (*given, nnx.state(model, optimizer.wrt)))
        params, opt_state = self(*arrays, **extra_args)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        optimizer.step[...] += 1
        return model, optimizer

    def _compile(
        self,
        grads: PyTree,
        rest: PyTree,
        params: PyTree,
        extra_args: Any,
        inner: PyTree,
        is_passed: list[bool],
    ) -> _Compiled:
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
        kept = update_program.common_shardings(leaves)[-len(jax.tree.leaves(rest)) :]
        shardings = jax.tree.unflatten(jax.tree.structure(after), kept)
        recorder = recorders[0]
        recorder.separate = True
        node = _node_of(after)
        named = zip(trees.flatten(inner)[0], is_passed, strict=True)
        paths = tuple(path for path, each in named if each)
        parts = (params, inner, node.adacheck_record, node.adacheck_extra)
        signature = UpdateSignature(*jax.tree.map(abstract, parts), passed=paths)
        function = update_program.update_function(recorder, signature)
        computed, passed = _parted(inner, is_passed)
        lists = [jax.tree.leaves(params), computed, *_consumed(node, passed)]
        specs = [list(map(_raw_spec, each)) for each in lists]
        here = update_program.platform()
        programs = exported_program.export(function, specs, update_program.switches(1), (here,))
        exported = exported_program.load_own(programs[here])

        def take_with_zero(*arguments: Any) -> tuple[PyTree, Any]:
            return take(*arguments), zero_of(_node_of(arguments[1]).adacheck_count)

        taking: Any = jax.jit(take_with_zero, out_shardings=(shardings, None), donate_argnums=1)
        raw = [[*map(transfer.raw, each)] for each in lists[:2]]
        update = update_program.jit_update_like(exported, raw[0], raw[1])
        return taking, update, recorder, exported_program.digest_of(programs[here])


def separate_update(tx: optax.GradientTransformation) -> SeparateUpdate:
    """Make an update that runs as a program of its own, so that any update replays exactly.

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


def _with(opt_state: PyTree, node: RecorderState) -> PyTree:
    return jax.tree.map(lambda x: node if _is_node(x) else x, opt_state, is_leaf=_is_node)


def _is_passed(node: RecorderState) -> list[bool]:
    """For each leaf of the inner state, True if the update passes it through and it is recorded."""
    keys = node.adacheck_passed
    return [passed_key(path) in keys for path in trees.flatten(node.adacheck_inner)[0]]


def _placed(inner: PyTree, is_passed: list[bool], params: PyTree) -> PyTree:
    """The inner state, with passed-through leaves on all devices of the params."""
    shardings = [x.sharding for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    main = max(shardings, key=lambda each: len(each.device_set), default=None)
    if not isinstance(main, NamedSharding):
        return inner
    leaves, treedef = jax.tree.flatten(inner)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == main.device_set:
            return leaf
        return jax.device_put(leaf, NamedSharding(main.mesh, PartitionSpec()))

    pairs = zip(leaves, is_passed, strict=True)
    return treedef.unflatten(put(leaf) if each else leaf for leaf, each in pairs)


def _parted(inner: PyTree, is_passed: list[bool]) -> tuple[list[Any], list[Any]]:
    """The leaves of the inner state that the update computes, and those that it passes through."""
    pairs = [*zip(jax.tree.leaves(inner), is_passed, strict=True)]
    return [leaf for leaf, each in pairs if not each], [leaf for leaf, each in pairs if each]


def _consumed(node: RecorderState, passed: list[Any]) -> tuple[list[Any], list[Any]]:
    """The record; and the extra arguments with the passed-through leaves."""
    extra = jax.tree.leaves(node.adacheck_extra)
    return jax.tree.leaves(node.adacheck_record), [*extra, *map(transfer.raw, passed)]


def _same(a: PyTree, b: PyTree) -> bool:
    ours, theirs = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, leaf.sharding)
    spec = abstract(leaf)
    return (spec.shape, spec.dtype, None)


def _raw_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(transfer.raw, leaf) if transfer.is_key(leaf) else abstract(leaf)


def _unshared(*lists: list[Any]) -> list[list[Any]]:
    """Plain leaves that can be donated: a buffer that occurs twice is copied."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        leaf = transfer.raw(leaf)
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return [[own(leaf) for leaf in each] for each in lists]
