"""Values of the fields of a record in JSON: each is what it is said to be, or refused.

All functions raise TypeError or ValueError for what they refuse.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


def texts(value: Any) -> dict[str, str]:
    """Texts by name."""
    return {text(name): text(each) for name, each in value.items()}


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


def numbers(count: int, items: Any) -> tuple[int, ...]:
    """So many numbers."""
    if not isinstance(items, list) or len(items) != count:
        raise TypeError(f"expected {count} numbers, found {shown(items)}")
    return tuple_of(natural, items)


def optional(read: Callable[[Any], _T], value: Any) -> _T | None:
    """None, or a value read by a function."""
    return None if value is None else read(value)


def check_ascending(values: Sequence[int], what: str, end: int = MAX_NUMBER + 1) -> None:
    """Refuses numbers that do not ascend, or reach an end."""
    if list(values) != sorted(set(values)) or (values and values[-1] >= end):
        raise ValueError(f"{what} that do not ascend, or are not there: {shown(values)}")
