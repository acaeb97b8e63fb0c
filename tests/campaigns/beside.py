"""Runs every command beside a training that deletes a step with each that it saves.

    python -m tests.campaigns.beside --count 300

A child trains a tiny model, and keeps two steps. The commands run in this process, by turns, most
of them on the older step, which goes next. Each has to do what it says, or to say that the step was
deleted: none may call a step damaged, or miss a file.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from tests import support
from tests.campaigns import children, command

KEPT_STEPS, MAX_DELTAS = 2, 6
_START_S, _PAUSE_S = 120.0, 0.1
_RULES = '[[rule]]\nrename = "scale"\nto = "factor"\n'
_DELETED = "deleted"
"""The word of every message and row about a step that goes."""
_GONE = (_DELETED, "expected step ")
"""Words about a step that goes, or has gone before the command began."""


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        arguments: its arguments; ``{root}``, ``{out}`` (an empty folder) and ``{step}`` (its
            number) are filled in.
        codes: exit codes without an error.
        also: words of another error that is right, too.
    """

    arguments: str
    codes: tuple[int, ...] = (0,)
    also: str = _DELETED


VERBS = {
    "ls": Verb("ls {root}"),
    "inspect": Verb("inspect {root} {step}"),
    "log": Verb("log {root}"),
    "diff": Verb("diff {root} {step} -1", (0, 1)),
    "bisect": Verb("bisect {root} --non-finite", (1,)),
    "diff of runs": Verb("diff {root} {root}", also="expected steps of both runs, found none"),
    "report": Verb("report {root} -o {out}/report.html"),
    "verify": Verb("verify {root}"),
    "verify --read-data": Verb("verify {root} --read-data"),
    "verify --replay": Verb("verify {root} --replay"),
    "verify STEP": Verb("verify {root} {step} --read-data"),
    "repair": Verb("repair {root} --dry-run --force --read-data"),
    "export": Verb("export {root} {step} {out}/step --all"),
    "transform": Verb("transform {root} {out}/new --rules {out}/rules.toml --step {step}"),
    "cp": Verb("cp {root} {out}/copy"),
}
"""Every command that reads a root of checkpoints."""


@dataclass(frozen=True)
class Tried:
    """One command that was run.

    Attributes:
        verb: its name in :data:`VERBS`.
        code: exit code.
        told: the output, if it speaks of deletion, or if it is not right.
        is_right: True if it did what it says, or said that a step was deleted.
    """

    verb: str
    code: int
    told: str
    is_right: bool


def train(root: Path) -> None:
    """Train and save until the process is ended."""
    run = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=MAX_DELTAS)
    with support.manager_of(root, handler, max_to_keep=KEPT_STEPS) as manager:
        while True:
            run.advance()
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            time.sleep(_PAUSE_S * (run.count % 4))  # some commands end before their step goes


@contextlib.contextmanager
def training(root: Path, cache: Path) -> Iterator[None]:
    """A training in a child, from when it has saved a few steps on."""
    command = [sys.executable, "-m", "tests.campaigns.beside", "--train", str(root)]
    log = root.with_name("training.log")
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stderr=errors, env=children.environment(1, cache=cache), stdout=errors
        )
    try:
        until_s = time.monotonic() + _START_S
        while len(_steps(root)) < KEPT_STEPS:
            if child.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"no steps: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
        if child.poll() is not None:
            raise RuntimeError(f"the training ended: {log.read_text(errors='replace')[-2000:]}")
    finally:
        child.kill()
        child.wait()


def _steps(root: Path) -> list[int]:
    """Numbers of the steps of a root."""
    return [int(each) for each in os.listdir(root) if each.isdecimal()] if root.exists() else []


def attempt(name: str, root: Path, out: Path, step: int) -> Tried:
    """Run one command.

    Args:
        name: one of :data:`VERBS`.
        root: root of the training.
        out: folder for what it writes; made, and removed again.
        step: number of the step that it is run on.
    """
    verb = VERBS[name]
    out.mkdir()
    (out / "rules.toml").write_text(_RULES)
    arguments = verb.arguments.format(root=root, out=out, step=step).split()
    found = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    text = " ".join(found.output.split())
    crashed = found.exception is not None and not isinstance(found.exception, SystemExit)
    is_right = not crashed and (
        found.exit_code in verb.codes or any(each in text for each in (*_GONE, verb.also))
    )
    is_right = is_right and "damaged" not in re.sub("not damaged|skip_damaged", "", text)
    shutil.rmtree(out)
    told = f"{found.exception!r} {text}" if crashed else text
    return Tried(name, found.exit_code, "" if is_right and _DELETED not in text else told, is_right)


def campaign(directory: Path, count: int, seed: int, verbs: Sequence[str] = ()) -> list[Tried]:
    """Run commands beside a training.

    Args:
        directory: to work in; empty.
        count: number of runs.
        seed: chooses the pauses between them.
        verbs: names of commands; all by default.
    """
    root, rng, names = directory / "root", random.Random(seed), [*(verbs or VERBS)]
    directory.mkdir(parents=True, exist_ok=True)
    tried = []
    with training(root, directory / "compiled"):
        for number in command.trials(count):
            time.sleep(rng.uniform(0, 0.2))
            name = names[number % len(names)]
            tried.append(attempt(name, root, directory / "out", min(_steps(root))))
    return tried


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, count=300, seed=0, directory=None)
    parser.add_argument("--only", nargs="+", choices=VERBS, default=[], metavar="VERB")
    parser.add_argument("--train", type=Path, metavar="ROOT", help="train there, run no command")
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return 0
    problems: list[object] = []
    with command.workplace(options.directory, problems) as directory:
        found = summary(campaign(directory, options.count, options.seed, options.only))
        problems += found["problems"]
    return command.finish(found, problems)


def summary(tried: Sequence[Tried]) -> dict[str, Any]:
    """Counts by command, and what was not right."""
    counts = {}
    for name in VERBS:
        own = [each for each in tried if each.verb == name]
        kinds = collections.Counter(
            "wrong" if not each.is_right else "told" if each.told else "done" for each in own
        )
        counts[name] = dict(kinds)
    return {
        "tried": len(tried),
        "verbs": counts,
        "problems": [asdict(each) for each in tried if not each.is_right],
    }


if __name__ == "__main__":
    sys.exit(main())
