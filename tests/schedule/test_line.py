"""The schedule of a line of steps: when it changes, and that it is the same in all processes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.schedule.adaptive import AdaptivePolicy, Position
from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.line import BEGINNING, ENOUGH, SAVE_COSTS, LineSchedule, Sizes
from adacheck_jax.schedule.waste import Costs, Schedule, restore_s

SIZES = Sizes(base_bytes=300_000_000, delta_bytes=10_000_000, deferred_bytes=50_000_000)
MEASURED = dict(zip(SAVE_COSTS, (0.1, 0.04, 0.08, 0.05, 0.4), strict=True))
NO_BUDGET = {"mtbf_s": 3600.0, "restore_budget_s": None, "most_deltas": 1000}


def measured(**costs):
    return [(name, seconds, 1) for name, seconds in {**MEASURED, **costs}.items()]


def line_of(policy, times=ENOUGH, **costs):
    line = LineSchedule(policy)
    for _ in range(times):
        line.add(measured(**costs))
    return line


def test_until_costs_are_known_it_is_twenty_deltas_a_base():
    line = line_of("auto", ENOUGH - 1)
    line.add([(name, 1.0, 1) for name in SAVE_COSTS if name != "base_write_s"])
    assert line.begin_lineage(SIZES) == ""
    assert line.longest_lineage == BEGINNING.base_every == 20
    line.add(measured())
    assert line.longest_lineage == 20  # it changes with a base alone
    assert line.begin_lineage(SIZES).startswith(f"schedule: a base each {line.longest_lineage} ")
    assert line.longest_lineage > 20
    assert line.begin_lineage(SIZES) == ""
    for count in (0, 1000):  # a number stays that number
        line = line_of(count)
        assert line.begin_lineage(SIZES) == ""
        assert line.longest_lineage == count


def test_what_was_not_measured_is_estimated_from_bytes():
    """1 s to read a base, 1 ms and 20 ms for each delta, a minute to restart, 2 s to begin."""
    costs = Costs(
        **MEASURED,
        restart_s=60.0,
        open_s=2.0,
        base_restore_s=1.0,
        replay_s=0.021,
        defer_blocking_s=0.004,
        further_write_s=0.005,
    )
    line = line_of(AdaptivePolicy(**NO_BUDGET))
    line.begin_lineage(SIZES)
    assert line.longest_lineage == best_schedule(costs, 3600.0, most_every=1).base_every


def test_where_a_delta_takes_long_to_write_its_replay_is_expected_to_take_a_quarter():
    line = line_of(AdaptivePolicy(1e9, 10.0), step_s=10.0, delta_write_s=2.0)
    line.begin_lineage(SIZES)
    assert line.longest_lineage == 12  # of 9 s, 3 for the base, and 0.5 for each


def test_a_restore_budget_is_kept():
    line = line_of(AdaptivePolicy(3600.0, 5.0), open_s=0.5, base_restore_s=1.0, replay_s=0.1)
    line.begin_lineage(SIZES)
    costs = Costs(**MEASURED, open_s=0.5, base_restore_s=1.0, replay_s=0.1)
    assert 3.5 < restore_s(costs, Schedule(line.longest_lineage, 1)) <= 5.0


def test_saves_hold_several_steps_where_a_manager_asks_and_no_more_than_memory_has_room_for():
    policy = AdaptivePolicy(**NO_BUDGET)
    line = line_of(policy)
    line.note(4, 2)
    assert policy._position == Position(4, 2, BEGINNING)
    line.note(None)
    assert policy.should_save(Position(7, 0, BEGINNING), [], context=None)  # now it is asked
    told = line.begin_lineage(SIZES)
    assert "a save each 6 steps" in told  # five of them deferred, of 10 MB each
    line.note(4, 2)
    assert policy._position.schedule == Schedule(line.longest_lineage, 6)


def test_the_log_says_which_failures_memory_survives_and_at_what_cost():
    policy = AdaptivePolicy(3600.0, storage_mtbf_s=90_000.0)
    line = line_of(policy)
    told = line.begin_lineage(SIZES)
    rates = "a failure each 3600 s, of which memory survives all but one each 90000 s at 3 s for a"
    assert f"with {rates} recovery, " in told  # 2 s, and a base at 300 MB/s
    line = line_of(policy, recover_s=4.5)
    assert "at 4.5 s for a recovery" in line.begin_lineage(SIZES)  # as measured
    assert "memory" not in line_of("auto").begin_lineage(SIZES)


def test_what_one_more_delta_takes_is_told_apart_from_what_one_takes():
    line = line_of("auto")
    line.add([("delta_write_s", 0.45, 5)])
    assert line._costs(SIZES).further_write_s == pytest.approx(0.1)
    assert line._costs(SIZES).delta_write_s == 0.05
    line.add([("delta_write_s", 0.01, 5), ("delta_write_s", 0.01, 5)])
    assert line._costs(SIZES).further_write_s == 0.0


names = st.sampled_from([field.name for field in dataclasses.fields(Costs)])
seconds = st.floats(1e-3, 100.0)
exchanged = st.lists(
    st.one_of(
        st.tuples(names, seconds, st.just(1)),
        st.tuples(st.just("delta_write_s"), seconds, st.integers(2, 9)),
        st.just("base"),
    ),
    max_size=40,
)


@given(exchanged, st.lists(st.integers(1, 40), max_size=5), st.booleans())
def test_decisions_are_a_function_of_what_was_exchanged(events, cuts, is_asked):
    """One process gets measurements one by one, the other as they come, but before each base."""
    found = []
    for together in (False, True):
        policy, decisions, waiting = AdaptivePolicy(1800.0, 30.0), [], []
        line = LineSchedule(policy)
        if is_asked:
            policy.should_save(Position(0, 0, BEGINNING), [], context=None)
        line.add(measured() * ENOUGH)
        for number, event in enumerate(events):
            if event != "base":
                waiting.append(event)
            if event == "base" or not together or number in cuts:
                line.add(waiting)
                waiting = []
            if event == "base":
                decisions.append((line.begin_lineage(SIZES), line.longest_lineage))
        found.append(decisions)
    assert found[0] == found[1]
