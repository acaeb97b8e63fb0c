"""Edits of neighbouring elements of one large leaf, and how many of them a check by sample finds.

    python -m tests.campaigns.edits --trials 200

Each trial trains a few steps of one leaf, overwrites some neighbours at a random place after an
update, saves, and looks into the delta for what the check found. A sample takes elements that are a
stride apart, from a random start: an edit of ``n`` neighbours is met with probability
``min(1, n / stride)``.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.update.elements.sample_sites import Sites
from tests.campaigns import command

SAVES = 3  # a base, a delta to begin with, and the one that is looked into


def stride_of(elements: int) -> int:
    """Distance of the elements that a sample takes of a leaf of one axis."""
    return Sites([0], [jnp.zeros(elements)]).of(0).stride


def is_found(elements: int, first: int, count: int, seed: int, root: Path) -> bool:
    """Edits a leaf by hand after an update.

    Args:
        elements: of the leaf.
        first: element of it that is overwritten.
        count: elements that are overwritten.
        seed: of the gradients.
        root: an empty directory.

    Returns:
        Whether the check of the delta found it.
    """
    recorder = adacheck.Recorder(optax.sgd(0.1))
    params = {"w": jnp.linspace(-1.0, 1.0, elements)}
    state: dict[str, Any] = {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def step(state: Any, noise: Any) -> Any:
        updates, inner = recorder.update({"w": noise}, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": inner}

    random = np.random.default_rng(seed)
    begin = int(random.integers(1_000_000))  # the start of a sample depends on the step's number
    handler = adacheck.AdaCheckHandler(recorder, shadow=None)
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        for number in range(begin, begin + SAVES):
            state = step(state, random.standard_normal(elements, np.float32))
            if number == begin + SAVES - 1:
                edited = state["params"]["w"].at[first : first + count].add(1.0)
                state = {**state, "params": {"w": edited}}
            manager.save(number, args=adacheck.SaveArgs(jax.block_until_ready(state)))
            manager.wait_until_finished()
    saved = manifest_file.read(root / str(begin + SAVES - 1) / "default")
    assert isinstance(saved, manifest.DeltaManifest)
    return bool(saved.deltas[-1].unreplayed)


def main() -> None:
    """Reads the command line, and prints a table."""
    parser = command.parser(__doc__)
    parser.add_argument("--trials", type=int, default=100, help="of each row")
    parser.add_argument("--elements", type=int, nargs="+", default=[4096, 65_536])
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    random, rows = np.random.default_rng(0), []
    for elements in arguments.elements:
        stride = stride_of(elements)
        for count in sorted({1, max(1, stride // 2), stride}):
            found = 0
            for trial in command.trials(arguments.trials):
                first = int(random.integers(elements - count + 1))
                with tempfile.TemporaryDirectory() as root:
                    found += is_found(elements, first, count, trial, Path(root))
            expected, share = min(1.0, count / stride), found / arguments.trials
            cells = [f"{elements:,}", count, f"{expected:.3f}", f"{share:.3f}", arguments.trials]
            rows.append(cells)
    head = ["elements of the leaf", "edited neighbours", "expected", "found", "trials"]
    print(command.table(head, rows))


if __name__ == "__main__":
    main()
