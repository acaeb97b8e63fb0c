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
    will be compared, of fewer elements (:meth:`Sites.thinned`), once they can be taken.
    """

    def __init__(
        self,
        structure: Structure,
        program: ExportedUpdate,
        pieces: Pieces,
        proves: Callable[[], bool],
    ) -> None:
        assert structure.sites is not None
        self._structure, self._program, self._proves = structure, program, proves
        self._dense = _Samples(structure, program, structure.sites, pieces)
        self._thin: _Samples | None = None

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return self._dense.is_ready

    def witness(self, arrays: Sequence[Any], step: int) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        samples = self._for_next(arrays)
        sample = samples.take(arrays, samples.sites.starts_at(step), is_before=True)
        return Witness(self._structure, self._program, (samples, sample))

    def _for_next(self, arrays: Sequence[Any]) -> _Samples:
        """The samples that the next step is checked by."""
        if not (self._dense.is_ready and self._proves()):
            return self._dense
        if self._thin is None:
            sites = self._dense.sites.thinned()
            pieces = self._dense.pieces.resized(sites.sizes)
            self._thin = self._dense
            if pieces is not None:
                self._thin = _Samples(self._structure, self._program, sites, pieces)
        return self._thin if self._thin.prepare(arrays) else self._dense

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
