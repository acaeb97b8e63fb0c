"""A run that is killed at any moment gets from memory what it had there, exact."""

import json

import pytest

from tests.faults.test_crashes import printed_by


# A few kills here; `python -m tests.campaigns.shadow_kills` makes hundreds.
@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(8, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "records",
    [
        pytest.param([], id="state", marks=pytest.mark.campaign),
        pytest.param(["--records"], id="records"),
    ],
)
def test_a_run_that_is_killed_at_random_recovers_what_its_file_held(tmp_path, records, kills):
    directory = tmp_path / "run"
    printed = printed_by(
        *("-m", "tests.campaigns.shadow_kills", "--count", kills, "--seed", 3, "--json"),
        *("--directory", directory, *records),
    )
    found = json.loads(printed)
    assert (found["wrong"], found["lost"], found["failures"]) == ([], [], [])
    assert found["kills"] == kills
    assert found["recovered"] >= kills // 3
    if kills > 4:
        assert found["in_fold"] >= 1
