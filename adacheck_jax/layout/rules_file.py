"""Rules in a TOML file: a table ``[[rule]]`` for each, with the arguments of its function.

::

    [[rule]]
    stack = "Block_{i}/{rest...}"
    to = "ScanBlock_0/{rest...}"

    [[rule]]
    split = "{layer...}/qkv/kernel"
    to = ["{layer...}/q/kernel", "{layer...}/k/kernel", "{layer...}/v/kernel"]
    axis = 1
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from adacheck_jax.errors import FormatError
from adacheck_jax.layout import rules
from adacheck_jax.layout.rules import Rule

_MAKERS: Mapping[str, Callable[..., Rule]] = {
    name: getattr(rules, name)
    for name in (
        *("rename", "stack", "unstack", "fuse", "split", "pad", "strip", "repeat", "average"),
        *("transpose", "cast"),
    )
}


def read_rules(text: str | bytes, where: str = "rules") -> list[Rule]:
    """Read rules from the text of a TOML file.

    Raises:
        FormatError: it is no TOML, or a table is no rule; the message names the table.
    """
    try:
        tables = tomllib.loads(text if isinstance(text, str) else text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: expected TOML, found what is not: {error}.") from error
    unknown = [name for name in tables if name != "rule"]
    found = tables.get("rule")
    if unknown or not isinstance(found, list) or not found:
        raise FormatError(
            f"{where}: expected tables [[rule]] and nothing else, found "
            f"{', '.join(unknown) or 'none'}."
        )
    return [_rule(table, f"{where}, rule {k}") for k, table in enumerate(found, 1)]


def _rule(table: Any, where: str) -> Rule:
    names = [name for name in _MAKERS if name in table] if isinstance(table, dict) else []
    if len(names) != 1:
        raise FormatError(
            f"{where}: expected one of {', '.join(_MAKERS)} with the pattern that it takes, found "
            f"{', '.join(names) or 'none'}."
        )
    (name,) = names
    maker, arguments = _MAKERS[name], dict(table)
    taken = arguments.pop(name)
    try:
        inspect.signature(maker).bind(taken, **arguments)
        return maker(taken, **arguments)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where} ({name}): {error}.") from error
