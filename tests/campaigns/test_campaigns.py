"""Campaigns of training runs: small ones, and all with -m campaign."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.save.pending import Pending, Phase
from tests.campaigns import (
    command,
    executed,
    growth,
    interleavings,
    mutations,
    plans,
    replica_drift,
    rows,
)
from tests.campaigns.executed import Record
from tests.campaigns.runs import differing

SEEDS = ((24,), (33,), (36,))
"""Of runs on one device: one is resumed, one has its update apart, one averages its params."""


@pytest.mark.parametrize("family", plans.FAMILIES)
def test_a_seed_tells_the_whole_run(family):
    drawn = [plans.plan_of(family, seed, 8) for seed in (17, 17, 18)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert plans.Plan(**{**vars(drawn[0])}) == drawn[0]


def test_every_kind_of_perturbation_is_certain_to_come():
    drawn = [plans.draw(seed) for seed in range(len(plans.KINDS))]
    assert [plan.kinds[0] for plan in drawn] == [*plans.KINDS]


def test_bits_are_compared_and_not_values():
    zeros = [np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)]
    assert differing(zeros[:1], zeros[1:]) == 1
    nan = np.array([np.nan], np.float32)
    assert differing([nan], [nan.copy()]) == 0


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
    own, others = record.parted("tests/store/test_a.py")
    assert [{*each.at(file, 4)} for each in (own, others)] == [{f"{a}[0]", f"{a}[1]"}, {b, long}]
    assert others.chosen(file, 6, False, 9, 20.0) == [b, long]
    new = Record({f"{a}[2]": 1.0}, record.sources, {file: {5: [f"{a}[2]"]}})
    assert {*record.renewed(new, ["tests/store"]).chosen(file, 5, False, 9, 5.0)} == {b, f"{a}[2]"}


@given(
    times=st.lists(st.sampled_from([0.1, 0.5, 2.0, 9.0]), min_size=1, max_size=12),
    drawn=st.data(),
)
def test_a_line_is_left_to_two_tests_and_one_of_its_room_where_these_execute_it(times, drawn):
    rooms = itertools.cycle(("store", "save"))
    seconds = {f"tests/{next(rooms)}/a.py::test_{n}": each for n, each in enumerate(times)}
    some = st.lists(st.sampled_from([*seconds]), unique=True)
    lines = dict(enumerate(drawn.draw(st.lists(some, max_size=20))))
    found = {*executed.spare(Record(seconds, {}, {"adacheck_jax/store/a.py": lines}))}
    assert all(seconds[test] >= executed.QUICK_S for test in found)
    for tests in map(set, lines.values()):
        assert len(tests - found) >= min(2, len(tests))
        own = {test for test in tests if "/store/" in test}
        assert len(own - found) >= min(1, len(own))
    idle = {test for test in seconds if not any(test in x for x in lines.values())}
    assert found >= {test for test in idle if seconds[test] >= executed.QUICK_S}


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("seeds", SEEDS)
def test_every_saved_step_of_a_few_runs_is_restored(seeds):
    found = [*rows.campaign(seeds, devices=1, options=[])]
    assert [each["seed"] for each in found] == [*seeds]
    assert not [text for each in found for text in rows.problems(each, "matrix")]
    sums = rows.totals(found)
    steps = sum(each["steps"] - len(each["dropped"]) for each in found)  # resumed before they were
    assert sums["saved"] == sums["exact"] == steps


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize(("family", "seed"), [("matrix", 50203), ("exactness", 0), ("summing", 3)])
def test_the_steps_of_a_row_are_restored_on_all_meshes(family, seed):
    (found,) = rows.campaign([seed], devices=8, options=["--family", family])
    assert not rows.problems(found, family), found
    counts = found["counts"]
    assert counts["saved"] == counts["exact"] == found["steps"]
    assert counts["replayed"] == found["steps"] - 1
    assert counts["other mesh"] == counts["exact there"] + counts.get("rounded there", 0) > 0


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
@pytest.mark.parametrize(
    ("family", "count", "options"),
    [
        ("training", 216, ["--check=sample"]),
        ("training", 216, ["--check=full"]),
        ("matrix", 300, []),
        ("exactness", len(plans.table()), []),
    ],
)
def test_no_step_of_a_row_is_lost(family, count, options):
    devices = None if family == "training" else 8
    options = ["--family", family, *options]
    found = [*rows.campaign(range(count), devices=devices, options=options)]
    assert not [text for each in found for text in rows.problems(each, family)]


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
