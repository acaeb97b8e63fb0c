"""The goodput simulation against closed forms, and what it counts."""

import dataclasses
import math

import numpy as np
import pytest

from adacheck_jax.schedule.waste import Costs, Schedule, waste
from benchmarks import memory_tiers
from benchmarks.goodput import __main__ as command
from benchmarks.goodput.figures import DAY_S, cluster_of, figures_of, read
from benchmarks.goodput.simulation import Trace, outcomes, replayed, sensitivities
from benchmarks.goodput.systems import ALWAYS, SYSTEMS, as_behaviour
from benchmarks.goodput.tiers import Behaviour, Tier

TABLES = read()
LLAMA = cluster_of(TABLES)

RUNS = 40


def cluster_of(mtbf_s, restart_s=0.0, step_s=1.0, **figures):
    restarts = {f"{kind}_restart_s": restart_s for kind in ("software", "host", "rack")}
    made = dataclasses.replace(LLAMA, hosts=1, duration_s=2000 * mtbf_s)
    figures["failures_a_device_day"] = DAY_S / mtbf_s / made.devices
    return made.changed(**{"step_s": step_s, **restarts, **figures})


def outcome_of(behaviour, cluster, runs=RUNS):
    return replayed("x", behaviour, cluster, Trace.drawn(cluster, runs, 0))


def storage(every, **costs):
    return Tier("storage", every, ALWAYS, **{"restore_s": 0.0} | costs)


@pytest.mark.parametrize("mtbf_s", [100.0, 1000.0])
@pytest.mark.parametrize(("every", "blocking_s", "recovery_s"), [(5, 0.0, 0.0), (20, 5.0, 30.0)])
def test_periodic_saves_are_dalys_formula(mtbf_s, every, blocking_s, recovery_s):
    """Daly (2006): M exp(R/M) (exp((T + d)/M) - 1) seconds for T seconds of work."""
    cluster = cluster_of(mtbf_s, restart_s=recovery_s / 3)
    tier = storage(every, base_blocking_s=blocking_s, restore_s=recovery_s * 2 / 3)
    segment_s = math.expm1((every + blocking_s) / mtbf_s) * math.exp(recovery_s / mtbf_s) * mtbf_s
    found = outcome_of(Behaviour((tier,)), cluster)
    assert 1 - found.goodput == pytest.approx(1 - every / segment_s, rel=0.02)


@pytest.mark.parametrize("schedule", [Schedule(20, 1), Schedule(60, 7), Schedule(9, 9)])
def test_a_lineage_is_the_closed_form_of_its_schedule(schedule):
    cluster = cluster_of(500.0, restart_s=10.0)
    costs = Costs(
        step_s=1.0,
        delta_blocking_s=0.1,
        base_blocking_s=0.5,
        delta_write_s=0.4,
        base_write_s=3.0,
        restart_s=10.0,
        open_s=1.0,
        base_restore_s=4.0,
        replay_s=0.3,
        defer_blocking_s=0.01,
        further_write_s=0.2,
    )
    found = outcome_of(as_behaviour(costs, schedule), cluster)
    assert 1 - found.goodput == pytest.approx(waste(costs, schedule, 500.0), rel=0.03)


def test_all_of_the_time_is_accounted_for():
    for each in outcomes(TABLES, dataclasses.replace(LLAMA, duration_s=5 * DAY_S), runs=2):
        shares = (each.goodput, each.saving, each.repeated, each.down)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0


def test_the_newest_safe_step_of_a_lineage():
    tier = storage(10, delta_every=4, base_write_s=2.0, delta_write_s=0.5)  # 0 4 8 9, 10 14 18 19
    progress = np.array([3.0, 4.4, 4.5, 8.6, 9.6, 10.5, 11.9, 12.0, 14.6, 19.5])
    assert tier.newest(progress, 1.0).tolist() == [0, 0, 4, 8, 9, 9, 9, 10, 14, 19]


def test_all_systems_meet_the_same_failures():
    first, second = (outcomes(TABLES, LLAMA, runs=3, seed=7) for _ in range(2))
    assert first == second
    assert len({each.failures for each in first}) == 1
    assert first != outcomes(TABLES, LLAMA, runs=3, seed=8)


def test_every_figure_has_a_source():
    for system in TABLES:
        for figure in figures_of(TABLES, system, LLAMA).values():
            assert figure.kind in ("published", "measured", "assumed", "given")
            assert figure.source
            assert figure.value >= 0


@pytest.mark.slow
def test_sensitivity_varies_what_is_uncertain():
    rows = sensitivities(TABLES, dataclasses.replace(LLAMA, duration_s=DAY_S), runs=2)
    found = {(each.system, each.figure): each for each in rows}
    of_cluster = [name for name, each in LLAMA.figures.items() if each.is_uncertain]
    for system in SYSTEMS:
        assert {f"cluster.{name}" for name in of_cluster} <= {x for y, x in found if y == system}
    row = found["stock Orbax", "cluster.host_restart_s"]
    assert row.halved < row.waste < row.doubled


@pytest.mark.slow
def test_what_memory_changes_is_printed(capsys):
    memory_tiers.main(["--failures", "40"])
    said = capsys.readouterr().out
    assert said.count("hosts (`copies=1`)") == 4  # two storages, in two tables
    assert "nan" not in said


@pytest.mark.slow
def test_the_tables_are_printed(capsys):
    command.main(["--runs", "1"])
    printed = capsys.readouterr().out
    assert all(f"| {system} |" in printed for system in SYSTEMS)
    assert "| stock Orbax | `cluster.host_restart_s` | 300 |" in printed
    assert "| cluster | `params` | 4.05e+11 | given | Llama 3 405B |" in printed
