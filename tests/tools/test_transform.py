"""``adacheck transform``: a step in another layout, in a new root."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from tests import support

RULES = """
[[rule]]
split = "in/kernel"
to = ["in/left", "in/right"]

[[rule]]
rename = "{all...}"
to = "model/{all...}"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    support.saved_run(root, 3, (1, 1))
    return root, {step: support.restored(root, step) for step in (1, 2, 3)}


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["transform", *map(str, arguments)])


def test_a_delta_becomes_a_base_in_another_layout(saved, rules, tmp_path):
    root, states = saved
    number = max(states)
    done = run(root, tmp_path / "new", "--rules", rules, "--step", number)
    assert done.exit_code == 0, done.output
    assert "in/kernel float32[64, 128]" in done.output
    assert "inverses give back every bit" in " ".join(done.output.split())
    with ocp.CheckpointManager(tmp_path / "new", item_handlers=adacheck.AdaCheckHandler()) as m:
        assert m.all_steps() == [number]
        found = m.restore(number, args=adacheck.RestoreArgs())
    before, after = states[number]["params"], found["params"]["model"]
    np.testing.assert_array_equal(after["in"]["left"], before["in"]["kernel"][:, :64])
    np.testing.assert_array_equal(after["in"]["right"], before["in"]["kernel"][:, 64:])
    np.testing.assert_array_equal(after["out"]["kernel"], before["out"]["kernel"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "rules.toml"]


def test_a_plan_is_shown_and_nothing_written(saved, rules, tmp_path):
    root, states = saved
    done = run(
        root, tmp_path / "new", "--rules", rules, "--step", min(states), "--dry-run", "--json"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["trees"][0] == "params"
    assert report["made"]["params/model/in/left"] == "float32[64, 64]"
    assert "step" in report["untouched"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "options", "code", "told"),
    [
        ("nothing", (), 1, "expected TOML"),
        ("[[rule]]\nrename = 'inn/kernel'\nto = 'x'", (), 1, "The leaves of params are"),
        ("[[rule]]\nstrip = 'in/kernel'\nsize = 3", (), 1, "lossy=True"),
        *(
            ("[[rule]]\nrename = 'scale'\nto = 'in'", more, 1, "expected no leaf below another one")
            for more in ((), ("--dry-run",))
        ),
        (RULES, ("--step", 77), 2, "expected step 77"),
        (RULES, ("--rules", "no"), 2, "no"),
    ],
)
def test_what_does_not_fit_leaves_nothing_behind(saved, tmp_path, text, options, code, told):
    root, states = saved
    path = tmp_path / "rules.toml"
    path.write_text(text)
    done = run(root, tmp_path / "new", "--rules", path, "--step", max(states), *options)
    assert done.exit_code == code, done.output
    assert told in " ".join(done.output.split())
    assert [each.name for each in tmp_path.iterdir()] == ["rules.toml"]
    assert run(root, root / "new", "--rules", path, "--step", max(states)).exit_code
    assert not (root / "new").exists()


def test_a_base_has_the_data_types_that_are_told(saved, tmp_path):
    root, states = saved
    number = max(states)
    (tmp_path / "wide.toml").write_text('[[rule]]\ncast = "in/kernel"\ndtype = "float64"\n')
    done = run(root, tmp_path / "new", "--rules", tmp_path / "wide.toml", "--step", number)
    assert done.exit_code == 0, done.output
    assert "in/kernel float64[64, 128]" in done.output
    words = ["export", tmp_path / "new", number, tmp_path / "x"]
    assert not CliRunner().invoke(app, [*map(str, words)]).exit_code
    found = load_file(tmp_path / "x/model.safetensors")["params.in.kernel"]
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.asarray(states[number]["params"]["in"]["kernel"]))
