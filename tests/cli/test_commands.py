"""All commands: what they say of wrong inputs, how wide they are, and what their help promises."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from tests.tools.small_run import trained

COMMANDS = [each.name or each.callback.__name__ for each in app.registered_commands]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands") / "run"
    shutil.copytree(trained(tmp_path_factory)[0], path)
    (path / "77").mkdir()  # somebody else's
    (path.parent / "a_file").write_text("no root")
    (path.parent / "empty").mkdir()
    (path.parent / "first/0.orbax-checkpoint-tmp-1/default").mkdir(parents=True)
    (path.parent / "checks.py").write_text(
        "def holds(state, step):\n    return step > 5\nraise_later = lambda: 1 / 0\n"
    )
    return path


def invoked(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


WRONG = [
    (("ls", "{root}/none"), "expected a checkpoint root, found nothing there"),
    (("ls", "{top}/a_file"), "expected a checkpoint root, found a file"),
    (("ls", "{top}/empty"), "expected steps saved by AdaCheckHandler, found nothing"),
    (("ls", "{root}/5/default"), "This is one step's item directory; give {root}"),
    (("ls", "ftp://bucket/run"), "expected a local path, gs://BUCKET/... or s3://BUCKET/..."),
    (("ls", "{root}", "--last", "0"), "greater than or equal to 1"),
    (("inspect", "{root}", "99"), "expected step 99, found"),
    (("inspect", "{root}", "newest"), "expected a step number, latest, or -1"),
    (("inspect", "{root}", "--item", "state"), "expected an item 'state', found default"),
    (("diff", "{root}", "5"), "expected two steps, or the root of another run, found one step"),
    (("diff", "{root}", "5", "99"), "near it. Give one of these steps."),
    (("bisect", "{root}"), "expected --predicate FILE.py:FUNCTION or --non-finite"),
    (("bisect", "{root}", "--predicate", "{top}/checks.py:raise_later"), "the function raised"),
    (("diff", "{root}", "{top}/empty"), "expected steps saved by AdaCheckHandler"),
    (("diff", "{root}", "3", "--other", "{root}"), "two steps, or the root of another run"),
    (("verify", "{root}", "99"), "expected step 99, found"),
    (("verify", "{top}/first"), "left by an interrupted save No step has been saved yet."),
    (("repair", "{top}/none"), "found nothing there"),
    (("export", "{root}", "99", "{top}/x"), "expected step 99, found"),
    (("export", "{root}", "1", "{top}/a_file"), "expected nothing there, found something"),
    (("export", "{root}", "1", "{root}/x"), "outside of the checkpoint root"),
    (("export", "{root}", "1", "{top}/no/x"), "expected a directory, found none"),
    (("export", "{root}", "1", "gs://bucket/x"), "expected a local path"),
    (("export", "{root}", "1", "{top}/x", "--format", "zip"), "is not one of 'orbax'"),
    (("cp", "{root}/5", "{top}/x"), "found one step of one. Give {root}; on a disk cp -a"),
    (("cp", "{root}", "{root}/x"), "expected a place apart"),
    (("cp", "{root}", "{top}"), "expected a place apart"),
    (("cp", "{root}", "{top}/a_file"), "found a file"),
    (("cp", "{root}", "{top}/no/x"), "expected a directory, found none"),
    (("cp", "{root}", "http://host/x"), "found another URL"),
    (("transform", "{root}", "{top}/x", "--rules", "{top}/no.toml", "--step", "5"), "no.toml"),
    (("frobnicate",), "No such command"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=lambda x: x[0] if x else None)
def test_wrong_inputs_are_told_in_one_line_and_exit_with_2(root, words, expected):
    places = {"root": root, "top": root.parent}
    before = there(root.parent)
    shown = invoked(*(word.format(**places) for word in words))
    assert shown.exit_code == 2, shown.output
    assert expected.format(**places) in " ".join(shown.output.split())
    own = [line for line in shown.output.splitlines() if line.startswith("adacheck:")]
    assert len(own) <= 1
    assert "Traceback" not in shown.output
    assert there(root.parent) == before


def there(top):
    return sorted(path for path in top.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_an_example_and_says_what_json_holds(name):
    shown = invoked(name, "--help").output
    if name != "demo":
        assert "Example" in shown
        assert "With --json: the fields of adacheck_jax." in " ".join(shown.split())
    assert "\\b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_list_of_commands_cuts_no_sentence():
    listed = " ".join(invoked("--help").output.split())
    assert "kind, sizes, and how it was checked. inspect" in listed
    assert listed.endswith("compare every bit, in a minute or two.")


IN_ONE_PROCESS = """
import json, sys
from adacheck_jax.cli.main import app

for words in json.loads(sys.argv[1]):
    app(words, standalone_mode=False)
    print("END OF A COMMAND")
"""


def on_a_terminal(columns, commands):
    """Lines that each of some commands prints on a terminal so wide."""
    process, terminal = pty.fork()
    if not process:  # pragma: no cover
        os.environ.pop("COLUMNS", None)
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(commands)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    printed = b""
    while True:
        try:
            found = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so that the other end is closed
            break
        if not found:
            break
        printed += found
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.decode()).replace("\r\n", "\n")
    assert os.waitstatus_to_exitcode(status) == 0, text
    *texts, _ = text.split("END OF A COMMAND\n")
    # Of a progress bar the last state counts.
    return [[line.rpartition("\r")[2] for line in each.splitlines()] for each in texts]


VERBS = [
    ("ls", "{root}"),
    ("inspect", "{root}"),
    ("log", "{root}"),
    ("diff", "{root}", "-2", "-1"),
    ("verify", "{root}"),
]


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_a_terminal(root: Path, columns):
    commands = [[word.format(root=root) for word in words] for words in VERBS]
    for words, lines in zip(VERBS, on_a_terminal(columns, commands), strict=True):
        # Sentences are wrapped by the terminal, and a slow command's bar is as long as its words.
        rows = [line for line in lines if "  " in line and "━" not in line]
        assert rows, words
        assert max(map(len, rows)) <= columns, words
