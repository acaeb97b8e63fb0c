"""The end of a wait for processes that have told nothing new: a pure function of its facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.processes.messages import named


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFacts:
    """All that the decision may know.

    Attributes:
        where: the matter, for messages.
        loss: consequence of an error, a sentence that begins with a space; empty without one.
        awaited: the processes that are waited for.
        silent: those of them that are taken for dead.
        silence_s: their silence, in seconds.
        is_over: True if the matter is given up here.
        is_late: True if the time is over.
    """

    where: str
    loss: str
    awaited: Sequence[int]
    silent: Sequence[int]
    silence_s: float
    is_over: bool
    is_late: bool


def reason_to_end(facts: WaitFacts) -> str:
    """The reason why waiting on is in vain, for an error; empty if it is not."""
    where, loss = facts.where, facts.loss
    if facts.is_over:
        return f"{where}: given up, this step is being saved again"
    if facts.silent:
        return (
            f"{where}: expected to hear of {named(facts.silent)}, found no sign of life for "
            f"{facts.silence_s:.0f} s: killed, or stopped?{loss} Start all processes again, and go "
            "on from the last step that is saved."
        )
    if facts.is_late:
        return (
            f"{where}: expected to hear of {named(facts.awaited)}, found nothing in time.{loss} "
            "Check that all processes save the same steps to the same path, and that the storage "
            "answers."
        )
    return ""
