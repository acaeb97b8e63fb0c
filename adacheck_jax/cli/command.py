"""One way to make a command of a function that returns a report, and the arguments they share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from adacheck_jax.errors import AdaCheckError, StorageError
from adacheck_jax.schemes import no_answer, shown
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.steps import InputError, Progress, quiet

Report = TypeVar("Report")
Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT", help=f"Directory or URL ({shown('')}) given to the checkpoint manager."
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
Last = Annotated[int | None, typer.Option("--last", "-n", min=1, help="Only the newest N steps.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Look only; change nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

RESTORES = "adacheck_jax.restore.progress"
"""Logger of restores that take long."""


class Groups(TyperGroup):
    """Commands listed by group, with the whole first sentence of each one's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            row = (name, command.get_short_help_str(limit=500))
            groups.setdefault(command.rich_help_panel, []).append(row)
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=Groups,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # paragraphs are wrapped to the terminal's width, and pipes stay plain
)


def command(
    group: str,
    show: Callable[[Report], None],
    code: Callable[[Report], int] = lambda report: 0,
    *,
    has_steps: bool = False,
) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Make a command of a function that returns a report; ``--json`` prints its fields.

    Args:
        group: heading in the list of commands.
        show: prints the report for people.
        code: exit code for a report.
        has_steps: True if it takes steps: ``-1`` is one then, and no option.
    """

    def register(function: Callable[..., Report]) -> Callable[..., Report]:
        del function.__annotations__["return"]  # which some modules import for type checkers alone

        @functools.wraps(function)
        def run(as_json: bool, **arguments: Any) -> None:
            with errors():
                report = function(**arguments)
            print_json(report) if as_json else show(report)
            if number := code(report):
                raise typer.Exit(number)

        takes = inspect.signature(function, eval_str=True).parameters.values()
        option = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
        )
        run.__signature__ = inspect.Signature([*takes, option])  # type: ignore[attr-defined]
        settings = {"ignore_unknown_options": has_steps}
        app.command(rich_help_panel=group, context_settings=settings)(run)
        return function

    return register


def print_json(report: Any) -> None:
    """Print a dataclass as one JSON object."""
    typer.echo(json.dumps(dataclasses.asdict(report), indent=2))


def step_of(text: str | None, name: str = "STEP") -> int | None:
    """The step that a user names.

    Args:
        text: a number, ``latest``, or a place counted from the newest step, which is ``-1``.
        name: name of the argument, for the message.

    Returns:
        The number; below zero a place; None if nothing is named.

    Raises:
        InputError: it is none of these.
    """
    if text is None or text == "latest":
        return text and -1
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise InputError(
            f"{name}: expected a step number, latest, or -1 for the newest step, found {text!r}."
        )
    return int(text)


def root_of(text: str) -> AnyPath:
    """The root that a user names.

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
        raise InputError(no_answer(text, f"{error.strerror}")) from error
    return root


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (InputError, OSError, AdaCheckError) as error:
        typer.echo(f"adacheck: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2 if isinstance(error, InputError | OSError) else 1) from error


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield quiet
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
