"""Parses programs one after the other, each told by its length; answers each with one byte."""

from __future__ import annotations

import contextlib
import sys

from adacheck_jax.update import vet_program


def main() -> None:
    """Goes on until its input ends, or a program ends it."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while True:
        target.write(b".")
        target.flush()
        length = source.read(4)
        if not length:
            return
        with contextlib.suppress(Exception):
            vet_program.parse(source.read(int.from_bytes(length, "little")))


if __name__ == "__main__":
    main()
