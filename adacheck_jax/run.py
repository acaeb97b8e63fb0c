"""Steps that were recorded and not saved yet: a run of deltas, in memory.

On accelerators a record is copied on its device first and drained from there in the background, so
that no step waits for a transfer. At most :data:`_DRAINING_COUNT` of them take device memory: then
the next one waits for the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from adacheck_jax.commit import StepShare
from adacheck_jax.copies import HostCopies
from adacheck_jax.decisions import Decisions
from adacheck_jax.expectation import Expectation
from adacheck_jax.policy import Tip
from adacheck_jax.snapshot import Structure

_DRAINING_COUNT = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that was recorded.

    Attributes:
        expectation: of the step.
        copies: what the next step compares with.
    """

    expectation: Expectation
    copies: HostCopies

    @property
    def share(self) -> StepShare:
        """What is held of the step."""
        return self.expectation.share


class Run:
    """The steps that were recorded since the last save."""

    def __init__(self) -> None:
        self._head: Hashable = None
        self._recorded: list[Recorded] = []
        self._draining: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def steps(self) -> list[StepShare]:
        """What is held of them, oldest first."""
        return [each.share for each in self._recorded]

    @property
    def copies(self) -> HostCopies:
        """What the next step compares with."""
        return self._recorded[-1].copies

    def where(self, step: int) -> Hashable:
        """Under which the small values of a recorded step are remembered."""
        return self._head, step

    def tip(self, saved: Callable[[], Tip]) -> Callable[[], Tip]:
        """What tells the step that the next one follows.

        Args:
            saved: tells the saved step that they all follow.
        """
        if not self._recorded:
            return saved
        last, count = self._recorded[-1].share, len(self)
        where = self.where(last.step)
        return lambda: Tip(last.step, last.count, saved().depth + count, where)

    def restart(self, head: Hashable) -> None:
        """Begins anew, after a save.

        Args:
            head: what tells the saved step from any other.
        """
        self._head, self._recorded = head, []

    def add(self, recorded: Recorded, *, drains: bool) -> None:
        """Adds a step.

        Args:
            recorded: the step.
            drains: whether it takes device memory until it was brought to the host.
        """
        self._recorded.append(recorded)
        if not drains:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="adacheck_drain")
        while len(self._draining) >= _DRAINING_COUNT:
            self._draining.pop(0).result()
        self._draining.append(self._pool.submit(recorded.share.drain))

    def cut(self, count: int) -> list[Recorded]:
        """Gives up all but some of them, and tells which."""
        given_up, self._recorded = self._recorded[count:], self._recorded[:count]
        return given_up

    def settle(self, decisions: Decisions) -> None:
        """Settles all of them, in order; waits for those that are still being computed.

        Raises:
            AdaCheckError: one is not what it was expected to be.
        """
        for each in self._recorded:
            each.expectation.settle(decisions)

    @property
    def settled_count(self) -> int:
        """How many of them, from the first on, are known to be what they were expected to be."""
        counts = [each.share.count for each in self._recorded]
        return next((i for i, count in enumerate(counts) if count is None), len(counts))


def bytes_of(structure: Structure, stored: Sequence[int]) -> int:
    """Bytes that a process holds of some leaves: of the one that holds most, so that all agree."""
    held: dict[int, int] = {}
    for index in stored:
        leaf = structure.leaves[index]
        for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
            held[owner] = held.get(owner, 0) + box.size * leaf.itemsize_bytes
    return max(held.values(), default=0)
