"""Formats of an export: which elements each holds, and what an array is called in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from adacheck_jax.errors import MismatchError
from adacheck_jax.format.manifest import Leaf


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

    Args:
        leaves: the leaves of the step.
        indices: indices of the leaves to export.
        wanted: the format.

    Raises:
        MismatchError: names every leaf that the format cannot hold, or two leaves of one name.
    """
    is_orbax = wanted is Format.ORBAX
    chosen = [i for i in indices if leaves[i].nbytes or not is_orbax]
    bad = [f"{leaves[i].path} ({leaves[i].dtype})" for i in chosen if not _holds(wanted, leaves[i])]
    if bad:
        more = f", and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise MismatchError(
            f"expected leaves of types that {wanted} holds, found {len(bad)} others: "
            f"{', '.join(bad[:20])}{more}. Nothing was written; {_REMEDIES[wanted]}"
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
