"""The step that the next delta follows, whatever was restored meanwhile."""

from __future__ import annotations

import pytest

from adacheck_jax.plan.which_parent import which_parent


@pytest.mark.parametrize(
    ("candidates", "counts", "expected"),
    [
        ([], (6,), None),
        ([(5,)], (6,), 0),
        ([(5,)], (9,), 0),  # no delta can follow it, and the plan says why
        ([(2,), (5,)], (6,), 1),  # step 2 was looked at
        ([(2,), (5,)], (3,), 0),  # the run went back to it
        ([(2,), (5,)], (5,), 1),  # saved again, with no update
        ([(2, 5), (5, 5)], (6, 5), 1),
        ([(2,), (5,)], (), 0),  # nothing counts: the restored one
    ],
)
def test_the_counters_tell_a_look_from_a_run_that_went_back(candidates, counts, expected):
    assert which_parent(candidates, counts) == expected
