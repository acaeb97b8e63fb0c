"""The package as a stranger meets it: names, types, version, and what the command imports."""

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adacheck_jax
from adacheck_jax.cli.main import app
from tests.data.make_golden import unpack

ROOT = Path(__file__).parent.parent.parent
COMMAND = "sys.argv[0] = 'adacheck'; from adacheck_jax.cli.main import app"
LARGE = {"jax", "jaxlib", "numba", "orbax", "flax", "optax", "tensorstore"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps")
    unpack(ROOT / "tests/data/v9", path)
    return path / "replayed"


def large_packages_after(program):
    """The large packages that a program imports, run in a process of its own."""
    ask = f"import json, sys\n{program}\nprint(json.dumps([*sys.modules]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ask], check=True, capture_output=True, text=True, env=env
    )
    return LARGE & {*json.loads(done.stdout.splitlines()[-1])}


def test_a_command_that_reads_no_array_imports_nothing_large(root, tmp_path):
    reading = [[name, f"{root}", *json] for name in ("ls", "inspect") for json in ([], ["--json"])]
    reading.append(["cp", f"{root}", f"{tmp_path}/copy"])
    helping = [["--help"], ["--version"], ["verify", "--help"], ["demo", "--help"]]
    calls = [f"app({words}, standalone_mode=False)" for words in (*helping, *reading)]
    assert not large_packages_after("; ".join([COMMAND, *calls]))


def test_the_package_imports_its_parts_when_they_are_used():
    lazy = f"{COMMAND}; import adacheck_jax; adacheck_jax"
    assert not large_packages_after(f"{lazy}.errors.FormatError, adacheck_jax.tools.__all__")
    assert "jax" in large_packages_after(f"{lazy}.Recorder")


def test_importing_the_package_makes_the_handler_known_and_compiles_nothing():
    found = large_packages_after("import adacheck_jax")
    assert "orbax" in found
    assert "numba" not in found


@pytest.mark.parametrize("module", [None, "errors", "layout", "publish", "tools", "update"])
def test_public_names_are_there(module):
    package = getattr(adacheck_jax, module) if module else adacheck_jax
    for name in package.__all__:
        found = getattr(package, name)
        assert found.__name__ == name
        assert found.__module__.startswith("adacheck_jax.")
        assert name in dir(package)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Recorders", "'adacheck_jax' has no attribute 'Recorders'$"),
        ("ReplayError", "no attribute 'ReplayError': it is adacheck_jax.errors.ReplayError$"),
        ("Publisher", "no attribute 'Publisher': it is adacheck_jax.publish.Publisher$"),
    ],
)
def test_another_name_is_an_attribute_error(name, told):
    with pytest.raises(AttributeError, match=told):
        getattr(adacheck_jax, name)
    assert not hasattr(adacheck_jax, name)


@pytest.mark.first(1)
@pytest.mark.parametrize("is_first", [True, False])
def test_orbax_finds_the_handler_once_the_package_was_imported(root, is_first):
    both = ["from adacheck_jax import Recorder", "import orbax.checkpoint as ocp"]
    program = "\n".join(both if is_first else both[::-1]) + (
        f"\nwith ocp.CheckpointManager({str(root)!r}) as manager:\n"
        "    assert manager.restore(2)['step'] == 2"
    )
    assert "orbax" in large_packages_after(program)


def test_one_version():
    assert importlib.metadata.version("adacheck-jax") == adacheck_jax.__version__
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.output == f"adacheck {adacheck_jax.__version__}\n"


def test_types_are_marked():
    assert importlib.resources.files("adacheck_jax").joinpath("py.typed").is_file()


def test_the_wheel_has_what_the_package_reads(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    found = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(each.relative_to(ROOT))
        for each in (ROOT / "adacheck_jax").rglob("*")
        if each.is_file() and each.parent.name != "__pycache__"
    }
    assert wanted <= found
    assert "adacheck_jax/tools/report/page.html" in found
