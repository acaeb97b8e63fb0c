"""Saves that follow a schedule: measured, exchanged, chosen where a base is planned."""

import logging

import pytest

import adacheck_jax as adacheck
from adacheck_jax.schedule import line
from adacheck_jax.schedule.stopwatch import Stopwatch
from adacheck_jax.schedule.waste import Schedule
from tests import support
from tests.processes import launch
from tests.save.loop import Loop
from tests.save.loop import kinds as every

FIVE = {
    **{"step_s": 1.0, "delta_blocking_s": 0.01, "base_blocking_s": 1.0},
    **{"delta_write_s": 0.1, "base_write_s": 0.5},
    **{"open_s": 0.5, "base_restore_s": 0.5, "replay_s": 1.0},
}
"""Costs by which a lineage has five deltas: with one more a restore takes longer than RARELY lets
it, but for its headroom."""
RARELY = {"mtbf_s": 1e9, "restore_budget_s": 6.8}


@pytest.fixture
def two_at_first(monkeypatch):
    """Lineages begin with two deltas, so that further bases come soon."""
    monkeypatch.setattr(line, "BEGINNING", Schedule(base_every=2, save_every=1))


def fake(monkeypatch, costs):
    measured = tuple((name, seconds, 1) for name, seconds in costs.items())
    monkeypatch.setattr(Stopwatch, "take", lambda _: measured)


def kinds(root):
    return "".join("B" if each == "B" else "d" for each in every(root))


def run_of():
    return support.dict_run(support.mesh_of((1, 1)))


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("schedule: ")]


@pytest.mark.slow
@pytest.mark.usefixtures("two_at_first")
def test_the_measured_costs_say_how_many_deltas_follow_a_base(tmp_path, monkeypatch, caplog):
    fake(monkeypatch, FIVE)
    policy = adacheck.AdaptivePolicy(**RARELY)
    with (
        caplog.at_level(logging.INFO, "adacheck_jax"),
        Loop(tmp_path, max_deltas=policy, shadow=None) as loop,
    ):
        loop.save(17)
    assert kinds(tmp_path) == "Bdd" + "Bddddd" * 2 + "Bd"
    (message,) = told(caplog)
    assert message.startswith("schedule: a base each 5 deltas, because a step takes 1 s, a save of")
    assert "a restore takes up to 6 s, 1 s of it for each delta" in message


@pytest.mark.usefixtures("two_at_first")
def test_what_is_really_measured_is_enough_to_choose_by(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "adacheck_jax"),
        Loop(tmp_path, shadow=None) as loop,  # the loop writes bases
    ):
        loop.save(11)
    assert kinds(tmp_path) == "BddBddBdddd"
    assert len(told(caplog)) == 1


@pytest.mark.usefixtures("two_at_first")
def test_one_object_says_when_a_save_is_due_and_when_a_base(tmp_path, monkeypatch):
    fake(monkeypatch, FIVE | {"delta_blocking_s": 3.0, "defer_blocking_s": 0.0})
    policy, saved = adacheck.AdaptivePolicy(**RARELY), []
    about = {"save_decision_policy": policy}
    loop = Loop(tmp_path, max_deltas=policy, shadow=None, manager=about)
    for step in range(1, 22):
        loop.train()
        if loop.manager.should_save(step) or not loop.record():
            loop.put(force=True)
            saved.append(step)
    # From the second base on saves are so dear that one holds all deltas of a lineage.
    assert saved == [1, 2, 3, 4, 9, 10, 15, 16, 21]
    loop.check()
    assert kinds(tmp_path) == "BddBdBdBd"


def test_a_resumed_run_measures_what_its_restore_took(tmp_path, monkeypatch):
    noted, take = [], Stopwatch.take
    loop = Loop(tmp_path)
    loop.save(7)
    loop.reopen(3)
    target = adacheck.RestoreArgs(support.abstract(loop.run.state))
    loop.run.state, loop.number = loop.manager.restore(7, args=target), 7
    monkeypatch.setattr(Stopwatch, "take", lambda watch: noted.append(take(watch)) or ())
    loop.save(1)
    loop.manager.close()
    (measured,) = noted
    assert [name for name, _, _ in measured] == ["open_s", "base_restore_s", "replay_s"]
    assert all(seconds > 0 for _, seconds, _ in measured)


def test_a_recovered_run_measures_what_its_recovery_took(tmp_path, monkeypatch):
    run, noted = run_of(), []
    shadow = adacheck.Shadow(directory=tmp_path / "memory")
    root, options = tmp_path / "root", {"shadow": shadow}
    with adacheck.checkpoint_manager(root, run.recorder, **options) as manager:
        support.save_steps(manager, run, 3)
    with adacheck.checkpoint_manager(root, run.recorder, **options) as manager:
        run.count, run.state = manager.restore_newest(support.abstract(run.state))
        take = Stopwatch.take
        monkeypatch.setattr(Stopwatch, "take", lambda watch: noted.append(take(watch)) or ())
        support.save_steps(manager, run, 1)
    ((name, seconds, _),) = noted[0]
    assert (name, run.count) == ("recover_s", 4)
    assert seconds > 0


@pytest.mark.slow
def test_processes_decide_alike_by_what_the_first_one_measured(tmp_path):
    """The second one measures other costs; by these it would write a base each 2 deltas."""
    launch("schedule", 2, tmp_path / "run", tmp_path / "out", devices=1)
    assert kinds(tmp_path / "run") == "Bd" + "Bddddd" + "Bddd"
    chosen = [(tmp_path / f"out-chosen{n}").read_text() for n in range(2)]
    assert chosen[0] == chosen[1]
    assert chosen[0].startswith("schedule: a base each 5 deltas")
