"""Arrays in safetensors files, one file in memory at a time.

Names, shards and index are those that Hugging Face's loaders read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.tools.handover.formats import ExportedLeaf
from adacheck_jax.tools.steps import InputError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FILE_BYTES = 5_000_000_000
"""Largest size of a file's arrays, as of Hugging Face's libraries; a larger leaf has a file."""


def check_installed() -> None:
    """Refuse to go on without the safetensors library.

    Raises:
        InputError: it is not installed, or is too old.
    """
    try:
        from safetensors import TensorSpec  # noqa: F401, which older ones lack
    except ImportError as error:
        raise InputError(
            f"safetensors 0.8 or later is not installed, which this export is written with "
            f"({error}). Install it: pip install 'adacheck-jax[safetensors]'"
        ) from error


def shards_of(leaves: Sequence[ExportedLeaf], most_bytes: int) -> dict[str, list[ExportedLeaf]]:
    """Leaves by file name: in their order, each file as full as it may be.

    Args:
        leaves: the leaves.
        most_bytes: largest size of a file's arrays; a larger leaf gets a file of its own.
    """
    shards: list[list[ExportedLeaf]] = [[]]
    size_bytes = 0
    for each in leaves:
        if shards[-1] and size_bytes + each.leaf.nbytes > most_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(each)
        size_bytes += each.leaf.nbytes
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    total = len(shards)
    return {f"model-{n:05}-of-{total:05}.safetensors": s for n, s in enumerate(shards, start=1)}


def write(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    read_leaf: Callable[[int], np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write leaves into one file, or several and an index.

    Args:
        directory: path of the new directory.
        leaves: the leaves.
        read_leaf: reads one of them.
        metadata: texts for each file's header.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory.mkdir()
    shards = shards_of(leaves, FILE_BYTES)
    for name, shard in shards.items():
        arrays = {each.name: np.asarray(read_leaf(each.index), order="C") for each in shard}
        try:
            save_file(arrays, directory / name, {**metadata})
        except SafetensorError as error:
            raise OSError(f"{name}: safetensors cannot write it: {error}") from error
        del arrays  # or those of two files would be in memory at once
    if len(shards) > 1:
        files = {each.name: name for name, shard in shards.items() for each in shard}
        index = {
            "metadata": {"total_size": sum(each.leaf.nbytes for each in leaves)},
            "weight_map": dict(sorted(files.items())),
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read(directory: Path, leaves: Sequence[ExportedLeaf]) -> Iterator[tuple[int, np.ndarray]]:
    """Read leaves back by the library, each from the file that the index names.

    Args:
        directory: directory of the files.
        leaves: the leaves.

    Yields:
        Each leaf's index and elements.

    Raises:
        IntegrityError: the library finds other leaves.
    """
    from safetensors import safe_open

    files = dict.fromkeys((each.name for each in leaves), WHOLE)
    if (index := directory / INDEX).exists():
        files = json.loads(index.read_text())["weight_map"]
    for name in dict.fromkeys(files.values()):
        inside = {each.name: each.index for each in leaves if files[each.name] == name}
        with safe_open(directory / name, framework="np", backend="pread") as opened:
            if {*opened.keys()} != inside.keys():
                path = directory / name
                raise IntegrityError(f"{path}: expected other names of leaves. Export it again.")
            for key, number in inside.items():
                yield number, opened.get_tensor(key)
