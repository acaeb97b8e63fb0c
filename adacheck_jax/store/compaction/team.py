"""The processes that write one base together, each its boxes, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
"""Account that one process gives the others, as JSON."""
Agree = Callable[[str, Report, Callable[[Sequence[Report]], Report]], Report]
"""Posts this process's report on a topic, and waits for the answer of process 0, which a function
makes of the reports of all. The answer is the same in all; what that function raises, all raise."""

BEGIN, WRITTEN = "begin", "written"
"""Topics: the directory is empty; every process has written its part."""


@dataclass(frozen=True, slots=True)
class Team:
    """The processes, as one of them reaches the others.

    Attributes:
        process: index of this process. Process 0 makes the base of what all have written.
        agree: has all of them agree.
        is_alone: True if there is no other process.
    """

    process: int
    agree: Agree
    is_alone: bool = False


ALONE = Team(0, lambda _topic, own, judge: judge([own]), is_alone=True)
