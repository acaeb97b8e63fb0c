"""``sample``: elements of every leaf, at positions that change, replayed from save to save."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from adacheck_jax.device import jax_settings
from adacheck_jax.device.background import in_background
from adacheck_jax.proof.checker import Check, Findings, Sums, Witness
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import Pieces
from adacheck_jax.update.elements.sample_sites import Sites, Starts
from adacheck_jax.update.elements.sampling import Sample, Taker, from_host


class Sampling:
    """Replays samples of the leaves.

    The sample of a state is taken for the step after it: where ``proves`` says that all of that
    will be compared, of fewer elements (:meth:`Sites.thinned`). What neither takes is not compiled.
    """

    def __init__(
        self,
        structure: Structure,
        program: ExportedUpdate,
        pieces: Pieces,
        proves: Callable[[], bool],
    ) -> None:
        self._structure, self._program, self._pieces = structure, program, pieces
        self._proves = proves
        self._made = dict[bool, _Samples]()

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return bool(self._made) and all(each.is_ready for each in self._made.values())

    def witness(self, arrays: Sequence[Any], step: int) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        samples = self._for_next(arrays)
        sample = samples.take(arrays, samples.sites.starts_at(step), is_before=True)
        return Witness(self._structure, self._program, (samples, sample))

    def _for_next(self, arrays: Sequence[Any]) -> _Samples:
        """The samples that the next step is checked by."""
        if not self._proves():
            return self._samples(is_thin=False)
        thin, dense = self._samples(is_thin=True), self._made.get(False)
        is_late = dense is not None and dense.is_ready and not thin.prepare(arrays)
        return dense if is_late and dense is not None else thin

    def _samples(self, *, is_thin: bool) -> _Samples:
        if is_thin not in self._made:
            sites, pieces = self._structure.sites, self._pieces
            assert sites is not None
            if is_thin:
                sites = sites.thinned()
                if (resized := pieces.resized(sites.sizes)) is None:
                    return self._made.setdefault(True, self._samples(is_thin=False))
                pieces = resized
            self._made[is_thin] = _Samples(self._structure, self._program, sites, pieces)
        return self._made[is_thin]

    def begin(self, before: Witness, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        samples, last = before.kept
        after = samples.take(arrays, last.starts, is_before=False)
        return Check(
            functools.partial(self.witness, arrays, step),
            functools.partial(samples.findings, last, after),
        )


class _Samples:
    """Samples of some places: taken, replayed and compared."""

    def __init__(
        self, structure: Structure, program: ExportedUpdate, sites: Sites, pieces: Pieces
    ) -> None:
        self._structure, self.sites, self.pieces = structure, sites, pieces
        self._compared = frozenset(program.compared(structure))
        # Before an update less is needed than behind it.
        self._takers = dict[bool, Taker]()
        self._arithmetic = program.arithmetic
        self._compiled = in_background(self._compile)

    @property
    def is_ready(self) -> bool:
        """True if nothing waits for a compiler."""
        takers = self._takers.values()
        return bool(takers) and all(x.is_ready for x in takers) and self._compiled.done()

    def _compile(self) -> Any:
        specs = self.pieces.abstract_samples(len(self.sites.devices))
        with self._arithmetic.applied():
            switches = update_program.switches(len(self._structure.bindings))
            return jax.jit(self.pieces.__call__).lower(*specs, switches).compile()

    def prepare(self, arrays: Sequence[Any]) -> bool:
        """Begins to compile the programs that take samples; returns True once all is compiled."""
        if not self._takers:
            for is_before in (True, False):
                self._takers[is_before] = Taker(self.sites, self._roles(is_before), arrays)
                in_background(self._takers[is_before].compile)
        return self.is_ready

    def _roles(self, is_before: bool) -> Sequence[Any]:
        return self.pieces.before if is_before else self.pieces.after

    def take(self, arrays: Sequence[Any], starts: Starts, *, is_before: bool) -> Sample:
        """A sample; taken from the host until there are programs for it."""
        self.prepare(arrays)
        if (taker := self._takers[is_before]).is_ready:
            return taker.take(arrays, starts)
        return from_host(arrays, self.sites, starts, self._roles(is_before))

    def findings(self, before: Sample, after: Sample, updates: Sequence[int]) -> Findings:
        """Replays what was taken of two states, and compares."""
        if not updates:
            return {}
        taken = after.vectors(self.pieces.after)
        given = before.vectors(self.pieces.before), taken
        with jax_settings.own(), self._arithmetic.applied():
            switches = update_program.switch_values(len(self._structure.bindings), updates)
            results = self._compiled.result()(*given, switches)
        found = self.pieces.wrong(results, taken)
        return {i: share for i, share in found.items() if i in self._compared}
