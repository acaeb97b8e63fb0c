"""Training runs that are perturbed in every way that people perturb them, and their saved steps.

    python -m tests.campaigns.training --runs 200 --seed 0 --check full --output FILE.json
    python -m tests.campaigns.training --only 17
    python -m tests.campaigns.training --table FILE.json ...

Each run is drawn from its seed (:mod:`tests.campaigns.perturbations`): a model, an optimizer, a
mesh, what is done to the state by hand, which handlers save which steps. After it every step that
was reported as saved is restored, also from inside the step that recorded it, and compared with
what it was, bit by bit:

* lost: reported as saved, and a restore raises. Silence that becomes an error too late.
* wrong: a restore returned other bits.
* vanished: reported as saved, and in no manifest.
* refused: a save, or the wait after it, raised one of this library's errors: it was said in time.
* failed: any other exception.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns import children
from tests.campaigns.perturbations import KINDS, devices_of, draw
from tests.support import SHADOWS

GROUP = 20
LIMIT_S = 600.0


def campaign(
    seeds: Sequence[int], *, devices: int | None, options: Sequence[str]
) -> Iterable[dict[str, Any]]:
    """Does runs in child processes.

    Args:
        seeds: of the runs.
        devices: of each run; None leaves it to the seeds.
        options: further arguments for the children.

    Yields:
        The :class:`~tests.campaigns.outcomes.Outcome` of each as a dictionary, with the key
        ``line``; or one with the keys ``seed`` and ``crash``.
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
                if isinstance(result, str):
                    yield {"seed": int(key), "devices": count, "crash": result}
                else:
                    yield result


def child(
    seeds: Sequence[int], devices: int, options: dict[str, Any], recording: dict[str, Any]
) -> None:
    """Does runs in this process, with these options of handlers and of recorders."""
    from tests.campaigns.runs import run  # it imports jax, which only children need

    for seed in seeds:
        with tempfile.TemporaryDirectory() as root:
            outcome = run(draw(seed, devices), Path(root), options, recording)
        children.tell({**outcome.json, "line": outcome.line})


_COLUMNS = (
    *("runs", "saved", "exact", "lost", "of a part", "other mesh", "lost there", "wrong"),
    *("vanished", "named a lost step", "nothing to fall back to", "refused", "runs refused twice"),
    *("refused and listed", "resumes failed", "failed", "bases", "replayed", "idle", "bits"),
    *("whole leaves", "bytes ÷ state"),
)


def totals(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over some runs, by column."""
    whole = [each for each in found if "crash" not in each]

    def count(name: str) -> int:
        return sum(v if isinstance(v := each[name], int) else len(v) for each in whole)

    kinds = ("bases", "replayed", "idle", "bits")
    steps = sum(each["state_bytes"] * sum(each[kind] for kind in kinds) for each in whole)
    written = count("delta_bytes") + count("base_bytes")
    return {
        "runs": len(found),
        "saved": count("saved"),
        "exact": count("exact"),
        "lost": count("lost"),
        "of a part": sum(lost["edited"] for each in whole for lost in each["lost"]),
        "other mesh": count("elsewhere"),
        "lost there": count("lost_elsewhere"),
        "wrong": count("wrong"),
        "vanished": count("vanished"),
        "named a lost step": sum(each["named_lost"] for each in whole),
        "nothing to fall back to": sum(
            bool(each["fallback"]) and not each["fallback"].isdecimal() for each in whole
        ),
        "refused": count("refused"),
        "runs refused twice": sum(len(each["refused"]) > 1 for each in whole),
        "refused and listed": count("listed_though_refused"),
        "resumes failed": count("resumes_failed"),
        "failed": count("failed") + len(found) - len(whole),
        "bases": count("bases"),
        "replayed": count("replayed"),
        "idle": count("idle"),
        "bits": count("bits"),
        "whole leaves": count("whole_leaves"),
        "bytes ÷ state": round(written / steps, 3) if steps else None,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row for each kind of perturbation.

    A run has several kinds, and counts in the row of each; in the last rows each counts once.
    """
    rows = [(kind, [each for each in found if kind in each.get("kinds", ())]) for kind in KINDS]
    rows += [(f"{n} devices", [each for each in found if each["devices"] == n]) for n in (1, 8)]
    rows = [*((name, some) for name, some in rows if some), ("all", list(found))]
    lines = [f"| | {' | '.join(_COLUMNS)} |", f"|{'---|' * (len(_COLUMNS) + 1)}"]
    for name, some in rows:
        sums = totals(some)
        lines.append(f"| {name} | {' | '.join(str(sums[each]) for each in _COLUMNS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--only", type=int, help="one run alone, by its seed")
    parser.add_argument("--check", choices=("auto", "sample", "full"), help="of the handlers")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, help="of the recorders")
    parser.add_argument("--devices", type=int, choices=(1, 8))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="of outputs; run nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        files = [json.loads(path.read_text()) for path in arguments.table]
        print(table([each for file in files for each in file["runs"]]))
        return
    options = {} if arguments.check is None else {"shadow": SHADOWS[arguments.check]}
    recording = {} if arguments.pin is None else {"pin": arguments.pin}
    if arguments.child:
        wanted = [int(each) for each in arguments.child.split(",")]
        child(wanted, arguments.devices, options, recording)
        return
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    if arguments.only is not None:
        seeds = range(arguments.only, arguments.only + 1)
    passed = [f"--check={arguments.check}"] if arguments.check else []
    if arguments.pin is not None:
        passed.append("--pin" if arguments.pin else "--no-pin")
    found: list[dict[str, Any]] = []
    for each in campaign(seeds, devices=arguments.devices, options=passed):
        found.append(each)
        print(each.get("line") or f"{each['seed']:>6} {each['crash']}", flush=True)
        if arguments.only is not None:
            print(json.dumps(each, indent=1))
        if arguments.output:  # what there is so far
            command = shlex.join(["python", "-m", "tests.campaigns.training", *sys.argv[1:]])
            whole = {"command": command, "cores": os.cpu_count(), "runs": found}
            arguments.output.write_text(json.dumps(whole))
    if arguments.only is None:
        print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
