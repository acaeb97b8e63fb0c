"""The plan of the house: which room may know which, and the picture of BUILD.md drawn from it.

``python -m tests.house`` writes the picture and the list of rooms anew; a test fails while they
differ.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adacheck_jax"
BUILD = ROOT / "BUILD.md"
FACADE = "adacheck_jax"
"""The package itself: it gives the public names, and a module that uses it uses them alone."""

MAY_IMPORT = {
    "lazy": (),
    "schemes": (),
    "errors": ("schemes",),
    "schedule": (),
    "layout": ("errors",),
    "format": ("errors",),
    "processes": ("errors", "format"),
    "device": ("errors", "format"),
    "store": ("schemes", "errors", "format"),
    "publish": ("errors", "format", "processes", "device", "store"),
    "update": ("errors", "format", "device"),
    "state": ("errors", "format", "device", "update"),
    "proof": ("errors", "format", "device", "update", "state"),
    "memory": ("errors", "format", "processes", "device", "update", "state"),
    "plan": ("errors", "schedule", "format", "device", "store", "update", "state"),
    "save": (
        *("errors", "schedule", "format", "processes", "device", "store", "update"),
        *("state", "proof", "memory", "plan"),
    ),
    "restore": ("errors", "layout", "format", "device", "store", "update"),
    "adapter": (
        "schemes",
        "errors",
        "schedule",
        "layout",
        "format",
        "processes",
        "device",
        "store",
        "update",
        "memory",
        "plan",
        "save",
        "restore",
    ),
    "tools": (
        "errors",
        "layout",
        "format",
        "device",
        "store",
        "update",
        "restore",
        "adapter",
        "publish",
    ),
    "cli": ("schemes", "errors", "layout", "store", "update", "tools", FACADE),
    "v1": ("adapter",),
}
"""Rooms, lowest first, and the rooms that each may import: a design decision, made here."""

MAY_USE = {
    "processes": {"jax", "orbax"},
    "device": {"jax"},
    "store": {"tensorstore"},
    "publish": {"jax"},
    "update": {"jax"},
    "state": {"jax"},
    "proof": {"jax"},
    "memory": {"jax"},
    "save": {"jax"},
    "restore": {"jax"},
    "adapter": {"jax", "orbax"},
    "tools": {"jax"},
    "cli": {"jax"},
}
"""The large packages from outside that a room may import."""

OUTSIDE = {"jax": "jax", "jaxlib": "jax", "orbax": "orbax", "tensorstore": "tensorstore"}
LARGEST_ROOM = 12

FILE_MODULES = {"os", "pathlib", "shutil", "glob", "tempfile", "fcntl"}
MAY_TOUCH_FILES = {
    "store.storage.posix": "it is the file system",
    "store.storage.location": "it takes local paths",
    "store.storage.kvstore": "it reads the environment",
    "errors": "it names errors of the operating system",
    "format.byte_loops": "it counts processors",
    "format.compiled_loops": "it sets what numba reads from the environment",
    "format.one_process": "it asks for the number of its process",
    "update.program": "it reads the environment",
    "memory.free_memory": "it reads what the system says of its memory",
    "memory.files.shadow_file": "it maps a file of this machine's memory",
    "memory.files.step_file": "it names that file, and reads what the system says of its start",
    "update.untrusted": "it starts a script beside it",
    "adapter.directories": "it looks if a directory can be written",
    "plan.options": "it looks if a directory that a caller names is a file",
    "tools.verification": "callers give it a path as a text",
    "adapter.stock.plain": "Orbax takes paths",
    "tools.handover.copy_steps": "it copies files",
    "tools.handover.export": "it makes what a user names, outside of checkpoint roots",
    "tools.handover.formats": "the safetensors library writes files",
    "cli.callables": "it imports files of the user's",
    "cli.demo": "the demonstration works in a directory of its own",
    "cli.demo_child": "the demonstration works in a directory of its own",
    "cli.models": "an argument is a path",
    "cli.travel": "it writes the page that a user names",
    "cli.handover": "users name files and directories",
}
"""Modules that import the operating system's files and paths, each with the reason; to all others
a checkpoint is what :mod:`adacheck_jax.store.storage` holds."""


def modules() -> dict[str, Path]:
    """Module names, relative to the package, and their files; without the rooms' docstrings."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "__init__.py":
            found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def room_of(module: str) -> str:
    """The room that a module lies in."""
    return module.split(".", maxsplit=1)[0]


def part_of(module: str, folder: str) -> str | None:
    """The module or folder directly in a folder that a module is, or lies in; None elsewhere."""
    if not module.startswith(f"{folder}."):
        return None
    return module.removeprefix(f"{folder}.").split(".", maxsplit=1)[0]


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """The package's modules, and the outside packages, that a file imports anywhere."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        for target in _targets(node):
            first, _, rest = target.partition(".")
            if first == PACKAGE.name:
                inside.add(_module_of(rest))
            elif first in OUTSIDE:
                outside.add(OUTSIDE[first])
    return inside, outside


def touches_files(path: Path) -> bool:
    """True if a module imports the operating system's files or paths, or calls ``open``."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    targets = {target for node in nodes for target in _targets(node)}
    pure = {"pathlib.PurePosixPath"}
    opens = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
        for node in nodes
    )
    return opens or any(each.partition(".")[0] in FILE_MODULES for each in targets - pure)


def _targets(node: ast.AST) -> list[str]:
    """Dotted names that one import statement takes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute here"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _module_of(dotted: str) -> str:
    """The longest part of a dotted name that is a module; the facade if none is."""
    parts = dotted.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or FACADE


MODULES = modules()


@functools.cache
def imports() -> dict[str, tuple[set[str], set[str]]]:
    """What each module imports, of the package and from outside; to read them all takes seconds."""
    return {name: imports_of(path) for name, path in MODULES.items()}


def purpose_of(path: Path) -> str:
    """First sentence of a module's docstring, as the list gives it."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split()).rstrip(".").replace("``", "`")
    return f"{first[0].lower()}{first[1:]}"


def picture() -> str:
    """The rooms and their arrows in Mermaid; an arrow that others imply is left out."""
    lines = ["```mermaid", "flowchart BT"]
    for room, below in MAY_IMPORT.items():
        direct = [b for b in below if not any(b in MAY_IMPORT.get(other, ()) for other in below)]
        lines += [f"    {room} --> {b}" for b in direct if b != FACADE]
    return "\n".join([*lines, "```"])


def rooms() -> str:
    """The purpose of each room, a line each."""
    rows = []
    for room in MAY_IMPORT:
        package = PACKAGE / room / "__init__.py"
        rows.append(f"- `{room}`: {purpose_of(package if package.exists() else MODULES[room])}")
    return "\n".join(rows)


def drawn(text: str) -> str:
    """BUILD.md with the picture and the list as they are now."""
    pattern = r"(<!-- house -->\n).*(<!-- /house -->)"
    now = f"{picture()}\n\n{rooms()}"
    return re.sub(pattern, lambda m: f"{m[1]}\n{now}\n\n{m[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    BUILD.write_text(drawn(BUILD.read_text()))
