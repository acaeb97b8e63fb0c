"""Sizes of what a step adds to a root: its own files, without links to those of other steps."""

from __future__ import annotations

from collections.abc import Iterator

from adacheck_jax.store.steps.folders import KEPT, LINEAGE
from adacheck_jax.store.storage.interface import Entry
from adacheck_jax.store.storage.location import AnyPath, at


def new_bytes(directory: AnyPath) -> int | None:
    """Bytes of the files under a step or item directory, without its links to earlier steps.

    None in an object store: tensorstore tells a value's size only with the value.
    """
    if not at(directory).on_file_system:
        return None
    return sum(each.size_bytes for each in files(directory, links=False))


def is_link(path: str) -> bool:
    """True for a file under a step that is a link to one of an earlier step."""
    return f"/{LINEAGE}/" in path or f"/{KEPT}/" in path


def files(directory: AnyPath, *, links: bool = True) -> Iterator[Entry]:
    """Descriptions of the files under a directory; files deleted meanwhile are left out.

    Args:
        directory: the directory.
        links: False to leave out those that are links to files of earlier steps.
    """
    for path, entry in at(directory).described():
        if links or not is_link(f"/{path}"):
            yield entry
