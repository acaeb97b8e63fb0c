"""Training runs of many optimizers, models, meshes and data types, and their saved steps.

    python -m tests.campaigns.rows --family training --runs 200 --seed 0 --check full
    python -m tests.campaigns.rows --family matrix --runs 300
    python -m tests.campaigns.rows --family exactness
    python -m tests.campaigns.rows --family matrix --only 17
    python -m tests.campaigns.rows --family matrix --runs 40 --isa AVX,AVX2,AVX512
    python -m tests.campaigns.rows --family matrix --runs 40 --flags=--xla_cpu_enable_fast_math=true
    python -m tests.campaigns.rows --family matrix --runs 20 --other-python /path/to/bin/python
    python -m tests.campaigns.rows --table FILE.json ...

Each run is drawn from its seed (:mod:`tests.campaigns.plans`): a model, an optimizer, a mesh, what
is done to the state by hand, which handlers save which steps. After it every step that was reported
as saved is restored, also from inside the step that recorded it, on its mesh and on others, and
compared with what it was, bit by bit (:mod:`tests.campaigns.runs` has the kinds of problems). In
the families but the first the check compares every leaf before a delta is saved: one that it finds
to differ is a problem, too. So is a step that another process does not restore to the same bits:
with fewer devices, under other instruction sets or flags of XLA, or by another release of JAX.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import xla_flags
from tests.campaigns import children, command
from tests.campaigns.plans import FAMILIES, KINDS, devices_of

GROUP = 20
LIMIT_S = 600.0
BAD = ("lost", "lost there", "wrong", "vanished", "failed", "elsewhere")
"""Kinds of problems; edits of a part of a leaf may be lost where a check takes samples."""


def campaign(
    seeds: Sequence[int], *, devices: int | None, options: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Does runs in child processes.

    Args:
        seeds: of the runs.
        devices: of each run; None leaves it to the seeds.
        options: further arguments for the children.

    Yields:
        The :class:`~tests.campaigns.runs.Outcome` of each as a dictionary, with the key ``line``;
        or one with the keys ``seed`` and ``crash``.
    """
    with tempfile.TemporaryDirectory() as cache:
        blocks = [seeds[i : i + 2 * GROUP] for i in range(0, len(seeds), 2 * GROUP)]
        for block, count in itertools.product(blocks, (1, 8)):
            keys = [str(s) for s in block if (devices or devices_of(s)) == count]
            environ = children.environment(count, cache=Path(cache))
            arguments = [*options, "--devices", str(count)]
            for key, result in children.results(
                __spec__.name, arguments, keys, environ, group=GROUP, limit_s=LIMIT_S
            ):
                is_text = isinstance(result, str)
                crash = {"seed": int(key), "devices": count, "kinds": [], "crash": result}
                yield crash if is_text else result


def child(arguments: argparse.Namespace) -> None:
    """Does runs, or restores them, in this process."""
    from tests.campaigns.plans import plan_of
    from tests.campaigns.runs import restored_from, run  # it imports jax, which only children need

    keys = arguments.child.split(",")
    if arguments.layouts:
        for key in keys:
            children.tell(restored_from(Path(key), arguments.layouts.split(",")))
        return
    for seed in map(int, keys):
        plan = plan_of(arguments.family, seed, arguments.devices)
        if arguments.check:
            plan = replace(plan, check=arguments.check)
        recording = {} if arguments.pin is None else {"pin": arguments.pin}
        folder = Path(tempfile.mkdtemp()) if arguments.keep is None else arguments.keep / str(seed)
        folder.mkdir(exist_ok=True)
        outcome = run(plan, folder / "root", recording, arguments.keep and folder)
        if arguments.keep is None:
            shutil.rmtree(folder)
        children.tell({**outcome.json, "layout": plan.layout, "line": outcome.line})


def problems(each: dict[str, Any], family: str) -> list[str]:
    """What must not be in the outcome of a run."""
    if "crash" in each:
        return [each["crash"]]
    found = [f"{name}: {text}" for name in BAD for text in each["found"].get(name, ())]
    part = each["found"].get("of a part", ())
    found = [text for text in found if not any(f"lost: {step}," in text for step in part)]
    if family != "training" and (count := each["counts"].get("found by checks")):
        found.append(f"checks found {count} leaves that differ")
    if family in ("training", "exactness") and each["left_out"].startswith("not trainable"):
        found.append(each["left_out"])
    if family != "training":
        found += [f"refused: {text}" for text in each["found"].get("refused", ())]
    return found


def add_elsewhere(
    found: Sequence[dict[str, Any]], folder: Path, places: Iterable[tuple[str, int, str, str, str]]
) -> None:
    """Restores runs in other processes, and adds what is not exact there.

    Args:
        found: outcomes.
        folder: where their files lie.
        places: name, number of devices, layout (a dot is that of the save), XLA flags, interpreter.
    """
    for name, devices, layout, flags, python in places:
        groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for each in found:
            if each.get("counts", {}).get("exact"):
                groups[each["layout"] if layout == "." else layout].append(each)
        for where, group in groups.items():
            keys = {str(folder / str(each["seed"])): each for each in group}
            arguments = ["--layouts", ",".join(dict.fromkeys((where, "one")))]
            for key, told in children.results(
                *(__spec__.name, arguments, [*keys], children.environment(devices, flags)),
                group=GROUP,
                limit_s=LIMIT_S,
                python=python,
            ):
                said = {where: told} if isinstance(told, str) else told
                for place, what in said.items():
                    keys[key]["counts"][f"{name}, {place}"] = int(not what)
                    kind = "rounded elsewhere" if "rounded" in what else "elsewhere"
                    if what:
                        keys[key]["found"].setdefault(kind, []).append(f"{name}, {place}: {what}")


