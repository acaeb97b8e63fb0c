"""``identity``: are the saved arrays the very ones that ``separate_update`` returned?

Then nothing is left to compare, if the program that it ran is the one that a restore will run.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.proof.checker import Check, CheckedState, Findings, Witness
from adacheck_jax.state.exported_update import Engine, ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.recording.signatures import SeparateCall


class Identity:
    """Asks whether the arrays are those that the replayed program took and returned."""

    engine: Engine = "identity"

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self.structure, self.program = structure, program

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return True

    def witness(self, state: CheckedState) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        own = (*self.structure.arguments[0], *self.structure.arguments[1])
        kept = {i: weakref.ref(state.arrays[i]) for i in own}
        return Witness(self.structure, self.program, kept)

    def begin(self, before: Witness, state: CheckedState) -> Check:
        """Takes what the check of a delta needs."""
        (binding,) = self.structure.bindings
        call: SeparateCall | None = binding.recorder.last_call
        witness = self.witness(state)
        every = dict.fromkeys(self.program.compared(self.structure), 1.0)
        if call is None or call.digest != self.program.digest:
            return _Identified(witness, every)
        own = (*self.structure.arguments[0], *self.structure.arguments[1])
        pairs = zip(own, call.taken, strict=True)
        if not all(_is_same(before.kept.get(i), taken) for i, taken in pairs):
            return _Identified(witness, every)
        returned = dict(zip(own, call.returned, strict=True))
        wrong = {i: each for i, each in every.items() if not _is_same(witness.kept[i], returned[i])}
        return _Identified(witness, wrong)


@dataclass(frozen=True, slots=True)
class _Identified:
    witness: Witness
    wrong: Findings

    def findings(self, updates: Sequence[int]) -> Findings:
        return self.wrong if updates else {}

    def renew(self, state: CheckedState, wrong: Collection[int]) -> None:
        """Nothing to do: a witness names the arrays of the state itself."""


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and a is b
