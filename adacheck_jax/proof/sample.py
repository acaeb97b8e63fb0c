"""``sample``: elements of every leaf, at positions that change, replayed from save to save."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from adacheck_jax.device import jax_settings
from adacheck_jax.device.background import in_background
from adacheck_jax.proof.checker import Check, Findings, Sums, Witness
from adacheck_jax.state.exported_update import ExportedUpdate, sites_of
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import Pieces
from adacheck_jax.update.elements.sample_sites import Starts
from adacheck_jax.update.elements.sampling import Sample, Taker, from_host


class Sampling:
    """Replays samples of the leaves."""

    def __init__(self, structure: Structure, program: ExportedUpdate, pieces: Pieces) -> None:
        self._sites = sites_of(structure, is_thinned=program.is_thinned)
        self._structure, self._pieces = structure, pieces
        self._program = program
        self._compared = frozenset(program.compared(structure))
        # Before an update less is needed than behind it.
        self._takers = dict[bool, Taker]()
        self._arithmetic = program.arithmetic
        self._compiled = in_background(self._compile)

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        takers = self._takers.values()
        return bool(takers) and all(x.is_ready for x in takers) and self._compiled.done()

    def _compile(self) -> Any:
        specs = self._pieces.abstract_samples(len(self._sites.devices))
        with self._arithmetic.applied():
            switches = update_program.switches(len(self._structure.bindings))
            return jax.jit(self._pieces.__call__).lower(*specs, switches).compile()

    def witness(self, arrays: Sequence[Any], step: int) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        sample = self._take(arrays, self._sites.starts_at(step), is_before=True)
        return Witness(self._structure, self._program, sample)

    def _take(self, arrays: Sequence[Any], starts: Starts, *, is_before: bool) -> Sample:
        """A sample; the first call begins to compile the programs that take them."""
        roles = {True: self._pieces.before, False: self._pieces.after}
        if not self._takers:
            for each, own in roles.items():
                self._takers[each] = Taker(self._sites, own, arrays)
                in_background(self._takers[each].compile)
        if (taker := self._takers[is_before]).is_ready:
            return taker.take(arrays, starts)
        return from_host(arrays, self._sites, starts, roles[is_before])

    def begin(self, before: Witness, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        last: Sample = before.kept
        after = self._take(arrays, last.starts, is_before=False)
        return Check(
            functools.partial(self.witness, arrays, step),
            functools.partial(self._findings, last, after),
        )

    def _findings(self, before: Sample, after: Sample, updates: Sequence[int]) -> Findings:
        """Replays what was taken of two states, and compares."""
        if not updates:
            return {}
        taken = after.vectors(self._pieces.after)
        given = before.vectors(self._pieces.before), taken
        with jax_settings.own(), self._arithmetic.applied():
            switches = update_program.switch_values(len(self._structure.bindings), updates)
            results = self._compiled.result()(*given, switches)
        found = self._pieces.wrong(results, taken)
        return {i: share for i, share in found.items() if i in self._compared}
