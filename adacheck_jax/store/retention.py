"""A preservation policy that keeps parents of kept steps, for file systems without hard links."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence, Set
from types import FrameType
from typing import Any, Protocol

from adacheck_jax.errors import expect_callable
from adacheck_jax.store.steps.lineage import shown_steps

_log = logging.getLogger(__name__)

_REMEMBERED = 1000
"""Number of steps that were let go, and are remembered: they may take a while to be deleted."""


class _SavedCheckpoint(Protocol):
    step: int


class _Policy(Protocol):
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]: ...


class KeepLineage:
    """An Orbax preservation policy that keeps the ancestors of whatever another policy keeps.

    :func:`checkpoint_manager` has one. A manager of another's making needs it where the file system
    has no hard links, so that a delta refers to other steps. Give the same object to the manager
    and to the handler; other policies go inside it::

        keep = adacheck.KeepLineage(AnyPreservationPolicy([LatestN(3), EveryNSteps(1000)]))
        handler = adacheck.AdaCheckHandler(recorder, keep_lineage=keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=keep)

    Args:
        inner_policy: policy for the steps to keep for their own sake.

    Attributes:
        is_asked: True once a manager asked which steps to keep, which it does with each save.
    """

    def __init__(self, inner_policy: _Policy) -> None:
        expect_callable(inner_policy, "a policy, such as LatestN(3)", "should_preserve")
        self._inner = inner_policy
        self._parents: dict[int, set[int]] = {}
        self._let_go: dict[int, None] = {}
        self._held: dict[object, int] = {}
        self._told: int | None = None
        self.is_asked = False

    def note(self, step: int, parent: int) -> None:
        """Remembers that a step builds on another; called by the handler."""
        self._parents.setdefault(step, set()).add(parent)

    def hold(self, holder: object, step: int | None) -> None:
        """Keeps a step until its holder gives None; called by the handler, to make a base of it.

        Of steps that it gives before that, the first stays.
        """
        if step is None:
            self._held.pop(holder, None)
        else:
            self._held.setdefault(holder, step)

    def lets_go(self, step: int) -> bool:
        """True if a step may be deleted at any moment, so that no step may build on it."""
        return step in self._let_go

    def should_preserve(
        self, checkpoints: Sequence[_SavedCheckpoint], *, context: Any
    ) -> Sequence[bool]:
        """Keeps the steps that the inner policy keeps, the newest, and all that those build on.

        A step stays, too, while a base is made of it in the background.

        Raises:
            ValueError: the policy lies in another one, which may keep steps without what they
                build on.
        """
        _refuse_outer_policy(inspect.currentframe())
        self.is_asked = True
        inner = self._inner.should_preserve(checkpoints, context=context)
        steps = {checkpoint.step for checkpoint in checkpoints}
        kept = {c.step for c, keep in zip(checkpoints, inner, strict=True) if keep}
        kept |= {max(steps)} if steps else set()  # the next step builds on it
        kept |= steps.intersection(self._held.values())
        wanted, waiting = frozenset(kept), list(kept)
        while waiting:
            parents = self._parents.get(waiting.pop(), set()) - kept
            kept |= parents
            waiting += parents
        self._tell(kept - wanted, wanted)
        self._forget(steps, kept)
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def _tell(self, ancestors: Set[int], wanted: Set[int]) -> None:
        """Says in the log which steps stay for the sake of others; once for each base."""
        if ancestors and min(ancestors) != self._told:
            self._told = min(ancestors)
            _log.info(
                "Steps %s stay beside those that were asked for (%s), which build on them: there "
                "are no hard links here. They are deleted once no kept step needs them.",
                *(shown_steps(sorted(ancestors)), shown_steps(sorted(wanted))),
            )

    def _forget(self, steps: set[int], kept: set[int]) -> None:
        """Forgets the steps that are gone: a run has millions of them."""
        newest = max(steps, default=-1)  # a later one is being saved
        here = steps | kept
        self._parents = {k: v for k, v in self._parents.items() if k in here or k > newest}
        let_go = [*self._let_go, *sorted(steps - self._let_go.keys())]
        self._let_go = dict.fromkeys([x for x in let_go if x not in kept][-_REMEMBERED:])


def _refuse_outer_policy(frame: FrameType | None) -> None:
    """Raises if Orbax's union of policies asks: nothing else tells a policy who does."""
    for _ in range(2):  # in Python 3.11 a comprehension has a frame of its own
        frame = frame.f_back if frame else None
        outer = type(frame.f_locals.get("self")).__name__ if frame else ""
        if outer == "AnyPreservationPolicy":
            raise ValueError(
                f"expected KeepLineage around all other policies, found it inside {outer}, which "
                "may keep a step and delete what it builds on. Nothing was deleted; write "
                "KeepLineage(AnyPreservationPolicy([...])), and give it to manager and handler."
            )
