"""Records of a manifest, read from JSON: by the types of their fields, and then by what must fit.

The types that :mod:`~adacheck_jax.format.manifest` declares say how each field is read. Whatever is
returned is bounded in size and consistent in itself, since JSON is untrusted input. All functions
raise LookupError, TypeError, ValueError or AttributeError for what they refuse.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.manifest import (
    CHECKS,
    DESCRIPTIONS,
    ITEMSIZES_BYTES,
    BaseManifest,
    Delta,
    DeltaManifest,
    Grid,
    Leaf,
    Pack,
    Update,
)

MAX_BOXES = 2**23
"""Boxes of all leaves of a step."""
MAX_AXES = 32
"""Axes of a leaf: more than tensorstore takes."""
MAX_STATE_BYTES = 2**60
"""Bytes of all leaves of a base, so that sums of offsets fit into 64 bits."""
LEFT_OUT = ("replaces", "replica", "grids")
"""Fields of which JSON says nothing where they are empty."""

_HEXADECIMAL = re.compile("[0-9a-f]+").fullmatch

MAX_NUMBER = 2**63 - 1
"""The largest of 64 bits with a sign."""

_T = TypeVar("_T")


def shown(value: Any) -> str:
    """A value for a message, shortened to a line."""
    return reprlib.repr(value)


def natural(value: Any, most: int = MAX_NUMBER) -> int:
    """A number from 0 to a largest one."""
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"expected a number from 0 to {most}, found {shown(value)}")
    return value


def truth(value: Any) -> bool:
    """True or false, and no number."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {shown(value)}")
    return value


def text(value: Any) -> str:
    """A text that can be encoded: no lone surrogate."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {shown(value)}")
    if not value.isascii():
        value.encode()  # a ValueError for a lone surrogate
    return value


def digits(value: Any, count: int) -> str:
    """A text of so many hexadecimal digits."""
    if not isinstance(value, str) or len(value) != count or not _HEXADECIMAL(value):
        raise ValueError(f"expected {count} hexadecimal digits, found {shown(value)}")
    return value


def tuple_of(read: Callable[[Any], _T], items: Any, count: int | None = None) -> tuple[_T, ...]:
    """The items of a list, each read by a function; of so many, if a number is given."""
    if not isinstance(items, list) or count not in (None, len(items)):
        wanted = "a list" if count is None else f"{count} numbers"
        raise TypeError(f"expected {wanted}, found {shown(items)}")
    return tuple(read(item) for item in items)


def check_ascending(values: Sequence[int], what: str, end: int = MAX_NUMBER + 1) -> None:
    """Refuses numbers that do not ascend, or reach an end."""
    if list(values) != sorted(set(values)) or (values and values[-1] >= end):
        raise ValueError(f"{what} that do not ascend, or are not there: {shown(values)}")


def record(kind: type[_T], body: Any) -> _T:
    """A record of a class that :mod:`~adacheck_jax.format.manifest` declares."""
    given = _readers(kind).items()
    found = kind(**{n: read(body[n]) for n, read in given if n in body or n not in LEFT_OUT})
    if kind in _CHECKS:
        _CHECKS[kind](found)
    return found


@functools.cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind)
    readers = {each.name: _reader_of(hints[each.name]) for each in dataclasses.fields(kind)}
    if "fingerprints" in readers:
        readers["fingerprints"] = lambda items: tuple_of(lambda x: int(digits(x, 16), 16), items)
    return readers


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """The function that reads values of one type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Mapping:
        return lambda value: {text(name): text(each) for name, each in value.items()}
    if origin is None:
        return functools.partial(record, kind)
    read = _reader_of(inner[0])
    if origin is types.UnionType:
        return lambda value: None if value is None else read(value)
    count = None if inner[-1] is Ellipsis else len(inner)
    return lambda value: tuple_of(read, value, count)


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    int: natural,
    str: text,
    bool: truth,
    Any: lambda value: value,
}


