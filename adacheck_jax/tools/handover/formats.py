"""Formats of an export: which elements each holds, and what an array is called in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from adacheck_jax.errors import MismatchError
from adacheck_jax.format.manifest import Leaf


class Format(StrEnum):
    """Formats that a step is exported to."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    NPZ = "npz"


SAFETENSORS_CODES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{code}{bits}" for sign, code in (("", "I"), ("u", "U"))
       for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}  # fmt: skip
"""Codes of the safetensors format by numpy's names of data types."""


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
    names = [leaves[i].path if is_orbax else name_of(leaves[i].path) for i in chosen]
    if doubled := sorted(name for name, count in Counter(names).items() if count > 1):
        raise MismatchError(
            f"expected a name of its own for each leaf, found {', '.join(doubled[:5])} for "
            "several: leaf paths are joined with dots. Nothing was written; export with --format "
            "orbax."
        )
    return [ExportedLeaf(i, n, leaves[i]) for i, n in zip(chosen, names, strict=True)]


def name_of(path: str) -> str:
    """Name of a leaf in a file of arrays: its leaf path with dots; that of a bare array is value.

    Args:
        path: leaf path.
    """
    return path.replace("/", ".") or "value"


_REMEDIES = {
    Format.ORBAX: "cast them when they are saved.",
    Format.SAFETENSORS: "export with --format orbax, or leave them out (without --all).",
    Format.NPZ: "numpy has no type of its own for them: export with --format safetensors.",
}


def _holds(wanted: Format, leaf: Leaf) -> bool:
    if wanted is Format.SAFETENSORS:
        return leaf.dtype in SAFETENSORS_CODES
    if wanted is Format.NPZ:
        return np.dtype(leaf.dtype).isbuiltin == 1
    return leaf.dtype not in ("uint2", "uint4")  # which tensorstore does not know
