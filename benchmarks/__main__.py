"""How fast saving and restoring are, beside stock Orbax and the storage itself, in one run.

    python -m benchmarks                                  # 3 minutes on two cores
    python -m benchmarks --size full --output RESULTS     # with 2 GB, 10,000 arrays and 50 deltas
    python -m benchmarks --only restores --only training

Prints Markdown tables. With ``--output`` a folder gets them, all figures as JSON, and plots (where
matplotlib is installed). PyTorch's DCP is measured where torch is. States are float32 params under
AdamW with a bfloat16 record, on CPU devices unless JAX finds others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import environment
from benchmarks.speed import child, longest, report
from benchmarks.speed import hosts as hosts_run
from benchmarks.speed.ways import BASE, DELTA, DELTA_FILE, FLOOR, STATE_FILE, STOCK

SIZES = ("small", "full")


def saves(is_full: bool) -> Any:
    """100 MB in 301 arrays."""
    rounds = 5 if is_full else 1
    return child.measure("saves", params=8_300_000, leaves=100, rounds=rounds, saves=3)


def large_saves(is_full: bool) -> Any:
    """2 GB in 301 arrays."""
    if not is_full:
        return None
    only = [DELTA, BASE, STOCK, STATE_FILE, DELTA_FILE, FLOOR]
    return child.measure("saves", params=167_000_000, leaves=100, rounds=2, saves=3, only=only)


def restores(is_full: bool) -> Any:
    """100 MB in 301 arrays, and some deltas."""
    deltas = [0, 1, 10, 50] if is_full else [0, 1, 10]
    repeats = 5 if is_full else 2
    return child.measure("restores", params=8_300_000, leaves=100, deltas=deltas, repeats=repeats)


def training(is_full: bool) -> Any:
    """A small language model."""
    rounds = 4 if is_full else 1
    return child.measure(
        "training", params=1_000_000, batch=16, steps=20, rounds=rounds, max_deltas=20
    )


def longest_steps(is_full: bool) -> dict[str, Any]:
    """A language model of 7 million params, each way in a process of its own."""
    size = {"params": 7_000_000, "batch": 32} if is_full else {"params": 1_000_000, "batch": 16}
    steps = (
        {"warm": 46, "steps": 52, "deltas": 12} if is_full else {"warm": 8, "steps": 8, "deltas": 3}
    )
    return {way: child.measure("longest", way=way, **size, **steps) for way in longest.WAYS}


def recording(is_full: bool) -> list[Any]:
    """Short steps, of which each is kept."""
    sizes = [1_000_000, 10_000_000] if is_full else [1_000_000]
    rounds = 5 if is_full else 1
    return [
        child.measure("recording", params=size // 12, leaves=20, steps=40, rounds=rounds, every=20)
        for size in sizes
    ]


def growth(is_full: bool) -> list[dict[str, Any]]:
    """Saves at several sizes, one thing grown at a time."""
    rows: list[dict[str, Any]] = []

    def add(of: str, at: int, **arguments: Any) -> None:
        small = {"params": 1_000_000, "leaves": 20, "rounds": 1, "saves": 5 if is_full else 3}
        chosen = {**small, "only": [DELTA, STOCK], **arguments}
        rows.append({"of": of, "at": at, "costs": child.measure("saves", **chosen)["costs"]})

    for size in [1, 10, 100, 1000] if is_full else [1, 30]:
        add("MB of state", size, params=size * 1_000_000 // 12)
    for arrays in [10, 100, 1000, 10_000] if is_full else [400]:  # four for each array of params
        add("arrays", arrays, leaves=max(1, arrays // 4), only=[DELTA, STOCK, FLOOR])
    for devices in [1, 2, 4, 8] if is_full else [4]:
        add("devices", devices, devices=devices)
    depth = 200 if is_full else 20
    found = child.measure("lineages", params=1_000_000, leaves=20, depth=depth, pieces=3)
    rows += [
        {"of": "deltas before it", "at": row.pop("depth"), "costs": {DELTA: row}}
        for row in found["rows"]
    ]
    return rows


def processes(is_full: bool) -> list[dict[str, Any]]:
    """100 MB in 301 arrays, cut over the devices of several processes."""
    size = {"params": 8_300_000, "leaves": 100, "rounds": 4 if is_full else 1, "saves": 4}
    counts = [1, 2, 4] if is_full else [2]
    return [
        {"of": "processes", "at": count, "costs": found["costs"]}
        for count in counts
        for found in [child.measure("saves", processes=count, only=[DELTA, STOCK], **size)]
    ]


def pinning(is_full: bool) -> list[Any]:
    """Updates and train steps, pinned and not, on one device and on eight."""
    size = {"leaves": 300, "params": 1_000_000, "batch": 16}
    rounds = {"steps": 20, "rounds": 5} if is_full else {"steps": 10, "rounds": 1}
    return [child.measure("pinning", devices=devices, **size, **rounds) for devices in (1, 8)]


def checks(is_full: bool) -> list[Any]:
    """100 MB in 301 arrays, checked and not, on one device and on eight."""
    rounds = {"rounds": 5, "saves": 6} if is_full else {"rounds": 1, "saves": 4}
    size = {"params": 8_300_000, "leaves": 100}
    return [child.measure("checks", devices=devices, **size, **rounds) for devices in (1, 8)]


def fingerprints(is_full: bool) -> list[Any]:
    """Deltas and recorded steps of 17 MB of params, on one device and on eight."""
    size = {"params": 4_200_000, "leaves": 25, "rounds": 40 if is_full else 8}
    return [child.measure("fingerprints", devices=devices, **size) for devices in (1, 8)]


def handover(is_full: bool) -> Any:
    """Peak memory of exports and transforms; of 3.2 GB of state."""
    return child.measure("handover", leaf_bytes=134_000_000 if is_full else 8_000_000, leaves=8)


def stores(is_full: bool) -> list[Any]:
    """12 MB in 81 arrays, in an object store on this machine whose requests take 0 and 30 ms."""
    size = {"params": 1_000_000, "leaves": 20, "saves": 10 if is_full else 3}
    kinds = ("gs", "s3") if is_full else ("gs",)
    return [
        child.measure("stores", kind=kind, delay_ms=delay, **size)
        for kind in kinds
        for delay in (0, 30)
    ]


def hosts(is_full: bool) -> list[dict[str, Any]]:
    """Four processes, each a host, a state on all or cut: saves, and what each tier takes."""
    size = {"params": 8_000_000 if is_full else 200_000, "leaves": 24, "steps": 24}
    return [_hosts_of({"processes": 4, "parts": parts, **size}) for parts in (1, 4)]


def _hosts_of(common: dict[str, Any]) -> dict[str, Any]:
    saves, takes = dict[str, Any](), dict[str, float]()
    for way in hosts_run.WAYS:
        with tempfile.TemporaryDirectory() as root, hosts_run.memory() as memory:
            given = {**common, "root": root, "copies": way.copies, "records": way.records}
            saves[way.name] = child.measure(
                "hosts", do="save", memory=memory if way.in_files else "", **given
            )
            for tier, do, wiped in way.tiers:
                if wiped is not None:
                    hosts_run.wipe(memory, wiped)
                place = memory if do == hosts_run.MEMORY else ""
                took = child.measure("hosts", do=do, memory=place, **given)
                takes[tier] = took["seconds"]
    return {"parts": common["parts"], "saves": saves, "takes": takes}


MEASUREMENTS = {
    "saves": saves,
    "large saves": large_saves,
    "restores": restores,
    "training": training,
    "longest step": longest_steps,
    "handover": handover,
    "recording": recording,
    "pinning": pinning,
    "checks": checks,
    "fingerprints": fingerprints,
    "stores": stores,
    "growth": growth,
    "processes": processes,
    "hosts": hosts,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", action="append", choices=[*MEASUREMENTS], help="may be repeated")
    parser.add_argument("--output", type=Path, help="folder for results.json, results.md and plots")
    arguments = parser.parse_args()
    if arguments.output is not None:  # now, and not when all is measured
        try:
            arguments.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: expected a folder that can be made ({error})")
    command = " ".join(["python -m benchmarks", *map(_quoted, sys.argv[1:])])
    results: dict[str, Any] = {"about": {**environment(), "command": command}}
    console = Console(stderr=True)
    for name in arguments.only or MEASUREMENTS:
        with console.status(f"Measuring {name}"):
            found = MEASUREMENTS[name](arguments.size == "full")
        if found is not None:
            results[name] = found
        if arguments.output is not None:  # the next one may fail
            (arguments.output / "results.json").write_text(json.dumps(results, indent=1))
    text = report.markdown(results)
    print(text)
    if arguments.output is not None:
        (arguments.output / "results.md").write_text(text)
        with contextlib.suppress(ImportError):
            report.plots(results, arguments.output)


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


if __name__ == "__main__":
    main()
