"""What the commands of all campaigns share: options, trials with an end, and printed results."""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adacheck_jax.schemes import SCHEMES

_SHARED: dict[str, dict[str, Any]] = {
    "count": {"type": int, "help": "trials (default %(default)s)"},
    "seed": {"type": int, "help": "seed of the first random choice (default %(default)s)"},
    "minutes": {"type": float, "help": "begin no trial after so many minutes"},
    "directory": {"type": Path, "help": "empty directory to work in"},
    "json": {"action": "store_true", "help": "print JSON instead of a table"},
    "store": {"choices": (*SCHEMES,), "help": "object store to save into"},
    "size": {"choices": ("small", "full"), "help": "small or full (default %(default)s)"},
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of a campaign's options.

    Args:
        doc: docstring of the campaign; its first sentence is the description.
        defaults: names and defaults of the shared options that the campaign has.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        made.add_argument(f"--{name}", default=default, **_SHARED[name])
    return made


def trials(count: int, minutes: float = math.inf) -> Iterator[int]:
    """Numbers of trials from 0, as long as there is time; every tenth is told on stderr."""
    start_s = time.monotonic()
    for number in range(count):
        if time.monotonic() - start_s >= minutes * 60:
            return
        yield number
        if number % 10 == 9:
            seconds = time.monotonic() - start_s
            print(f"{number + 1} of {count}, {seconds:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def workplace(directory: Path | None, problems: Sequence[object]) -> Iterator[Path]:
    """A directory to work in, which is left where there are problems in the end."""
    made = directory or Path(tempfile.mkdtemp(prefix="campaign-"))
    made.mkdir(parents=True, exist_ok=True)
    yield made
    if not problems:
        shutil.rmtree(made, ignore_errors=True)


def steps_given_up(message: str) -> set[int]:
    """The recorded steps of which a warning of the library says that they are not saved."""
    found = re.match(r"Recorded steps that are not saved: ([^;]*);", message)
    ranges = re.findall(r"(\d+)(?: to (\d+))?", found[1] if found else "")
    return {step for a, b in ranges for step in range(int(a), int(b or a) + 1)}


class GivenUp(logging.Handler):
    """Collects the recorded steps that the library gives up, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.steps |= steps_given_up(record.getMessage())

    def __enter__(self) -> GivenUp:
        logging.getLogger("adacheck_jax").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("adacheck_jax").removeHandler(self)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def finish(found: dict[str, Any], problems: Iterable[object] = (), text: str = "") -> int:
    """Prints what was found, as text or else as JSON, and problems on stderr.

    Returns:
        The exit status.
    """
    from benchmarks.common import environment  # it imports jax, which not every campaign needs

    if text:
        print(json.dumps(environment()), text, sep="\n\n")
    else:
        print(json.dumps({**environment(), **found}))
    failed = 0
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
        failed = 1
    return failed
