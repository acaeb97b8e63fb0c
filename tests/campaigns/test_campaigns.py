"""Campaigns of perturbed runs and of recomputed updates: small ones, and all with -m campaign."""

import json

import numpy as np
import pytest

from adacheck_jax.save.pending import Pending, Phase
from tests.campaigns import (
    command,
    growth,
    history,
    interleavings,
    matrix,
    mutations,
    perturbations,
    replays,
    replica_drift,
    training,
)
from tests.campaigns.executed import Record
from tests.campaigns.outcomes import differing

SEEDS = ((24,), (33,), (36,))
"""Of runs on one device: one is resumed, one has its update apart, one averages its params."""


def test_a_seed_tells_the_whole_run():
    assert perturbations.draw(17, 8) == perturbations.draw(17, 8) != perturbations.draw(18, 8)


def test_every_kind_of_perturbation_is_certain_to_come():
    plans = [perturbations.draw(seed) for seed in range(len(perturbations.KINDS))]
    assert [plan.kinds[0] for plan in plans] == [*perturbations.KINDS]


def test_bits_are_compared_and_not_values():
    zeros = [np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)]
    assert differing(zeros[:1], zeros[1:]) == 1
    assert replays.different_elements(*zeros) == 1
    nan = np.array([np.nan], np.float32)
    assert replays.different_elements(nan, nan.copy()) == 0


def test_a_case_is_read_as_it_was_written(tmp_path):
    arrays = [np.arange(3, dtype=np.float32), np.array(5, np.int32)]
    update = replays.Update(arrays, [], arrays[:1], [], arrays, [])
    replays.Case(b"program", ["a", "b"], [update, update]).write(tmp_path / "case")
    case = replays.read(tmp_path / "case")
    assert (case.program, case.names, len(case.updates)) == (b"program", ["a", "b"], 2)
    found = case.updates[1].params
    assert [(x.dtype, x.tolist()) for x in found] == [(x.dtype, x.tolist()) for x in arrays]


def test_a_campaign_ends_by_its_count_or_its_time(capsys):
    assert [*command.trials(12)] == [*range(12)]
    assert "10 of 12" in capsys.readouterr().err
    assert not [*command.trials(12, minutes=0)]


@pytest.mark.parametrize("problems", [[], ["a step is lost"]])
def test_problems_are_told_and_keep_the_directory(tmp_path, capsys, problems):
    with command.workplace(tmp_path / "run", problems) as directory:
        (directory / "log").touch()
    assert (tmp_path / "run/log").exists() == bool(problems)
    assert command.finish({"steps": 3}, problems) == len(problems)
    told = capsys.readouterr()
    assert json.loads(told.out)["steps"] == 3
    assert told.err == "".join(f"FAILED: {each}\n" for each in problems)


ADDING = """\
LIMIT = 3
def added(x):
    if x < LIMIT:
        return x + 1
    return 2
"""


def _planted_in(root, source):
    """Places of faults in a package with one module, and the path of the module."""
    path = root / "adacheck_jax/store/adding.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return mutations.places(root), str(path.relative_to(root))


def test_faults_are_planted_again_where_their_lines_are_now(tmp_path):
    before, _ = _planted_in(tmp_path, ADDING)
    assert [(x.line, x.at_import) for x in before][:2] == [(1, True), (3, False)]
    changed = "import os\n" + ADDING.replace("x < LIMIT", "LIMIT > x")
    after, _ = _planted_in(tmp_path, changed)
    earlier = [mutations.Outcome(each, "a test", 1, 0.5) for each in before]
    found = mutations.again(earlier, after)
    assert [(x.fault.line, y.line) for y, x in found.items()] == [(1, 2), (4, 5), (4, 5), (5, 6)]
    for new, old in found.items():
        expected = old.fault.applied(ADDING.encode()).replace(b"x < LIMIT", b"LIMIT > x")
        assert new.applied(changed.encode()) == b"import os\n" + expected


