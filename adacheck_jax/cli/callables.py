"""Calls of a function that the command line names, with errors in one line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adacheck_jax.tools.steps import InputError


def function_of(target: str, takes: str) -> Callable[..., Any]:
    """A function of the user's.

    The directory of its file, or for a module the working directory, is where imports are looked
    for first, as ``python file.py`` and ``python -m module`` do.

    Args:
        target: ``path/to/file.py:function`` or ``package.module:function``.
        takes: the arguments that it is called with, for messages.

    Returns:
        The function. What it raises is an InputError, which says ``where`` in a run it was called
        if that argument is given too.

    Raises:
        InputError: there is no such function, or its module raises.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise InputError(
            f"{target}: expected path/to/file.py:function or package.module:function. Name a "
            "function."
        )
    is_file = place.endswith(".py") or Path(place).name != place
    if is_file and not Path(place).is_file():
        raise InputError(f"{place}: expected a Python file, found none. Check the path.")
    directory = Path(place).absolute().parent if is_file else Path.cwd()
    run = place if is_file else f"-m {place}"
    with _looked_for_in(directory, f"{place}: cannot be imported: ", f"Run python {run} to see."):
        module = _from_file(Path(place)) if is_file else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        found = f"a value of type {type(function).__name__}" if function else "no such name"
        own = inspect.getmembers(module, inspect.isfunction)
        names = ", ".join(x for x, value in own if value.__module__ == module.__name__)
        raise InputError(
            f"{target}: expected a function {name} in {place}, found {found}. It has "
            f"{names or 'no functions'}."
        )

    def call(*arguments: Any, where: str = "") -> Any:
        beginning = f"{target}: {where}the function raised "
        with _looked_for_in(directory, beginning, f"It is called {takes}."):
            return function(*arguments)

    return call


@contextlib.contextmanager
def _looked_for_in(directory: Path, beginning: str, remedy: str) -> Iterator[None]:
    """Look for imports in a directory first; any error is the user's, between two texts."""
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    try:
        yield
    except (Exception, SystemExit) as error:
        # JAX has long messages, of which the beginning says most.
        message = ": ".join([type(error).__name__, *filter(None, [" ".join(str(error).split())])])
        raise InputError(f"{beginning}{message[:500]}. {remedy}") from error
    finally:
        sys.path[:] = before


def _from_file(path: Path) -> Any:
    name = f"adacheck_target_{path.stem}"  # an installed module may have the file's own name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module they are defined in
    spec.loader.exec_module(module)
    return module
