"""Patterns over leaf paths: names in braces stand for what they match.

``{i}`` matches a part of one segment, ``{rest...}`` any number of segments, at least one. The same
name twice has to match the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIELD = re.compile(r"\{([a-z_][a-z0-9_]*)(\.\.\.)?\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of leaf paths.

    Attributes:
        text: the pattern, as it was given.

    Raises:
        ValueError: braces that enclose no name, or an empty pattern.
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text or set(_FIELD.sub("", self.text)) & set("{}"):
            raise ValueError(
                f"expected a leaf path in which braces enclose names, like "
                f"'block_{{i}}/{{rest...}}', found {self.text!r}"
            )

    @property
    def names(self) -> frozenset[str]:
        """Names in braces."""
        return frozenset(name for name, _ in _FIELD.findall(self.text))

    def match(self, path: str) -> dict[str, str] | None:
        """The text that each name stands for in a path; None if the path does not match."""
        found = re.fullmatch(self._expression(), path)
        return None if found is None else found.groupdict()

    def fill(self, values: Mapping[str, str]) -> str:
        """The path in which each name is replaced by its text."""
        return _FIELD.sub(lambda field: values[field[1]], self.text)

    def _expression(self) -> str:
        parts: list[str] = []
        seen: set[str] = set()
        end = 0
        for field in _FIELD.finditer(self.text):
            parts.append(re.escape(self.text[end : field.start()]))
            name, end = field[1], field.end()
            wanted = ".+" if field[2] else "[^/]+"
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{wanted})")
            seen.add(name)
        return "".join([*parts, re.escape(self.text[end:])])
