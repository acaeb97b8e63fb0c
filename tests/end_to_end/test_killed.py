"""A process of several that is killed in a save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.campaigns import killed


@pytest.mark.slow
def test_the_others_learn_of_a_process_that_is_killed(tmp_path):
    """Also where JAX does not tell them; the step before restores on another number of processes.

    `python -m tests.campaigns.killed --size full` restores on several numbers of them.
    """
    cells = killed.cells("small")
    with ThreadPoolExecutor(len(cells)) as pool:  # they wait, most of the time
        seen = [*pool.map(lambda cell: killed.run(cell, tmp_path), cells)]
    for cell, (survivor,) in zip(cells, seen, strict=True):
        # With process 0 its service ends: JAX ends the others, or a call of theirs fails before.
        expected = {"error"} if cell.victim else {"ended by JAX", "error of the service"}
        assert survivor.what in expected, (cell, survivor)
    places = [tmp_path / cell.name for cell in cells]
    assert killed.restored(places, 1, tmp_path) == len(places)
