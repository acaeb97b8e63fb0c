"""Processes that fork, or end, while threads of this library are at work."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.one_process import OneProcess
from tests.faults import forks_worker
from tests.faults.forks_worker import DEEDS, SITUATIONS

OTHERS = [each for each in SITUATIONS if each not in ("writing", "saving", "managing", "folding")]


def ran(situation: str, tmp_path: Any) -> Any:
    """What a process tells that is in a situation; it forks, and this one may not."""
    command = [sys.executable, "-m", "tests.faults.forks_worker", situation]
    done = subprocess.run(
        [*command, tmp_path / "root", tmp_path / "memory"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.first(0, slow=3)
@pytest.mark.parametrize("situation", ["writing", "managing", "folding", "saving", *OTHERS])
def test_no_child_hangs_or_harms_its_parent(tmp_path, situation):
    found = ran(situation, tmp_path)
    assert found["outcomes"] == dict.fromkeys(DEEDS, "ended with 0")
    assert found["locked"]  # the file of the shadow is the parent's as before
    assert found["recovered"]
    if situation in ("writing", "written"):
        assert found["compacted"] == [1 + forks_worker.LINEAGE]
        # The lock of who makes the base, and the base, which is begun or whole.
        ends = {name.split(".")[-2] for name in found["beside"]}
        assert ends - {"compaction"} == {"compacting"}
        assert situation == "writing" or "compaction" in ends


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("situation", ["saving", "writing", "folding", *OTHERS])
def test_a_process_ends_whatever_its_threads_do(tmp_path, situation):
    ran(f"end-{situation}", tmp_path)


FORKING = """
import os, signal, sys, time
import optax
import adacheck_jax as adacheck
adacheck.checkpoint_manager(sys.argv[1], adacheck.Recorder(optax.sgd(0.1)))
time.sleep(float(sys.argv[2]))
if (child := os.fork()) == 0:
    signal.alarm(60)
    import numba
    os._exit(numba.njit(lambda x: x + 1)(1) - 2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("delay_s", ["0", "0.2"])
def test_a_child_that_is_forked_while_loops_are_compiled_can_compile(tmp_path, delay_s):
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "root"), delay_s]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_an_object_works_in_the_process_that_used_it_first(monkeypatch):
    here = OneProcess("a thing")
    assert not here.is_elsewhere
    monkeypatch.setattr("os.getpid", lambda: 7)  # forked before it was used
    here.enter()
    here.enter()
    monkeypatch.setattr("os.getpid", lambda: 8)
    assert here.is_elsewhere
    with pytest.raises(AdaCheckError, match=r"a thing in process 7.* process 8, which was forked"):
        here.enter()
