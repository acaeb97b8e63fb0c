"""A compaction that is stopped or fails anywhere leaves the delta or the base, whole."""

import json

import pytest

from tests.campaigns import shim
from tests.faults.test_crashes import library, printed_by

__all__ = ["library"]


# A few of all operations here; `python -m tests.campaigns.compaction` tries every one of them.
@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("step", "modes"),
    [(6, ["stopped"]), (6, ["once"]), (6, ["full"]), (7, ["stopped", "once", "full"])],
)
def test_a_compaction_that_is_stopped_or_fails_at_any_call_harms_nothing(
    library, tmp_path, step, modes
):
    options = ("--directory", tmp_path, "--step", step, "--stride", 37)
    printed = printed_by(
        *("-m", "tests.campaigns.compaction", *modes, *options), variables=shim.loading(library)
    )
    found = json.loads(printed.splitlines()[-1])["modes"]
    for mode in modes:
        assert found[mode]["problems"] == []
        assert found[mode]["is_whole"]
        assert found[mode]["tried"] >= 4
        assert 0 < found[mode]["had_base"] < found[mode]["tried"]
