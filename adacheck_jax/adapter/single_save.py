"""One state saved as a base in a root of its own, without a training run."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import SaveArgs
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.device.trees import PyTree


def save_base(
    root: str,
    step: int,
    state: PyTree,
    recorder: Any = None,
    item: str = "default",
) -> None:
    """Save a state as a base; without a recorder no update is stored with it.

    Args:
        root: directory of a new root.
        step: step number.
        state: the whole state.
        recorder: the recorder or recorders of the state; None if it has none.
        item: name of the item; ``default`` for a manager of one item.

    Raises:
        AdaCheckError: it cannot be saved.
    """
    handler = AdaCheckHandler(delta="bits") if recorder is None else AdaCheckHandler(recorder)
    args = SaveArgs(state)
    if item == "default":
        with ocp.CheckpointManager(root, item_handlers=handler) as manager:
            manager.save(step, args=args)
        return
    with ocp.CheckpointManager(root, item_handlers={item: handler}) as manager:
        manager.save(step, args=ocp.args.Composite(**{item: args}))
