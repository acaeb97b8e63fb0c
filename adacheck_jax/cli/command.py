"""Kinds of arguments, errors in one line and JSON, for all commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from adacheck_jax.errors import AdaCheckError, StorageError
from adacheck_jax.store.storage.location import AnyPath, located
from adacheck_jax.tools.steps import InputError

Root = Annotated[
    str, typer.Argument(help="Directory or URL (gs://, s3://) given to the checkpoint manager.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def root_of(text: str) -> AnyPath:
    """The root that a user names.

    Args:
        text: path or URL.

    Raises:
        InputError: a URL of an unknown kind.
    """
    try:
        return located(text)
    except StorageError as error:
        raise InputError(str(error)) from error


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


def print_json(record: Any) -> None:
    """Print a dataclass as one JSON object.

    Args:
        record: the dataclass.
    """
    typer.echo(json.dumps(dataclasses.asdict(record), indent=2))
