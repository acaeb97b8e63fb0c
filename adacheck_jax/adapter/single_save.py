"""One state saved as a base in a root of its own, without a training run."""

from __future__ import annotations

import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import SaveArgs
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.device.trees import PyTree


def save_base(root: str, step: int, state: PyTree, item: str) -> None:
    """Save a state as a base; no update is stored with it.

    Args:
        root: directory of a new root.
        step: step number.
        state: the whole state.
        item: name of the item; ``default`` for a manager of one item.

    Raises:
        AdaCheckError: it cannot be saved.
    """
    handler, args = AdaCheckHandler(delta="bits"), SaveArgs(state)
    if item == "default":
        with ocp.CheckpointManager(root, item_handlers=handler) as manager:
            manager.save(step, args=args)
        return
    with ocp.CheckpointManager(root, item_handlers={item: handler}) as manager:
        manager.save(step, args=ocp.args.Composite(**{item: args}))
