"""A script that parses the module of an exported program, read from its standard input.

The parser is native code, and some crafted bytes end its process. The exit status is 0 if the
parser returned, even with an error, which it will raise again for the restore.

A restore may wait for this process, so it imports native modules of jaxlib alone, which takes half
as long as jax. If a release of jaxlib has other names, jax is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from jaxlib.mlir import ir


def parse(module: bytes) -> None:
    """Run all native code that reads a program, a portable artifact, before parts are compiled."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    with _context():
        whole = _jax.mlir.deserialize_portable_artifact(module)
        looked_at = ir.Module.parse(str(whole.operation.get_asm()))
        # As it is cut into parts.
        cut = looked_at.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        ir.Module.parse(str(cut))


def _context() -> Any:
    """An MLIR context with the dialects that jax uses."""
    try:
        libs = importlib.import_module("jaxlib.mlir._mlir_libs")
        names = ("_jax_mlir_ext", "_mlirHlo", "_sdy", "_sdyMpmd", "_chlo", "_stablehlo")
        jax_ext, hlo, *others = (
            importlib.import_module(f"{libs.__name__}.{name}") for name in names
        )
        context = _VettingContext()
        registry = ir.DialectRegistry()
        jax_ext.register_dialects(registry)
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        hlo.register_mhlo_dialect(context)
        for each in others:
            each.register_dialect(context)
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
