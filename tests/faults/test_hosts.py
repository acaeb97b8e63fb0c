"""A run whose hosts are killed recovers what the memory of those that are left holds, exact."""

import json

import pytest

from tests.faults.test_crashes import printed_by


# A few kills here; `python -m tests.campaigns.hosts` makes hundreds.
@pytest.mark.slow
def test_hosts_that_are_killed_at_random_recover_what_their_memory_held(tmp_path):
    printed = printed_by(
        *("-m", "tests.campaigns.hosts", "--count", 4, "--seed", 2, "--json"),
        *("--directory", tmp_path / "run"),
    )
    found = json.loads(printed)
    assert (found["wrong"], found["lost"], found["failures"]) == ([], [], [])
    assert sum(found["kills"].values()) == 4
    assert found["recovered"] >= 2
