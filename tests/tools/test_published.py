"""``adacheck export`` of published weights: a version, whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from adacheck_jax.publish import Publisher


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def root(tmp_path):
    """Versions 5 to 9; in each one element of the kernel changes; bases at 5 and 8."""
    kernel = np.zeros((10, 300), np.float32)
    with Publisher(tmp_path / "weights", base_every=3) as publisher:
        for version in range(5, 10):
            kernel[version, 1] = version
            params = {"layer": {"kernel": jnp.asarray(kernel, jnp.bfloat16)}, "bias": jnp.ones(2)}
            publisher.publish(params, version=version)
    return tmp_path / "weights"


@pytest.mark.parametrize("version", [5, 7, 8, 9])
def test_a_version_is_read_by_the_safetensors_library(version, root, tmp_path):
    result = run("export", root, version, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["leaf_count"] == 2
    found = load_file(tmp_path / "out/model.safetensors")
    expected = np.zeros((10, 300), np.float32)
    expected[5 : version + 1, 1] = range(5, version + 1)
    assert {*found} == {"layer.kernel", "bias"}
    assert np.array_equal(found["layer.kernel"].astype(np.float32), expected)
    assert found["layer.kernel"].dtype == jnp.bfloat16


def test_the_newest_version_is_read_by_orbax(root, tmp_path):
    path = tmp_path / "out"
    result = run("export", root, "latest", path, "--format", "orbax", "--json")
    assert result.exit_code == 0, result.output
    kernel = ocp.StandardCheckpointer().restore(path)["layer"]["kernel"]
    assert np.asarray(kernel, np.float32)[5:, 1].tolist() == [*range(5, 10)]
    report = json.loads(result.output)
    assert (report["step"], report["format"]) == (9, "orbax")


def test_what_cannot_be_exported_is_told_in_one_line(root, tmp_path):
    for arguments, code, text in [
        ((root, 4, tmp_path / "a"), 1, "expected version 4, found versions 5 to 9"),
        ((root, 5, root), 2, "expected nothing there"),
    ]:
        result = run("export", *arguments)
        assert result.exit_code == code, result.output
        assert text in " ".join(result.output.split())
    assert not (tmp_path / "a").exists()


def test_a_damaged_version_is_not_exported(root, tmp_path):
    for path in (root / "deltas").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    result = run("export", root, 9, tmp_path / "out")
    assert result.exit_code == 1
    assert run("export", root, 5, tmp_path / "out").exit_code == 0
