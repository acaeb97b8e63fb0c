"""How far something is that takes long, for whoever looks on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

_PATIENCE_S = 2.0
_T = TypeVar("_T")


def track(items: Sequence[_T], what: str) -> Iterator[_T]:
    """Gives the items; shows a bar on a terminal once it has taken a while.

    Args:
        items: to be worked through.
        what: is being done, in a few words.
    """
    console = Console(stderr=True)
    start_s = time.monotonic()
    with ExitStack() as stack:
        bar = None
        for done, item in enumerate(items):
            if bar is None and console.is_terminal and time.monotonic() - start_s > _PATIENCE_S:
                bar = stack.enter_context(Progress(console=console, transient=True))
                bar.add_task(what, total=len(items))
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
