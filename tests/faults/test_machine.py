"""Small campaigns of the machine, and what it says of worlds that have lost a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.campaigns import profiles, shim
from tests.campaigns.profiles import Profile
from tests.campaigns.world import Tally, World

ROOT = Path(__file__).parents[2]
SMALL = {
    "kills": ("crashes=3", "together=2", "phases=2"),
    "memory": ("shadow=3", "hosts=2"),
    "storage": ("operations=3", "outages=2", "damage=1", "beside=1"),
}


def ran(tmp_path: Path, *profiles: str, seed: int = 3) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status of the machine, what it found, and what it said."""
    command = [sys.executable, "-m", "tests.campaigns.machine", "--json", "--profile", *profiles]
    done = subprocess.run(
        [*command, "--seed", str(seed), "--directory", str(tmp_path / "run")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.stdout, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found.get("profiles", [found]), done.stderr


BEFORE = [f"{what} {n} {n}a" for n in (1, 2, 3, 4) for what in ("state", "saving", "committed")]
LATER = ["restored 4 4a", "state 5 5a"]


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (["found 2 2a", "found 3 3a", "found 4 4a"], {}),
        (["found 2 2a", "found 3 4a", "found 4 4a"], {"wrong": "step 3 has other bits"}),
        (["found 2 2a", "found 4 4a"], {"lost": "step 3 is not among [2, 4]"}),
        (["found 2 2a", "found 3 3a"], {"lost": "step 4 is not among [2, 3]"}),
        (["damaged 1 Error", "found 2 2a", "found 3 3a", "found 4 4a"], {}),
        (["found 2 2a", "found 3 3a", "damaged 4 Error"], {"lost": "step 4 of [2, 3, 4]: Error"}),
    ],
)
def test_what_a_life_does_not_find_is_lost(tmp_path, now, found):
    world = World(Profile("", life={"kept": 3}), tmp_path, tmp_path, 0, tally := Tally())
    for lines in (BEFORE, [*now, *LATER]):
        world._lines = [[line.split() for line in lines]]
        world._judge_storage()
        world._note_saves(is_clean=False)
    told = {kind: getattr(tally, kind) for kind in ("lost", "wrong", "other")}
    assert {kind for kind, each in told.items() if each} == {*found}
    assert all(f"seed 0: {text}" in told[kind] for kind, text in found.items())


@pytest.mark.parametrize(("there", "lost"), [((4, 6), ()), ((6,), (4,))])
def test_what_retention_took_before_a_deletion_is_not_lost(tmp_path, there, lost):
    world = World(Profile("", life={"kept": 3}), tmp_path, tmp_path, 0, tally := Tally())
    first = [*BEFORE, "state 5 5a", "saving 5"]  # it is there, and nobody waited for it
    second = [*(f"found {n} {n}a" for n in (3, 4, 5)), "restored 5 5a"]
    second += ["state 6 6a", "saving 6", "deleted 5", "committed 6"]
    third = [*(f"found {n} {n}a" for n in there), "restored 6 6a", "state 7 7a"]
    for lines in (first, second, third):
        world._lines = [[line.split() for line in lines]]
        world._judge_storage()
        world._note_saves(is_clean=False)
    assert tally.lost == [f"seed 0: step {step} is not among {[*there]}" for step in lost]


@pytest.mark.parametrize(
    ("failed", "found"),
    [
        (["failed 3 1 1 0.0 OSError"], ""),
        (["failed 3 2 1 0.0 OSError"], "raised more than once"),
        (["failed 3 1 1 0.0 OSError", "failed 4 1 0 0.0 OSError"], ""),
        (["failed 4 1 0 0.0 OSError", "failed 5 1 0 0.0 OSError"], "a later save failed"),
    ],
)
def test_a_save_that_fails_raises_once_and_the_next_ones_do_not(tmp_path, failed, found):
    world = World(Profile("", life={"kept": 3}), tmp_path, tmp_path, 0, tally := Tally())
    world._lines = [[line.split() for line in ("disarmed once 1", *failed)]]
    world._judge_fault({"fault": {"kind": "once"}})
    assert len(tally.other) == bool(found)
    assert all(found in each for each in tally.other)


CALLS = "open\tTMP/a\t\nwrite\tTMP/a\t\n{}rename\tTMP\tDONE\n"


@pytest.mark.parametrize("synced", [True, False])
def test_what_is_not_synced_before_the_rename_may_be_lost(tmp_path, synced):
    calls = "fsync\tTMP/a\t\nfsync\tTMP\t\n" if synced else "fsync\tTMP\t\n"
    (tmp_path / "log").write_text(CALLS.format(calls))
    assert shim.volatile(tmp_path / "log", PurePath("TMP")) == ([] if synced else ["TMP/a"])


# A few lives here; `python -m tests.campaigns.machine` has hundreds.
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("profiles", SMALL.values(), ids=SMALL)
def test_nothing_is_lost_whatever_happens(tmp_path, profiles):
    code, found, said = ran(tmp_path, *profiles)
    assert code == 0, said[-5000:]
    assert [each["profile"] for each in found] == [each.split("=")[0] for each in profiles]
    for each in found:
        if "not_tried" not in each:
            assert each["tried"] >= 1
            compared = ("restored and compared", "recovered from memory", "harmless")
            told = any(each["counts"].get(name) for name in compared)
            assert told or each["profile"] in ("beside", "phases")


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_nothing_is_lost_in_a_long_campaign(tmp_path, profile):
    code, _, said = ran(tmp_path, f"{profile}=40")
    assert code == 0, said[-5000:]
