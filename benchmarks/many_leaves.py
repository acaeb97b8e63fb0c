"""Seconds of saves and restores of states of many small leaves, beside stock Orbax in the same run.

    python -m benchmarks.many_leaves --leaves 300 1000 3000 10000

Three saves of one process; three restores of another, of the base and of the second delta; and
three saves of a process that goes on from a restored step: each by this library, then by stock
Orbax's manager (``StandardSave``, asynchronous). A save blocks until
it returns, and is durable when the manager has finished. Where other jobs run beside, CPU seconds
tell more than wall seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from benchmarks.common import environment
from benchmarks.speed import child
from benchmarks.speed.many_leaves import SAVES


def measured(leaves: int) -> dict[str, Any]:
    """Figures of saves and restores, by their names; own ones before those of stock Orbax.

    Args:
        leaves: number of arrays of params and moments.
    """
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="many-leaves.") as root:

        def of(way: str, act: str) -> Any:
            return child.measure("many_leaves", root=root, leaves=leaves, way=way, act=act)

        saves = [of(way, "saves") for way in ("own", "stock")]
        for number, name in enumerate(["first save (base)", "second save", "third save"][:SAVES]):
            rows[name] = [each[number] for each in saves]
        stock = of("stock", "restores 0")
        for step, what in ((0, "of a base"), (SAVES - 1, "of two deltas")):
            own = of("own", f"restores {step}")
            rows[f"first restore {what}"] = [own[0], stock[0]]
            rows[f"later restore {what}"] = [own[-1], stock[-1]]
        saves = [of(way, "goes on") for way in ("own", "stock")]
        for number, name in enumerate(["first", "second", "third"][:SAVES]):
            rows[f"{name} save after a restore"] = [each[number] for each in saves]
    return rows


def lines(leaves: int, rows: dict[str, Any]) -> str:
    """Lines of a Markdown table: wall and CPU seconds, and their ratio to stock Orbax's."""
    made = []
    for name, (own, stock) in rows.items():
        cells = [f"{a:.2f} | {b:.2f} | {a / b:.1f}" for a, b in zip(own, stock, strict=True)]
        made.append(f"| {leaves:,} | {name} | {' | '.join(cells)} |")
    return "\n".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_leaves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--leaves", type=int, nargs="+", default=[300, 1000, 3000, 10000])
    given = parser.parse_args()
    print(json.dumps(environment()))
    print("| leaves | | blocking s | stock | × | durable s | stock | × | CPU s | stock | × |")
    print(f"|{'---|' * 11}")
    for leaves in given.leaves:
        print(lines(leaves, measured(leaves)), flush=True)


if __name__ == "__main__":
    main()
