"""Steps that were recorded and not saved yet: a run of deltas, in memory.

Each is replayed and compared with its state in the background. A step that replay gets wrong takes
those after it along, so at most :data:`_UNCHECKED_COUNT` steps wait for that: then the next one
waits for the oldest. On accelerators a record is copied on its device first and drained from there
in the background, so that no step waits for a transfer; :data:`_DRAINING_COUNT` of them at most
take device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from adacheck_jax.device import jax_settings
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.save.checks import Witness
from adacheck_jax.save.commit import StepShare
from adacheck_jax.save.expectation import Expectation
from adacheck_jax.save.heads import Head
from adacheck_jax.save.policy import Tip
from adacheck_jax.save.snapshot import Structure

_DRAINING_COUNT = 2
_UNCHECKED_COUNT = 4


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that was recorded.

    Attributes:
        expectation: of the step.
        copies: host copies of leaves that the next step may be stored as a difference from.
        witness: of its state, to check the next step with.
    """

    expectation: Expectation
    copies: Mapping[int, Blocks]
    witness: Witness

    @property
    def share(self) -> StepShare:
        """What is held of the step."""
        return self.expectation.share


class Run:
    """The steps that were recorded since the last save.

    Attributes:
        follows: the saved or restored step that they follow.
    """

    def __init__(self) -> None:
        self.follows: Head | None = None
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
    def last(self) -> Recorded:
        """The one recorded last."""
        return self._recorded[-1]

    def tip(self, saved: Callable[[], Tip]) -> Callable[[], Tip]:
        """What tells the step that the next one follows.

        Args:
            saved: tells the saved step that they all follow.
        """
        if not self._recorded:
            return saved
        last, count = self._recorded[-1].share, len(self)
        return lambda: Tip(last.step, last.counts, saved().depth + count)

    def restart(self, head: Head) -> None:
        """Begins anew, after a save or a restore.

        Args:
            head: the step that the next one follows.
        """
        self.follows, self._recorded = head, []

    def add(self, recorded: Recorded, *, drains: bool) -> None:
        """Adds a step.

        Args:
            recorded: the step.
            drains: whether it takes device memory until it was brought to the host.
        """
        self._recorded.append(recorded)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="adacheck_drain")
        while len(self._draining) >= (_DRAINING_COUNT if drains else _UNCHECKED_COUNT):
            self._draining.pop(0).result()
        self._draining.append(self._pool.submit(self._drain, recorded))

    @jax_settings.own()
    def _drain(self, recorded: Recorded) -> None:
        recorded.share.drain()
        with contextlib.suppress(AdaCheckError):  # whoever saves or records the next is told
            recorded.expectation.verify()

    def cut(self, count: int) -> list[Recorded]:
        """Gives up all but some of them, and tells which."""
        given_up, self._recorded = self._recorded[count:], self._recorded[:count]
        return given_up

    def settle(self) -> None:
        """Settles all of them, in order; waits for those that are still being computed.

        Raises:
            AdaCheckError: one is not what it was expected to be.
        """
        for each in self._recorded:
            each.expectation.settle()

    @property
    def settled_count(self) -> int:
        """How many of them, from the first on, are known to be what they were expected to be."""
        counts = [each.share.counts for each in self._recorded]
        return next((i for i, count in enumerate(counts) if count is None), len(counts))

    @property
    def wrong(self) -> tuple[int, AdaCheckError] | None:
        """The first of them that is known not to be what it was expected to be, and why."""
        pairs = enumerate(each.share.refused for each in self._recorded)
        return next(((i, error) for i, error in pairs if error is not None), None)


def bytes_of(structure: Structure, stored: Sequence[int]) -> int:
    """Bytes that a process holds of some leaves: of the one that holds most, so that all agree."""
    held: dict[int, int] = {}
    for index in stored:
        leaf = structure.leaves[index]
        for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
            held[owner] = held.get(owner, 0) + box.size * leaf.itemsize_bytes
    return max(held.values(), default=0)
