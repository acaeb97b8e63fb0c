"""The adaptive policy: running medians, and schedules that do not change back and forth."""

import dataclasses
import random

import pytest

from adacheck_jax.schedule.adaptive import WINDOW, AdaptivePolicy, RunningCosts
from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.costs import Costs, Schedule
from adacheck_jax.schedule.waste import restore_s

ESTIMATE = Costs(0.1, 0.03, 0.08, 0.05, 0.4, 10.0, 0.4, 0.3, 0.02, 0.001)


def test_an_outlier_does_not_count():
    running = RunningCosts(ESTIMATE)
    for seconds in (0.02, 0.021, 5.0):
        running.add("delta_blocking_s", seconds)
    assert running.costs() == dataclasses.replace(ESTIMATE, delta_blocking_s=0.021)


def test_old_measurements_are_forgotten():
    running = RunningCosts(ESTIMATE)
    for seconds in [9.0] * WINDOW + [1.0] * (WINDOW // 2 + 1):
        running.add("replay_s", seconds)
    assert running.costs().replay_s == 1.0


@pytest.mark.parametrize(("name", "value"), [("delta_s", 1.0), ("step_s", 0.0), ("replay_s", -1.0)])
def test_an_impossible_measurement_is_refused(name, value):
    running = RunningCosts(ESTIMATE)
    with pytest.raises(ValueError, match="expected"):
        running.add(name, value)
    assert running.costs() == ESTIMATE


def test_it_begins_with_the_best_schedule():
    assert AdaptivePolicy(3600.0).next(ESTIMATE, None) == best_schedule(ESTIMATE, 3600.0)


@pytest.mark.parametrize("budget_s", [None, 1.2])
def test_noise_changes_nothing(budget_s):
    draw, running = random.Random(0), RunningCosts(ESTIMATE)
    policy, used = AdaptivePolicy(3 * 3600.0, budget_s), []
    for _ in range(30):
        for field in dataclasses.fields(Costs):
            noise = draw.lognormvariate(0, 0.1)
            running.add(field.name, getattr(ESTIMATE, field.name) * noise)
        used.append(policy.next(running.costs(), used[-1] if used else None))
    assert len({*used[5:]}) == 1


def test_a_storage_that_becomes_slow_changes_the_schedule():
    policy, slow = AdaptivePolicy(3600.0), dataclasses.replace(ESTIMATE, delta_blocking_s=3.0)
    first = policy.next(ESTIMATE, None)
    second = policy.next(slow, first)
    assert second.save_every > first.save_every
    assert policy.next(slow, second) == second


def test_a_schedule_over_the_budget_is_given_up():
    policy = AdaptivePolicy(3600.0, restore_budget_s=5.0)
    found = policy.next(ESTIMATE, Schedule(10_000, 10))
    assert restore_s(ESTIMATE, found) <= 5.0


def test_a_budget_that_no_delta_fits_does_not_end_a_run():
    assert AdaptivePolicy(3600.0, restore_budget_s=0.1).next(ESTIMATE, None) == Schedule(1, 1)


@pytest.mark.parametrize("arguments", [(0.0,), (3600.0, 0.0)])
def test_impossible_wishes_are_refused(arguments):
    with pytest.raises(ValueError, match="more than 0"):
        AdaptivePolicy(*arguments)
