"""Seconds of restores, beside stock Orbax's restore, the deltas' bytes and bare updates.

    python -m benchmarks.restores --mb 250
    python -m benchmarks.restores --mb 1000 --deltas 0 1 10 20

Prints wall and CPU seconds of restores with some deltas, and their ratio to the least that they
have to do: stock Orbax's restore of the same state, reading the files of the deltas, and the
compiled updates alone. Once for the first restore of a process, as a run does that is resumed, and
once for the later ones. Other jobs change the wall times; CPU seconds tell more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.common import environment
from benchmarks.speed import child

_BYTES_A_PARAM = 12


def measured(
    root: str, mb: float, leaves: int, deltas: Sequence[int], repeats: int, **how: int
) -> Any:
    """Figures of later restores, those of first ones added to them.

    Args:
        root: where the steps are saved, or were by an earlier call.
        mb: size of params and moments in MB.
        leaves: arrays of params.
        deltas: how many are replayed, ascending.
        repeats: of each restore.
        how: devices of each process, processes, and devices that steps are restored onto.
    """
    chosen: dict[str, Any] = {
        "root": root,
        "params": int(mb * 1e6) // _BYTES_A_PARAM,
        "leaves": leaves,
        "deltas": [*deltas],
        "repeats": repeats,
        **how,
    }
    found = child.measure("restores", **chosen)
    names = ["stock", *map(str, deltas)]
    rounds = [
        [child.measure("restores", first=name, **chosen) for name in names] for _ in range(repeats)
    ]
    firsts = {
        name: [statistics.median(kind) for kind in zip(*each, strict=True)]
        for name, each in zip(names, zip(*rounds, strict=True), strict=True)
    }
    for row in found["rows"]:
        row["first_s"], row["first_cpu_s"] = firsts[str(row["deltas"])]
        row["first_stock_s"], row["first_stock_cpu_s"] = firsts["stock"]
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Wall seconds and CPU seconds of each row."""
    lines = []
    for kind, what in (("s", "wall s"), ("cpu_s", "CPU s")):
        lines.append(
            f"{what:7} | deltas | restore | stock  | reading | updates | × | first | stock | ×"
        )
        for row in rows:
            rest = row[f"read_{kind}"] + row[f"updates_{kind}"]
            later = row[f"restore_{kind}"] / (row[f"stock_{kind}"] + rest)
            first = row[f"first_{kind}"] / (row[f"first_stock_{kind}"] + rest)
            lines.append(
                f"        | {row['deltas']:6} | {row[f'restore_{kind}']:7.3f} "
                f"| {row[f'stock_{kind}']:6.3f} | {row[f'read_{kind}']:7.3f} "
                f"| {row[f'updates_{kind}']:7.3f} | {later:.2f} "
                f"| {row[f'first_{kind}']:.3f} | {row[f'first_stock_{kind}']:.3f} | {first:.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mb", type=float, default=100, help="size of params and moments")
    parser.add_argument("--leaves", type=int, default=100, help="arrays of params")
    parser.add_argument("--deltas", type=int, nargs="+", default=[0, 1, 10, 20, 100])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--processes", type=int, default=1, help="that save and restore together")
    parser.add_argument("--onto", type=int, default=0, help="devices to restore onto; 0 for all")
    parser.add_argument("--root", help="folder whose steps are made once, and used again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restores.") as root:
        found = measured(
            given.root or root,
            given.mb,
            given.leaves,
            sorted(given.deltas),
            given.repeats,
            devices=given.devices,
            processes=given.processes,
            onto=given.onto,
        )
    print(json.dumps(environment()))
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
