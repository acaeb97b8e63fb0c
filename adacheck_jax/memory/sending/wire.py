"""Sends copies when a step is staged, and receives those of other processes.

A process that consented sends, also if its save fails after that.
"""

# Threads: all but the question to the others runs on the thread that saves, records or restores;
# that on one of this module's. What is received is awaited by the shadow's thread.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.memory.holdings import HeldBox
from adacheck_jax.memory.sending import plans
from adacheck_jax.memory.sending.plans import SendPlan
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.processes.consent import Consent
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Snapshot

_REMEMBERED = 8


class Received(transfer.Arriving):
    """Boxes of other processes on their way here, by leaf; zeros for those that do not come.

    Args:
        plan: their plan.

    Attributes:
        rows: gives the rows that came, or None if none was sent.
    """

    def __init__(self, plan: SendPlan) -> None:
        self.rows, self._plan = Future[Sequence[Any] | None](), plan
        self._known = {each.leaf for pieces in plan.received for each in pieces}
        self._blocks: dict[int, dict[Box, np.ndarray]] | None = None

    def joined(self, blocks: Mapping[int, Blocks]) -> Mapping[int, Blocks]:
        """These boxes beside those that this process has, of the same leaves."""
        self._known = {*self._known, *(self._plan.kept.keys() & {*blocks})}
        return transfer.Merged(blocks, self)

    def lost(self) -> set[int]:
        """The processes of whose boxes some do not come; waits."""
        found, kept = self._found(), self._plan.kept
        every = ((i, owner, box) for i in self for owner, box in kept[i])
        return {owner for i, owner, box in every if box not in found.get(i, {})}

    def __getitem__(self, leaf: int) -> Blocks:
        found, nothing = self._found().get(leaf, {}), np.zeros((), self._plan.dtypes[leaf])
        every = (box for _, box in self._plan.kept[leaf])
        return {x: found[x] if x in found else np.broadcast_to(nothing, x.shape) for x in every}

    def _found(self) -> Mapping[int, Blocks]:
        if self._blocks is None:
            try:
                self._blocks = self._arrived()
            except Exception:  # the collective failed: a process is gone
                self._blocks = {}
        return self._blocks

    def _arrived(self) -> dict[int, dict[Box, np.ndarray]]:
        found = dict[int, dict[Box, np.ndarray]]()
        for lanes, pieces in zip(self.rows.result() or (), self._plan.received, strict=False):
            arrays = ([np.asarray(row).reshape(-1) for row in lane] for lane in lanes)
            rows = [{x.dtype.itemsize: x for x in lane} for lane in arrays]
            for each in pieces:
                words = rows[each.lane][each.width][each.start : each.start + each.count]
                block = words.view(self._plan.dtypes[each.leaf]).reshape(each.box.shape)
                found.setdefault(each.leaf, {})[each.box] = block
        return found


class Wire:
    """Sends copies for one training run's shadow."""

    def __init__(self, shadow: ShadowThread) -> None:
        self._shadow = shadow
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_consent")
        self._plans: dict[tuple[int, int, frozenset[int]], tuple[Any, SendPlan]] = {}
        self._sending: tuple[SendPlan, Any, Future[bool], Received] | None = None
        self._past: list[Exchange] = []

    def begin(
        self,
        snapshot: Snapshot,
        update: ExportedUpdate,
        leaves: Collection[int],
        consent: Consent | None,
        label: str,
        *,
        is_followed: bool,
    ) -> Received | None:
        """Takes what is sent of some leaves, and asks the others if all do so.

        None if no leaf of the state need be sent; otherwise :meth:`finish` has to follow, whatever
        happens. Shadows get a step that ``is_followed``.
        """
        parts = self._shadow.sent(snapshot.structure, update)
        if not parts or consent is None:
            return None
        self._past.append(consent.exchange)
        plan = self._plan(snapshot, update, parts, frozenset(leaves if is_followed else ()))
        rows, arrays = list[Any](), snapshot.arrays
        if (sender := plan.sender) is not None:
            for n, lanes in enumerate(plan.picks):
                picked = ([plans.part_of(arrays[i], pick) for i, pick in lane] for lane in lanes)
                rows.append([sender.row(n, lane, own) for lane, own in enumerate(picked)])
        what = f"{label} {plan.digest}" if is_followed else ""
        received = Received(plan)
        self._sending = plan, rows, consent.begin(what, self._thread), received
        return received

    def finish(self) -> None:
        """Sends, if all processes do; collective.

        Raises:
            AdaCheckError: another process is gone, or did not come to this step.
        """
        if self._sending is None:
            return
        (plan, rows, consented, received), self._sending = self._sending, None
        try:
            found = None
            if consented.result() and plan.sender is not None:
                found = plan.sender.send(rows)
            received.rows.set_result(found)
        except BaseException as error:
            received.rows.set_exception(error)
            raise
        self._forget()

    def agrees(self, consent: Consent | None, what: str) -> bool:
        """True if all processes enter another collective of the same name now; waits for all.

        Raises:
            AdaCheckError: another process is gone, or makes another call.
        """
        if consent is None:
            return False
        self._past.append(consent.exchange)
        is_agreed = consent.ask(what)
        self._forget()
        return is_agreed

    def leave(self, consent: Consent) -> None:
        """Refuses at the end of a call in which nothing was asked, if any call did ask so far."""
        if self._past and not consent.is_used:
            self._past.append(consent.exchange)
            consent.refuse()

    def _forget(self) -> None:
        # All processes have begun this call, so none waits in an earlier one.
        *past, last = self._past
        self._past = [last]
        for each in past:
            each.forget()

    def _plan(
        self,
        snapshot: Snapshot,
        update: ExportedUpdate,
        parts: Sequence[HeldBox],
        leaves: frozenset[int],
    ) -> SendPlan:
        structure = snapshot.structure
        key = id(structure), id(update), leaves
        if key not in self._plans:
            if len(self._plans) >= _REMEMBERED:
                del self._plans[next(iter(self._plans))]
            made = plans.plan_of(snapshot, parts, leaves)
            self._plans[key] = (structure, update), made
        return self._plans[key][1]
