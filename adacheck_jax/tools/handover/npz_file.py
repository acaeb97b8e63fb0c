"""Arrays in one ``.npz`` file of numpy's, written and read one array at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adacheck_jax.tools.handover.formats import ExportedLeaf
from adacheck_jax.tools.handover.sources import ReadLeaf


def write(path: Path, leaves: Sequence[ExportedLeaf], read_leaf: ReadLeaf) -> None:
    """Write leaves as ``numpy.savez`` does, which would take all of them at once.

    Args:
        path: path of the new file.
        leaves: the leaves.
        read_leaf: reads one of them.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for each in leaves:
            with archive.open(f"{each.name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, read_leaf(each.index), allow_pickle=False)


def read(path: Path, leaves: Sequence[ExportedLeaf]) -> Iterator[tuple[int, np.ndarray]]:
    """Read leaves back by numpy.

    Args:
        path: path of the file.
        leaves: the leaves.

    Yields:
        Each leaf's index and elements.
    """
    with np.load(path, allow_pickle=False) as file:
        for each in leaves:
            yield each.index, file[each.name]
