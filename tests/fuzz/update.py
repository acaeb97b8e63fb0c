"""Fuzzes the loader of exported updates: ``python -m tests.fuzz.update --count 10000``.

An input is a program whose bytes were changed, with the digest that fits. It is loaded, and if that
is allowed traced with the leaves that it was made for, and cut into parts, which are compiled. What
native code parses it first lies in a
process of its own, as for a restore, but one for many inputs; if the loading process ends all the
same, or hangs, that is a failure. Each batch has a process of its own, so that it is told of.
"""

from __future__ import annotations

import collections
import faulthandler
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.export

from adacheck_jax.errors import FormatError
from adacheck_jax.format.manifest import Update
from adacheck_jax.update import exported_program, untrusted
from adacheck_jax.update import program as update_program
from adacheck_jax.update.compiling import cut_program
from tests.fuzz import engine

CORPUS = Path(__file__).parent / "corpus" / "update"


def leaves_of(exported: jax.export.Exported) -> list[list[jax.ShapeDtypeStruct]]:
    """What a program of the corpus takes: params, optimizer state, record and nothing else."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((4, 2), "float32", sharding=device)
    return [[leaf] * (4 if len(exported.in_avals) > 5 else 1)] * 3 + [[]]


class ParserEnded(FormatError):
    """The process that parses first was ended, or did not come to an end."""


class Updates:
    """The target."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._count, self.cut_count = directory, 0, 0
        # Threads begin before memory is limited, and no alarm comes while a module is imported.
        import scipy.linalg  # noqa: F401  as JAX does where it first compiles an exported program

        self._switches = update_program.switches(1)

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
        self._count += 1  # for the post-mortem of a process that ends
        (self._directory / "count").write_text(str(self._count))
        (self._directory / "last.stablehlo").write_bytes(case)
        digest = hashlib.sha256(case).hexdigest()
        untrusted._verdicts.clear()
        faulthandler.dump_traceback_later(_INPUT_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_PROF, 0)  # a parser that hangs is this library's to end
        why = untrusted._verdicts[digest] = untrusted._verdict_of(case)
        signal.setitimer(signal.ITIMER_PROF, engine.SECONDS)
        update = Update(
            (), (), (), (), (0,), ((0, 0, 0, 0),), (), (), "", "", {"cpu": digest}, "0.10.2", True
        )
        try:
            exported = exported_program.vetted(case, update, "update")
        except FormatError as error:
            raise ParserEnded if why else error from error
        leaves = leaves_of(exported)
        jax.eval_shape(exported_program.function_of(exported, "update"), *leaves, self._switches)
        if cut_program.compiled(exported, leaves, self._switches):
            self.cut_count += 1
            (self._directory / "cuts").write_text(str(self.cut_count))


class Parser:
    """Does what :mod:`adacheck_jax.update.untrusted` does, in one process while that lives."""

    def __init__(self) -> None:
        self._process: Any = None

    def tried(self, data: bytes) -> str:
        """Takes the place of ``untrusted._tried``."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz.parser"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
            assert self._process.stdout.read(1)  # it is there
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _PARSE_SECONDS)[0]:
            self._process.kill()
            return self._end("takes the parser too long")
        if os.read(self._process.stdout.fileno(), 1):
            return ""
        return self._end(f"ends the parser by signal {-self._process.wait()}")

    def _end(self, why: str) -> str:
        self._process.wait()
        self._process = None
        return why


_PARSE_SECONDS = 5.0
_BATCH = 2000
_BATCH_SECONDS = 600.0
"""Native code is not interrupted by the alarm of one input."""
_INPUT_SECONDS = 100.0
"""Native code that takes longer ends its process, which tells where it stood."""


def _run_batch(count: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """Runs inputs in a process of their own.

    Returns:
        What it found; or ``ended``, why the process ended without a word, and at which input.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.fuzz.update", "--alone", directory, "--json"]
        command += ["--count", str(count), "--seed", str(seed)]
        if keep is not None:
            command += ["--keep", str(keep)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                check=False,
                timeout=_BATCH_SECONDS,
                env={**os.environ, "XDG_CACHE_HOME": directory},  # of what has parsed
            )
        except subprocess.TimeoutExpired:
            why = "hang"
        else:
            if done.stdout:
                return json.loads(done.stdout)
            why = f"signal {-done.returncode}"
        place = Path(directory) / "count"
        if why == "signal -1" or not place.exists():  # an exception of the fuzzer's own
            raise SystemExit(f"seed {seed}: {why}: {done.stderr.decode(errors='replace')[-3000:]}")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(directory) / "last.stablehlo", keep / f"ended-{seed}.stablehlo")
        told = done.stderr.decode(errors="replace")[-3000:] if why != "hang" else ""
        return {"inputs": int(place.read_text()), "ended": f"{why} {told}".rstrip()}


def main() -> None:
    """Runs batches in processes of their own; with ``--alone`` one in this process."""
    if sys.argv[1:2] == ["--alone"]:
        directory = Path(sys.argv.pop(2))
        del sys.argv[1]
        untrusted._tried = Parser().tried
        engine.main(Updates(directory))
    options = engine.options_of(sys.argv[1:])
    outcomes: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    ended: list[dict[str, Any]] = []
    tried, seed = 0, options.seed * options.count  # other inputs for another seed
    while tried < options.count:
        found = _run_batch(min(_BATCH, options.count - tried), seed, options.keep)
        tried += found["inputs"]
        if "ended" in found:
            ended.append({"seed": seed, **found})
        else:
            outcomes.update(found["outcomes"])
            failures.update(found["failures"])
        print(f"{tried} of {options.count} inputs", file=sys.stderr, flush=True)
        seed += 1
    result = {"inputs": tried, "outcomes": outcomes, "failures": failures, "ended": ended}
    if options.json:
        print(json.dumps(result))
    else:
        for key in ("inputs", "outcomes", "ended"):
            print(f"{key}: {result[key]}")
        print(*failures.values(), sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
