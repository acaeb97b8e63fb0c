"""Every command that reads a root of checkpoints, run while steps of it are deleted.

Each has to do what it says, or to say that the step was deleted: none may call a step damaged, or
miss a file.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from adacheck_jax.cli.main import app

_RULES = '[[rule]]\nrename = "{all...}"\nto = "model/{all...}"\n'
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
