"""Agreement of all processes of a restore, before each collective, that none of them has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

Agreed = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives a context for what may fail in one process alone; all processes enter the same ones.

It is left once all have come to its end. If one fails, all leave it by an error of the same kind.
"""
ALONE: Agreed = contextlib.nullcontext
"""For a process that restores alone."""
