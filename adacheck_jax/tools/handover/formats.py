"""Formats of an export: which elements each holds, what a leaf is called, and safetensors files.

Names, shards and index of these are those that Hugging Face's loaders read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from adacheck_jax.errors import IntegrityError, MismatchError, listed
from adacheck_jax.format.boxes import batches
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.tools.steps import InputError


class Format(StrEnum):
    """Formats that a step is exported to."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"


_SAFETENSORS_TYPES = {
    *("bool", "float16", "float32", "float64", "bfloat16", "complex64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""Data types that the safetensors library reads into numpy arrays."""


@dataclass(frozen=True, slots=True)
class ExportedLeaf:
    """A leaf of an export.

    Attributes:
        index: its index in the step's leaves.
        name: its name in the export.
        leaf: the manifest's record of it.
    """

    index: int
    name: str
    leaf: Leaf


def planned(leaves: Sequence[Leaf], indices: Iterable[int], wanted: Format) -> list[ExportedLeaf]:
    """The leaves of an export; those that Orbax does not store (empty arrays) left out.

    Raises:
        MismatchError: names every leaf that the format cannot hold, or two leaves of one name.
    """
    is_orbax = wanted is Format.ORBAX
    chosen = [i for i in indices if leaves[i].nbytes or not is_orbax]
    bad = [f"{leaves[i].path} ({leaves[i].dtype})" for i in chosen if not _holds(wanted, leaves[i])]
    if bad:
        raise MismatchError(
            f"expected leaves of types that {wanted} holds, found {len(bad)} others: "
            f"{listed(bad)}. Nothing was written; {_REMEDIES[wanted]}"
        )
    names = [leaves[i].path if is_orbax else _name_of(leaves[i].path) for i in chosen]
    if doubled := sorted(name for name, count in Counter(names).items() if count > 1):
        raise MismatchError(
            f"expected a name of its own for each leaf, found {', '.join(doubled[:5])} for "
            "several: leaf paths are joined with dots. Nothing was written; export with --format "
            "orbax."
        )
    return [ExportedLeaf(i, n, leaves[i]) for i, n in zip(chosen, names, strict=True)]


def _name_of(path: str) -> str:
    """Name of a leaf in a file of arrays; a bare array has no path."""
    return path.replace("/", ".") or "value"


_REMEDIES = {
    Format.ORBAX: "cast them when they are saved.",
    Format.SAFETENSORS: "export with --format orbax, or leave them out (without --all).",
}


def _holds(wanted: Format, leaf: Leaf) -> bool:
    if wanted is Format.SAFETENSORS:
        return leaf.dtype in _SAFETENSORS_TYPES
    return leaf.dtype not in ("uint2", "uint4")  # which tensorstore does not know


_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
FILE_BYTES = 5_000_000_000
"""Largest size of a file's arrays, as of Hugging Face's libraries; a larger leaf has a file."""


def check_safetensors() -> None:
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
    """Leaves by file name: in their order, each file as full as it may be."""
    places = batches([each.leaf.nbytes for each in leaves], most_bytes)
    shards = [[*leaves[each.start : each.stop]] for each in places]
    if len(shards) < 2:
        return {_WHOLE: [*leaves]}
    total = len(shards)
    return {f"model-{n:05}-of-{total:05}.safetensors": s for n, s in enumerate(shards, start=1)}


def write_safetensors(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    read_leaf: Callable[[int], np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write leaves into one file, or several and an index."""
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
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_safetensors(
    directory: Path, leaves: Sequence[ExportedLeaf]
) -> Iterator[tuple[int, np.ndarray]]:
    """Read leaves back by the library, each from the file that the index names.

    Yields:
        Each leaf's index and elements.

    Raises:
        IntegrityError: the library finds other leaves.
    """
    from safetensors import safe_open

    files = dict.fromkeys((each.name for each in leaves), _WHOLE)
    if (index := directory / _INDEX).exists():
        files = json.loads(index.read_text())["weight_map"]
    for name in dict.fromkeys(files.values()):
        inside = {each.name: each.index for each in leaves if files[each.name] == name}
        with safe_open(directory / name, framework="np", backend="pread") as opened:
            if {*opened.keys()} != inside.keys():
                path = directory / name
                raise IntegrityError(f"{path}: expected other names of leaves. Export it again.")
            for key, number in inside.items():
                yield number, opened.get_tensor(key)
