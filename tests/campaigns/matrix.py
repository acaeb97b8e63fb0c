"""Updates of many optimizers, models, meshes and data types, computed again in other programs.

    python -m tests.campaigns.matrix --rows 300 --seed 0 --output FILE.json
    python -m tests.campaigns.matrix --only 17
    python -m tests.campaigns.matrix --rows 300 --summing
    python -m tests.campaigns.matrix --table FILE.json ...
    python -m tests.campaigns.matrix --rows 40 --isa AVX,AVX2,AVX512
    python -m tests.campaigns.matrix --rows 40 --flags=--xla_cpu_enable_fast_math=true
    python -m tests.campaigns.matrix --rows 20 --other-python /path/to/bin/python

Each row is drawn from its seed (:mod:`tests.campaigns.matrix_rows`): a model is trained for a few
steps, each in one compiled program on the row's mesh. Then each update is computed again from what
it took, by the program that the library stored in a base: on the same mesh, on one device, on other
meshes, under other instruction sets, by another release of JAX. What is counted is elements whose
bits differ from the trained ones, of all leaves but those that the library stores by their class.

* exact: none, anywhere. * differs: some. * left out: the library does not replay it, and says why.
* not trainable: the row itself raises (an optimizer that wants other arguments, say).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import xla_flags
from tests.campaigns import children, command

DEVICES = 8
GROUP = 15
LIMIT_S = 600.0
_REPLAYS = "tests.campaigns.replays"
CLASSES = ("exact", "differs", "left out", "not trainable", "crash")


def child(
    seeds: Sequence[int], options: dict[str, Any], folder: Path | None, *, summing: bool
) -> None:
    """Trains and replays rows in this process; keeps their files where a folder is given."""
    import logging

    from tests.campaigns import matrix_rows, replays  # they import jax, which only children need

    logging.disable(logging.WARNING)
    for seed in seeds:
        row = matrix_rows.draw(seed, summing=summing)
        result: dict[str, Any] = {**asdict(row), "text": row.text, "class": "exact"}
        start = time.process_time()
        try:
            with tempfile.TemporaryDirectory() as root:
                trained = matrix_rows.Trained(row, options)
                case, update = trained.case(Path(root))
            if folder is not None:
                case.write(folder / str(seed))
            result["found"] = replays.measured(case, matrix_rows.other_layouts(row))
            result["elements"] = sum(
                x.size for each in case.updates for x in (*each.new_params, *each.new_inner)
            )
            result["stored"] = len(trained.stored)
            result["reducing"] = len(update.get("reducing") or ())
            last = case.updates[-1].new_params
            result["nan"] = not all(bool((x == x).all()) for x in last)  # noqa: PLR0124
            if any(result["found"].values()):
                result["class"] = "differs"
        except matrix_rows.LeftOut as why:
            result |= {"class": "left out", "why": str(why)}
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            result |= {"class": "not trainable", "why": text}
        result["cpu_s"] = round(time.process_time() - start, 1)
        children.tell(result)


def line_of(row: dict[str, Any]) -> str:
    """A row in one line."""
    found = row.get("found") or {}
    shown = {
        layout: sum(leaves.values()) if isinstance(leaves, dict) else leaves
        for layout, leaves in found.items()
    }
    what = " ".join(f"{layout}:{count}" for layout, count in shown.items())
    return f"{row['seed']:>6} {row['class']}: {row.get('text', '')} | {what}{row.get('why', '')}"


def rows_of(
    seeds: Iterable[int], options: Sequence[str], folder: Path | None
) -> Iterable[dict[str, Any]]:
    """Does rows in child processes.

    Args:
        seeds: of the rows.
        options: further arguments for the children.
        folder: where the files of rows that were trained are kept; None for nowhere.
    """
    arguments = [*options, *([] if folder is None else ["--keep", str(folder)])]
    with tempfile.TemporaryDirectory() as cache:
        environ = children.environment(DEVICES, cache=Path(cache))
        for key, result in children.results(
            __spec__.name, arguments, [*map(str, seeds)], environ, group=GROUP, limit_s=LIMIT_S
        ):
            if isinstance(result, str):
                yield {"seed": int(key), "class": "crash", "why": result}
            else:
                yield result


def replayed_elsewhere(
    rows: Sequence[dict[str, Any]], folder: Path, flags: str, python: str
) -> dict[int, Any]:
    """Replays rows from their files in child processes, by seed.

    Args:
        rows: as :func:`rows_of` gave them.
        folder: where their files lie.
        flags: XLA flags of the children.
        python: their interpreter.
    """
    by_layout: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        if "found" in row:
            by_layout[row["layout"]].append(str(folder / str(row["seed"])))
    found: dict[int, Any] = {}
    for layout, folders in by_layout.items():
        layouts = ",".join(dict.fromkeys((layout, "one")))
        environ = children.environment(DEVICES, flags)
        for key, result in children.results(
            _REPLAYS,
            ["--layouts", layouts],
            folders,
            environ,
            group=GROUP,
            limit_s=LIMIT_S,
            python=python,
        ):
            found[int(Path(key).name)] = result
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Two Markdown tables: rows by class, and elements that differ by where they were replayed."""
    counts = collections.Counter(row["class"] for row in rows)
    classes = command.table(CLASSES, [[counts[each] for each in CLASSES]])
    places: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    failures: collections.Counter[str] = collections.Counter()
    for row in rows:
        for layout, leaves in {**row.get("found", {}), **row.get("elsewhere", {})}.items():
            place = "same mesh" if layout == row["layout"] else layout
            if not isinstance(leaves, dict):
                failures[place] += 1
                continue
            places[place].append((sum(leaves.values()), row["elements"]))
    lines = []
    for place, each in sorted(places.items()):
        differ = sum(count > 0 for count, _ in each)
        totals = [f"{sum(n for _, n in each):,}", f"{sum(count for count, _ in each):,}"]
        lines.append([place, len(each), differ, *totals, failures[place]])
    head = ["replayed on", "rows", "rows that differ", "elements", "that differ", "raised"]
    whys = collections.Counter(
        (row["class"], row["why"].split(",")[-1].split(":")[0][:80])
        for row in rows
        if row["class"] in ("left out", "not trainable")
    )
    left_out = "\n".join(f"* {count} {kind}: {why}" for (kind, why), count in whys.most_common(12))
    return "\n\n".join([classes, command.table(head, lines), left_out])


