"""Call of a function that the command line names, with errors in one line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:  # which loads JAX
    from adacheck_jax.update.recorder import Recorder


def state_of(target: str) -> tuple[Any, Recorder | None]:
    """Import a function that returns an abstract state, and call it without arguments.

    Args:
        target: as for :func:`function`.

    Returns:
        The state, and the Recorder if the function returns a tuple of both.

    Raises:
        InputError: there is no such function, or it or its module raises.
    """
    from adacheck_jax.update.recorder import Recorder

    found = function(target)
    with _first_on_path(_directory(target)):
        try:
            made = found()
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{target}: the function raised {_described(error)}. It is called without "
                "arguments and must return an abstract state, or a tuple of it and a Recorder."
            ) from error
    has_recorder = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Recorder)
    return made if has_recorder else (made, None)


def called(target: str, found: Callable[..., Any], state: Any, step: int) -> Any:
    """Call a predicate.

    Args:
        target: its name, for messages.
        found: the function.
        state: nested dicts of arrays.
        step: the step number.

    Raises:
        InputError: it raises.
    """
    with _first_on_path(_directory(target)):
        try:
            return found(state, step)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{target}: at step {step} the function raised {_described(error)}. It is called "
                "with the state, nested dicts of arrays, and the step number."
            ) from error


def function(target: str) -> Callable[..., Any]:
    """Import a function.

    The directory of the file, or for a module the working directory, is where its own imports are
    looked for first, as ``python file.py`` and ``python -m module`` do.

    Args:
        target: ``path/to/file.py:function`` or ``package.module:function``.

    Raises:
        InputError: there is no such function, or its module raises.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise InputError(
            f"{target}: expected path/to/file.py:function or package.module:function. Name a "
            "function."
        )
    is_file = _is_file(place)
    if is_file and not Path(place).is_file():
        raise InputError(f"{place}: expected a Python file, found none. Check the path.")
    with _first_on_path(_directory(target)):
        return _function(place, name, _imported(place, is_file))


def _is_file(place: str) -> bool:
    return place.endswith(".py") or Path(place).name != place


def _directory(target: str) -> Path:
    place = target.rpartition(":")[0]
    return Path(place).absolute().parent if _is_file(place) else Path.cwd()


@contextlib.contextmanager
def _first_on_path(directory: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(place: str, is_file: bool) -> ModuleType:
    try:
        return _from_file(Path(place)) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{place}: cannot be imported: {_described(error)}. Run python "
            f"{place if is_file else f'-m {place}'} to see where."
        ) from error


def _function(place: str, name: str, module: ModuleType) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a value of type {type(function).__name__}"
        raise InputError(
            f"{place}:{name}: expected a function {name} in {place}, found {found}. It has "
            f"{', '.join(_functions_of(module)) or 'no functions'}."
        )
    return function


def _from_file(path: Path) -> ModuleType:
    name = f"adacheck_target_{path.stem}"  # an installed module may have the file's own name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module they are defined in
    spec.loader.exec_module(module)
    return module


def _functions_of(module: ModuleType) -> list[str]:
    """Names of the functions that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and callable(value)
        and not isinstance(value, type)
    ]


def _described(error: BaseException) -> str:
    """Type and message of an error; only the beginning of a long message, as JAX has."""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
