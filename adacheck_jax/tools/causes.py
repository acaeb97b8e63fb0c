"""Causes of damage: one damaged file is named once, however many leaves and steps it concerns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.tools.verification import Damage

_QUOTED = re.compile(r'"/[^"]*"|"[a-z0-9]+://[^"]*"')


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of damage.

    Attributes:
        file: path of the damaged file, as the first of the steps has it.
        steps: numbers of the damaged steps, ascending; those without a number are left out.
        leaves: leaf paths that it concerns; none where no single leaf is damaged.
        message: the expected and the found.
    """

    file: str
    steps: tuple[int, ...]
    leaves: tuple[str, ...]
    message: str


def causes_of(root: str, found: Iterable[tuple[int | None, Damage]]) -> tuple[Cause, ...]:
    """The causes of all damage, in the order in which they were found.

    Files that steps share are verified once, so that a cause has the same words in each of them.

    Args:
        root: the checkpoint root.
        found: all damage, each with the number of its step.
    """
    files: dict[object, str] = {}
    steps: dict[object, dict[int, None]] = {}
    leaves: dict[object, dict[str, None]] = {}
    messages: dict[object, str] = {}
    for step, each in found:
        told = _without(each.message, each.leaf)
        named = bool(_QUOTED.search(told))  # then the words tell the file
        key = told if named else (told, _own_name(root, step, each.file))
        files.setdefault(key, each.file)
        messages.setdefault(key, told)
        if step is not None:
            steps.setdefault(key, {})[step] = None
        if each.leaf is not None:
            leaves.setdefault(key, {})[each.leaf] = None
    return tuple(
        Cause(file, (*steps.get(key, ()),), (*leaves.get(key, ()),), messages[key])
        for key, file in files.items()
    )


def _without(message: str, leaf: str | None) -> str:
    """A message that says nothing of a single leaf."""
    if leaf is None:
        return message
    told = re.sub(rf" of {re.escape(leaf)} (are|is) ", r" \1 ", message)
    return told.replace(f"{leaf}: ", "")


def _own_name(root: str, step: int | None, file: str) -> str:
    """Name of a file in the step that wrote it, the same whichever step links it."""
    below = file.removeprefix(root).lstrip("/")
    _, is_link, rest = below.partition(f"/{LINEAGE}/")
    if is_link:
        return rest
    return f"{step}.{below.rpartition('/')[2]}"
