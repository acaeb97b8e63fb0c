"""A small coverage-guided fuzzer, which needs no package.

An input that reaches new code of the library joins the population that later inputs are made from.
Lines are traced for some inputs only, since tracing costs more than what it looks at. What an
input may not do: raise anything but an ``AdaCheckError``, take longer than ``SECONDS`` or more
memory than ``MEMORY_BYTES`` above what the process had at the start.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import adacheck_jax
from adacheck_jax.errors import AdaCheckError

SECONDS = 2.0
"""Of CPU time: how long an input takes by the clock, other jobs of the machine decide."""
MEMORY_BYTES = 2 << 30
"""Of addresses, of which each thread takes some, too: native code without them may hang."""
TRACED_BYTES = 32 << 20
"""What Python objects of one input may take at most, looked at where lines are traced."""
_TRACED_ONE_IN = 32
_PROGRESS_EVERY = 10_000
_PACKAGE = str(Path(adacheck_jax.__file__).parent)


class Target(Protocol):
    """What is fuzzed: how inputs are made, and what is done with one."""

    def seeds(self) -> list[Any]: ...

    def mutate(self, rng: random.Random, population: list[Any]) -> Any: ...

    def run(self, case: Any) -> None: ...

    def save(self, case: Any, path: Path) -> None: ...


class Hang(BaseException):
    """An input took too long; no ``except Exception`` may swallow it."""


def run(target: Target, count: int, seed: int, *, keep: Path | None = None) -> dict[str, Any]:
    """Runs that many inputs.

    Args:
        target: what is fuzzed.
        count: of inputs.
        seed: of the random numbers; the same seed gives the same inputs.
        keep: where inputs that fail are written, None for nowhere.

    Returns:
        Counts, and for each different failure its traceback.
    """
    rng = random.Random(seed)
    population = target.seeds()
    covered: set[tuple[str, int, int]] = set()
    outcomes: dict[str, int] = {}
    failures: dict[str, str] = {}
    signal.signal(signal.SIGPROF, _too_long)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    try:
        seeds = len(population)
        for number in range(count + seeds):
            if number and number % _PROGRESS_EVERY == 0:
                print(f"{number} of {count + seeds} inputs", file=sys.stderr, flush=True)
            is_seed = number < seeds
            case = population[number] if is_seed else target.mutate(rng, population)
            is_traced = is_seed or number % _TRACED_ONE_IN == 0
            found: set[tuple[str, int, int]] = set()
            outcome, problem = _one(target, case, found if is_traced else None)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if problem and outcome not in failures:
                failures[outcome] = problem
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    target.save(case, keep / f"failure-{len(failures)}")
            if found - covered and not is_seed and not problem:
                population.append(case)
            covered |= found
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    seconds, cpu_seconds = time.monotonic() - start_s, time.process_time() - start_cpu_s
    return {
        "inputs": sum(outcomes.values()),
        "seconds": round(seconds, 1),
        "per_second": round(sum(outcomes.values()) / seconds),
        "per_cpu_second": round(sum(outcomes.values()) / cpu_seconds),
        "population": len(population),
        "edges": len(covered),
        "outcomes": dict(sorted(outcomes.items(), key=lambda each: -each[1])),
        "failures": failures,
    }


def _one(target: Target, case: Any, found: set[Any] | None) -> tuple[str, str]:
    """Runs one input; returns how it ended, and a traceback if it must not end so."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS * (5 if found is not None else 1))
    try:
        if found is None:
            target.run(case)
        else:
            with _Traced(found):
                target.run(case)
    except AdaCheckError as error:
        return type(error).__name__, ""
    except (Exception, Hang) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        return where, traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted", ""


def _too_long(*_: Any) -> None:
    raise Hang(f"longer than {SECONDS} s")


class _Traced:
    """Notes which lines of the library follow which, and how much Python objects take."""

    def __init__(self, found: set[tuple[str, int, int]]) -> None:
        self._found = found

    def __enter__(self) -> None:
        tracemalloc.start()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if peak_bytes > TRACED_BYTES:
            raise MemoryError(f"{peak_bytes} bytes of objects for one small input")

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            return None
        previous = [frame.f_lineno]

        def line(frame: FrameType, event: str, _: Any) -> Any:
            self._found.add((name, previous[0], frame.f_lineno))
            previous[0] = frame.f_lineno
            return line

        return line


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The options of a fuzz target's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    return parser.parse_args(arguments)


def main(target: Target) -> None:
    """The command line of a fuzz target."""
    options = options_of(sys.argv[1:])
    result = run(target, options.count, options.seed, keep=options.keep)
    if options.json:
        print(json.dumps(result))
        sys.exit(bool(result["failures"]))
    failures = result.pop("failures")
    for key, value in result.items():
        print(f"{key}: {value}")
    for each in failures.values():
        print(each)
    sys.exit(bool(failures))
