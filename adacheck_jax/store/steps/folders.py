"""Names of the files and folders of a step, below its item directory."""

from __future__ import annotations

from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.storage.location import AnyPath

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


def pack_name(process: int) -> str:
    """Beginning of the names of the files of one process's pack; a dot follows."""
    return f"{DELTA}.{process}"


def pack_in(item_directory: AnyPath, process: int) -> AnyPath:
    """Beginning of the paths of the pack that a process writes; a dot follows."""
    return item_directory / manifest_file.DIRECTORY / pack_name(process)
