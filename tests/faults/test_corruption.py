"""The corruption campaign at a small size: no damaged file gives other bits without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FEW = ["kept volumes, aliases"]
CASES = [*FEW, "recorded steps", "replayed deltas", "bit-pattern deltas", "two items a step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "count"), [(FEW, 6), pytest.param(CASES, 200, marks=pytest.mark.campaign)]
)
def test_nothing_is_silently_wrong(cases, count):
    command = [sys.executable, "-m", "tests.campaigns.corruption", "--json", "--seed", "11"]
    command += ["--count", str(count), "--stock-count", "0", "--cases", *cases]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    restores = json.loads(done.stdout)["restores"]
    assert len(restores) >= count
    assert {each["case"] for each in restores} == set(cases)
    assert not [each for each in restores if each["outcome"] not in ("refused", "harmless")]
    assert {each["outcome"] for each in restores} == {"refused", "harmless"}
