"""What became of each step of a run: restored, lost, refused; and how it lies on disk.

Manifests are read as plain JSON, and what one of them lacks counts as absent, so that steps that
other releases wrote can be counted by the same program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SHARED = ("adacheck/lineage", "adacheck/kept")


@dataclass
class Lost:
    """A step that was reported as saved and does not restore.

    Attributes:
        step: its number.
        inside: the step from which it was asked for, where it was recorded.
        mesh: on which it does not restore.
        error: what was raised.
        edited: whether the error names the leaf of which a part was edited before, and no other.
    """

    step: int
    inside: int
    mesh: str
    error: str
    edited: bool


@dataclass
class Outcome:
    """What one run gave.

    Attributes:
        seed, kinds, devices, text: of its plan.
        steps: that were trained and offered to be saved.
        saved: reported as saved, recorded ones included, and kept.
        exact: of these, restored with every bit where they were saved.
        lost: of these, not restored where they were saved.
        elsewhere: restores on other meshes, of steps that restore where they were saved.
        elsewhere_exact, elsewhere_rounded: of these.
        lost_elsewhere: of these.
        wrong: restores that returned other bits.
        vanished: steps that were reported as saved and are in no manifest.
        refused: errors of this library at a save or at the next wait, by step.
        dropped: recorded steps that went with a refused one.
        listed_though_refused: steps that were refused, and that the manager lists.
        failed: any other exception, by where it was raised.
        resumes_failed: restores in the middle of the run that raised.
        named: the newest step that ``latest_restorable`` named; None for none.
        named_lost: whether that step does not restore.
        fallback: the step that a restore of the last one with ``skip_damaged=True`` gave, or an
            error.
        edited_path: the leaf of which an element or a row was edited; empty for none.
        bases, replayed, idle, bits: steps by how they lie on disk; idle ones hold no update.
        whole_leaves: leaves that the update computes and that replayed deltas hold all the same.
        reasons: of bases but the first, as their manifests tell them.
        delta_bytes: new bytes of all deltas.
        base_bytes: new bytes of all bases.
        state_bytes: of one state.
        cpu_s: of the process.
    """

    seed: int
    kinds: Sequence[str]
    devices: int
    text: str
    steps: int = 0
    saved: int = 0
    exact: int = 0
    lost: list[Lost] = field(default_factory=list)
    elsewhere: int = 0
    elsewhere_exact: int = 0
    elsewhere_rounded: int = 0
    lost_elsewhere: list[Lost] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    vanished: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    listed_though_refused: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    resumes_failed: list[str] = field(default_factory=list)
    named: int | None = None
    named_lost: bool = False
    fallback: str = ""
    edited_path: str = ""
    bases: int = 0
    replayed: int = 0
    idle: int = 0
    bits: int = 0
    whole_leaves: int = 0
    reasons: list[str] = field(default_factory=list)
    delta_bytes: int = 0
    base_bytes: int = 0
    state_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def line(self) -> str:
        """The run in one line."""
        parts = [f"{self.seed:>6} {self.devices}d saved {self.saved} exact {self.exact}"]
        for name in ("lost", "lost_elsewhere", "wrong", "vanished", "refused", "failed"):
            if count := len(getattr(self, name)):
                parts.append(f"{name.upper()} {count}")
        parts += ["NAMED A LOST STEP"] * self.named_lost
        kinds = f"{self.bases}b {self.replayed}r {self.idle}i {self.bits}x {self.whole_leaves}w"
        return f"{' '.join(parts)} [{kinds}] {self.cpu_s:.1f}s  {self.text}"

    @property
    def json(self) -> dict[str, Any]:
        """As it is written to a file."""
        return asdict(self)


class Disk:
    """The manifests of all steps that a root ever held, also of those that are deleted since."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: dict[int, dict[str, Any]] = {}
        self.new_bytes: dict[int, int] = {}
        self._inodes: set[int] = set()

    def look(self) -> None:
        """Reads the manifests that are new."""
        for path in sorted(self.root.glob("*/default/adacheck/manifest.json")):
            name = path.parents[2].name
            if not name.isdecimal() or int(name) in self.manifests:
                continue
            try:
                self.manifests[int(name)] = json.loads(path.read_text())
                self.new_bytes[int(name)] = self._new_bytes(path.parents[2])
            except FileNotFoundError:  # it was deleted meanwhile
                continue

    def _new_bytes(self, directory: Path) -> int:
        total = 0
        for folder, _, names in os.walk(directory):
            for name in names:
                status = os.stat(os.path.join(folder, name))
                if status.st_ino not in self._inodes:
                    self._inodes.add(status.st_ino)
                    total += status.st_size
        return total

    def inside(self, step: int) -> list[int]:
        """The steps that were recorded and lie in a saved one, and those that it builds on."""
        found: list[int] = []
        while (manifest := self.manifests.get(step)) is not None:
            found += [each["step"] for each in manifest.get("recorded") or ()]
            if manifest.get("kind") != "delta":
                break
            step = manifest["parent"]["step"]
            found.append(step)
        return found

    def tell(self, outcome: Outcome) -> None:
        """Counts steps by how they lie on disk."""
        for step, manifest in sorted(self.manifests.items()):
            if manifest.get("kind") == "base":
                outcome.bases += 1
                outcome.base_bytes += self.new_bytes.get(step, 0)
                if outcome.bases > 1:
                    outcome.reasons.append(str(manifest.get("reason")))
                continue
            outcome.delta_bytes += self.new_bytes.get(step, 0)
            update = self._update_of(step)
            passed = set(update.get("passed") or ())
            computed = {*(update.get("params") or ()), *(update.get("inner") or ())} - passed
            before = _counts(self.manifests.get(manifest["parent"]["step"], {}))
            for delta in (*(manifest.get("recorded") or ()), manifest):
                if delta.get("updates") or delta.get("has_update"):
                    outcome.replayed += 1
                    outcome.whole_leaves += len(computed & _held(delta))
                elif _counts(delta) == before and not _differences(delta):
                    outcome.idle += 1
                else:
                    outcome.bits += 1
                before = _counts(delta)

    def _update_of(self, step: int) -> dict[str, Any]:
        manifest = self.manifests.get(step, {})
        while manifest.get("kind") == "delta":
            manifest = self.manifests.get(manifest["parent"]["step"], {})
        return manifest.get("update") or {}


def _counts(manifest: dict[str, Any]) -> Any:
    """The update counters, as either format version has them."""
    return manifest.get("counts", manifest.get("count"))


def _letters(delta: dict[str, Any], position: int) -> set[str]:
    return {pack["encodings"][position] for pack in delta.get("packs") or ()}


def _held(delta: dict[str, Any]) -> set[int]:
    stored = delta.get("stored") or ()
    return {leaf for position, leaf in enumerate(stored) if _letters(delta, position) - {"="}}


def _differences(delta: dict[str, Any]) -> bool:
    stored = delta.get("stored") or ()
    return any(_letters(delta, position) & {"x", "s"} for position in range(len(stored)))


def differing(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> int:
    """Leaves whose type, shape or bits differ."""
    pairs = zip(found, expected, strict=True)
    return sum(
        (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes() for a, b in pairs
    )
