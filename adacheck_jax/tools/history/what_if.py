"""Going on from any step with the recorded gradients, and another update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.restoring import StepRestorer
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.device.trees import PyTree
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools.handover.recorded_step import find
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.steps import InputError
from adacheck_jax.update.recorder_state import RECORD_FIELD

Step = Callable[[PyTree, PyTree], PyTree]


def replay(
    root: str | os.PathLike[str],
    from_step: int,
    abstract_state: PyTree,
    with_: Step,
    to_step: int | None = None,
    item: str | None = None,
) -> Iterator[tuple[int, PyTree]]:
    """Go on from a recorded step as the run did, but with another update.

    The gradients are the recorded ones: those of the params that the run had, not of those that
    another update makes of them. A function that computes its own (with another batch, say) may
    leave them aside.

    Args:
        root: the directory or URL given to the checkpoint manager.
        from_step: number of a recorded step.
        abstract_state: the state to restore it to, as for ``RestoreArgs``, with one Recorder's
            state in it.
        with_: makes of a state and the gradients of the next recorded step the next state, such as
            ``lambda state, gradients: state.apply_gradients(grads=gradients)``.
        to_step: the last step; None for the newest.
        item: name of the item directory, needed if steps hold several.

    Yields:
        Step numbers and states, beginning with ``from_step`` as it was saved.

    Raises:
        InputError: a step is not recorded, or the state has not one Recorder's state.
        AdaCheckError: a step is damaged, or does not fit the abstract state.
    """
    where = located(os.fspath(root))
    wanted = _record_in(abstract_state)
    walk, stock = Walk(where, item), StockCheckpoints()
    try:
        first = walk.number(from_step)
        step = find(where, first, item)
        args = RestoreArgs(abstract_state, step=None if step.is_own else first)
        state = StepRestorer(stock, {}, None).restore(step.directory, args).state
        yield first, state
        later = walk.between(first + 1, None if to_step is None else walk.number(to_step))
        for number in later:
            state = with_(state, _gradients(walk.at(number), wanted))
            yield number, state
    finally:
        walk.close()
        stock.close()


def _record_in(state: PyTree) -> PyTree:
    """The Recorder's tree of gradients in a state, of abstract leaves."""

    def record_of(node: Any) -> Any:
        if isinstance(node, Mapping):
            return node.get(RECORD_FIELD)
        return getattr(node, RECORD_FIELD, None)

    nodes = jax.tree.leaves(state, is_leaf=lambda node: record_of(node) is not None)
    found = [record_of(node) for node in nodes if record_of(node) is not None]
    if len(found) != 1:
        raise InputError(
            f"expected a state with one Recorder's state in it, found {len(found)}. Give the "
            "abstract state of the run that saved the steps."
        )
    return found[0]


def _gradients(state: State, wanted: PyTree) -> PyTree:
    """The recorded gradients, in the tree and on the shardings of the abstract ones."""
    update = state.update
    leaves, shape = jax.tree.flatten(wanted)
    if update is None or len(update.record) != len(leaves):
        found = 0 if update is None else len(update.record)
        raise InputError(
            f"step {state.step}: expected {len(leaves)} recorded gradients, found {found}. Give "
            "the abstract state of the run that saved it."
        )
    placed = [
        jax.device_put(state.arrays[index], getattr(leaf, "sharding", None))
        for index, leaf in zip(update.record, leaves, strict=True)
    ]
    return jax.tree.unflatten(shape, placed)
