"""The page of all commands, drawn from the command line itself.

``python -m tests.command_reference`` writes it anew; a test fails while it differs.
"""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from adacheck_jax.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "command-line.md"
MARKS = ("<!-- commands -->\n", "<!-- /commands -->\n")
WIDTH = 90


def drawn(page: str) -> str:
    """The page with every command as it is now."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{_all_commands()}\n{MARKS[1]}{after}"


def commands() -> list[str]:
    """Names of all commands, in the order in which ``adacheck --help`` lists them."""
    return [*typer.main.get_command(app).commands]


def _all_commands() -> str:
    sections = []
    for name in commands():
        shown = CliRunner().invoke(
            app,
            [name, "--help"],
            prog_name="adacheck",
            terminal_width=WIDTH,
            max_content_width=WIDTH,
        )
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        sections.append(f"### adacheck {name}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