def places_of(arguments: argparse.Namespace) -> list[tuple[str, int, str, str, str]]:
    """Where runs are restored besides, as was asked for."""
    here = sys.executable
    found = [(f"isa {isa}", 8, ".", f"--xla_cpu_max_isa={isa}", here) for isa in arguments.isa]
    found += [(flags, 8, ".", flags, here) for flags in arguments.flags]
    if arguments.other_python:
        found.append(("other python", 8, ".", "", arguments.other_python))
    if arguments.family == "exactness":
        found += [("4 devices", 4, "sharded_22", "", here), ("1 device", 1, "one", "", here)]
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row for each kind of run.

    A run has several kinds, and counts in the row of each; in the last rows each counts once.
    """
    kinds = dict.fromkeys((*KINDS, *(kind for each in found for kind in each["kinds"])))
    rows = [(kind, [each for each in found if kind in each["kinds"]]) for kind in kinds]
    rows += [(f"{n} devices", [each for each in found if each["devices"] == n]) for n in (1, 8)]
    rows = [*((name, some) for name, some in rows if some), ("all", list(found))]
    sums = {name: totals(some) for name, some in rows}
    columns = [name for name in sums["all"] if sums["all"][name] or name in ("lost", "wrong")]
    whys = collections.Counter(each.get("left_out", "")[:90] for each in found)
    left_out = [f"* {count}: {why}" for why, count in whys.most_common(12) if why]
    lines = [[name, *(each.get(column, 0) for column in columns)] for name, each in sums.items()]
    return "\n".join([command.table(["", *columns], lines), "", *left_out])


def totals(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over some runs, by column."""
    sums = collections.Counter[str](runs=len(found), saved=0, exact=0, lost=0, wrong=0)
    share = 0.0
    for each in found:
        sums.update({"crash": 1} if "crash" in each else each["counts"])
        sums.update({name: len(texts) for name, texts in each.get("found", {}).items()})
        sums["left out"] += bool(each.get("left_out"))
        share = max(share, each.get("share", 0.0))
    steps = sum(sums[name] for name in ("bases", "replayed", "idle", "bits"))
    states = sums.pop("state bytes", 0) * steps / max(len(found), 1)
    written = sums.pop("bytes", 0)
    more = {"bytes ÷ state": round(written / states, 3) if states else 0}
    return {**sums, **more, "share of the tolerance": round(share, 3)}


def main() -> int:
    """Reads the command line, and prints a line for each run and a table."""
    parser = command.parser(__doc__, seed=0)
    parser.add_argument("--family", choices=FAMILIES, default="training")
    parser.add_argument("--runs", type=int, help="of them; 200 by default, or all of the table")
    parser.add_argument("--only", type=int, help="one run alone, by its seed")
    parser.add_argument("--check", choices=("auto", "sample", "full"), help="of the handlers")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, help="of the recorders")
    parser.add_argument("--devices", type=int, choices=(1, 4, 8))
    parser.add_argument("--isa", type=lambda text: text.split(","), default=[])
    parser.add_argument(
        "--flags", action="append", default=[], help="XLA flags of a restore; may be repeated"
    )
    parser.add_argument("--other-python", help="an interpreter with another release of JAX")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="of outputs; run nothing")
    for hidden, kind in {"child": str, "keep": Path, "layouts": str}.items():
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        files = [json.loads(path.read_text()) for path in arguments.table]
        print(table([each for file in files for each in file["runs"]]))
        return 0
    if arguments.child:
        child(arguments)
        return 0
    places = places_of(arguments)
    for _, _, _, flags, _ in places:
        if flags and not xla_flags.accepts([flags]):
            parser.error(f"expected flags that this XLA knows, found {flags}. Leave it out.")
    first = arguments.seed if arguments.only is None else arguments.only
    usual = 21 if arguments.family == "exactness" else 200
    count = 1 if arguments.only is not None else arguments.runs or usual
    options = ["--family", arguments.family]
    options += [f"--check={arguments.check}"] if arguments.check else []
    options += [] if arguments.pin is None else ["--pin" if arguments.pin else "--no-pin"]
    devices = arguments.devices or (None if arguments.family == "training" else 8)
    found, bad = list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        options += ["--keep", folder] if places else []
        for each in campaign(range(first, first + count), devices=devices, options=options):
            found.append(each)
            print(each.get("line") or f"{each['seed']:>6} {each['crash']}", flush=True)
        add_elsewhere(found, Path(folder), places)
    for each in found:
        bad += [f"run {each['seed']}: {text}" for text in problems(each, arguments.family)]
    if arguments.output:
        line = shlex.join(["python", "-m", __spec__.name, *sys.argv[1:]])
        whole = {"command": line, "cores": os.cpu_count(), "runs": found}
        arguments.output.write_text(json.dumps(whole))
    print(f"\n{table(found)}" if count > 1 else json.dumps(found, indent=1))
    for text in bad:
        print(f"FAILED: {text}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
