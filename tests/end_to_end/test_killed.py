"""A process of several that is killed in a save."""

from __future__ import annotations

import pytest

from tests.campaigns import killed


@pytest.mark.slow
def test_the_others_learn_of_a_process_that_is_killed(tmp_path):
    """Also where JAX does not tell them; the step before restores on any number of processes."""
    cells = killed.cells("small")
    seen = {cell: killed.run(cell, tmp_path) for cell in cells}
    for cell, (survivor,) in seen.items():
        assert survivor.what == ("error" if cell.victim else "ended by JAX"), (cell, survivor)
    places = [tmp_path / cell.name for cell in cells]
    assert killed.restored(places, 1, tmp_path) == len(places)
    assert killed.restored(places, 4, tmp_path) == len(places)
