"""Values of the fields of a record in JSON: each is what it is said to be, or refused.

All functions raise TypeError or ValueError for what they refuse.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from adacheck_jax.format.manifest import Caution

MAX_NUMBER = 2**63 - 1
"""The largest of 64 bits with a sign."""

_T = TypeVar("_T")


def shown(value: Any) -> str:
    """A value for a message, shortened to a line."""
    return reprlib.repr(value)


def natural(value: Any, most: int = MAX_NUMBER) -> int:
    """A number from 0 to a largest one."""
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"expected a number from 0 to {most}, found {shown(value)}")
    return value


def truth(value: Any) -> bool:
    """True or false, and no number."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {shown(value)}")
    return value


def text(value: Any) -> str:
    """A text that can be encoded: no lone surrogate."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {shown(value)}")
    if not value.isascii():
        value.encode()  # a ValueError for a lone surrogate
    return value


def digits(value: Any, count: int) -> str:
    """A text of so many hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{count}}}", value):
        raise ValueError(f"expected {count} hexadecimal digits, found {shown(value)}")
    return value


def fingerprint(value: Any) -> int:
    """A fingerprint, from its hexadecimal digits."""
    return int(digits(value, 16), 16)


def tuple_of(read: Callable[[Any], _T], items: Any) -> tuple[_T, ...]:
    """The items of a list, each read by a function."""
    if not isinstance(items, list):
        raise TypeError(f"expected a list, found {type(items).__name__}")
    return tuple(read(item) for item in items)


def naturals(items: Any) -> tuple[int, ...]:
    """Numbers, each as of :func:`natural`."""
    return tuple_of(natural, items)


def optional(read: Callable[[Any], _T], value: Any) -> _T | None:
    """None, or a value read by a function."""
    return None if value is None else read(value)


def ascending(body: Any) -> tuple[int, ...]:
    """Numbers that ascend."""
    values = naturals(body)
    if list(values) != sorted(set(values)):
        raise ValueError(f"numbers that do not ascend: {shown(values)}")
    return values


def pair(body: Any) -> tuple[int, int]:
    """Two numbers."""
    if not isinstance(body, list) or len(body) != 2:
        raise TypeError(f"expected two numbers, found {shown(body)}")
    return natural(body[0]), natural(body[1])


def pairs(body: Any, first_end: int, second_end: int | None) -> tuple[tuple[int, int], ...]:
    """Pairs of numbers, each below its end; None for no end."""
    found = tuple_of(pair, body)
    for first, second in found:
        if first >= first_end or (second_end is not None and second >= second_end):
            raise ValueError(f"a pair of leaves lies outside the state: {(first, second)}")
    return found


def stale(body: dict[str, Any], leaf_count: int) -> tuple[tuple[int, int], ...]:
    """The stale leaves of a step, and the steps whose bits they have."""
    found = pairs(body["stale"], leaf_count, natural(body["step"]))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(found)):
        raise ValueError(f"stale leaves that do not ascend: {shown(found)}")
    return found


def caution(body: dict[str, Any], leaf_count: int) -> Caution:
    """Findings of the checks of a run."""
    distrusted = ascending(body["distrusted"])
    if distrusted and distrusted[-1] >= leaf_count:
        raise ValueError(f"leaves that are not there are distrusted: {shown(distrusted)}")
    return Caution(text(body["reason"]), distrusted)
