"""Parses an exported program as a restore would, alone in a process: run with it on its input.

The parser is native code, which some crafted bytes end together with its process. The exit status
tells: 0 if it got through, also where it refused the program, since it will do so again.
"""

from __future__ import annotations

import contextlib
import sys

import jax.export
from jax.interpreters import mlir
from jaxlib.mlir import ir


def parse(data: bytes) -> None:
    """Goes through everything native that reads a program before it is compiled."""
    exported = jax.export.deserialize(bytearray(data))
    with mlir.make_ir_context():
        ir.Module.parse(exported.mlir_module())


if __name__ == "__main__":
    with contextlib.suppress(Exception):
        parse(sys.stdin.buffer.read())
