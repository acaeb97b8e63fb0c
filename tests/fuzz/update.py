"""Fuzzes the loader of exported updates: ``python -m tests.fuzz.update --count 10000``.

An input is a program whose bytes were changed, with the digest that fits. It is loaded, and if that
is allowed traced with the leaves that it was made for. What parses it is native code, which some
inputs end: each batch has a process of its own, and those that were ended are counted, not failures
of this library (see SECURITY.md).
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from adacheck_jax import replay
from adacheck_jax.manifest import Update
from tests.fuzz import engine

CORPUS = Path(__file__).parent / "corpus" / "update"
LEAVES = [[jax.ShapeDtypeStruct((4, 2), "float32")]] * 3 + [[]]
"""What the programs of the corpus take: params, optimizer state, record and nothing else."""


class Updates:
    """The target."""

    def __init__(self) -> None:
        self._last = Path(tempfile.gettempdir()) / "adacheck-fuzz-last.stablehlo"

    def seeds(self) -> list[Any]:
        """The committed corpus."""
        return [path.read_bytes() for path in sorted(CORPUS.glob("*.stablehlo"))]

    def save(self, case: Any, path: Path) -> None:
        """Writes an input."""
        path.with_suffix(".stablehlo").write_bytes(case)

    def mutate(self, rng: random.Random, population: list[Any]) -> Any:
        """Changes a few bytes of one input."""
        data = bytearray(rng.choice(population))
        for _ in range(rng.choice([1, 1, 2, 4, 16])):
            at = rng.randrange(len(data))
            kind = rng.randrange(5)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice([0, 1, 127, 128, 255])
            elif kind == 2:
                length = rng.randint(1, 32)
                other = rng.choice(population)
                start = rng.randrange(len(other))
                data[at : at + length] = other[start : start + length]
            elif kind == 3:
                data[at : at + 4] = rng.choice([0, 2**31, 2**32 - 1, len(data)]).to_bytes(
                    4, "little"
                )
            else:
                del data[at : at + rng.choice([1, 2, 64])]
        return bytes(data) or b"\0"

    def run(self, case: Any) -> None:
        """Loads and traces."""
        self._last.write_bytes(case)  # for the post-mortem of a process that ends
        digest = hashlib.sha256(case).hexdigest()
        update = Update((), (), (), (), 0, (), (), "", "", {"cpu": digest}, "0.10.2")
        function = replay.load(case, update, "update")
        jax.eval_shape(function, *LEAVES)


_BATCH = 500


def main() -> None:
    """Runs batches in processes of their own; with ``--alone`` one in this process."""
    if "--alone" in sys.argv:
        sys.argv.remove("--alone")
        engine.main(Updates())
    options = engine.options_of(sys.argv[1:])
    ended, failed = 0, False
    for number in range(0, options.count, _BATCH):
        count = min(_BATCH, options.count - number)
        arguments = ["--count", str(count), "--seed", str(options.seed + number)]
        if options.keep is not None:
            arguments += ["--keep", str(options.keep)]
        command = [sys.executable, "-m", "tests.fuzz.update", "--alone", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            ended += 1
            print(f"seed {options.seed + number}: ended by signal {-done.returncode}")
            continue
        print(done.stdout)
        failed = failed or done.returncode != 0
    print(f"batches ended by the parser: {ended}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
