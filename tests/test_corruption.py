"""The corruption campaign at a small size: no damaged file gives other bits without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

COUNT = 60


def test_nothing_is_silently_wrong():
    command = [sys.executable, "-m", "benchmarks.corruption", "--json", "--seed", "11"]
    command += ["--count", str(COUNT), "--stock-count", "0"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    restores = json.loads(done.stdout)["restores"]
    assert len(restores) >= COUNT
    assert not [each for each in restores if each["outcome"] not in ("refused", "harmless")]
    assert {each["outcome"] for each in restores} == {"refused", "harmless"}
