"""``identity``: are the saved arrays the very ones that ``separate_update`` returned?

Then nothing is left to compare, if the program that it ran is the one that a restore will run.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from adacheck_jax.proof.checker import Check, Sums, Witness
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.recording.signatures import SeparateCall


class Identity:
    """Asks whether the arrays are those that the replayed program took and returned."""

    is_ready = True

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self._structure, self._program = structure, program
        self._own = (*structure.arguments[0], *structure.arguments[1])

    def witness(self, arrays: Sequence[Any], step: int) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        kept = {i: weakref.ref(arrays[i]) for i in self._own}
        return Witness(self._structure, self._program, kept)

    def begin(self, before: Witness, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        (binding,) = self._structure.bindings
        call: SeparateCall | None = binding.recorder.last_call
        witness = self.witness(arrays, step)
        wrong = dict.fromkeys(self._program.compared(self._structure), 1.0)
        if (
            call is not None
            and call.digest == self._program.digest
            and all(_is_same(before.kept.get(i), x) for i, x in self._pairs(call.taken))
        ):
            returned = dict(self._pairs(call.returned))
            wrong = {i: x for i, x in wrong.items() if not _is_same(witness.kept[i], returned[i])}
        return Check(lambda: witness, lambda updates: wrong if updates else {})

    def _pairs(self, arrays: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        return zip(self._own, arrays, strict=True)


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and a is b
