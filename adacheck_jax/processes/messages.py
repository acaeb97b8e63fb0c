"""A message of one process to the others: a report, or an error that becomes the error of all."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from adacheck_jax import errors
from adacheck_jax.errors import AdaCheckError, StorageError, is_refusal

Report = dict[str, Any]
"""Report of one process to the others, as JSON."""
RecentCalls = tuple[int, Sequence[str]]
"""Number of all calls of a process, and the last ones of them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A value of the service.

    Attributes:
        report: the report, or the answer of process 0.
        calls: calls of the sender that all have to make alike; None if it compares none.
        error: text of the error that it posts instead; empty without one.
        kind: name of that error's class.
    """

    report: Report = field(default_factory=dict)
    calls: RecentCalls | None = None
    error: str = ""
    kind: str = ""

    def packed(self) -> bytes:
        """As the service stores it."""
        parts = [self.report, self.calls, self.error, self.kind]
        return zlib.compress(json.dumps(parts).encode(), 1)

    def raised(self) -> AdaCheckError:
        """The error, of its own class if that is one of this library's."""
        kind = getattr(errors, self.kind, AdaCheckError)
        is_ours = isinstance(kind, type) and issubclass(kind, AdaCheckError)
        return (kind if is_ours else AdaCheckError)(self.error)


def unpacked(data: bytes) -> Message:
    """A message that was a value of the service."""
    return Message(*json.loads(zlib.decompress(data)))


def refusal(error: BaseException) -> Message:
    """An error that all processes raise alike."""
    text = str(error) if isinstance(error, AdaCheckError) else _described(error)
    return Message(error=text, kind=type(error).__name__)


def failure(
    error: BaseException, process: int, what: str, kinds: Sequence[type[AdaCheckError]], loss: str
) -> Message:
    """An error of one process, which could not do something, as the others raise it.

    They raise those of the ``kinds`` alike. What storage refused one of them is a refusal to all:
    it can be written again. The ``loss`` is the consequence, a sentence that begins with a space.
    """
    kind = next((each for each in kinds if isinstance(error, each)), AdaCheckError)
    kind = StorageError if is_refusal(error) else kind
    text = f"process {process} could not {what} ({_described(error)}).{loss}"
    return Message(error=text, kind=kind.__name__)


def named(processes: Sequence[int]) -> str:
    """Processes, for messages."""
    shown = ", ".join(map(str, processes[:10])) + (" ..." if len(processes) > 10 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