def test_tests_that_execute_a_line_look_for_its_fault_and_those_of_its_room_first(tmp_path):
    _, file = _planted_in(tmp_path, ADDING)
    a, b, long = "tests/store/test_a.py::test_a", "tests/save/b.py::test_b", "tests/save/c.py::c"
    seconds = {f"{a}[0]": 0.1, f"{a}[1]": 0.2, b: 0.05, long: 9.0}
    lines = {1: [], 2: [], 3: [*seconds], 4: [f"{a}[1]", b], 5: [f"{a}[0]"]}
    Record(seconds, {file: ADDING}, {file: lines}).write(tmp_path / "record")
    _planted_in(tmp_path, "import os\n" + ADDING)
    record = Record.read(tmp_path / "record", tmp_path)
    assert record.chosen(file, 5, False, 2, 10.0) == [b, f"{a}[1]"]
    assert record.chosen(file, 6, False, 1, 10.0) == [f"{a}[0]"]
    assert {*record.chosen(file, 4, False, 9, 5.0)} == {*seconds} - {long}
    assert {*record.chosen(file, 2, True, 9, 20.0)} == {*seconds}
    new = Record({f"{a}[2]": 1.0}, record.sources, {file: {5: [f"{a}[2]"]}})
    assert {*record.renewed(new, ["tests/store"]).chosen(file, 5, False, 9, 5.0)} == {b, f"{a}[2]"}


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("seeds", SEEDS)
def test_every_saved_step_of_a_few_runs_is_restored(seeds):
    found = list(training.campaign(seeds, devices=1, options=[]))
    assert [each["seed"] for each in found] == [*seeds]
    sums = training.totals(found)
    steps = sum(each["steps"] - len(each["dropped"]) for each in found)  # resumed before they were
    assert sums["saved"] == sums["exact"] == steps
    none = ("lost", "wrong", "vanished", "refused", "failed")
    assert {each: sums[each] for each in none} == dict.fromkeys(none, 0)


@pytest.mark.slow
def test_a_scheduler_that_draws_which_thread_goes_on_finds_no_fault(tmp_path):
    outcome, scheduler = interleavings.run(2, tmp_path, length=10)
    assert not outcome.problems
    assert outcome.saved == 10
    assert scheduler.choices > 50, "several threads wait to go on"


def test_a_move_that_is_not_in_the_table_is_noted():
    problems = []
    with interleavings.watched_phases(problems):
        step = Pending.__new__(Pending)
        step.plan = type("Plan", (), {"step": 3})
        step.phase = Phase.STAGED
        step.phase = Phase.SETTLED
        assert not problems
        step.phase = Phase.PROVED
    assert problems == ["step 3 moved from Phase.SETTLED to Phase.PROVED"]


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("check", ["sample", "full"])
def test_no_step_of_a_perturbed_run_is_lost(check):
    runs = training.campaign(range(216), devices=None, options=[f"--check={check}"])
    sums = training.totals([*runs])
    assert sums["lost"] == (sums["of a part"] if check == "sample" else 0)
    none = ("lost there", "wrong", "vanished", "failed", "runs refused twice")
    assert {each: sums[each] for each in none} == dict.fromkeys(none, 0)


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_no_element_of_a_recomputed_update_differs():
    rows = [*matrix.rows_of(range(300), [], None)]
    assert not [matrix.line_of(row) for row in rows if row["class"] in ("differs", "crash")]


@pytest.mark.slow
def test_single_flipped_bits_are_named_by_step_leaf_and_element():
    found = history.campaign(steps=30, mb=0.2, faults=2, clean=1, seed=0)
    assert [each.is_right for each in found] == [True] * 3
    assert all(max(each.restored_counts) <= 7 for each in found)


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize(("processes", "seeds"), [(1, range(1)), (2, range(1))])
def test_steps_of_replicas_that_differ_are_of_one_of_them(processes, seeds):
    for found in replica_drift.outcomes(iter(seeds), processes):
        assert (found.wrong, found.lost) == ([], {})
        assert found.saved == found.exact > 0


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("verb", ["publish", "verify", "restore with deltas"])
def test_a_process_keeps_nothing_of_a_verb(verb):
    (found,) = growth.campaign([verb], "small")
    assert found.verb.startswith(verb.split()[0])
    assert found.is_flat, growth.table([found])
