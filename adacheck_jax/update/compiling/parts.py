"""An update program cut into parts that share nothing but small values; equal parts have one text.

The leaves of an element-wise update are computed apart from each other, and many of them alike. A
compiler takes as long for each of a hundred equal leaves as for the first. So equal parts had
better be compiled once. This module plans the cut, from MLIR's generic text alone;
:mod:`~adacheck_jax.update.compiling.cut_program` compiles the parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

_TYPE = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_OPERATION = re.compile(
    r'  (?:(%\w+)(?::(\d+))? = )?("[\w.]+")\(([^()]*)\)(.*) : \(([^()]*)\) -> (?:\((.*)\)|(.*))'
)
_SMALL_COUNT = 16
"""Elements of the largest result that is computed once for all parts that need it."""

_TEXT_BYTES = 64 << 20
"""Text of all parts: a program made to have its copies fill the memory is compiled whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """Operations as a program of its own.

    Attributes:
        text: the program; that of an equal part is equal.
        taken: values that it takes: its own arguments of the whole program, then shared ones.
        own_count: number of its own arguments.
        given: values that it returns.
    """

    text: str
    taken: tuple[str, ...]
    own_count: int
    given: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A program, cut.

    Attributes:
        arguments, returned: values that the program takes and returns.
        types: shape and MLIR's element type of each value.
        shared: the part that computes what all others may take; it runs first.
        parts: all others, each with arguments of its own.
    """

    arguments: tuple[str, ...]
    returned: tuple[str, ...]
    types: Mapping[str, tuple[tuple[int, ...], str]]
    shared: Part
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    operands: tuple[str, ...]
    rest: str
    results: tuple[str, ...]
    types: tuple[str, ...]


def cut(
    main: str, functions: Mapping[str, str], attributes: str, shared: Iterable[int]
) -> Cut | None:
    """Cut a program; None if it does not fall into parts, or fewer than half are equal to others.

    Args:
        main: the text of its function ``main``, in MLIR's generic form.
        functions: the texts of all others by name.
        attributes: the module's attributes.
        shared: positions of arguments that parts may share, which are not donated.

    Raises:
        ValueError, LookupError: the text is not as it is known here.
    """
    program = _ProgramText(main, functions, attributes)
    arguments, returned = program.arguments, program.returned
    if len({*arguments, *returned}) < len(arguments) + len(returned):
        return None  # what is returned twice, or as it was taken, cannot be donated
    common = {arguments[n] for n in shared}
    roots = {value: value for value in arguments if value not in common}

    def root(value: str) -> str:
        while roots[value] != value:
            roots[value] = value = roots[roots[value]]
        return value

    for each in program.operations:
        joined = [root(value) for value in each.operands if value in roots]
        if joined:
            roots |= dict.fromkeys([*joined, *each.results], joined[0])
        elif any(v in common for v in each.operands) and all(map(program.is_small, each.results)):
            common.update(each.results)
        # All others are made of constants, or too large to be shared: parts have copies.
    given: dict[str, list[str]] = {}
    for value in returned:
        if value in roots:
            given.setdefault(root(value), []).append(value)
    parts = [program.part(values, common) for values in given.values()]
    if 2 * len({each.text for each in parts}) > len(parts):
        return None
    wanted = [v for each in parts for v in each.taken[each.own_count :] if v not in arguments]
    wanted += [value for value in returned if value not in roots]
    first = program.part([*dict.fromkeys(wanted)], set(arguments))
    return Cut(arguments, returned, program.types, first, tuple(parts))


class _ProgramText:
    """The text of a program as a list of operations, of which equal ones are one."""

    def __init__(self, main: str, functions: Mapping[str, str], attributes: str) -> None:
        self._functions, self._attributes = functions, attributes
        self._texts, self._left_bytes = dict[str, str](), _TEXT_BYTES
        _, head, *lines, last, _ = main.splitlines()
        found = re.findall(r"(%\w+): (\S+?)(?:, |\):$)", head)
        self.arguments = tuple(name for name, _ in found)
        self.types = {name: _type(text) for name, text in found}
        self.operations: list[_Operation] = []
        self._makers: dict[str, _Operation] = {}
        now = {name: name for name in self.arguments}
        known: dict[tuple[str, tuple[str, ...], str], _Operation] = {}
        for line in lines:
            each = _operation(line, now)
            if not each.results:
                raise ValueError(f"an operation without a result: {line[:100]}")
            first = known.setdefault((each.name, each.operands, each.rest), each)
            if first is each:
                self.operations.append(each)
                self._makers |= dict.fromkeys(each.results, each)
                self.types |= zip(each.results, map(_type, each.types), strict=True)
            now |= zip(each.results, first.results, strict=True)
        end = _operation(last, now)
        if end.name != '"func.return"':
            raise ValueError("a function of several blocks")
        self.returned = end.operands

    def is_small(self, value: str) -> bool:
        return math.prod(self.types[value][0]) <= _SMALL_COUNT

    def part(self, given: Sequence[str], shared: Set[str]) -> Part:
        """The operations that compute some values from arguments and shared values."""
        # Operands first, then who takes them: so the order is the same in equal parts.
        ordered, taken, waiting = dict[str, _Operation](), dict[str, None](), [*reversed(given)]
        entered = set[str]()
        while waiting:
            value = waiting[-1]
            maker = self._makers.get(value)
            if maker is None or value in shared:
                taken[value] = None
            elif maker.results[0] not in entered:
                entered.add(maker.results[0])
                waiting += reversed(maker.operands)
                continue
            else:
                ordered[maker.results[0]] = maker
            waiting.pop()
        mine = [v for v in self.arguments if v in taken and v not in shared]
        every = (*mine, *(v for v in taken if v not in mine))
        text = self._text([*ordered.values()], every, given)
        return Part(text, every, len(mine), tuple(given))

    def _text(
        self, operations: Sequence[_Operation], taken: Sequence[str], given: Sequence[str]
    ) -> str:
        now = {value: f"%a{n}" for n, value in enumerate(taken)}
        types = [self._type_text(v) for v in taken], ", ".join(map(self._type_text, given))
        head = ", ".join(f"{now[v]}: {x}" for v, x in zip(taken, types[0], strict=True))
        lines = [f"func.func public @main({head}) -> ({types[1]}) {{"]
        for n, each in enumerate(operations):
            operands = ", ".join(now[v] for v in each.operands)
            count = len(each.results)
            now |= {v: f"%{n}#{k}" if count > 1 else f"%{n}" for k, v in enumerate(each.results)}
            lines.append(f"%{n}:{count} = {each.name}({operands}){each.rest}")
        lines.append(f'"func.return"({", ".join(now[v] for v in given)}) : ({types[1]}) -> ()')
        own = "\n".join([*lines, "}"])
        self._left_bytes -= len(own)
        if own not in self._texts:
            names, called = re.findall(r"@([\w.$-]+)", own)[1:], dict[str, str]()
            while names:
                if (name := names.pop()) not in called:
                    called[name] = self._functions[name]
                    names += re.findall(r"callee = @([\w.$-]+)", called[name])
            start = f"module @part attributes {{{self._attributes}}} {{"
            self._texts[own] = "\n".join([start, own, *called.values(), "}"])
            self._left_bytes -= len(self._texts[own])
        if self._left_bytes < 0:
            raise ValueError("its parts copy too much")
        return self._texts[own]

    def _type_text(self, value: str) -> str:
        shape, element = self.types[value]
        return f"tensor<{''.join(f'{n}x' for n in shape)}{element}>"


def _operation(line: str, now: Mapping[str, str]) -> _Operation:
    """An operation on values as they are called now; its ``rest`` is all behind its operands."""
    found = _OPERATION.fullmatch(line)
    if found is None:
        raise ValueError(f"an operation of another form: {line[:100]}")
    value, count, name, operands, rest, taken, several, single = found.groups()
    results = (value,) if value else ()
    if count:
        results = tuple(f"{value}#{k}" for k in range(int(count)))
    given = single if several is None else several
    return _Operation(
        name,
        tuple(now[each] for each in operands.split(", ") if each),
        f"{rest} : ({taken}) -> ({given})",
        results,
        tuple(each for each in given.split(", ") if each),
    )


def _type(text: str) -> tuple[tuple[int, ...], str]:
    found = _TYPE.fullmatch(text)
    if found is None:
        raise ValueError(f"a value of another type: {text[:100]}")
    return tuple(map(int, found[1].split("x")[:-1])), found[2]
