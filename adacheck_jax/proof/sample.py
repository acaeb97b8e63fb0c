"""``sample``: elements of every leaf, at positions that change, replayed from save to save."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from adacheck_jax.device import jax_settings
from adacheck_jax.device.background import in_background
from adacheck_jax.proof.checker import Check, Findings, Sums, Witness
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import Pieces, Role
from adacheck_jax.update.elements.sample_sites import Starts
from adacheck_jax.update.elements.sampling import Sample, Taker, from_host


class Sampling:
    """Replays samples of the leaves."""

    def __init__(self, structure: Structure, program: ExportedUpdate, pieces: Pieces) -> None:
        assert structure.sites is not None
        self._structure, self._sites, self._pieces = structure, structure.sites, pieces
        self._program = program
        self._compared = frozenset(program.compared(structure))
        self._taker: Taker | None = None
        self._arithmetic = program.arithmetic
        self._compiled = in_background(self._compile)

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return self._taker is not None and self._taker.is_ready and self._compiled.done()

    def _compile(self) -> Any:
        specs = self._pieces.abstract_samples(len(self._sites.devices))
        with self._arithmetic.applied():
            switches = update_program.switches(len(self._structure.bindings))
            return jax.jit(self._pieces.__call__).lower(*specs, switches).compile()

    def _prepare(self, arrays: Sequence[Any]) -> Taker:
        """The program that takes samples; begins to compile it at the first call."""
        if self._taker is None:
            self._taker = Taker(self._sites, self._pieces.after, arrays)
            in_background(self._taker.compile)
        return self._taker

    def witness(self, arrays: Sequence[Any], step: int) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        return self._of(self._take(arrays, self._sites.starts_at(step), self._pieces.before))

    def _take(self, arrays: Sequence[Any], starts: Starts, roles: Sequence[Role]) -> Sample:
        taker = self._prepare(arrays)
        if taker.is_ready:
            return taker.take(arrays, starts, roles)
        return from_host(arrays, self._sites, starts, roles)

    def _of(self, sample: Sample) -> Witness:
        return Witness(self._structure, self._program, sample)

    def begin(self, before: Witness, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        last: Sample = before.kept  # what is waited for first is taken first
        after = self._take(arrays, last.starts, self._pieces.after)
        following = self._take(arrays, self._sites.starts_at(step), self._pieces.before)
        return Check(self._of(following), functools.partial(self._findings, last, after))

    def _findings(self, before: Sample, after: Sample, updates: Sequence[int]) -> Findings:
        """Replays what was taken of two states, and compares."""
        if not updates:
            return {}
        taken = after.vectors(self._pieces.after)
        given = before.vectors(self._pieces.before), taken
        with jax_settings.own(), self._arithmetic.applied():
            switches = update_program.switches(len(self._structure.bindings), updates)
            results = self._compiled.result()(*given, switches)
        found = self._pieces.wrong(results, taken)
        return {i: share for i, share in found.items() if i in self._compared}
