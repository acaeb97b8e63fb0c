"""A script that parses the module of an exported program, read from its standard input.

The parser is native code, and some crafted bytes end its process. The exit status is 0 if the
parser returned, even with an error, which it will raise again for the restore.

A restore may wait for this process, so it imports jaxlib alone, in half the time of jax. If a
release of jaxlib has other names, jax is imported.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from jaxlib.mlir import ir


def parse(module: bytes) -> None:
    """Run all native code that reads a program, a portable artifact, before it is compiled."""
    with _context():
        found = _deserialize(module)
        text = io.StringIO()
        found.operation.print(file=text)
        ir.Module.parse(text.getvalue())


def _deserialize(module: bytes) -> Any:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    return _jax.mlir.deserialize_portable_artifact(module)


def _context() -> Any:
    """An MLIR context with the dialects that jax uses."""
    try:
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

        context = _VettingContext()
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


class _VettingContext(ir.Context):
    """A context that does not load every dialect."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


if __name__ == "__main__":
    with contextlib.suppress(Exception):
        parse(sys.stdin.buffer.read())
        print("parsed")
