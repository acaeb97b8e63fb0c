"""Saves that follow a schedule: measured, exchanged, chosen where a base is planned."""

import logging

import pytest

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.schedule import line
from adacheck_jax.schedule.stopwatch import Stopwatch
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.steps import roots
from tests import support
from tests.processes import launch

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
    steps = roots.steps_of(root)
    return "".join("B" if isinstance(each.manifest, BaseManifest) else "d" for each in steps)


def run_of():
    return support.dict_run(support.mesh_of((1, 1)))


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("schedule: ")]


@pytest.mark.slow
@pytest.mark.usefixtures("two_at_first")
def test_the_measured_costs_say_how_many_deltas_follow_a_base(tmp_path, monkeypatch, caplog):
    fake(monkeypatch, FIVE)
    run = run_of()
    handler = adacheck.AdaCheckHandler(
        run.recorder, max_deltas=adacheck.AdaptivePolicy(**RARELY), shadow=None
    )
    with (
        support.manager_of(tmp_path, handler) as manager,
        caplog.at_level(logging.INFO, "adacheck_jax"),
    ):
        support.save_steps(manager, run, 17)
    assert kinds(tmp_path) == "Bdd" + "Bddddd" * 2 + "Bd"
    (message,) = told(caplog)
    assert message.startswith("schedule: a base each 5 deltas, because a step takes 1 s, a save of")
    assert "a restore takes up to 6 s, 1 s of it for each delta" in message


@pytest.mark.usefixtures("two_at_first")
def test_what_is_really_measured_is_enough_to_choose_by(tmp_path, caplog):
    run = run_of()
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=None)  # the loop writes bases
    with (
        support.manager_of(tmp_path, handler) as manager,
        caplog.at_level(logging.INFO, "adacheck_jax"),
    ):
        support.save_steps(manager, run, 11)
    assert kinds(tmp_path) == "BddBddBdddd"
    assert len(told(caplog)) == 1


@pytest.mark.usefixtures("two_at_first")
def test_one_object_says_when_a_save_is_due_and_when_a_base(tmp_path, monkeypatch):
    fake(monkeypatch, FIVE | {"delta_blocking_s": 3.0, "defer_blocking_s": 0.0})
    run, policy = run_of(), adacheck.AdaptivePolicy(**RARELY)
    handler, states, saved = (
        adacheck.AdaCheckHandler(run.recorder, max_deltas=policy, shadow=None),
        {},
        [],
    )
    with support.manager_of(tmp_path, handler, save_decision_policy=policy) as manager:
        for step in range(1, 22):
            run.advance()
            states[step] = support.host_copy(run.state)
            if manager.should_save(step) or not handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state), force=True)
                saved.append(step)
    # From the second base on saves are so dear that one holds all deltas of a lineage.
    assert saved == [1, 2, 3, 4, 9, 10, 15, 16, 21]
    assert kinds(tmp_path) == "BddBdBdBd"
    other = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, other) as manager:
        target = support.abstract(run.state)
        for step, holder in ((7, 9), (9, 9), (17, 21)):
            found = manager.restore(holder, args=adacheck.RestoreArgs(target, step=step))
            support.assert_same_bits(found, states[step])


def test_a_resumed_run_measures_what_its_restore_took(tmp_path, monkeypatch):
    run, resumed, noted = run_of(), run_of(), []
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        support.save_steps(manager, run, 7)
    handler = adacheck.AdaCheckHandler(resumed.recorder)
    with support.manager_of(tmp_path, handler) as manager:
        for step in (3, 7):
            target = adacheck.RestoreArgs(support.abstract(resumed.state))
            resumed.state, resumed.count = manager.restore(step, args=target), step
        take = Stopwatch.take
        monkeypatch.setattr(Stopwatch, "take", lambda watch: noted.append(take(watch)) or ())
        support.save_steps(manager, resumed, 1)
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
