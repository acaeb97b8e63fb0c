"""The schedule of saves: its closed form against simulated failures, and the search."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.waste import (
    LARGEST,
    Costs,
    Schedule,
    expm1,
    lineage_s,
    power_sum,
    restore_s,
    waste,
)
from benchmarks import memory_tiers
from benchmarks import schedule as simulation

PLAIN = Costs(step_s=1.0, delta_blocking_s=0.1, base_blocking_s=0.5, replay_s=0.2, restart_s=20.0)
seconds = st.floats(1e-3, 100.0)
all_costs = st.builds(
    Costs,
    step_s=st.floats(0.01, 10.0),
    **{field.name: seconds for field in dataclasses.fields(Costs)[1:]},
)
mtbfs = st.floats(600.0, 2.6e6)


@given(st.floats(-LARGEST, LARGEST))
def test_the_exponential_is_that_of_libm(exponent):
    assert expm1(exponent) == pytest.approx(math.expm1(exponent), rel=1e-12, abs=1e-300)


@given(st.floats(0.0, 0.1), st.integers(1, 1000))
@example(2.2250738585e-313, 8)  # of fewer digits than others
def test_a_sum_of_powers_is_the_sum_of_its_terms(exponent, count):
    terms = math.fsum(math.exp(exponent * k) for k in range(1, count + 1))
    assert power_sum(exponent, count) == pytest.approx(terms, rel=1e-9)


@given(st.floats(0.1, 50.0), st.floats(0.0, 5.0), st.floats(0.0, 500.0), mtbfs)
def test_of_equal_saves_it_is_dalys_formula(step_s, blocking_s, restart_s, mtbf_s):
    """Daly (2006): M exp(R/M) (exp((T + d)/M) - 1) seconds for T seconds of work."""
    costs = Costs(step_s, blocking_s, blocking_s, restart_s=restart_s)
    segment_s = math.expm1((step_s + blocking_s) / mtbf_s) * math.exp(restart_s / mtbf_s) * mtbf_s
    assert lineage_s(costs, 9, 1, mtbf_s) == pytest.approx(10 * segment_s)


def test_the_waste_where_failures_are_none_or_all():
    found = waste(PLAIN, Schedule(9, 3), 1e15)
    assert found == pytest.approx((0.5 + 3 * 0.1) / (10 + 0.5 + 3 * 0.1))
    slow = dataclasses.replace(PLAIN, delta_write_s=3.0)  # a save waits for the write before it
    found = lineage_s(slow, 4, 1, 1e15)
    assert found == pytest.approx(lineage_s(PLAIN, 4, 1, 1e15) + 4 * (3.0 - 1.0))
    assert waste(dataclasses.replace(PLAIN, restart_s=1e6), Schedule(20, 1), 1.0) == 1.0


@pytest.mark.parametrize("save_every", [1, 4])
@pytest.mark.parametrize("storage_mtbf_s", [3000.0, 6000.0, 60_000.0])
def test_failures_that_memory_survives_cost_what_they_cost_in_a_simulation(
    storage_mtbf_s, save_every
):
    costs = dataclasses.replace(
        PLAIN,
        **{"delta_write_s": 0.4, "base_write_s": 5.0, "base_restore_s": 300.0, "recover_s": 10.0},
    )
    numbers = costs, Schedule(40, save_every), 3000.0, storage_mtbf_s
    found = memory_tiers.simulated_waste(*numbers, failures=1500)
    assert waste(*numbers) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("name", simulation.COSTS)
def test_the_closed_form_and_the_choice_agree_with_simulated_failures(name):
    for mtbf_s in (600.0, 1e5):
        found = simulation.compare(simulation.COSTS[name], mtbf_s, 10.0, failures=40, trials=250)
        assert found.computed == pytest.approx(found.simulated, rel=0.05)
        assert found.simulated <= 1.05 * found.least


@given(all_costs, mtbfs, *(st.integers(1, most) for most in (40, 50, 30, 60)))
def test_within_small_bounds_no_schedule_is_better(
    costs, mtbf_s, longest, most_every, least_deltas, most_deltas
):
    budget_s = restore_s(costs, Schedule(longest, 1)) + costs.replay_s / 2
    bounds = {"most_every": most_every, "least_deltas": least_deltas, "most_deltas": most_deltas}
    chosen = best_schedule(costs, mtbf_s, budget_s, **bounds)
    longest = min(longest, most_deltas)
    lengths = range(min(least_deltas, longest), longest + 1)
    every = [Schedule(n, b) for n in lengths for b in range(1, min(n, most_every) + 1)]
    assert chosen in every
    assert waste(costs, chosen, mtbf_s) == min(waste(costs, each, mtbf_s) for each in every)


@given(all_costs, mtbfs, st.integers(65, 5000), st.sampled_from([1, 3, 100]))
def test_a_bound_is_kept_and_hardly_anything_below_it_is_better(
    costs, mtbf_s, most_deltas, most_every
):
    bounds = {"most_deltas": most_deltas, "most_every": most_every}
    chosen = best_schedule(costs, mtbf_s, **bounds)
    assert chosen.base_every <= most_deltas
    assert chosen.save_every <= most_every
    lengths = {round(most_deltas ** (k / 30)) for k in range(31)}
    every = {Schedule(n, min(n, b)) for n in lengths for b in (1, 2, most_every) if b <= most_every}
    least = min(waste(costs, each, mtbf_s) for each in every)
    assert waste(costs, chosen, mtbf_s) <= 1.05 * least


def test_for_rare_failures_the_least_waste_is_that_of_the_first_order():
    """Young's square root for the saves, and the same for the bases: docs/reference/schedule.md."""
    costs, mtbf_s = Costs(1.0, 0.01, 10.0, base_restore_s=5.0, replay_s=0.1), 1e6
    found = waste(costs, best_schedule(costs, mtbf_s), mtbf_s)
    first = math.sqrt(2 * 0.01 / mtbf_s) + math.sqrt(2 * 10.0 * 0.1 / mtbf_s) + 5.0 / mtbf_s
    assert found == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Costs(0, 0, 0), r"_s to be"),
        (lambda: Costs(1, 0, 0, replay_s=-1), r"_s to be"),
        (lambda: Costs(math.nan, 0, 0), r"_s to be"),
        *(
            (lambda pair=pair: Schedule(*pair), "base_every >= save_every >= 1")
            for pair in ((0, 0), (3, 4), (5, 0))
        ),
        (lambda: best_schedule(PLAIN, 3600.0, 0.1), r"restore_budget_s of at least 0\.2 "),
        *(
            (lambda mtbf_s=mtbf_s: best_schedule(PLAIN, mtbf_s), "mtbf_s")
            for mtbf_s in (0.0, -1.0, math.nan)
        ),
    ],
)
def test_what_cannot_be_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()
