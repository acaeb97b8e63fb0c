"""A process of several that is killed in a save."""

from __future__ import annotations

import pytest

from tests.campaigns import killed


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("number", range(2))
def test_the_others_learn_of_a_process_that_is_killed(tmp_path, number):
    """Also where JAX does not tell them; the step before restores on another number of processes.

    `python -m tests.campaigns.killed --size full` restores on several numbers of them.
    """
    cell = killed.cells("small")[number]
    (survivor,) = killed.run(cell, tmp_path)
    # With process 0 its service ends: JAX ends the others, or a call of theirs fails before.
    expected = {"error"} if cell.victim else {"ended by JAX", "error of the service"}
    assert survivor.what in expected, survivor
    assert killed.restored([tmp_path / cell.name], 1, tmp_path) == 1
