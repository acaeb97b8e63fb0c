"""``sample``: elements of every leaf, at positions that change, replayed from save to save."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from adacheck_jax.device.background import in_background
from adacheck_jax.proof.checker import Baseline, Check, Findings, Sums
from adacheck_jax.proof.sample_replay import SampleReplay
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.pieces import Pieces
from adacheck_jax.update.elements.sample_sites import Sites, Starts
from adacheck_jax.update.elements.sampling import Sample, Taker, from_host

_EARLY_COUNT = 3
"""Dense samples for which no program is compiled, where thin ones will be taken soon."""


class Sampling:
    """Replays samples of the leaves.

    The sample of a state is taken for the step after it. It has fewer elements
    (:meth:`Sites.thinned`) if ``proves`` says that the whole of that step will be compared (None:
    not known yet). Programs that few steps need are not compiled.
    """

    def __init__(
        self,
        structure: Structure,
        program: ExportedUpdate,
        pieces: Pieces,
        proves: Callable[[], bool | None],
    ) -> None:
        self._structure, self._program, self._pieces = structure, program, pieces
        self._proves = proves
        self._made = dict[bool, _Samples]()
        self._next: _Samples | None = None
        self._early_count = 0

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return self._next is not None and self._next.is_ready

    def baseline(self, arrays: Sequence[Any], step: int, *, is_restored: bool = False) -> Baseline:
        """Takes a baseline of a base, or of a restored state; waits for the state."""
        samples = self._next = self._for_next(arrays)
        sample = samples.take(arrays, samples.sites.starts_at(step), is_before=True)
        return Baseline(self._structure, self._program, (samples, sample))

    def _for_next(self, arrays: Sequence[Any]) -> _Samples:
        """The samples that the next step is checked by."""
        proves = self._proves()
        if proves is False:
            dense = self._samples(is_thin=False)
            dense.prepare(arrays)
            return dense
        thin = self._samples(is_thin=True)
        if thin.prepare(arrays) and proves:
            return thin
        dense = self._samples(is_thin=False)
        self._early_count += proves is None
        if self._early_count > _EARLY_COUNT:  # else they are taken by way of the host
            dense.prepare(arrays)
        return thin if proves and not dense.is_ready else dense

    def _samples(self, *, is_thin: bool) -> _Samples:
        if is_thin not in self._made:
            sites = self._structure.sites
            assert sites is not None
            pieces: Pieces | None = self._pieces
            if is_thin:
                sites = sites.thinned()
                pieces = pieces.resized(sites.sizes)
            if pieces is None:
                self._made[is_thin] = self._samples(is_thin=False)
            else:
                thin = self._made.get(True)
                replay = thin.replay if thin is not None else self._replay(sites, pieces)
                compared = self._program.compared(self._structure)
                self._made[is_thin] = _Samples(sites, pieces, replay, compared)
        return self._made[is_thin]

    def _replay(self, sites: Sites, pieces: Pieces) -> SampleReplay:
        rows, recorders = len(sites.devices), len(self._structure.bindings)
        return SampleReplay(self._program, pieces, rows, recorders)

    def begin(self, before: Baseline, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        samples, last = before.kept
        has_moved = before.structure is not self._structure
        after = samples.take(arrays, last.starts, is_before=False, has_moved=has_moved)
        return Check(
            functools.partial(self.baseline, arrays, step),
            functools.partial(samples.findings, last, after),
        )


class _Samples:
    """Samples of some places: taken, replayed and compared."""

    def __init__(
        self, sites: Sites, pieces: Pieces, replay: SampleReplay, compared: Collection[int]
    ) -> None:
        self.sites, self.replay, self._pieces = sites, replay, pieces
        self._compared = frozenset(compared)
        # Before an update fewer elements are needed than after it.
        self._takers = dict[bool, Taker]()

    @property
    def is_ready(self) -> bool:
        """True if nothing waits for a compiler."""
        takers = self._takers.values()
        return bool(takers) and all(x.is_ready for x in takers) and self.replay.is_compiled

    def prepare(self, arrays: Sequence[Any]) -> bool:
        """Begins to compile the programs that take samples; returns True once all is compiled."""
        if not self._takers:
            for is_before in (True, False):
                self._takers[is_before] = Taker(self.sites, self._roles(is_before), arrays)
                in_background(self._takers[is_before].compile)
        return self.is_ready

    def _roles(self, is_before: bool) -> Sequence[Any]:
        return self._pieces.before if is_before else self._pieces.after

    def take(
        self, arrays: Sequence[Any], starts: Starts, *, is_before: bool, has_moved: bool = False
    ) -> Sample:
        """A sample; by way of the host until its programs are compiled.

        So too where arrays that may have moved (``has_moved``) lie on other devices now, or in
        other memory.
        """
        taker = self._takers.get(is_before)
        if taker is not None and taker.is_ready and (not has_moved or taker.fits(arrays)):
            return taker.take(arrays, starts)
        return from_host(arrays, self.sites, starts, self._roles(is_before))

    def findings(self, before: Sample, after: Sample, updates: Sequence[int]) -> Findings:
        """Replays what was taken of two states, and compares."""
        if not updates:
            return {}
        taken = after.vectors(self._pieces.after)
        results = self.replay(before.vectors(self._pieces.before), taken, updates)
        found = self._pieces.wrong(results, taken)
        return {i: share for i, share in found.items() if i in self._compared}
