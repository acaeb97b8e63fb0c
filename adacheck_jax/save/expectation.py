"""What a step is expected to be before its values are known, and whether it is.

A save does not wait for a step that is still being computed. That at most one update of each
recorder lies between it and the step before is assumed then, and found out when the values are
there; so is whether replaying them gives the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.save import host_copies, policy
from adacheck_jax.save.checks import Check, Findings
from adacheck_jax.save.commit import StepShare
from adacheck_jax.save.exported_update import Program
from adacheck_jax.save.policy import Counts, Decision, Tip
from adacheck_jax.save.snapshot import Structure


@dataclass(slots=True)
class Expectation:
    """That a step is a delta of the step before.

    Attributes:
        share: of the step; its decision and counters are set, and what depends on them.
        structure: of the state.
        values: of its counters, by leaf index; perhaps still being computed.
        tip: tells the step before; its counters may come to be known meanwhile.
        program: the update.
        check: compares its replay with the state; None where it was compared before.
        before: of the step before, which is to be compared first; None where it was.
        again: of the same step, if it was recorded before it was saved.
    """

    share: StepShare
    structure: Structure
    values: Mapping[int, Any]
    tip: Callable[[], Tip]
    program: Program
    check: Check | None
    before: Expectation | None = None
    again: Expectation | None = None

    @property
    def counts(self) -> Counts:
        """The update counters; waits for them."""
        return tuple(int(np.asarray(self.values[i])) for i in self.structure.counts)

    def settle(self) -> None:
        """Finds out which updates were made, and sets what depends on it.

        Raises:
            AdaCheckError: some recorder made another number than one or none.
        """
        if self.share.counts is not None:
            return
        share, counts = self.share, self.counts
        if self.again is not None and self.again.counts != counts:
            raise AdaCheckError(
                f"expected step {share.step} as it was recorded, with "
                f"{policy.shown(self.again.counts)} updates; found {policy.shown(counts)}. The "
                "step is not saved. Give record_step the numbers of the steps, as the manager "
                "counts them."
            )
        tip = self.tip()
        assert tip.counts is not None
        updates = policy.advanced(tip.counts, counts)
        if updates is None:
            raise AdaCheckError(
                f"expected one update since step {tip.step}, as between the steps before; but the "
                f"update counter went from {policy.shown(tip.counts)} to {policy.shown(counts)}: "
                "not one update. A save does not wait for a step that is still computed, and so "
                "this was found when a full state could not be had any more. The step is not "
                "saved; the next one will be a base."
            )
        share.decision = Decision("replay", policy.described(updates), updates)
        delta = share.delta
        if delta is None:
            raise AdaCheckError(f"step {share.step} was given up before it was written")
        stored = delta.candidates
        if len(updates) < len(counts):
            held = frozenset(stored)
            delta.candidates = stored = tuple(
                i
                for i in host_copies.candidates(
                    self.structure, share.decision, self.program, share.unreplayed
                )
                if i in held
            )
        share.unchanged = host_copies.unchanged(self.structure, stored, updates)
        share.counts = counts

    def verify(self) -> None:
        """Replays, and compares with the state; once, and remembers what was found.

        Raises:
            AdaCheckError: as from :meth:`settle`.
            ReplayError: replay gives something else, and the state is gone.
        """
        share = self.share
        with share.verify_lock:
            if self.before is not None:
                with contextlib.suppress(AdaCheckError):  # its own save is told
                    self.before.verify()
                self.before = None
            try:
                if share.refused is None:
                    self._compare()
            except AdaCheckError as error:
                share.refused = error
            if share.refused is not None:
                raise share.refused

    def _compare(self) -> None:
        self.settle()
        share, check, self.check = self.share, self.check, None
        if check is None:
            return
        updates = share.decision.updates
        found = check.findings(updates)
        if wrong := {i: each for i, each in found.items() if i not in share.unreplayed}:
            raise ReplayError(
                f"step {share.step}: {told(self.structure, wrong)}. This was found after the save "
                "had returned, when the state could not be had any more: the step is not saved. "
                f"{CAUSES} From now on each save is checked before it returns, and stores what "
                "replay does not reproduce."
            )
        share.checked = self.program.engine if updates else "stored"


CAUSES = (
    "Look for: params or optimizer state edited by hand, rolled back or swapped between the update "
    "and the save; a transformation or projection after the Recorder; another optimizer than the "
    "handler's recorder; arithmetic that is not pinned (pin=False)."
)


def told(structure: Structure, wrong: Collection[int] | Findings) -> str:
    """Names the leaves that replay gets wrong."""
    paths = [structure.leaves[i].path for i in wrong]
    shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
    return f"replaying the update does not give the state that was trained, in {shown}"


def are_ready(values: Mapping[int, Any]) -> bool:
    """Whether all values have been computed: then no device is busy with their step any more."""
    return all(map(transfer.is_ready, values.values()))
