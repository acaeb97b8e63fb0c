"""The test command where XLA ends a process: which flags are set, and what is seen of the end."""

import subprocess
import sys

import pytest

from benchmarks import xla_flags
from tests import last_words

DEVICES = "--xla_force_host_platform_device_count=2"
DIES = """
import os

def test_passes():
    pass

def test_dies():
    os.write(2, b"Unknown flag in XLA_FLAGS: --xla_unheard_of=1")
    os._exit(6)
"""


@pytest.mark.slow
def test_flags_that_xla_does_not_know_are_left_out():
    assert xla_flags.known([DEVICES]) == [DEVICES]
    assert xla_flags.known(["--xla_unheard_of=1", DEVICES]) == [DEVICES]


@pytest.mark.slow
def test_a_worker_that_dies_says_why(tmp_path):
    (tmp_path / "test_dies.py").write_text(DIES)
    plugin = last_words.__file__
    (tmp_path / "conftest.py").write_text(
        f"import runpy\nWORDS = runpy.run_path({plugin!r})['LastWords']\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(WORDS())\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout
    assert "died; the end of its output:\nUnknown flag in XLA_FLAGS: --xla_un" in run.stdout
