"""``adacheck export`` of published weights: a version, and what changed since the one before."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from adacheck_jax.publish import Publisher
from adacheck_jax.tools.handover import safetensors_files


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def root(tmp_path):
    """Versions 5 to 9; in each one element of the kernel changes; bases at 5 and 8."""
    kernel = np.zeros((10, 3), np.float32)
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
    found = safetensors_files.files_at(tmp_path / "out")
    expected = np.zeros((10, 3), np.float32)
    expected[5 : version + 1, 1] = range(5, version + 1)
    assert {*found} == {"layer.kernel", "bias"}
    assert np.array_equal(found["layer.kernel"].astype(np.float32), expected)
    assert found["layer.kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("version", [6, 8, 9])
def test_changes_lead_from_the_version_before_to_this_one(version, root, tmp_path):
    for each, options in ((version - 1, ()), (version, ("--changes",))):
        result = run("export", root, each, tmp_path / str(each), *options)
        assert result.exit_code == 0, result.output
    before = np.array(safetensors_files.files_at(tmp_path / str(version - 1))["layer.kernel"])
    changes = safetensors_files.files_at(tmp_path / str(version))
    assert {*changes} == {"layer.kernel.indices", "layer.kernel.bits"}
    assert changes["layer.kernel.indices"].tolist() == [3 * version + 1]
    before.reshape(-1).view(np.uint16)[changes["layer.kernel.indices"]] = changes[
        "layer.kernel.bits"
    ]
    assert before[version, 1] == version


@pytest.mark.parametrize("kind", ["orbax", "npz"])
def test_the_newest_version_in_other_formats(kind, root, tmp_path):
    path = tmp_path / "out"
    result = run("export", root, "latest", path, "--format", kind, "--json")
    assert result.exit_code == (0 if kind == "orbax" else 1), result.output
    if kind == "npz":  # which has no bfloat16
        result = run("export", root, "-1", path, "--format", kind, "--changes", "--json")
        assert result.exit_code == 0, result.output
        with np.load(path) as file:
            assert file["layer.kernel.indices"].tolist() == [28]
    else:
        kernel = ocp.StandardCheckpointer().restore(path)["layer"]["kernel"]
        assert np.asarray(kernel, np.float32)[5:, 1].tolist() == [*range(5, 10)]
    report = json.loads(result.output)
    assert (report["step"], report["format"]) == (9, kind)


def test_what_cannot_be_exported_is_told_in_one_line(root, tmp_path):
    for arguments, code, text in [
        ((root, 4, tmp_path / "a"), 1, "expected version 4, found versions 5 to 9"),
        ((root, 5, tmp_path / "a", "--changes"), 1, "begins with a base"),
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
