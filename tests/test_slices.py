"""Slices of the tests: each test is in one of them, and in the same one in every run."""

import ast
import functools
import subprocess
import sys

import pytest

from tests import house, slices
from tests.slices import Slice

NAMES = [f"tests/room/test_{n}.py::test_it[{n}]" for n in range(400)]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_test_is_in_one_slice(count):
    found = [[x for x in NAMES if Slice(f"{k}/{count}").has(x)] for k in range(count)]
    assert sorted(x for each in found for x in each) == sorted(NAMES)
    assert min(map(len, found)) > 400 / count / 2
    assert found[0] == [x for x in NAMES if Slice(f"{7 * count}/{count}").has(x)]


@pytest.mark.parametrize("given", ["3", "3/0", "a/8", "-1/8", "3/8/2"])
def test_what_names_no_slice_is_refused(given):
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        Slice(given)


def test_a_run_has_the_tests_of_its_slice(tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import runpy\nSlice = runpy.run_path({slices.__file__!r})['Slice']\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Slice('1/3'))\n"
    )
    (tmp_path / "test_n.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(30))\ndef test_n(n):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-v"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    passed = {n for n in range(30) if f"test_n[{n}] PASSED" in run.stdout}
    assert passed == {n for n in range(30) if Slice("1/3").has(f"test_n.py::test_n[{n}]")}
    assert f"{len(passed)} passed, {30 - len(passed)} deselected" in run.stdout


def test_spare_tests_are_there():
    @functools.cache
    def tests_in(file):
        path = house.ROOT / file
        nodes = ast.walk(ast.parse(path.read_text())) if path.exists() else ()
        return {each.name for each in nodes if isinstance(each, ast.FunctionDef)}

    parts = [x.partition("[")[0].split("::") for x in slices.SPARE.read_text().splitlines()]
    gone = {f"{file}::{test}" for file, *_, test in parts if test not in tests_in(file)}
    assert not gone, "run: python -m tests.campaigns.executed"
