"""The adaptive policy: running medians, and schedules that do not change back and forth."""

import dataclasses
import math
import random
import types

import pytest
from orbax.checkpoint.checkpoint_managers import SaveDecisionPolicy

from adacheck_jax.schedule.adaptive import (
    LEAST_DELTAS,
    WINDOW,
    AdaptivePolicy,
    Position,
    RunningCosts,
)
from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.waste import Costs, Schedule, restore_s, waste

ESTIMATE = Costs(0.1, 0.03, 0.08, 0.05, 0.4, 10.0, 0.4, 0.3, 0.02, 0.001)


def test_an_outlier_does_not_count_and_old_measurements_are_forgotten():
    running = RunningCosts()
    for seconds in (0.02, 0.021, 5.0):
        running.add("delta_blocking_s", seconds)
    assert running.costs(ESTIMATE) == dataclasses.replace(ESTIMATE, delta_blocking_s=0.021)
    for seconds in [9.0] * WINDOW + [1.0] * (WINDOW // 2 + 1):
        running.add("replay_s", seconds)
    assert running.costs(ESTIMATE).replay_s == 1.0


@pytest.mark.parametrize(("name", "value"), [("delta_s", 1.0), ("step_s", 0.0), ("replay_s", -1.0)])
def test_an_impossible_measurement_is_refused(name, value):
    running = RunningCosts()
    with pytest.raises(ValueError, match="expected"):
        running.add(name, value)
    assert running.costs(ESTIMATE) == ESTIMATE


@pytest.mark.parametrize("budget_s", [None, 1.2])
def test_noise_changes_nothing(budget_s):
    draw, running = random.Random(0), RunningCosts()
    policy, used = AdaptivePolicy(3 * 3600.0, budget_s, most_deltas=1000), []
    for _ in range(30):
        for field in dataclasses.fields(Costs):
            noise = draw.lognormvariate(0, 0.1)
            running.add(field.name, getattr(ESTIMATE, field.name) * noise)
        used.append(policy.next(running.costs(ESTIMATE), used[-1] if used else None))
    assert len({*used[5:]}) == 1


def test_a_storage_that_becomes_slow_changes_the_schedule():
    policy, slow = (
        AdaptivePolicy(3600.0, most_deltas=1000),
        dataclasses.replace(ESTIMATE, delta_blocking_s=3.0),
    )
    first = policy.next(ESTIMATE, None)
    second = policy.next(slow, first)
    assert second.save_every > first.save_every
    assert policy.next(slow, second) == second


def test_a_schedule_over_a_bound_is_given_up():
    found = AdaptivePolicy(3600.0, restore_budget_s=5.0).next(ESTIMATE, Schedule(10_000, 10))
    assert restore_s(ESTIMATE, found) <= 5.0
    # A budget that no delta fits does not end a run.
    assert AdaptivePolicy(3600.0, restore_budget_s=0.1).next(ESTIMATE, None) == Schedule(1, 1)
    for most in (1, 3):
        policy = AdaptivePolicy(1e8, restore_budget_s=None)
        assert policy.next(ESTIMATE, Schedule(1_000, 500), most).save_every == most
    for most in (30, 1000):
        policy = AdaptivePolicy(1e8, restore_budget_s=None, most_deltas=most)
        assert policy.next(ESTIMATE, Schedule(most + 1, 1)).base_every == most


def test_bases_that_block_no_longer_than_deltas_are_no_more_frequent_than_at_first():
    cheap = dataclasses.replace(ESTIMATE, base_blocking_s=0.01, base_write_s=0.05)
    assert best_schedule(cheap, 3600.0, most_every=1).base_every < LEAST_DELTAS
    assert AdaptivePolicy(3600.0).next(cheap, None, 1).base_every == LEAST_DELTAS
    assert AdaptivePolicy(3600.0, 0.9).next(cheap, None, 1).base_every < LEAST_DELTAS
    assert AdaptivePolicy(3600.0, most_deltas=5).next(cheap, None, 1).base_every == 5


def test_a_lineage_that_a_budget_made_short_grows_once_restores_are_quick():
    """Also where time alone would hardly change it."""
    cheap = dataclasses.replace(ESTIMATE, base_blocking_s=0.01, base_write_s=0.05)
    policy = AdaptivePolicy(3600.0, restore_budget_s=1.0)
    slow = dataclasses.replace(cheap, replay_s=0.09)
    short = policy.next(slow, None, 1)
    assert short.base_every < LEAST_DELTAS
    assert policy.next(slow, short, 1) == short
    quick = dataclasses.replace(cheap, replay_s=0.005)
    assert policy.next(quick, short, 1).base_every == LEAST_DELTAS


SCHEDULE = Schedule(base_every=7, save_every=3)


def asked(policy, step, *, preempted=False):
    context = types.SimpleNamespace(reached_preemption=preempted)
    return policy.should_save(types.SimpleNamespace(step=step), [], context=context)


def test_a_manager_saves_each_so_many_steps_and_at_the_end_of_a_lineage():
    policy, depth, saved = AdaptivePolicy(), 0, []
    for step in range(100, 120):
        if asked(policy, step):
            depth = 0 if not saved or depth == SCHEDULE.base_every else depth + 1
            saved.append(step)
        else:
            depth += 1
        policy.note(Position(saved[-1], depth, SCHEDULE))
    assert saved == [100, 103, 106, 107, 108, 111, 114, 115, 116, 119]  # 7 deltas, and a base


def test_a_manager_saves_where_there_is_nothing_to_follow_and_before_a_preemption():
    policy = AdaptivePolicy()
    assert not policy.is_asked
    assert asked(policy, 5)
    assert policy.is_asked
    policy.note(Position(5, 0, SCHEDULE))
    assert not asked(policy, 6)
    assert asked(policy, 6, preempted=True)
    # Steps that nobody defers are saved as often.
    assert [asked(policy, step) for step in (6, 7, 8, 9)] == [False, False, True, True]
    policy.note(None)
    assert asked(policy, 6)


SHARED = dataclasses.replace(
    ESTIMATE,
    **{"base_restore_s": 600.0, "delta_write_s": 0.09, "base_write_s": 5.0, "replay_s": 0.5},
)
"""A storage that takes ten minutes for a restore, as one does that thousands of hosts share."""


def test_where_memory_survives_most_failures_lineages_are_longer_and_saves_rarer():
    asked = {"restore_budget_s": None, "most_deltas": 10_000}
    every = AdaptivePolicy(3600.0, **asked).next(SHARED, None)
    some = AdaptivePolicy(3600.0, storage_mtbf_s=90_000.0, **asked).next(SHARED, None)
    assert some == best_schedule(SHARED, 90_000.0)
    assert some.base_every > 2 * every.base_every
    assert some.save_every > 2 * every.save_every
    assert waste(SHARED, some, 3600.0, 90_000.0) < waste(SHARED, every, 3600.0, 90_000.0)
    # The schedule in use is kept by the same measure.
    policy = AdaptivePolicy(3600.0, storage_mtbf_s=90_000.0, **asked)
    assert policy.next(SHARED, every) == some
    assert policy.next(SHARED, some) == some


@pytest.mark.parametrize(
    "arguments",
    [
        *((0.0,), (None,), (3600.0, 0.0), ("3 h",), (3600.0, 60.0, 0), (3600.0, 60.0, 2.5)),
        *((3600.0, 60.0, 9, each) for each in (0.0, 1800.0, math.inf, math.nan, "a day")),
    ],
)
def test_impossible_wishes_are_refused(arguments):
    names = ("mtbf_s", "restore_budget_s", "most_deltas", "storage_mtbf_s")
    told = r"_s to be more than 0|int of at least 1|expected storage_mtbf_s to be"
    with pytest.raises(ValueError, match=told):
        AdaptivePolicy(**dict(zip(names, arguments, strict=False)))
    assert isinstance(AdaptivePolicy(), SaveDecisionPolicy)