def _check_base(base: BaseManifest) -> None:
    leaves, count = base.leaves, len(base.leaves)
    if count != len(base.fingerprints):
        raise ValueError(f"{count} leaves but {len(base.fingerprints)} fingerprints")
    _check_owners(leaves, base.process_count)
    if len({leaf.path for leaf in leaves}) != count:
        raise ValueError("two leaves have the same path")
    if sum(leaf.nbytes for leaf in leaves) > MAX_STATE_BYTES:
        raise ValueError(f"more than {MAX_STATE_BYTES} bytes of leaves")
    if base.update is not None:
        _check_update(base.update, count)
    _check_pairs(base.aliases, count, count)
    _check_pairs(base.kept, count, None)
    if not DESCRIPTIONS.issuperset(base.described):  # their paths are opened
        raise ValueError(f"expected {sorted(DESCRIPTIONS)}, found {shown([*base.described])}")
    check_ascending(base.caution.distrusted, "distrusted leaves", count)
    _check_stale(base, count)


def _check_leaf(leaf: Leaf) -> None:
    if leaf.itemsize_bytes != ITEMSIZES_BYTES.get(leaf.dtype):
        raise _refused(leaf, f"no elements of {shown(leaf.dtype)} have {leaf.itemsize_bytes} bytes")
    if leaf.key_type is not None and not (
        re.fullmatch("key<[^<>]{1,64}>", leaf.key_type) and leaf.dtype == "uint32" and leaf.shape
    ):
        raise _refused(
            leaf,
            f"no keys of type {shown(leaf.key_type)} consist of "
            f"{leaf.dtype}{list(leaf.shape[:MAX_AXES])}",
        )
    if len(leaf.shape) > MAX_AXES:
        raise _refused(leaf, f"{len(leaf.shape)} axes")
    # Bounded for empty arrays too.
    if math.prod(filter(None, leaf.shape)) * leaf.itemsize_bytes > MAX_STATE_BYTES:
        raise _refused(leaf, f"an array of shape {leaf.shape}")
    found = Grid(leaf.cuts, leaf.owners)
    _check_grid(found)
    if found.shape != leaf.shape:
        raise _refused(leaf, f"cuts {shown(leaf.cuts)} do not fit shape {leaf.shape}")


def _check_grid(grid: Grid) -> None:
    cuts, owners = grid.cuts, grid.owners
    count = math.prod(max(1, len(points) - 1) for points in cuts)
    ascending = all(points[0] == 0 and list(points) == sorted(set(points)) for points in cuts)
    if len(cuts) > MAX_AXES or count != len(owners) or not ascending:
        raise ValueError(f"cuts {shown(cuts)} with {len(owners)} owners are no grid of boxes")


def _check_owners(cut: Sequence[Leaf | Grid], process_count: int) -> None:
    if any(each.owners and max(each.owners) >= process_count for each in cut):
        raise ValueError("a box is owned by a process that does not exist")
    if sum(len(each.owners) for each in cut) > MAX_BOXES:
        raise ValueError(f"more than {MAX_BOXES} boxes")


def _refused(leaf: Leaf, why: str) -> ValueError:
    return ValueError(f"leaf {shown(leaf.path)}: {why}")


def _check_update(update: Update, leaf_count: int) -> None:
    lists = (update.params, update.inner, update.record, update.extra)
    totals = [sum(each[n] for each in update.parts) for n in range(4)]
    if totals != [len(each) for each in lists] or len(update.parts) != len(update.counts):
        raise ValueError(f"parts {shown(update.parts)} do not make up the update's leaves")
    # An update may consume its counter too.
    counts = set(update.counts).difference(update.extra)
    indices = [*update.params, *update.inner, *update.consumed, *counts]
    is_repeated = len({*indices}) != len(indices) or len({*update.counts}) != len(update.counts)
    if is_repeated or max(indices) >= leaf_count:
        raise ValueError("the update's leaf indices repeat or lie outside the state")
    if not update.explained.issuperset(update.reducing + update.passed):
        raise ValueError("a leaf is reducing or passed through, but not computed by the update")
    for name in update.programs:
        if not re.fullmatch("[a-z0-9]{1,16}", name):  # it becomes part of a file's name
            raise ValueError(f"expected the name of a platform, found {shown(name)}")


