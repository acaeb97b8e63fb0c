"""Small campaigns of the machine, and worlds whose storage lies: each must be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import machine

ROOT = Path(__file__).parents[2]
SMALL = {
    "kills": ("crashes=4", "together=3", "beside=1"),
    "memory": ("shadow=3", "hosts=3"),
    "storage": ("operations=6", "disk=3", "outages=2", "damage=1"),
    "phases": ("phases=3",),
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
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found.get("profiles", [found]), done.stderr


# A few lives here; `python -m tests.campaigns.machine` has hundreds.
@pytest.mark.slow
@pytest.mark.timeout(600)
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
@pytest.mark.parametrize("profile", machine.PROFILES)
def test_nothing_is_lost_in_a_long_campaign(tmp_path, profile):
    code, _, said = ran(tmp_path, f"{profile}=40")
    assert code == 0, said[-5000:]
