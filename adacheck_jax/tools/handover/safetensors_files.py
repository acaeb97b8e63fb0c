"""Arrays in safetensors files, one leaf in memory at a time.

The safetensors library takes all arrays of a file at once. So it lays out each file over untouched
zeros, which take no memory, and every leaf is then written to the place that the file's header
names for it. Names, shards and index are those that Hugging Face's loaders read.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.store.storage.location import AnyPath, Location
from adacheck_jax.tools.handover.formats import SAFETENSORS_CODES, ExportedLeaf
from adacheck_jax.tools.handover.sources import ReadLeaf
from adacheck_jax.tools.steps import InputError

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
WHOLE = f"model{SUFFIX}"


def library() -> Any:
    """The safetensors library.

    Raises:
        InputError: it is not installed, or is too old.
    """
    try:
        import safetensors
    except ImportError as error:
        raise InputError(
            "safetensors is not installed, which this export is written with. Install it: "
            "pip install 'adacheck-jax[safetensors]'"
        ) from error
    if not hasattr(safetensors, "TensorSpec"):
        raise InputError(
            f"expected safetensors 0.8 or later, found {safetensors.__version__}. Install it: "
            "pip install 'adacheck-jax[safetensors]'"
        )
    return safetensors


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
    return {f"model-{n:05}-of-{total:05}{SUFFIX}": s for n, s in enumerate(shards, start=1)}


def write(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    read_leaf: ReadLeaf,
    most_bytes: int,
    metadata: Mapping[str, str],
) -> None:
    """Write leaves into one file, or several and an index.

    Args:
        directory: path of the new directory.
        leaves: the leaves.
        read_leaf: reads one of them.
        most_bytes: as for :func:`shards_of`.
        metadata: texts for each file's header.
    """
    directory.mkdir()
    shards = shards_of(leaves, most_bytes)
    for name, shard in shards.items():
        _lay_out(directory / name, shard, metadata)  # a disk that is too small is found here
    for name, shard in shards.items():
        places = _places(directory / name)
        with (directory / name).open("r+b") as file:
            for each in shard:
                file.seek(places[each.name])
                file.write(_bytes_of(read_leaf(each.index)))
    if len(shards) > 1:
        files = {each.name: name for name, shard in shards.items() for each in shard}
        index = {
            "metadata": {"total_size": sum(each.leaf.nbytes for each in leaves)},
            "weight_map": dict(sorted(files.items())),
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _lay_out(path: Path, shard: Sequence[ExportedLeaf], metadata: Mapping[str, str]) -> None:
    safetensors = library()
    zeros = np.zeros(max((each.leaf.nbytes for each in shard), default=0) or 1, np.uint8)
    specs = {
        each.name: safetensors.TensorSpec(
            dtype=each.leaf.dtype,
            shape=[*each.leaf.shape],
            data_ptr=zeros.ctypes.data,
            data_len=each.leaf.nbytes,
        )
        for each in shard
    }
    try:
        safetensors.serialize_file(specs, path, {**metadata})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: safetensors cannot write it: {error}") from error
    del zeros  # the library has read it through a pointer


def _header(path: Path) -> dict[str, Any]:
    """The header of a file, with ``start`` for the place of its arrays."""
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        return {**json.loads(file.read(size_bytes)), "__start__": 8 + size_bytes}


def _places(path: Path) -> dict[str, int]:
    """Offset of each array in a file, by its name."""
    header = _header(path)
    start = header.pop("__start__")
    header.pop("__metadata__", None)
    return {name: start + each["data_offsets"][0] for name, each in header.items()}


def _bytes_of(array: np.ndarray) -> Any:
    """The bytes of an array, not copied if they lie as the file has them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read(directory: Path, leaves: Sequence[ExportedLeaf]) -> Iterator[tuple[int, np.ndarray]]:
    """Read leaves back, each from the file that the index names, where the library finds it.

    Args:
        directory: directory of the files.
        leaves: the leaves.

    Yields:
        Each leaf's index and elements.

    Raises:
        IntegrityError: the library finds another leaf, type or shape.
    """
    safetensors, index = library(), directory / INDEX
    files = dict.fromkeys((each.name for each in leaves), WHOLE)
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
    for name in dict.fromkeys(files.values()):
        path = directory / name
        inside = {each.name: each for each in leaves if files[each.name] == name}
        with safetensors.safe_open(path, framework="np", backend="pread") as opened:
            found = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            types = {k: (x.get_dtype(), tuple(x.get_shape())) for k, x in found.items()}
        wanted = {k: (SAFETENSORS_CODES[x.leaf.dtype], x.leaf.shape) for k, x in inside.items()}
        if types != wanted:
            raise IntegrityError(f"{path}: expected other names, types or shapes. Export it again.")
        places = _places(path)
        for key, each in inside.items():
            yield each.index, _elements(path, places[key], each)


def _elements(path: Path, start: int, each: ExportedLeaf) -> np.ndarray:
    """Elements of a leaf, read from its place in a file."""
    dtype = np.dtype(each.leaf.dtype)
    if not each.leaf.nbytes:
        return np.empty(each.leaf.shape, dtype)
    elements = np.fromfile(path, np.uint8, each.leaf.nbytes, offset=start)
    return elements.view(dtype).reshape(each.leaf.shape)


def files_at(path: AnyPath) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file, or of the files in a directory, mapped into memory by name.

    Args:
        path: the file or directory.

    Returns:
        The arrays; none if there are no such files.

    Raises:
        InputError: the library is not installed.
        IntegrityError: a file is damaged.
    """
    if isinstance(path, Location):
        return {}
    names = [path] if path.suffix == SUFFIX and path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    if (index := path / INDEX).is_file():
        try:
            weights = json.loads(index.read_text())["weight_map"]
            names = [path / name for name in sorted({*weights.values()})]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{index}: expected an index of shards, found {error}.") from error
    return {key: array for each in names for key, array in _mapped(each).items()}


def _mapped(path: Path) -> dict[str, np.ndarray]:
    safetensors, types = library(), {code: name for name, code in SAFETENSORS_CODES.items()}
    try:
        with safetensors.safe_open(path, framework="np", backend="pread"):
            header = _header(path)  # which the library has checked
    except (safetensors.SafetensorError, OSError) as error:
        raise IntegrityError(f"{path}: safetensors cannot read it: {error}.") from error
    start, arrays = header.pop("__start__"), {}
    header.pop("__metadata__", None)
    for name, each in header.items():
        if each["dtype"] not in types:
            raise IntegrityError(f"{path}: {name}: expected a type of jax, found {each['dtype']}.")
        (begin, end), dtype = each["data_offsets"], np.dtype(types[each["dtype"]])
        array = np.empty(each["shape"], dtype)
        if end > begin:
            bytes_ = np.memmap(path, np.uint8, "r", start + begin, (end - begin,))
            array = bytes_.view(dtype).reshape(each["shape"])
        arrays[name] = array
    return arrays