def _check_delta(delta: Delta) -> None:
    check_ascending(delta.stored, "stored leaves")
    check_ascending(delta.unreplayed, "leaves that are not replayed")
    check_ascending(delta.updates, "updates", len(delta.counts))
    if delta.checked not in CHECKS:
        raise ValueError(f"expected one of {sorted(CHECKS)}, found {shown(delta.checked)}")
    _check_stale(delta, len(delta.fingerprints))
    if not {i for i, _ in delta.stale}.isdisjoint(delta.stored):
        raise ValueError(f"a leaf is stored and stale: {shown(delta.stale)}")
    for pack in delta.packs:
        if len(pack.encodings) != len(delta.stored):
            raise ValueError(
                f"{len(pack.encodings)} encodings of {len(delta.stored)} stored leaves"
            )


def _check_delta_manifest(manifest: DeltaManifest) -> None:
    _check_delta(manifest)
    every = (*manifest.recorded, manifest)
    shapes = {(len(each.packs), len(each.fingerprints)) for each in every}
    if len(shapes) != 1:
        raise ValueError(f"deltas with different numbers of packs or fingerprints: {shapes}")
    check_ascending([each.step for each in every], "recorded steps")
    if manifest.depth < len(every):
        raise ValueError(
            f"delta number {manifest.depth} of its lineage with {len(manifest.recorded)} before it"
        )
    count = len(manifest.fingerprints)
    check_ascending(manifest.caution.distrusted, "distrusted leaves", count)
    if len(manifest.grids) not in (0, count):
        raise ValueError(f"boxes of {len(manifest.grids)} leaves, and {count} fingerprints")
    _check_owners(manifest.grids, manifest.process_count)


def _check_stale(step: BaseManifest | Delta, leaf_count: int) -> None:
    _check_pairs(step.stale, leaf_count, step.step)
    check_ascending([leaf for leaf, _ in step.stale], "stale leaves")


def _check_pairs(pairs: Sequence[tuple[int, int]], first_end: int, second_end: int | None) -> None:
    """Refuses pairs of numbers that reach their ends; None for no end."""
    for first, second in pairs:
        if first >= first_end or (second_end is not None and second >= second_end):
            raise ValueError(f"a pair of leaves lies outside the state: {(first, second)}")


def _check_pack(pack: Pack) -> None:
    if not frozenset(Encoding).issuperset(pack.encodings):
        known, found = "".join(Encoding), shown(pack.encodings)
        raise ValueError(f"encodings {known} are known, found {found}, perhaps of a later release")
    for ranges in (pack.raw_zeros, pack.compressed_zeros):
        borders = [border for each in ranges for border in each]
        if any(a >= b for a, b in itertools.pairwise(borders)):  # adjoining ranges would be one
            raise ValueError(f"ranges that do not ascend: {ranges[:4]}")
    targets = [first for first, _ in pack.aliases]
    if targets != sorted(set(targets)) or any(a <= b for a, b in pack.aliases):
        raise ValueError(f"aliases that do not ascend, or of later extents: {pack.aliases[:4]}")
    if not set(targets).isdisjoint(second for _, second in pack.aliases):
        raise ValueError("an alias of an alias")


_CHECKS: dict[Any, Callable[[Any], None]] = {
    BaseManifest: _check_base,
    Leaf: _check_leaf,
    Grid: _check_grid,
    Delta: _check_delta,
    DeltaManifest: _check_delta_manifest,
    Pack: _check_pack,
}
