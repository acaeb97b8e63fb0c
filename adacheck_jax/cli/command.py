"""Kinds of arguments, errors in one line and JSON, for all commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from adacheck_jax.errors import AdaCheckError, StorageError
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:
    from adacheck_jax.tools.audit import Progress

Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT", help="Directory or URL (gs://, s3://) given to the checkpoint manager."
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Function to call: path/to/file.py:function or package.module:function.",
    ),
]
Item = Annotated[str | None, typer.Option(help="Item name, where a step holds several such items.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


Step = Annotated[str, typer.Argument(metavar="STEP", help="Number, latest, or -1.")]
RESTORES = "adacheck_jax.restore.progress"
"""Logger of restores that take long."""
STEPS = {"ignore_unknown_options": True}
"""Settings of a command that takes steps: -1 is one, and no option."""


class WholeSentences(TyperGroup):
    """Commands whose list has the whole first sentence of each one's help, wrapped."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list.

        Args:
            ctx: context of the call.
            formatter: what the help is written with.
        """
        names = self.list_commands(ctx)
        rows = [(name, self.commands[name].get_short_help_str(limit=500)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def step_of(text: str | None, name: str = "STEP") -> int | None:
    """The step that a user names.

    Args:
        text: a number, ``latest``, or a place counted from the newest step, which is ``-1``.
        name: name of the argument, for the message.

    Returns:
        The number; below zero a place; None for the newest step, and if nothing is named.

    Raises:
        InputError: it is none of these.
    """
    if text is None or text == "latest":
        return None
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise InputError(
            f"{name}: expected a step number, latest, or -1 for the newest step, found {text!r}."
        )
    return int(text)


_CREDENTIALS = {
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AWS_REGION and AWS_ENDPOINT_URL name it",
}


def root_of(text: str) -> AnyPath:
    """The root that a user names.

    Args:
        text: path or URL.

    Raises:
        InputError: a URL of an unknown kind, or of an object store that does not answer.
    """
    try:
        root = located(text)
    except StorageError as error:
        raise InputError(str(error)) from error
    try:
        at(root).check_answers()
    except OSError as error:
        raise InputError(
            f"{text}: expected an object store that answers, found: {error.strerror}. Look after "
            f"the network, the URL and the credentials ({_CREDENTIALS[text[:2]]})."
        ) from error
    return root


_UNITS_BYTES = {
    "": 1,
    "kB": 1000,
    **{f"{unit}B": 1000**n for n, unit in enumerate(("", "K", "M", "G", "T"))},
    **{f"{unit}iB": 1024**n for n, unit in enumerate(("", "K", "M", "G", "T")) if n},
}


def bytes_of(option: str, text: str) -> int:
    """Bytes of a size such as ``5GB``.

    Args:
        option: name of the option, for the message.
        text: a number, and a unit of 1000 (``GB``) or 1024 bytes (``GiB``).

    Raises:
        InputError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    size = int(float(found[1]) * _UNITS_BYTES.get(found[2], 0)) if found else 0
    if not size:
        raise InputError(f"{option}: expected a size such as 5GB or 512MiB, found {text!r}.")
    return size


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (InputError, OSError) as error:
        _fail(error, 2)
    except AdaCheckError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    typer.echo(f"adacheck: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from error


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    import rich.progress  # only here: it takes a tenth of the time of a listing
    from rich.console import Console

    console = Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell


class _Lines(logging.Handler):
    """Writes to stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


def show_restores() -> None:
    """Tell how far long restores are, if stderr is a terminal."""
    log = logging.getLogger(RESTORES)
    if sys.stderr.isatty() and not log.handlers:
        log.addHandler(_Lines())
        log.setLevel(logging.INFO)


def print_json(record: Any) -> None:
    """Print a dataclass as one JSON object.

    Args:
        record: the dataclass.
    """
    typer.echo(json.dumps(dataclasses.asdict(record), indent=2))
