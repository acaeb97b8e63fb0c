"""``identity``: are the saved arrays the very ones that ``separate_update`` returned?

Then nothing is left to compare, if the program that it ran is the one that a restore will run. No
update has returned the arrays that it took first, so their elements are compared too: on CPU
devices they may lie in memory that their owner can change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.byte_loops import fingerprints_of
from adacheck_jax.proof.checker import Baseline, Check, Sums
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.recording.signatures import SeparateCall


class Identity:
    """Asks whether the arrays are those that the replayed program took and returned."""

    is_ready = True

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self._structure, self._program = structure, program
        self._own = (*structure.arguments[0], *structure.arguments[1])

    def baseline(self, arrays: Sequence[Any], step: int, *, is_restored: bool = False) -> Baseline:
        """Takes a baseline of a base, or of a restored state; waits for the state."""
        kept, call = {i: weakref.ref(arrays[i]) for i in self._own}, self._last_call
        returned = set(map(id, call.returned if call is not None else ()))
        views = list[np.ndarray]()
        for i in () if is_restored else self._own:  # which lies in memory of nobody else
            if id(kept[i]) not in returned and not transfer.on_accelerator(arrays[i]):
                shards = getattr(arrays[i], "addressable_shards", ())
                views += [np.asarray(each.data) for each in shards] or [arrays[i]]
        return Baseline(self._structure, self._program, (kept, views, _sums(views)))

    def begin(self, before: Baseline, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        call, (taken, views, before_sums) = self._last_call, before.kept
        baseline = self.baseline(arrays, step)
        wrong = dict.fromkeys(self._program.compared(self._structure), 1.0)
        if (
            call is not None
            and call.digest == self._program.digest
            and all(_is_same(taken.get(i), x) for i, x in self._pairs(call.taken))
            and _sums(views) == before_sums
        ):
            (own, *_), returned = baseline.kept, dict(self._pairs(call.returned))
            wrong = {i: x for i, x in wrong.items() if not _is_same(own[i], returned[i])}
        return Check(lambda: baseline, lambda updates: wrong if updates else {})

    @property
    def _last_call(self) -> SeparateCall | None:
        (binding,) = self._structure.bindings
        return binding.recorder.last_call

    def _pairs(self, arrays: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        return zip(self._own, arrays, strict=True)


def _sums(views: Sequence[np.ndarray]) -> list[int]:
    """Fingerprints of what some arrays have now."""
    return fingerprints_of((each, ()) for each in views)


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and a is b
