"""The campaign of kills, damages and prunings, at a small size."""

import json
import subprocess
import sys

import pytest

from tests.campaigns import publishing


@pytest.mark.slow
def test_no_follower_has_wrong_weights_while_publishers_are_killed_and_files_damaged():
    # In a process of its own: the campaign forks, and threads of this one may hold locks.
    command = [sys.executable, "-m", "tests.campaigns.publishing", "--seed", "7"]
    ran = subprocess.run(
        [*command, "--count", str(2 * len(publishing.FAULTS))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["trials"] == dict.fromkeys(publishing.FAULTS, 2)
    assert found["wrong"] == []
    assert not found["stuck"]
    assert found["counts"]["lasting served"] > 5
    assert found["counts"]["late served"] > 5
