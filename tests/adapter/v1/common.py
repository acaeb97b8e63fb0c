"""Runs saved by the stock Checkpointer of Orbax v1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from tests.support import Run, host_copy


def assert_same_leaves(found: Any, expected: list[Any]) -> None:
    """Compares a tree that was loaded without an abstract one: its leaves come in any order."""
    assert sorted(x.tobytes() for x in host_copy(found)) == sorted(x.tobytes() for x in expected)


def checkpointer_of(root: Path, **options: Any) -> ocp.training.Checkpointer:
    """A stock Checkpointer that saves every step, also while it writes the one before."""
    every = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    return ocp.training.Checkpointer(root, save_decision_policy=every, **options)


def save_steps(checkpointer: ocp.training.Checkpointer, run: Run, steps: int) -> dict[int, Any]:
    """Trains and saves every step, and waits for it; returns what each saved state was.

    Orbax puts a new checkpointer into its manager before it waits for the last save. A thread that
    looks for it late waits for the new one: without the wait here the last step is now and then not
    committed yet, and the next one a base.
    """
    saved = {}
    for _ in range(steps):
        run.advance()
        saved[run.count] = host_copy(run.state)
        assert checkpointer.save_async(run.count, run.state) is not None
        checkpointer.wait()
    return saved
