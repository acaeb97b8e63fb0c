"""How the steps of a run are kept: as bases, replayed updates or differences, of which leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import lookup, manifest_file, roots


def delta_of(root: Path, step: int) -> DeltaManifest:
    found = manifest_file.read(root / str(step) / "default")
    assert isinstance(found, DeltaManifest)
    return found


def base_of(root: Path, step: int) -> BaseManifest:
    return lookup.resolve(root / str(step) / "default").base


def kinds(root: Path) -> str:
    """A letter a step: Base, Replayed update, No update, or Differences of bits."""
    letters, counts = "", ()
    for step in roots.steps_of(root):
        found = step.manifest
        if isinstance(found, BaseManifest):
            letters += "B"
        elif found.has_update:
            letters += "R"
        else:
            letters += "N" if found.counts and found.counts == counts else "D"
        counts = found.counts
    return letters


def stored_letters(root: Path, step: int) -> dict[str, str]:
    """How a delta of one process stores each of its leaves, by leaf path."""
    leaves, delta = base_of(root, step).leaves, delta_of(root, step)
    pairs = zip(delta.stored, delta.packs[0].encodings, strict=True)
    return {leaves[i].path: letter for i, letter in pairs}


def assert_only_changes_are_stored(root: Path, saved: dict[int, list[np.ndarray]]) -> None:
    """A delta holds the record, and of what no update computes exactly what changed."""
    for letter, step in zip(kinds(root), saved, strict=True):
        if letter == "B":
            continue
        delta, update = delta_of(root, step), base_of(root, step).update
        assert delta.problem == ""
        computed, consumed = frozenset[int](), frozenset[int]()
        if update is not None and letter in "RN":
            computed = update.explained.difference(update.passed, delta.unreplayed)
            consumed = frozenset(update.consumed)
        stored = frozenset(delta.stored)
        assert not stored & computed
        assert (stored & consumed) == (consumed if letter == "R" else frozenset())
        for i, (new, old) in enumerate(zip(saved[step], saved[step - 1], strict=True)):
            if i not in computed | consumed:
                changed = new.tobytes() != old.tobytes()
                assert (i in stored) == changed, base_of(root, step).leaves[i].path
