"""Kills ``adacheck cp`` at random moments, and counts what it sends again.

    python -m tests.campaigns.copies --count 10

A root of steps goes into an S3 server on this machine, and from there to a disk. Each trial kills
the copy some times with SIGKILL, and lets the last call end. Requests are counted by a proxy
before the server. Then the copy has to have every file of the original, and each step to verify.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import adacheck_jax as adacheck
from adacheck_jax.store.steps import marks, roots
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools import audit
from tests import object_stores, support
from tests.campaigns import command

STEPS, DELAY_S = 6, 0.02
"""Steps of the run; pause of the server before each answer."""
WAYS = ("disk to S3", "S3 to disk")


@dataclass(frozen=True)
class Trial:
    """One copy.

    Attributes:
        way: one of :data:`WAYS`.
        kills: number of processes that were killed while they copied.
        all_bytes: bytes of the files.
        again_bytes: bytes of values that were sent more than once.
        problem: the first thing that is wrong with the copy; else empty.
    """

    way: str
    kills: int
    all_bytes: int
    again_bytes: int
    problem: str


def saved(root: Path, mb: float) -> None:
    """A run whose every step takes some megabytes."""
    state, noise = jnp.zeros(int(mb * 250_000), jnp.float32), np.random.default_rng(0)
    with support.manager_of(root, adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step in range(STEPS):
            state = state + noise.standard_normal(state.shape, np.float32)
            manager.save(step, args=adacheck.SaveArgs({"w": state}))


def trials(count: int, kills: int, mb: float, seed: int, directory: Path) -> Iterator[Trial]:
    """Trials in both directions, by turns.

    Args:
        count: number of trials in each direction.
        kills: number of times that a copy is killed.
        mb: megabytes of a state.
        seed: seed of the moments of the kills.
        directory: an empty directory.
    """
    rng, root = random.Random(seed), directory / "run"
    saved(root, mb)
    with object_stores.served("s3") as url:
        object_stores.taken(url, DELAY_S)
        longest_s = _seconds(root, whole := f"{url}/whole")
        shortest_s = _seconds(root, whole)
        for number in range(2 * count):
            way = WAYS[number % 2]
            source, place = (root, f"{url}/{number}")
            if way == WAYS[1]:
                source, place = whole, str(directory / f"{number}")
            object_stores.taken(url, DELAY_S)
            moments = (rng.uniform(0.5 * shortest_s, 0.8 * longest_s) for _ in range(kills))
            killed = sum(_killed(source, place, after_s) for after_s in sorted(moments))
            code = _copy(source, place).wait()
            requests = object_stores.taken(url, DELAY_S)
            yield _judged(way, killed, root, located(place), code, requests)


def _copy(source: object, place: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "adacheck_jax.cli.main", "cp", str(source), place]
    return subprocess.Popen(program, stdout=subprocess.DEVNULL)


def _seconds(source: object, place: str) -> float:
    begun_s = time.monotonic()
    _copy(source, place).wait()
    return time.monotonic() - begun_s


def _killed(source: object, place: str, after_s: float) -> bool:
    """Starts a copy and kills it; False if it had ended."""
    child = _copy(source, place)
    time.sleep(after_s)
    ended = child.poll() is not None
    child.kill()
    child.wait()
    return not ended


def _judged(
    way: str, kills: int, root: Path, place: AnyPath, code: int, requests: list[dict[str, Any]]
) -> Trial:
    field, method = ("sent_bytes", "PUT") if way == WAYS[0] else ("received_bytes", "GET")
    sent: dict[str, list[int]] = {}
    for each in requests:
        is_read = (
            each["method"] == method
            and each["status"] in (200, 206, 499)
            and "?" not in each["path"]
        )
        if is_read and each["key"].rpartition("/")[2] != "manifest.json":  # which is read to look
            sent.setdefault(each["key"], []).append(each[field])
    again = sum(sum(sizes) - max(sizes) for sizes in sent.values())
    return Trial(way, kills, sum(map(max, sent.values())), again, _problem(root, place, code))


def _problem(root: Path, place: AnyPath, code: int) -> str:
    if code:
        return f"the last call ended with {code}"
    for each in at(root).list():
        copy = at(place) / each.below(at(root))
        is_left_out = "/adacheck/lineage/" in each.key and not copy.exists
        if not is_left_out and copy.read() != each.read():
            return f"{copy} has other bytes"
    report = audit.verify_root(place, read_data=True, replay=True)
    damaged = [each.step for each in report.steps if each.damage]
    if damaged or report.leftovers:
        return f"damaged: {damaged}, left: {report.leftovers}"
    numbers = [step.step for step in roots.steps_of(place)]
    if numbers != [*range(STEPS)] or not (at(place) / "0" / marks.STEP_METADATA).exists:
        return f"steps are {numbers}"
    return ""


def summary(found: list[Trial]) -> list[list[Any]]:
    """A row for each direction."""
    rows = []
    for way in WAYS:
        own = [each for each in found if each.way == way]
        every, again = sum(x.all_bytes for x in own), sum(x.again_bytes for x in own)
        worst = max((x.again_bytes / max(x.all_bytes, 1) for x in own), default=0.0)
        row = [way, len(own), sum(x.kills for x in own), f"{every / max(len(own), 1) / 1e6:.1f}"]
        rows.append(
            [*row, f"{again / max(every, 1):.4f}", f"{worst:.4f}", sum(not x.problem for x in own)]
        )
    return rows


def main() -> int:
    """Runs the campaign, and prints its table."""
    parser = command.parser(__doc__, count=10, seed=0, minutes=6.0, directory=None)
    parser.add_argument("--mb", type=float, default=8.0, help="megabytes of a state")
    parser.add_argument("--kills", type=int, default=4, help="kills of a copy")
    arguments = parser.parse_args()
    found: list[Trial] = []
    problems: list[str] = []
    with command.workplace(arguments.directory, problems) as directory:
        begun_s = time.monotonic()
        given = (arguments.count, arguments.kills, arguments.mb, arguments.seed)
        for each in trials(*given, directory):
            found.append(each)
            problems += [f"{each.way}: {each.problem}"] if each.problem else []
            if time.monotonic() - begun_s > 60 * arguments.minutes:
                break
    head = ["way", "copies", "kills", "MB a copy", "sent twice ÷ all", "worst copy", "whole"]
    return command.finish({}, problems, command.table(head, summary(found)))


if __name__ == "__main__":
    sys.exit(main())
