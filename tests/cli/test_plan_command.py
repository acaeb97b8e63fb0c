"""``adacheck plan``: what it prints, and what it says of targets that are no good."""

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adacheck_jax.cli import main
from adacheck_jax.tools.plan import RedundancyReport

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_llama.py"
STATE = """
    import jax, jax.numpy as jnp
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    def leaf(*shape, mesh=AbstractMesh((16,), ("x",))):
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Runs the command in a directory with a target of this source."""
    monkeypatch.chdir(tmp_path)

    def run(source, target="target.py:state", *options):
        (tmp_path / "target.py").write_text(textwrap.dedent(source))
        return CliRunner().invoke(main.app, ["plan", target, *options])

    return run


def words(text):
    return " ".join(text.split())


@pytest.mark.slow
def test_the_example_on_128_devices_is_told_by_the_kind_of_save(plan):
    result = plan("", f"{EXAMPLE}:data_parallel")
    assert result.exit_code == 0, result.output
    assert "1,458 leaves, 128 devices, 16 processes" in result.stdout
    said = words(result.stdout)
    assert "all that each device holds 12.1 TB 1.0 stock Orbax 94.3 GB 128" in said
    assert "delta 13.5 GB 896 842.3 MB mean of 1 base, 20 deltas 18.0 GB 672" in said
    assert "2,048 devices" in plan("", f"{EXAMPLE}:fsdp_tensor_parallel").stdout


RECORDED = f"""{STATE}
    import adacheck_jax, optax

    def state():
        recorder, params = adacheck_jax.Recorder(optax.adam(0.1)), leaf(250)
        optimizer = jax.eval_shape(recorder.init, params)
        optimizer = jax.tree.map(lambda x: leaf(*x.shape), optimizer)
        return {{"params": params, "opt": optimizer}}, recorder
"""


def test_options_reach_the_report_and_json_holds_all_of_it(plan):
    numbers = ("--devices-per-process", "1", "--max-deltas", "5")
    result = plan(RECORDED, "target.py:state", "--json", *numbers)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report.keys() == {field.name for field in dataclasses.fields(RedundancyReport)}
    assert (report["device_count"], report["process_count"]) == (16, 16)
    assert report["max_deltas"] == 5
    assert 0 < report["delta_bytes"] < report["base_bytes"]
    assert report["amortised_bytes"] == (report["base_bytes"] + 5 * report["delta_bytes"]) / 6


def test_a_state_without_a_recorder_is_all_bases(plan):
    result = plan(f"{STATE}\n    def state(): return {{'w': leaf(250_000)}}")
    assert result.exit_code == 0, result.output
    assert "stock Orbax 1.0 MB 16.0" in words(result.stdout)
    assert "no Recorder in this state, so every step is a base" in result.stdout
    assert "delta  " not in result.stdout
    result = plan(f"{STATE}\n    def state(): return leaf(2), leaf(3)", "target.py:state", "--json")
    assert json.loads(result.stdout)["state_bytes"] == 20
    for option in ("--devices-per-process=0", "--max-deltas=-1"):
        assert plan(RECORDED, "target.py:state", option).exit_code == 2


def test_a_module_of_the_working_directory_and_what_lies_beside_it(plan, tmp_path):
    (tmp_path / "beside_the_target.py").write_text(textwrap.dedent(STATE))
    (tmp_path / "module_of_a_plan.py").write_text(
        "def state():\n    from beside_the_target import leaf\n    return leaf(5)\n"
    )
    before = list(sys.path)
    for target in ("module_of_a_plan:state", f"{tmp_path}/module_of_a_plan.py:state"):
        result = plan("", target, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["state_bytes"] == 20
    assert sys.path == before


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "target.py", "expected path/to/file.py:function or package.module:function"),
        ("", "absent.py:state", "absent.py: expected a Python file, found none"),
        ("", "some/where:state", "some/where: expected a Python file, found none"),
        ("", "no_such_module_here:state", "ModuleNotFoundError: No module named 'no_such_module"),
        ("def (", "target.py:state", "target.py: cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "target.py:state", "cannot be imported: SystemExit: 3"),
        ("def other(): ...", "target.py:state", "found no such name. It has other."),
        ("def state(): return 1 / 0", "target.py:state", "ZeroDivisionError: division by zero"),
        ("def state(): return {'a': 'b'}", "target.py:state", "leaf a: expected an array"),
        (
            f"{STATE}\n    def state(): return [leaf(3), jax.ShapeDtypeStruct((2,), jnp.int32)]",
            "target.py:state",
            "target.py:state: leaf 1: expected a sharding, as other leaves have one",
        ),
    ],
)
def test_a_target_that_is_no_good_is_one_line_and_exit_code_2(plan, source, target, message):
    result = plan(source, target)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("adacheck: ")
    assert result.stderr.count("\n") == 1
