"""``adacheck goodput``: what it prints and draws, and what it says of bad arguments."""

import json
import sys

import pytest
from typer.testing import CliRunner

from adacheck_jax.cli import main
from adacheck_jax.tools.goodput.systems import SYSTEMS


def run(*options):
    return CliRunner().invoke(main.app, ["goodput", "--runs", "2", "--days", "2", *options])


def test_it_prints_a_row_for_each_system():
    done = run("--hosts", "16384", "--mtbf", "45min")
    assert done.exit_code == 0, done.output
    assert "16,384 hosts, 131,072 devices, a failure every 0.75 h" in done.output
    assert all(system.name in done.output for system in SYSTEMS)


def test_json_has_the_sources_of_all_figures():
    found = json.loads(run("--json").output)
    assert found["devices"] == 16_384
    assert {each["kind"] for each in found["figures"]} >= {"published", "measured", "assumed"}
    assert all(each["source"] for each in found["figures"])


def test_sensitivity_is_a_second_table():
    assert "cluster.host_restart_s" in run("--sensitivity").output


def test_figures_are_read_from_a_file(tmp_path):
    (tmp_path / "costs.json").write_text('{"cluster": {"step_s": 2}}')
    found = json.loads(run("--costs", str(tmp_path / "costs.json"), "--json").output)
    step = next(each for each in found["figures"] if each["name"] == "step_s")
    assert (step["value"], step["kind"]) == (2, "given")


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_it_draws(tmp_path, name):
    pytest.importorskip("matplotlib")
    assert run("--plot", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).stat().st_size > 1000


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("--plot", str(tmp_path / "plot.svg"))
    assert done.exit_code == 2
    assert "pip install 'adacheck-jax[plot]'" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mtbf", "often"], "--mtbf: expected a time such as 3h"),
        (["--mtbf", "0h"], "--mtbf: expected a time such as 3h"),
        (["--plot", "plot.gif"], "ends in .png or .svg"),
        (["--costs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line(options, message):
    done = run(*options)
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1)
    assert message in done.output


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": 1}', '{"clutter": {}}'])
def test_a_bad_file_is_one_line(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    done = run("--costs", str(tmp_path / "costs.json"))
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1)
