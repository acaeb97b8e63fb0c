"""An extension of griffe: docstrings, which are written for Sphinx's eyes, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([^`]+)`")
LITERAL = re.compile(r"^( *)(.*)::\n\n((?:\1 {4}.*\n|\n)+)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """A docstring with code where it has roles, and fences where it has literal blocks."""
    text = ROLE.sub(lambda match: f"`{match[1].removeprefix('adacheck_jax.')}`", text)
    return LITERAL.sub(_fenced, text + "\n").rstrip("\n")


def _fenced(match: re.Match[str]) -> str:
    indent, before, code = match[1], match[2], match[3]
    lines = [line.removeprefix(f"{indent}    ") for line in code.strip("\n").splitlines()]
    language = "text" if any("──" in line for line in lines) else "python"
    told = f"{indent}{before}:\n\n" if before else ""
    body = "\n".join(f"{indent}{line}" if line else "" for line in lines)
    return f"{told}{indent}```{language}\n{body}\n{indent}```\n\n"


class Docstrings(griffe.Extension):
    """Turns every docstring into Markdown when it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Turns one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
