"""Leaves that change their place, data type or structure in mid-run: each step is saved."""

import itertools

import pytest

from tests import support
from tests.campaigns import places
from tests.campaigns.places import Plan, Step


def stays(optimizer, options, *where, each=3):
    """A run that saves some steps at each of some places."""
    steps = [
        Step("" if n else "place", place, False, False, True, "")
        for place, n in itertools.product(where, range(each))
    ]
    return Plan(options, optimizer, tuple(steps))


ROUTES = {
    "to numpy and back": ("one", "numpy", "one"),
    "to other devices": ("eight", "eight turned", "four", "another"),
    "to another order": ("four", "four turned", "four"),
}


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("options", ["auto", "full", "sample", "large"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_change_of_place_costs_one_base(tmp_path, route, options):
    outcome = places.run(stays("adamw", options, *ROUTES[route]), tmp_path)
    assert not outcome.problems
    # Of a large state in numpy no sample is taken, and no second copy is kept.
    kinds = "BDD" if options == "large" else "BRR"
    wanted = ["BRR" if place != "numpy" else kinds for place in ROUTES[route]]
    assert outcome.kinds == "".join(wanted)


@pytest.mark.first(1, slow=4)
@pytest.mark.parametrize("options", ["auto", "sample"])
@pytest.mark.parametrize("is_small", [True, False])
def test_some_leaves_on_other_devices_cost_no_step(tmp_path, is_small, options):
    """The programs that take samples are compiled for the devices of the step before."""
    moves = [("place", "one"), ("leaf", "")] if is_small else [("place", "one")]
    moves += [("", ""), ("", ""), ("", ""), ("some leaves", "another"), ("", "")]
    moves += [("some leaves", "four"), ("", ""), ("some leaves", "one"), ("", "")]
    steps = tuple(Step(*each, False, False, True, "") for each in moves)
    run = places.Run(Plan(options, "adamw", steps), tmp_path)
    for number, step in enumerate(steps, 1):
        run.step(number, step)
        support.wait_for_compilers()
    outcome = run.verify()
    assert not outcome.problems
    assert outcome.saved == len(steps)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("options", ["auto", "full", "bits"])
def test_a_change_of_memory_costs_nothing(tmp_path, optimizer, options):
    route = ("eight", "eight pinned", "eight unpinned", "eight")
    outcome = places.run(stays(optimizer, options, *route, each=2), tmp_path)
    assert not outcome.problems
    assert outcome.kinds == "B" + ("D" if options == "bits" else "R") * 7


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("seed", [1, 4, 10, 109, 6, 302, *range(20, 60)])
def test_every_step_of_a_run_that_changes_at_any_time_is_restored(tmp_path, seed):
    outcome = places.run(Plan.drawn(seed, 12 if seed in (1, 4) else 24), tmp_path)
    assert not outcome.problems
    assert outcome.saved


@pytest.mark.slow
def test_a_state_in_numpy_whose_update_adds_up_elements_is_saved(tmp_path):
    """No device has it, so no device takes a sample of the sums' results."""
    outcome = places.run(stays("muon", "auto", "numpy", "one", each=2), tmp_path)
    assert not outcome.problems
    assert outcome.saved == 4
