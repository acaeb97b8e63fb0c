"""The table of faults: what a campaign's program tells, and what becomes of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.campaigns import faults
from tests.campaigns.faults import CAMPAIGNS, Campaign, Result, Row

KILLS = {"tried": 7, "counts": {"reported as saved": 30}}
KILLS |= {name: [] for name in ("lost", "wrong", "crashed", "other")}


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """A campaign whose program is a text; it finds what :data:`KILLS` says."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(program: str = f"print('noise'); print({json.dumps(KILLS)!r})", **changes) -> Campaign:
        (tmp_path / "a_program.py").write_text(program)
        known = next(each for each in CAMPAIGNS if each.name == "crashes")
        return replace(known, module="a_program", **changes)

    return make


def named(name: str) -> Campaign:
    return next(each for each in CAMPAIGNS if each.name == name)


def test_what_a_program_tells_is_kept_and_becomes_a_row(campaign, tmp_path):
    result = faults.run(campaign(), "small", 5, tmp_path)
    (row,) = result.rows
    assert (row.tried, row.lost, row.wrong, row.crashed, row.other) == (7, 0, 0, 0, 0)
    assert row.is_good
    assert "--seed 5" in result.command
    assert "jax" in result.environment["versions"]
    assert result.found == KILLS
    assert Result.read(tmp_path / "crashes.json") == result
    assert faults.read_all(tmp_path) == [result]
    printed = faults.table([result]).splitlines()
    assert printed[2].split(" | ")[2:7] == ["7", "0", "0", "0", "0"]


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("import sys; print('the reason', file=sys.stderr); sys.exit(3)", "exit status 3: the rea"),
        ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
        ("import time; time.sleep(600)", "did not end in time"),
        ("print('{not JSON')", "exit status 0"),
    ],
)
def test_a_program_that_ends_without_a_result_is_a_failure(campaign, tmp_path, program, note):
    limits = {"small": 0.01 if "sleep" in program else 1}
    (row,) = faults.run(campaign(program, limit_minutes=limits), "small", 0, tmp_path).rows
    assert row.crashed == 1
    assert note in row.note
    assert not row.is_good


def test_what_cannot_be_tried_says_so(campaign, tmp_path):
    told = campaign("""print('{"not_tried": "no tmpfs"}')""")
    (row,) = faults.run(told, "small", 0, tmp_path).rows
    assert (row.tried, row.note) == (None, "not tried: no tmpfs")
    assert "| – | – | – | – | – |" in faults.table(faults.read_all(tmp_path))


def test_the_table_alone_runs_nothing_and_tells_failures_by_its_status(tmp_path, capsys):
    found = {**KILLS, "wrong": ["step 3"]}
    for name, body, status in (("crashes", KILLS, 0), ("together", found, 1)):
        rows = faults.machine_rows(named(name), body)
        Result(name, "full", 0, "", 1.5, {"cores": 2}, rows, body).write(tmp_path)
        assert faults.main(["--directory", str(tmp_path), "--table"]) == status
    printed = capsys.readouterr().out
    assert "| 7 | 0 | 1 | 0 | 0 | 1.5 |" in printed
    assert '{"size": "full", "seed": 0, "cores": 2}' in printed


def test_each_kind_of_problem_has_its_column():
    found = KILLS | {"lost": ["a", "b"], "wrong": ["c"], "crashed": [], "other": ["d"]}
    (row,) = faults.machine_rows(named("operations"), found)
    assert (row.tried, row.lost, row.wrong, row.crashed, row.other) == (7, 2, 1, 0, 1)
    assert row.note == "30 reported as saved"


def test_no_program_may_end_the_process_that_loads_it():
    outcomes = {"FormatError": 40, "ParserEnded": 8}
    found = {"inputs": 50, "outcomes": outcomes, "failures": {}, "ended": []}
    (row,) = faults.update_rows(named("fuzz-updates"), found)
    assert (row.tried, row.crashed, row.other, row.is_good) == (50, 0, 0, True)
    assert "8 ended the process that parses" in row.note
    found["ended"] = [{"seed": 0, "inputs": 2, "ended": "signal 11"}]
    (row,) = faults.update_rows(named("fuzz-updates"), found)
    assert (row.crashed, row.is_good) == (1, False)


def test_what_is_raised_or_hangs_is_not_what_was_promised():
    outcomes = {"FormatError": 40, "KeyError at x.py:1": 3, "Hang at y.py:2": 2}
    failures = dict.fromkeys(list(outcomes)[1:], "")
    (row,) = faults.fuzz_rows(
        named("fuzz-manifests"), {"inputs": 45, "outcomes": outcomes, "failures": failures}
    )
    assert (row.tried, row.crashed, row.other, row.is_good) == (45, 2, 3, False)


def test_every_campaign_has_a_name_and_a_command_for_each_size():
    names = [campaign.name for campaign in CAMPAIGNS]
    assert len(set(names)) == len(names)
    for campaign in CAMPAIGNS:
        for size in faults.SIZES:
            command = campaign.command(size, 3, "WORK")
            assert not any("{" in word for word in command)
            assert campaign.limit_minutes[size] > 0


def test_a_row_is_good_if_nothing_is_found():
    row = Row("a fault", "a promise", 3, 0, 0, 0, 0)
    assert row.is_good
    for name in ("lost", "wrong", "crashed", "other"):
        assert not replace(row, **{name: 1}).is_good
