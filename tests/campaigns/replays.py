"""Recorded updates, computed again from files, in any process and on any mesh.

    python -m tests.campaigns.replays FOLDER ... --layouts one,sharded_42

reads what :mod:`tests.campaigns.matrix` wrote, and prints for each folder and layout the elements
whose bits differ, leaf by leaf. It needs JAX and numpy alone, so that another release of JAX can
run it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from tests.campaigns.children import tell
from tests.campaigns.layouts import sharding_of

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Update:
    """One update that was trained: what it took, and what it gave.

    Attributes:
        params, inner, record, extra: the arguments of the update program.
        new_params, new_inner: its results in training.
    """

    params: Arrays
    inner: Arrays
    record: Arrays
    extra: Arrays
    new_params: Arrays
    new_inner: Arrays


@dataclass(frozen=True)
class Case:
    """A few updates of one training run.

    Attributes:
        program: the exported update.
        names: leaf paths of its results; empty for one that is not to be compared.
        updates: in order.
    """

    program: bytes
    names: list[str]
    updates: list[Update]

    def write(self, folder: Path) -> None:
        """Writes files from which :func:`read` makes the same case."""
        folder.mkdir(parents=True)
        (folder / "program").write_bytes(self.program)
        arrays: dict[str, np.ndarray] = {}
        shapes: dict[str, Any] = {}
        for number, update in enumerate(self.updates):
            for role, values in vars(update).items():
                for i, value in enumerate(values):
                    key = f"{number:02}.{role}.{i:03}"
                    arrays[key] = np.frombuffer(value.tobytes(), np.uint8)
                    shapes[key] = [value.dtype.name, list(value.shape)]
        np.savez(folder / "arrays.npz", allow_pickle=False, **arrays)
        about = {"names": self.names, "shapes": shapes, "count": len(self.updates)}
        (folder / "about.json").write_text(json.dumps(about))


def read(folder: Path) -> Case:
    """Reads a case."""
    about = json.loads((folder / "about.json").read_text())
    roles: list[dict[str, Arrays]] = [
        {role: [] for role in Update.__dataclass_fields__} for _ in range(about["count"])
    ]
    with np.load(folder / "arrays.npz") as arrays:
        for key, (dtype, shape) in sorted(about["shapes"].items()):
            number, role, _ = key.split(".")
            value = np.frombuffer(arrays[key].tobytes(), jnp.dtype(dtype)).reshape(shape)
            roles[int(number)][role].append(value)
    updates = [Update(**each) for each in roles]
    return Case((folder / "program").read_bytes(), about["names"], updates)


def differing(case: Case, layout: str) -> dict[str, int]:
    """Computes each update again from what it took in training.

    Args:
        case: the updates.
        layout: where they are computed.

    Returns:
        Elements whose bits differ from what was trained, by leaf path; summed over the updates.
    """
    exported = jax.export.deserialize(bytearray(case.program))
    first = case.updates[0]
    lists = (first.params, first.inner, first.record, first.extra)
    has_zero = len(exported.in_avals) > sum(map(len, lists))

    def update(params: Any, inner: Any, record: Any, extra: Any, zero: Any) -> Any:
        return exported.call(params, inner, record, extra, *[zero][: int(has_zero)])

    kept = [[sharding_of(x.shape, layout) for x in each] for each in lists[:2]]
    run = jax.jit(update, out_shardings=tuple(kept), donate_argnums=(0, 1))
    found = dict.fromkeys(case.names, 0)
    for each in case.updates:
        arguments = [
            [jax.device_put(x, sharding_of(x.shape, layout)) for x in values]
            for values in (each.params, each.inner, each.record, each.extra)
        ]
        zero = jax.device_put(np.uint32(0), sharding_of((), layout))
        results = run(*arguments, zero)
        expected = [*each.new_params, *each.new_inner]
        pairs = zip(case.names, [*results[0], *results[1]], expected, strict=True)
        for name, result, trained in pairs:
            found[name] += different_elements(np.asarray(result), trained)
    return {name: count for name, count in found.items() if name and count}


def different_elements(a: np.ndarray, b: np.ndarray) -> int:
    """Elements whose bits differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return max(a.size, b.size)
    words = [np.frombuffer(x.tobytes(), f"u{x.dtype.itemsize}") for x in (a, b)]
    return int((words[0] != words[1]).sum())


def measured(case: Case, layouts: Sequence[str]) -> dict[str, Any]:
    """Differing elements by layout and leaf, or a text where the update could not be computed."""
    found: dict[str, Any] = {}
    for layout in layouts:
        try:
            found[layout] = differing(case, layout)
        except Exception as error:
            found[layout] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default="one")
    parser.add_argument("--child", required=True, help="folders, separated by commas")
    arguments = parser.parse_args()
    for folder in arguments.child.split(","):
        tell(measured(read(Path(folder)), arguments.layouts.split(",")))


if __name__ == "__main__":
    main()
