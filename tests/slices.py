"""One of several slices of the chosen tests, so that a series of runs makes all of them.

Besides the tests that are marked as slow those wait for their slice that are spare, as
:mod:`tests.campaigns.executed` has found.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

SPARE = Path(__file__).parent / "spare.txt"
"""Names of spare tests, a line each."""
MEASURED = "ADACHECK_EXECUTED"
"""Environment variable with the directory into which measured tests write; all of them run then."""


class Slice:
    """Runs one slice of the tests that marks have chosen.

    A test is in the slice that its name falls into, wherever it stands and whatever else is chosen.

    Args:
        given: ``K/N``: slice ``K`` modulo ``N`` of ``N`` slices.

    Raises:
        pytest.UsageError: it is not two numbers, the second one positive.
    """

    def __init__(self, given: str) -> None:
        number, _, count = given.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(count)):
            raise pytest.UsageError(f"--slice: expected K/N, as 3/8, found {given!r}")
        self.number, self.count = int(number) % int(count), int(count)

    def has(self, name: str) -> bool:
        """True if the test of this name is in the slice."""
        return zlib.crc32(name.encode()) % self.count == self.number

    @pytest.hookimpl(trylast=True)  # behind `covering` and `first`, which need all cases of a test
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselects the tests of other slices."""
        others = [item for item in items if not self.has(item.nodeid)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if self.has(item.nodeid)]
