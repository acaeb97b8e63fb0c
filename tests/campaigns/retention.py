"""Runs the state machines of tests/faults/test_retention_machine.py for as long as is wanted.

python -m tests.campaigns.retention --examples 500
python -m tests.campaigns.retention --examples 100 --store gcs
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from tests import object_stores
from tests.campaigns import command
from tests.faults import test_retention_machine as machines

RULES = 12


def run(machine: type[machines.Retention], examples: int, seed: int) -> tuple[int, str]:
    """Runs random examples of a machine.

    Returns:
        How many were run, and the traceback of the first that failed.
    """
    count = 0

    class Counted(machine):
        def __init__(self) -> None:
            nonlocal count
            count += 1
            if count % 10 == 0:
                print(f"{machine.__name__}: {count} of {examples}", file=sys.stderr, flush=True)
            super().__init__()

    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        # To shrink what fails takes longer than to find it.
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(Counted), settings=settings)
    except Exception:
        return count, traceback.format_exc()
    return count, ""


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, seed=0, json=False, store=None)
    parser.add_argument("--examples", type=int, default=100, help="of each machine")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        chosen: list[type[machines.Retention]] = [
            machines.Retention,
            machines.RetentionOfReferences,
        ]
        if options.store:
            served = object_stores.served(options.store)
            machines.RetentionInStore.url = stack.enter_context(served)
            chosen = [machines.RetentionInStore]
        found = [run(machine, options.examples, options.seed) for machine in chosen]
    failures = [failure for _, failure in found if failure]
    result = {"examples": sum(count for count, _ in found), "rules": RULES, "failures": failures}
    text = "" if options.json else f"{result['examples']} examples"
    return command.finish(result, failures, text)


if __name__ == "__main__":
    sys.exit(main())
