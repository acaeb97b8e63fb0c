"""Rules: a pattern of leaf paths, the operation on what matches, and the paths of the results.

Paths are those inside a tree of params, like ``block_3/attention/kernel``. A rule is applied to the
params and to every tree that the optimizer keeps for them. A pattern that begins with ``/`` is the
whole path of leaves elsewhere in the state (``/batch_stats/block_{i}/{rest...}``). Names in braces
stand for what they match: ``{i}`` a part of one segment, ``{rest...}`` any number of segments, at
least one. The same name twice has to match the same text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.layout import operations
from adacheck_jax.layout.operations import Kind, Operation

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


Making = Callable[[Sequence[Kind]], Operation | None]
"""Makes the operation on some leaves, when their shapes are known; None to keep them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule; the functions of this module make them.

    Attributes:
        name: name of the operation.
        sources: patterns of the leaves that it takes.
        results: patterns of the leaves that it gives.
        making: makes the operation.
        counts_sources: name in braces that numbers the leaves that it takes, from 0.
        counts_results: name in braces that numbers the leaves that it gives, from 0.
        trees: paths of the trees that it is applied to, ``"params"`` for the trained params; None
            for the params and all that the optimizer keeps for them.

    Raises:
        ValueError: a pattern lacks a name, or has one that the other side does not know.
    """

    name: str
    sources: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    making: Making
    counts_sources: str | None = None
    counts_results: str | None = None
    trees: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        shared = self.sources[0].names - {self.counts_sources}
        for pattern in (*self.sources, *self.results):
            counted = self.counts_sources if pattern in self.sources else self.counts_results
            wanted = shared | ({counted} if counted else frozenset())
            if pattern.names != wanted:
                raise ValueError(
                    f"{self}: expected the names {_shown(wanted)} in {pattern.text!r}, found "
                    f"{_shown(pattern.names)}"
                )
        if len({pattern.text.startswith("/") for pattern in (*self.sources, *self.results)}) > 1:
            raise ValueError(f"{self}: expected '/' at the beginning of all paths, or of none")

    @property
    def is_anchored(self) -> bool:
        """True if its patterns are whole paths of the state."""
        return self.sources[0].text.startswith("/")

    def __str__(self) -> str:
        sources, results = (
            " + ".join(repr(pattern.text) for pattern in each)
            for each in (self.sources, self.results)
        )
        return f"{self.name} {sources}" + (f" to {results}" if results != sources else "")


def _shown(names: frozenset[str | None]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(map(str, names))) or "none"


Trees = Sequence[str] | None


def _one_to_one(
    name: str, source: str, to: str | None, made: Operation | None, trees: Trees
) -> Rule:
    taken, given = (Pattern(source),), (Pattern(source if to is None else to),)
    return Rule(name, taken, given, lambda _: made, trees=_trees(trees))


def _trees(trees: Trees) -> tuple[str, ...] | None:
    return None if trees is None else tuple(trees)


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"expected an integer for {name}, found {value!r}") from None


def _integers(name: str, values: Sequence[object]) -> tuple[int, ...]:
    return tuple(_integer(name, value) for value in values)


def rename(source: str, to: str, *, trees: Trees = None) -> Rule:
    """Give leaves another path.

    Args:
        source: pattern of the leaves.
        to: pattern of their new paths.
        trees: the trees that it is applied to; see :class:`Rule`. So for all rules.
    """
    return _one_to_one("rename", source, to, None, trees)


def stack(source: str, to: str, *, over: str = "i", axis: int = 0, trees: Trees = None) -> Rule:
    """Stack numbered leaves, as a scan over layers wants them.

    Args:
        source: pattern of the leaves; the name ``over`` in braces stands for their number, from 0.
        to: pattern of the stacked leaves.
        over: the name.
        axis: position of the new axis.
        trees: see :func:`rename`.
    """
    taken, given = (Pattern(source),), (Pattern(to),)
    made = operations.Stack(_integer("axis", axis))
    return Rule("stack", taken, given, lambda _: made, counts_sources=over, trees=_trees(trees))


def unstack(source: str, to: str, *, over: str = "i", axis: int = 0, trees: Trees = None) -> Rule:
    """Take stacked leaves apart: the inverse of :func:`stack`.

    Args:
        source: pattern of the stacked leaves.
        to: pattern of the results; the name ``over`` in braces stands for their number, from 0.
        over: the name.
        axis: position of the axis.
        trees: see :func:`rename`.
    """
    axis = _integer("axis", axis)

    def made(taken: Sequence[Kind]) -> Operation:
        operations.Unstack(0, axis).source_axes(len(taken[0].shape))  # the axis exists
        return operations.Unstack(taken[0].shape[axis], axis)

    taken, given = (Pattern(source),), (Pattern(to),)
    return Rule("unstack", taken, given, made, counts_results=over, trees=_trees(trees))


def fuse(
    sources: Sequence[str], to: str, *, axis: int = -1, groups: int = 1, trees: Trees = None
) -> Rule:
    """Join leaves along an axis, as q, k and v, or gate and up.

    Args:
        sources: patterns of the leaves, in order.
        to: pattern of the fused leaves.
        axis: the axis.
        groups: number of groups along the axis: with 2 the first half of each leaf comes first,
            then the second half of each (the heads of a tensor-parallel model).
        trees: see :func:`rename`.
    """
    made = operations.Fuse(_integer("axis", axis), _integer("groups", groups))
    taken = tuple(map(Pattern, _several(sources)))
    return Rule("fuse", taken, (Pattern(to),), lambda _: made, trees=_trees(trees))


def split(
    source: str,
    to: Sequence[str],
    *,
    axis: int = -1,
    sizes: Sequence[int] | None = None,
    groups: int = 1,
    trees: Trees = None,
) -> Rule:
    """Cut leaves along an axis: the inverse of :func:`fuse`.

    Args:
        source: pattern of the fused leaves.
        to: patterns of the parts, in order.
        axis: the axis.
        sizes: lengths of the parts along the axis; None for equal ones.
        groups: see :func:`fuse`.
        trees: see :func:`rename`.
    """
    given = tuple(map(Pattern, _several(to)))
    axis, groups = _integer("axis", axis), _integer("groups", groups)
    lengths = None if sizes is None else _integers("sizes", sizes)
    if lengths is not None and len(lengths) != len(given):
        raise ValueError(f"expected {len(given)} sizes, one for each part, found {[*lengths]}")

    def made(taken: Sequence[Kind]) -> Operation:
        operations.Unstack(0, axis).source_axes(len(taken[0].shape))  # the axis exists
        equal = (taken[0].shape[axis] // len(given),) * len(given)
        return operations.Split(axis, equal if lengths is None else lengths, groups)

    return Rule("split", (Pattern(source),), given, made, trees=_trees(trees))


def _several(paths: Sequence[str]) -> Sequence[str]:
    if isinstance(paths, str) or not paths:
        raise ValueError(f"expected a list of leaf paths, found {paths!r}")
    return paths


def pad(
    source: str, size: int, *, axis: int = 0, to: str | None = None, trees: Trees = None
) -> Rule:
    """Add zeros at the end of an axis, as rows of a vocabulary.

    Args:
        source: pattern of the leaves.
        size: length of the axis afterwards.
        axis: the axis.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`.
    """
    made = operations.Resize(_integer("axis", axis), _integer("size", size), is_longer=True)
    return _one_to_one("pad", source, to, made, trees)


def strip(
    source: str,
    size: int,
    *,
    axis: int = 0,
    lossy: bool = False,
    to: str | None = None,
    trees: Trees = None,
) -> Rule:
    """Cut off the end of an axis: the inverse of :func:`pad`.

    Args:
        source: pattern of the leaves.
        size: length of the axis afterwards.
        axis: the axis.
        lossy: True to cut off whatever is there; False refuses to lose other elements than zeros.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`.
    """
    made = operations.Resize(
        _integer("axis", axis), _integer("size", size), is_longer=False, is_lossy=lossy
    )
    return _one_to_one("strip", source, to, made, trees)


def repeat(
    source: str, count: int, *, axis: int = 0, to: str | None = None, trees: Trees = None
) -> Rule:
    """Copy leaves along a new axis, as one replica for each of several workers.

    Args:
        source: pattern of the leaves.
        count: number of copies.
        axis: position of the new axis.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`.
    """
    made = operations.Stack(_integer("axis", axis), _integer("count", count))
    return _one_to_one("repeat", source, to, made, trees)


def average(source: str, *, axis: int = 0, to: str | None = None, trees: Trees = None) -> Rule:
    """Take the mean along an axis, of replicas that drifted apart; exact to rounding.

    Args:
        source: pattern of the leaves.
        axis: position of the axis, which goes.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`.
    """
    return _one_to_one("average", source, to, operations.Average(_integer("axis", axis)), trees)


def transpose(
    source: str, axes: Sequence[int], *, to: str | None = None, trees: Trees = None
) -> Rule:
    """Put axes in another order.

    Args:
        source: pattern of the leaves.
        axes: for each axis of the result the axis of the leaf.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`.
    """
    made = operations.Transpose(_integers("axes", axes))
    return _one_to_one("transpose", source, to, made, trees)


def cast(
    source: str, dtype: object, *, lossy: bool = False, to: str | None = None, trees: Trees = None
) -> Rule:
    """Give elements another data type.

    Args:
        source: pattern of the leaves.
        dtype: the data type, or numpy's name of it.
        lossy: True to round elements; False refuses to change a value.
        to: pattern of their new paths; None to keep the paths.
        trees: see :func:`rename`; often ``["params"]``.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # pyright: ignore
    return _one_to_one("cast", source, to, operations.Cast(name, lossy), trees)


def scan_layers(unrolled: str, scanned: str, *, axis: int = 0) -> list[Rule]:
    """From layers in a Python loop to ``nn.scan`` (linen), or ``nnx.scan`` over one module.

    Args:
        unrolled: path of a layer among the params, with ``{i}`` for its number: ``"Block_{i}"`` in
            linen, ``"layers/{i}"`` for a list of nnx.
        scanned: path of the scanned module: ``"ScanBlock_0"``, ``"layers"``.
        axis: ``variable_axes={"params": axis}`` of the scan.

    Example:
        ``RestoreArgs(state, rules=layout.scan_layers("Block_{i}", "ScanBlock_0"))``
    """
    return [stack(f"{unrolled}/{{rest...}}", f"{scanned}/{{rest...}}", over="i", axis=axis)]


def unroll_layers(scanned: str, unrolled: str, *, axis: int = 0) -> list[Rule]:
    """From a scan over layers to layers in a Python loop: the inverse of :func:`scan_layers`.

    Args:
        scanned: path of the scanned module among the params.
        unrolled: path of a layer, with ``{i}`` for its number.
        axis: ``variable_axes={"params": axis}`` of the scan.
    """
    return [unstack(f"{scanned}/{{rest...}}", f"{unrolled}/{{rest...}}", over="i", axis=axis)]
