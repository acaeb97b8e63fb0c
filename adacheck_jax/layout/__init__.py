"""Layouts: rules that give the leaves of a state other paths and other shapes.

A rule names leaves of the params by a pattern and an operation (rename, stack, unstack, fuse,
split, pad, strip, repeat, average, transpose, cast). :mod:`~adacheck_jax.layout.plan` finds all
leaves that it concerns, in the params and in whatever the optimizer keeps for them, and gives
operations on whole leaves. Pure: no array is touched here, and none is known but by its shape and
data type. Begin with :mod:`~adacheck_jax.layout.rules`; this module gives its names to users.
"""

from adacheck_jax.layout.rules import (
    Rule,
    average,
    cast,
    fuse,
    pad,
    rename,
    repeat,
    scan_layers,
    split,
    stack,
    strip,
    transpose,
    unroll_layers,
    unstack,
)
from adacheck_jax.layout.rules_file import read_rules

__all__ = [
    "Rule",
    "average",
    "cast",
    "fuse",
    "pad",
    "read_rules",
    "rename",
    "repeat",
    "scan_layers",
    "split",
    "stack",
    "strip",
    "transpose",
    "unroll_layers",
    "unstack",
]
