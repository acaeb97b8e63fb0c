"""An update that ran as a program of its own, told by the very arrays that it took and returned."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SeparateCall:
    """One update that ran as a program of its own, by weak references to its arrays.

    Attributes:
        taken: the params and inner state that it took, in the order of their leaves.
        returned: the params and inner state that it returned, in the same order.
        digest: digest of the exported program that ran.
    """

    taken: tuple[Any, ...]
    returned: tuple[Any, ...]
    digest: str


def reference(array: Any) -> Any:
    """A weak reference to an array: one and the same object for an array as long as it lives."""
    return weakref.ref(array)
