"""``adacheck export``: what others read has the bits of the step, and nothing else is left."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.device import trees
from adacheck_jax.errors import MismatchError, StorageError
from adacheck_jax.publish import Publisher
from adacheck_jax.store.steps import identity
from adacheck_jax.store.storage.location import at
from adacheck_jax.tools.handover import export as exports
from adacheck_jax.tools.handover import formats, sources
from adacheck_jax.tools.handover.formats import Format
from tests import support
from tests.support import manager_of, mesh_of

FORMATS = [*Format]
READERS = {
    "v0": "import orbax.checkpoint as ocp; tree = ocp.StandardCheckpointer().restore(path)",
    "v1": "from orbax.checkpoint import v1; tree = v1.load(path)",
}


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def named(state: Any) -> dict[str, np.ndarray]:
    """Host copies of leaves, by leaf path."""
    return {path: np.array(support._plain(x)) for path, x in trees.flatten(state)[0].items()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A root of a base, a replayed delta, and a save of two deferred steps; and its states."""
    root, states = tmp_path_factory.mktemp("root") / "run", {}
    trained = support.dict_run(mesh_of((4, 2)))
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(root, handler) as manager:
        for step in range(1, 6):
            state = jax.block_until_ready(trained.advance())
            states[step] = named(state)
            if step in (1, 2, 5):
                manager.save(step, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
            else:
                assert handler.record_step(state, step)
    return root, states


def mixed_state() -> dict[str, Any]:
    """A state with a leaf of each unusual kind."""
    return {
        "params": {
            "w": jnp.arange(6.0).reshape(2, 3),
            "half": jnp.arange(5, dtype=jnp.bfloat16),
            "small": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
            "scalar": jnp.float32(2.5),
        },
        "list": [jnp.arange(3), np.arange(2.0), (np.ones(2, np.complex64),)],
        "number": 7,
        "real": 0.5,
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
    }


def saved_bits(root: Path, state: Any, steps: int = 1) -> dict[str, np.ndarray]:
    """Saves a state as a base, then with another number as bit-pattern deltas."""
    handler = adacheck.AdaCheckHandler(delta="bits")
    with manager_of(root, handler) as manager:
        for step in range(1, steps + 1):
            state = {**state, "number": step}
            manager.save(step, args=adacheck.SaveArgs(state))
    return named(state)


def found_in(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an export, by name, as the safetensors library reads them."""
    files = [path / "model.safetensors"]
    if (index := path / "model.safetensors.index.json").exists():
        weights = json.loads(index.read_text())["weight_map"]
        files = [path / name for name in dict.fromkeys(weights.values())]
    return {name: array for file in files for name, array in load_file(file).items()}


def same_bits(found: Any, expected: Any) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def params(state: dict[str, np.ndarray], mark: str = "/") -> dict[str, np.ndarray]:
    return {k.replace("/", mark): x for k, x in state.items() if k.startswith("params/")}


def read_by_orbax(path: Path, api: str = "v0") -> dict[str, np.ndarray]:
    """Leaves that stock Orbax reads, in a process that does not know this library."""
    script = f"""
import sys, numpy as np, jax
path, target = sys.argv[1:]
{READERS[api]}
assert not any("adacheck" in name for name in sys.modules)
plain = lambda x: jax.random.key_data(x) if str(getattr(x, "dtype", "")).startswith("key") else x
pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
name = lambda keys: "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys)
np.save(target, np.array([(name(k), np.asarray(plain(x))) for k, x in pairs] + [0], object))
"""
    target = path.parent / f"{path.name}.{api}.npy"
    subprocess.run(
        [sys.executable, "-I", "-c", script, str(path), str(target)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    found = np.load(target, allow_pickle=True)
    target.unlink()
    return dict(found[:-1])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("step", [1, 2, 4, 5], ids=["base", "delta", "deferred", "after"])
def test_the_params_of_any_recorded_step_are_exported(recorded, tmp_path, step, kind):
    root, states = recorded
    before = identity.of_directory(root)
    done = run("export", root, step, tmp_path / "out", "--format", kind, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["kind"] == {1: "base", 4: "deferred"}.get(step, "delta")
    assert report["replayed_count"] == step - 1
    assert (report["leaf_count"], report["params_only"]) == (4, True)
    expected = params(states[step], "/" if kind == "orbax" else ".")
    assert report["leaf_bytes"] == sum(x.nbytes for x in expected.values())
    if kind == "orbax":
        found, _ = trees.flatten(exports.plain.read(tmp_path / "out"))
    else:
        found = found_in(tmp_path / "out")
    same_bits(found, expected)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert identity.of_directory(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("api", READERS)
def test_stock_orbax_reads_an_export_without_this_library(recorded, tmp_path, api):
    root, states = recorded
    shown = run("export", root, 4, tmp_path / "out", "--format", "orbax", "--all")
    told = " ".join(shown.output.split())
    assert "Step 4 (deferred, 3 updates replayed) is at" in told
    assert "Read back, every leaf has the bits that were saved." in told
    same_bits(read_by_orbax(tmp_path / "out", api), states[4])
    names = {x.name for x in (tmp_path / "out").rglob("*")}
    assert not [name for name in names if "adacheck" in name or name == "manifest.json"]


@pytest.mark.parametrize("step", [1, 2], ids=["base", "bits"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_state_of_all_kinds_of_leaves_is_exported(tmp_path, step, kind):
    state = {**mixed_state(), "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1))}
    state["wide"] = np.arange(3, dtype=np.float64) / 3
    if kind == "orbax":
        state["nibbles"] = jnp.arange(5, dtype=jnp.int4)
    else:
        del state["params"]["small"]
    saved = saved_bits(tmp_path / "run", state, step)
    done = run("export", tmp_path / "run", step, tmp_path / "x", "--format", kind, "--all")
    assert done.exit_code == 0, done.output
    if kind != "orbax":
        expected = {path.replace("/", "."): value for path, value in saved.items()}
        same_bits(found_in(tmp_path / "x"), expected)
        return
    assert "Without elements, which Orbax does not store: empty." in done.output
    del saved["empty"]
    found = exports.plain.ocp.StandardCheckpointer().restore(tmp_path / "x")
    same_bits(named(found), saved)
    assert (found["number"], found["real"], type(found["number"])) == (step, 0.5, int)
    assert found["keys"].dtype == state["keys"].dtype
    assert jax.tree.structure(found["list"]) == jax.tree.structure([0, 0, [0]])
    with pytest.raises(StorageError, match="stock Orbax cannot write it"):
        exports.plain.write(tmp_path / "y", {"a": np.zeros((0, 3))})
    leaf = sources.Leaf("u", (4,), "uint4", 1, None, (), ())
    with pytest.raises(MismatchError, match="u \\(uint4\\)"):
        formats.planned([leaf], [0], Format.ORBAX)


@pytest.mark.parametrize(("size", "count"), [(34_000, 2), (33_000, 3), (1_000, 4), (10**9, 1)])
def test_a_large_export_is_cut_into_shards_with_an_index(
    recorded, tmp_path, monkeypatch, size, count
):
    root, states = recorded
    monkeypatch.setattr(formats, "FILE_BYTES", size)
    out = tmp_path / "out"
    assert run("export", root, 2, out).exit_code == 0
    same_bits(found_in(out), params(states[2], "."))
    names = sorted(path.name for path in out.iterdir())
    if count == 1:
        assert names == ["model.safetensors"]
        return
    files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert names == [*files, "model.safetensors.index.json"]
    index = json.loads((out / names[-1]).read_text())
    assert sorted({*index["weight_map"].values()}) == files
    total = sum(x.nbytes for x in params(states[2]).values())
    assert index["metadata"] == {"total_size": total}


def test_what_a_format_does_not_hold_is_named_before_anything_is_written(tmp_path):
    state = mixed_state()
    state["params"]["nibbles"] = jnp.arange(5, dtype=jnp.int4)
    saved_bits(tmp_path / "run", state)
    doubled = {"params": {"b": jnp.ones(2), "a.c": np.ones(1)}, "params.b": np.ones(0)}
    saved_bits(tmp_path / "doubled", doubled)
    for name, told in (
        ("run", ("params/nibbles (int4)", "params/small (float8_e4m3fn)")),
        ("doubled", ("found params.b for several",)),
    ):
        done = run("export", tmp_path / name, 1, tmp_path / "x", "--all")
        assert done.exit_code == 1
        assert all(each in done.stderr for each in told)
        assert not any(f"params/{each}" in done.stderr for each in ("half", "w"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doubled", "run"]


HELD = """
import sys
from adacheck_jax.cli.main import app
from adacheck_jax.tools.handover import export

compare = export._compare

def held(*arguments):
    print("written", flush=True)
    sys.stdin.read()
    compare(*arguments)

export._compare = held
app(sys.argv[1:])
"""


@contextlib.contextmanager
def exporting(*words):
    """A process that has written an export, and waits before it reads it back."""
    command = [sys.executable, "-c", HELD, "export", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_exports_to_one_place_take_turns_and_clear_what_a_killed_one_left(recorded, tmp_path):
    words = (recorded[0], 1, tmp_path / "x")
    with exporting(*words) as process:
        process.kill()
    assert any((tmp_path / ".x.adacheck-export").rglob("*"))
    with exporting(*words) as process:
        with open(tmp_path / ".x.adacheck-export-lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with ThreadPoolExecutor(1) as threads:
            second = threads.submit(run, "export", *words)
            process.communicate("")
            done = second.result()
    assert process.returncode == 0
    assert (done.exit_code, "expected nothing there" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_step_of_stock_orbax_is_named(recorded, tmp_path):
    saved_bits(tmp_path / "run", {"w": jnp.ones(3)})
    exports.plain.write(tmp_path / "run" / "4", {"w": np.ones(3)})
    done = run("export", tmp_path / "run", 4, tmp_path / "x")
    assert (done.exit_code, "stock Orbax saved step 4" in done.stderr) == (2, True)
    done = run("export", tmp_path / "run", 1, tmp_path / "x")
    assert (done.exit_code, "with --all" in done.stderr) == (2, True)


def test_without_safetensors_it_is_said_what_to_install(recorded, tmp_path, monkeypatch):
    root, _ = recorded
    monkeypatch.setitem(sys.modules, "safetensors", None)
    done = run("export", root, 1, tmp_path / "x", "--format", "safetensors")
    assert done.exit_code == 2
    assert "pip install 'adacheck-jax[safetensors]'" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_base_is_an_error_and_leaves_nothing(tmp_path, kind):
    saved_bits(tmp_path / "run", {"params": {"w": np.arange(4096.0)}, "x": np.ones(3000)})
    volumes = tmp_path / "run/1/default/adacheck/base"
    for path in volumes.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(support.with_flipped_data(path.read_bytes()))
    done = run("export", tmp_path / "run", 1, tmp_path / "x", "--format", kind, "--all")
    assert done.exit_code == 1, done.output
    assert "expected the bits that were saved" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", FORMATS)
def test_other_bits_in_what_was_written_are_found(recorded, tmp_path, monkeypatch, kind):
    root, _ = recorded
    opened = sources.step_source

    @contextlib.contextmanager
    def changed(*arguments: Any) -> Any:
        with opened(*arguments) as source:
            other = lambda index: np.nextafter(source.read(index), np.float32(9))  # noqa: E731
            yield dataclasses.replace(source, read=other)

    monkeypatch.setattr(sources, "step_source", changed)
    done = run("export", root, 1, tmp_path / "x", "--format", kind)
    assert done.exit_code == 1
    assert "found others in 4 of 4 leaves" in " ".join(done.stderr.split())
    assert not [*tmp_path.iterdir()]


def test_of_a_base_one_file_is_in_memory_at_once(tmp_path, monkeypatch):
    saved_bits(tmp_path / "run", {"params": {f"w{n}": np.full(1000, n * 1.0) for n in range(8)}})
    monkeypatch.setattr(formats, "FILE_BYTES", 2 * 8000)
    alive: list[Any] = []
    read = sources._stored

    def counted(*arguments: Any) -> Any:
        assert sum(each() is not None for each in alive) <= 1
        alive.append(weakref.ref(array := read(*arguments)))
        return array

    monkeypatch.setattr(sources, "_stored", counted)
    exports.export(tmp_path / "run", 1, str(tmp_path / "x"))
    assert len(alive) == 8


def test_a_place_that_was_taken_meanwhile_is_not_replaced(recorded, tmp_path, monkeypatch):
    root, _ = recorded
    out = tmp_path / "x"
    monkeypatch.setattr(exports, "_compare", lambda *_: out.write_text("mine"))
    done = run("export", root, 1, out)
    assert (done.exit_code, "something was put there" in done.stderr) == (2, True)
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_params_are_what_the_update_trains(tmp_path):
    """Whatever the state calls them."""
    recorder = adacheck.Recorder(optax.sgd(0.1))
    weights = {"w": jnp.ones(4)}
    state = {"model": weights, "opt": recorder.init(weights), "ema": {"w": jnp.zeros(3)}}
    with manager_of(tmp_path / "run", adacheck.AdaCheckHandler(recorder)) as manager:
        _, state["opt"] = jax.jit(recorder.update)(weights, state["opt"], weights)
        manager.save(1, args=adacheck.SaveArgs(state))
    exports.export(at(tmp_path / "run"), 1, str(tmp_path / "x"))
    assert [*found_in(tmp_path / "x")] == ["model.w"]


@pytest.fixture
def published(tmp_path):
    """Versions 5 to 9; in each one element of the kernel changes; bases at 5 and 8."""
    kernel = np.zeros((10, 300), np.float32)
    with Publisher(tmp_path / "weights", base_every=3) as publisher:
        for version in range(5, 10):
            kernel[version, 1] = version
            params = {"layer": {"kernel": jnp.asarray(kernel, jnp.bfloat16)}, "bias": jnp.ones(2)}
            publisher.publish(params, version=version)
    return tmp_path / "weights"


@pytest.mark.parametrize("version", [5, 7, 8])
def test_a_published_version_is_read_by_the_safetensors_library(version, published, tmp_path):
    done = run("export", published, version, tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["leaf_count"] == 2
    kernel = np.zeros((10, 300), jnp.bfloat16)
    kernel[5 : version + 1, 1] = range(5, version + 1)
    expected = {"layer.kernel": kernel, "bias": np.ones(2, np.float32)}
    same_bits(found_in(tmp_path / "out"), expected)


def test_the_newest_version_is_read_by_orbax(published, tmp_path):
    path = tmp_path / "out"
    done = run("export", published, "latest", path, "--format", "orbax", "--json")
    assert done.exit_code == 0, done.output
    kernel = exports.plain.ocp.StandardCheckpointer().restore(path)["layer"]["kernel"]
    assert np.asarray(kernel, np.float32)[5:, 1].tolist() == [*range(5, 10)]
    report = json.loads(done.output)
    assert (report["step"], report["format"]) == (9, "orbax")


def test_what_cannot_be_exported_of_published_weights_is_told_in_one_line(published, tmp_path):
    for version, target, code, text in (
        (4, tmp_path / "a", 1, "expected version 4, found versions 5 to 9"),
        (5, published, 2, "expected nothing there"),
    ):
        done = run("export", published, version, target)
        assert done.exit_code == code, done.output
        assert text in " ".join(done.output.split())
    for path in (published / "deltas").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run("export", published, 9, tmp_path / "a").exit_code == 1
    assert not (tmp_path / "a").exists()
    assert run("export", published, 5, tmp_path / "a").exit_code == 0
