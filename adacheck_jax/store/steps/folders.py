"""Names of the files and folders of a step below its item directory, and their sizes."""

from __future__ import annotations

from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.storage.location import AnyPath, at

DELTA = "delta"
"""Beginning of the names of a pack's files; a dot, the process and a dot follow."""
LINEAGE = f"{manifest_file.DIRECTORY}/lineage"
"""Folder of hard links to the files of the steps that a delta builds on."""
BASE = f"{manifest_file.DIRECTORY}/base"
"""Folder of the volumes of a base, one or two a process."""
STILL = ".still"
"""End of the name of a volume with arrays that are expected not to change."""
KEPT = f"{manifest_file.DIRECTORY}/kept"
"""Folder of hard links to volumes of earlier bases whose arrays have not changed since."""


def pack_in(item_directory: AnyPath, process: int) -> AnyPath:
    """Beginning of the paths of the pack that a process writes; a dot follows."""
    return item_directory / manifest_file.DIRECTORY / f"{DELTA}.{process}"


def new_bytes(directory: AnyPath) -> int | None:
    """Bytes of the files under a step or item directory, without its links to earlier steps.

    None in an object store: tensorstore tells a value's size only with the value.
    """
    if not at(directory).on_file_system:
        return None
    files = at(directory).described()
    return sum(entry.size_bytes for path, entry in files if not is_link(f"/{path}"))


def is_link(path: str) -> bool:
    """True for a file under a step that is a link to one of an earlier step."""
    return f"/{LINEAGE}/" in path or f"/{KEPT}/" in path
