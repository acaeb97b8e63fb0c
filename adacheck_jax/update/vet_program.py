"""Parses the module of an exported program as a restore would, alone in a process, from its input.

The parser is native code, which some crafted bytes end together with its process. The exit status
tells: 0 if it got through, also where it refused the module, since it will do so again.

It imports as little as it can, since a restore may wait for it: jaxlib alone takes half the time of
jax. What that has under other names in another version is had from jax.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from jaxlib.mlir import ir


def parse(module: bytes) -> None:
    """Goes through everything native that reads a program before it is compiled.

    Args:
        module: what ``jax.export`` keeps of a program: a portable artifact of StableHLO.
    """
    with _context():
        found = _deserialize(module)
        text = io.StringIO()
        found.operation.print(file=text)
        ir.Module.parse(text.getvalue())


def _deserialize(module: bytes) -> Any:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    return _jax.mlir.deserialize_portable_artifact(module)


def _context() -> Any:
    """What jax parses programs in."""
    try:
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

        context = _Context()
        registry = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        mhlo.register_mhlo_dialect(context)
        for dialect in (chlo, mpmd, sdy, stablehlo):
            dialect.register_dialect(context)
        return context
    except (ImportError, AttributeError):
        from jax.interpreters import mlir

        return mlir.make_ir_context()


class _Context(ir.Context):
    """One that does not load every dialect there is."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


if __name__ == "__main__":
    with contextlib.suppress(Exception):
        parse(sys.stdin.buffer.read())
        print("parsed")
