"""One state saved as a base in a root of its own, without a training run."""

from __future__ import annotations

import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import SaveArgs
from adacheck_jax.adapter.manager import checkpoint_manager
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
    args, items = SaveArgs(state), None if item == "default" else {}
    with checkpoint_manager(root, delta="bits", items=items, item=item) as manager:
        manager.save(step, args=args if items is None else ocp.args.Composite(**{item: args}))