def isa_flags(names: Sequence[str]) -> list[str]:
    """The XLA flags under which no later instruction set than each of some is used."""
    return [f"--xla_cpu_max_isa={name}" for name in names]


def add_elsewhere(rows: list[dict[str, Any]], arguments: argparse.Namespace, folder: Path) -> None:
    """Replays under other flags, and by another interpreter, as was asked for."""
    flags_of = dict(zip(arguments.isa, isa_flags(arguments.isa), strict=True))
    wanted = [(f"isa {isa}", flags, sys.executable) for isa, flags in flags_of.items()]
    wanted += [(flags, flags, sys.executable) for flags in arguments.flags]
    if arguments.other_python:
        wanted.append(("other python", "", arguments.other_python))
    for name, flags, python in wanted:
        found = replayed_elsewhere(rows, folder, flags, python)
        for row in rows:
            result = found.get(row["seed"])
            if result is None:
                continue
            each = {"": result} if isinstance(result, str) else result
            row.setdefault("elsewhere", {}).update(
                {f"{name}, {'same mesh' if k == row['layout'] else k}": v for k, v in each.items()}
            )
            if any(each.values()) and row["class"] == "exact":
                row["class"] = "differs"


def main() -> None:
    """Reads the command line, and prints a line for each and a table."""
    parser = command.parser(__doc__, seed=0)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--only", type=int, help="one row alone, by its seed")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, help="of the Recorder")
    parser.add_argument("--summing", action="store_true", help="optimizers that add up elements")
    parser.add_argument("--isa", type=lambda text: text.split(","), default=[])
    parser.add_argument(
        "--flags", action="append", default=[], help="XLA flags of a replay; may be repeated"
    )
    parser.add_argument("--other-python", help="an interpreter with another release of JAX")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="of outputs; run nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        files = [json.loads(path.read_text()) for path in arguments.table]
        print(table([each for file in files for each in file["rows"]]))
        return
    for flag in [*isa_flags(arguments.isa), *arguments.flags]:
        if not xla_flags.accepts([flag]):
            parser.error(f"expected flags that this XLA knows, found {flag}. Leave it out.")
    options = {} if arguments.pin is None else {"pin": arguments.pin}
    if arguments.child:
        seeds = [int(each) for each in arguments.child.split(",")]
        child(seeds, options, arguments.keep, summing=arguments.summing)
        return
    seeds = range(arguments.seed, arguments.seed + arguments.rows)
    if arguments.only is not None:
        seeds = range(arguments.only, arguments.only + 1)
    passed = [] if arguments.pin is None else ["--pin" if arguments.pin else "--no-pin"]
    passed += ["--summing"] if arguments.summing else []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keeps = bool(arguments.isa or arguments.flags or arguments.other_python)
        for row in rows_of(seeds, passed, Path(folder) if keeps else None):
            rows.append(row)
            print(line_of(row), flush=True)
            write(rows, arguments.output)
        add_elsewhere(rows, arguments, Path(folder))
    write(rows, arguments.output)
    print(f"\n{table(rows)}")
    if arguments.only is not None:
        print(json.dumps(rows, indent=1))


def write(rows: Sequence[dict[str, Any]], output: Path | None) -> None:
    """Writes what there is so far, if it is to be written."""
    if output is not None:
        command = shlex.join(["python", "-m", "tests.campaigns.matrix", *sys.argv[1:]])
        whole = {"command": command, "cores": os.cpu_count(), "rows": list(rows)}
        output.write_text(json.dumps(whole))


if __name__ == "__main__":
    main()
