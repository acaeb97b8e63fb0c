"""A manager's action on a step while storage may be away: a pure function of its facts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SaveState(enum.Enum):
    """State of the save that was begun last."""

    ENDED = enum.auto()
    FAILED = enum.auto()
    GOES_ON = enum.auto()


class Action(enum.Enum):
    """Action on a step, of all processes alike."""

    RESOLVE = "resolve"
    """All learn if what failed is kept, and it is decided again."""
    LOOK = "look"
    """Storage is looked at, and it is decided again; by process 0 alone."""
    SAVE = "save"
    """It is saved."""
    WRITE = "write"
    """The steps in memory are written, and this one is recorded behind them."""
    RECORD = "record"
    """It is recorded in memory."""
    WAIT = "wait"
    """All that is in memory is written, and waited for; and then it is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """All that the decision about a step may know.

    Attributes:
        in_flight: the save that was begun last.
        is_due: True if storage is to be tried.
        has_gap: True if a step was lost, so that nothing follows by one update.
        is_ours: True if the save holds nothing but the state.
        is_new: True if it comes after all steps in memory.
        is_acknowledged: True if steps are in memory for which ``save`` has answered True.
        has_refused: True if one of them was refused, and is to be written again.
        deferred: number of the others.
        portion: number of those that a save takes with it.
        fits: True if they have the leaves of this step; its save cannot write others.
        answers: True if storage answers; None if it was not looked at.
    """

    in_flight: SaveState
    is_due: bool
    has_gap: bool
    is_ours: bool
    is_new: bool
    is_acknowledged: bool
    has_refused: bool
    deferred: int
    portion: int
    fits: bool
    answers: bool | None = None


def decide(facts: StorageFacts) -> Action:
    """The action on a step."""
    if facts.in_flight is SaveState.FAILED:
        return Action.RESOLVE
    if facts.deferred and not facts.fits:
        return Action.WAIT
    is_tried = facts.in_flight is SaveState.ENDED and facts.is_due and not facts.has_gap
    if is_tried and (facts.is_ours or not facts.is_acknowledged):  # those before are written first
        if facts.answers is None:
            return Action.LOOK
        is_all = not facts.is_acknowledged or facts.deferred < facts.portion
        if facts.answers and is_all and not facts.has_refused:
            return Action.SAVE
        if facts.answers and (facts.has_refused or facts.deferred):
            return Action.WRITE
    return Action.RECORD if facts.is_ours and facts.is_new else Action.WAIT
