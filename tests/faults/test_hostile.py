"""Files that somebody made up: they are refused, cheaply and by name, and never run or followed."""

import dataclasses
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, IntegrityError, LineageError
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format import manifest_json
from adacheck_jax.format.manifest import Update
from adacheck_jax.restore.deltas.delta_reader import DeltaReader
from adacheck_jax.store import zarr
from adacheck_jax.store.packs import arrays, reader
from adacheck_jax.store.steps import lookup, manifest_file, roots
from adacheck_jax.update import exported_program, untrusted
from adacheck_jax.update import program as update_program
from tests.format.test_manifest import A_BASE, A_DELTA, body_of, decode, encode_body

ROOT = Path(__file__).parents[2]
LEAF = body_of(A_BASE)["leaves"][0]


def with_leaf(**changes):
    body = body_of(A_BASE)
    body["leaves"][0].update(changes)
    return encode_body(body)


@pytest.mark.parametrize(
    "name", ["r16", "V8", "object", "O", "S4", "f4", "float128", "", "x" * 9999]
)
def test_a_data_type_that_jax_does_not_have_is_refused(name):
    with pytest.raises(FormatError, match="no elements of"):
        decode(with_leaf(dtype=name))


def test_every_data_type_of_jax_is_known_with_its_size():
    for name, size in manifests.ITEMSIZES_BYTES.items():
        assert jnp.dtype(name).itemsize == size
    numbers = (each for each in vars(jnp).values() if hasattr(each, "dtype"))
    known = {str(each.dtype) for each in numbers if isinstance(each.dtype, np.dtype)}
    assert "bfloat16" in known
    assert known - {"object"} <= manifests.ITEMSIZES_BYTES.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"itemsize_bytes": 0},
        {"itemsize_bytes": 4},
        {"key_type": "key<fry>"},  # of bfloat16
        {"key_type": "key<fry>", "dtype": "uint32", "itemsize_bytes": 4, "shape": [], "cuts": []},
        {"key_type": "key<a<b>", "dtype": "uint32", "itemsize_bytes": 4},
        {"shape": [2**62, 2**62], "cuts": [[0, 2**62], [0, 2**62]], "owners": [0]},
        {"shape": [0, 2**62], "cuts": [[0], [0, 2**62]], "owners": [0]},
        {"shape": [2**64, 1], "cuts": [[0, 2**64], [0, 1]], "owners": [0]},
        {"shape": [1] * 40, "cuts": [[0, 1]] * 40, "owners": [0]},
        {"cuts": [[*range(5000)], [*range(5000)]], "shape": [4999, 4999]},
        {"path": "\ud800"},
        {"path": ["a"]},
        {"path": "count"},  # that of the other leaf
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_leaf_that_no_one_saved_is_refused_without_making_its_boxes(changes):
    changes = {"owners": [0], **changes} if changes.get("shape") == [] else changes
    data = with_leaf(**changes)
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        decode(data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert len(str(caught.value)) < 1000  # and no page of numbers


@pytest.mark.parametrize(
    "text",
    [
        b'{"format":' + b"9" * 5000 + b"}",
        b'{"format":1e400}',
        b'{"format":NaN}',
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b"\xff\xfe[",
        b"[[],[],[]," * 2**19,
    ],
    ids=["digits", "infinite", "nan", "lists", "objects", "utf-16", "many"],
)
def test_json_that_no_one_writes_is_refused(text):
    with pytest.raises(FormatError):
        decode(text)


def test_a_key_that_appears_twice_is_refused():
    data = encode_body(body_of(A_DELTA))
    decode(data)
    with pytest.raises(FormatError, match="twice"):
        decode(data.replace(b"{", b'{"kind":"base",', 1))


def test_metadata_as_deep_as_json_can_read_is_read_or_refused():
    for depth in (10, 300, 700, 900, 960, 980, 990, 995, 1000, 2000):
        body = {**body_of(A_DELTA), "checksum": ""}
        text = json.dumps({**body, "custom_metadata": "@"}).replace(
            '"@"', "[" * depth + "]" * depth
        )
        with pytest.raises((FormatError, IntegrityError)):
            decode(text.encode())


def test_a_manifest_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_json, "MAX_CONTAINERS", 5)
    with pytest.raises(FormatError, match="at most"):
        manifest_file.write(tmp_path, A_BASE)
    assert not (tmp_path / manifest_file.FILE).exists()


@pytest.mark.parametrize(("field", "value"), [("updates", 1), ("problem", {}), ("problem", 3)])
def test_a_field_of_another_type_is_not_taken_for_it(field, value):
    with pytest.raises(FormatError):
        decode(encode_body({**body_of(A_DELTA), field: value}))


def write_steps(root, *, count=1, fingerprints=2, **changes):
    """A base and deltas that refer to one another, without data."""
    (root / "10").mkdir(parents=True, exist_ok=True)
    manifest_file.write(root / "10", A_BASE)
    parent = manifest_file.read(root / "10")
    for number in range(1, count + 1):
        link = manifests.Link(9 + number, f"../{9 + number}", parent.checksum)
        delta = dataclasses.replace(
            A_DELTA,
            step=10 + number,
            parent=link,
            depth=number,
            fingerprints=(0,) * fingerprints,
            caution=manifests.NO_CAUTION,
            **changes,
        )
        (root / str(10 + number)).mkdir(exist_ok=True)
        manifest_file.write(root / str(10 + number), delta)
        parent = manifest_file.read(root / str(10 + number))
    return root / str(10 + count)


@pytest.mark.parametrize("fingerprints", [0, 1, 3])
def test_a_delta_with_another_number_of_fingerprints_than_leaves_is_refused(fingerprints, tmp_path):
    with pytest.raises(IntegrityError, match="a fingerprint for each of 2 leaves"):
        lookup.resolve(write_steps(tmp_path, fingerprints=fingerprints))


def test_zeros_and_sizes_beyond_what_the_leaves_take_are_refused(tmp_path):
    for size in (2**60, 2**63 - 1):
        for zeros in ((), ((0, 2**50),), ((0, 2**62),)):
            pack = manifests.Pack("rr", (), size, 0, zeros, ())
            step = write_steps(tmp_path, packs=(pack, manifests.Pack("==", (), 0, 0, (), ())))
            found = lookup.resolve(step)
            with pytest.raises(IntegrityError, match="expected packs of"):
                DeltaReader(found.entries[-1])


def test_a_lineage_of_many_references_takes_linear_time(tmp_path):
    step = write_steps(tmp_path, count=300)
    looked = []
    original = Path.is_dir

    def is_dir(path):
        looked.append(path)
        return original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", is_dir)
        assert len(lookup.resolve(step).entries) == 301
    assert len(looked) < 300 * 5


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "place", ["adacheck", "adacheck/manifest.json", "x/y", "d", "adacheck/lineage"]
)
@pytest.mark.parametrize("of", ["11", "10"])
def test_a_link_in_a_step_is_refused_by_name(place, of, tmp_path):
    step = write_steps(tmp_path)
    path, elsewhere = tmp_path / of / place, tmp_path / "elsewhere"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(FormatError, match=rf"{path}: .*symbolic link"):
        lookup.resolve(step)
    assert [each.step for each in roots.steps_of(tmp_path) if each.error] == (
        [10, 11] if of == "10" else [11]
    )


def test_a_step_that_is_referred_to_may_not_be_a_link_but_the_root_may(tmp_path):
    root = tmp_path / "root"
    step = write_steps(root)
    (tmp_path / "link").symlink_to(root)
    assert len(lookup.resolve(tmp_path / "link" / "11").entries) == 2
    os.rename(root / "10", tmp_path / "10")
    (root / "10").symlink_to(tmp_path / "10")
    with pytest.raises(FormatError, match=rf"{root / '10'}: .*symbolic link"):
        lookup.resolve(step)


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(tmp_path):
    step = write_steps(tmp_path)
    (step / manifest_file.FILE).unlink()
    os.mkfifo(step / manifest_file.FILE)
    for read in (manifest_file.read, lookup.resolve):
        with pytest.raises(FormatError, match=r"manifest\.json.*not followed"):
            read(step)


@pytest.mark.parametrize(
    "reference", ["/etc", "..", "../..", "../../../a/b/c", "a", "../10/../..", "\0", "../1\0"]
)
def test_a_reference_leads_to_siblings_only(reference, tmp_path):
    for name in ("10", "11"):
        (tmp_path / name).mkdir()
    manifest_file.write(tmp_path / "10", A_BASE)
    link = manifests.Link(10, reference, manifest_file.read(tmp_path / "10").checksum)
    manifest_file.write(tmp_path / "11", dataclasses.replace(A_DELTA, parent=link))
    with pytest.raises(LineageError):
        lookup.resolve(tmp_path / "11")


@pytest.mark.parametrize("changes", [{"chunk": 1 << 30}, {"codec": "gzip"}, {"codec": "blosc"}])
def test_a_pack_in_other_chunks_or_codecs_than_are_written_is_refused(changes, tmp_path):
    codecs = [{"name": "bytes"}, {"name": changes.get("codec", "crc32c")}]
    metadata = {
        "data_type": "uint8",
        "shape": [64],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [changes.get("chunk", 64)]},
        },
        "codecs": codecs,
    }
    database = zarr.database_at(tmp_path / "pack")
    zarr.array_in(database, arrays.RAW.name, metadata, create=True).result()
    with pytest.raises(FormatError, match="expected chunks of at most"):
        reader.PackArray(tmp_path / "pack", arrays.RAW, 64)


def test_a_base_in_other_codecs_than_are_written_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=adacheck.AdaCheckHandler()) as manager:
        manager.save(0, args=adacheck.SaveArgs({"w": jnp.ones((4, 16))}))
        manager.wait_until_finished()
        database = zarr.database_in(tmp_path / "0" / "default")
        body = json.loads(database.read("w/zarr.json").result().value)
        body["codecs"].insert(1, {"name": "gzip", "configuration": {"level": 1}})
        database.write("w/zarr.json", json.dumps(body)).result()
        message = r"array w in one of .* found .*gzip"
        with pytest.raises(IntegrityError, match=message):
            manager.restore(0)
    with pytest.raises(IntegrityError, match=message):
        adacheck.latest_restorable(tmp_path)


def test_a_base_of_another_shape_than_its_manifest_says_is_refused_before_it_is_read(tmp_path):
    state = {"w": jnp.ones((4, 16)), "n": jnp.zeros((), jnp.int32)}
    with ocp.CheckpointManager(tmp_path, item_handlers=adacheck.AdaCheckHandler()) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        directory = tmp_path / "0" / "default"
        manifest = manifest_file.read(directory)
        index = [leaf.path for leaf in manifest.leaves].index("w")
        for changes in (
            {"shape": (2**20, 2**30), "cuts": ((0, 2**20), (0, 2**30))},
            {"dtype": "int32"},
        ):
            leaves = list(manifest.leaves)
            leaves[index] = dataclasses.replace(leaves[index], **changes)
            manifest_file.write(directory, dataclasses.replace(manifest, leaves=tuple(leaves)))
            with pytest.raises(IntegrityError, match="expected leaf w of shape"):
                adacheck.AdaCheckHandler().restore(directory)


SPECS = [[jax.ShapeDtypeStruct((4, 4), "float32")]] * 3 + [[]]
SWITCHES = jax.ShapeDtypeStruct((), "uint32")


def exported(function, **options):
    """As a program of format version 6, or of this one if it takes switches."""
    arguments = [*SPECS, SWITCHES][: len(inspect.signature(function).parameters)]
    program = jax.export.export(
        jax.jit(function), platforms=(update_program.platform(),), **options
    )
    return program(*arguments)


def load(data):
    digests = {update_program.platform(): hashlib.sha256(data).hexdigest()}
    update = Update(
        (), (), (), (), (0,), ((0, 0, 0, 0),), (), (), "", "", digests, jax.__version__, False
    )
    exported = exported_program.vetted(data, update, "update.stablehlo")
    return exported_program.function_of(exported, "update.stablehlo")


def test_linear_algebra_and_loops_are_pure():
    def update(params, inner, record, extra):
        q, r = jnp.linalg.qr(record[0])
        values, vectors = jnp.linalg.eigh(record[0] @ record[0].T)
        x = jax.lax.fori_loop(0, 3, lambda _, x: x * 0.5 + q, params[0])
        x += jax.random.normal(jax.random.key(0), x.shape) + jax.scipy.special.erf(r)
        return [x], [vectors * values + jnp.linalg.inv(record[0]) + jnp.sort(x)]

    lists, switches = [[jnp.eye(4)] for _ in range(3)], update_program.switches(1)
    params, inner = load(bytes(exported(update).serialize()))(*lists, [], switches)
    assert params[0].shape == inner[0].shape == (4, 4)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "lamb", "sgd", "muon", "noisy_sgd"])
def test_what_optimizers_do_is_pure_on_every_platform(name):
    tx = getattr(optax, name, None) or getattr(optax.contrib, name)
    params = {"a": jnp.ones((16, 16)), "b": jnp.ones(16)}
    transformation = tx(1e-3)
    state = transformation.init(params)
    for platform in exported_program.PLATFORMS:
        program = jax.export.export(jax.jit(transformation.update), platforms=(platform,))
        untrusted.check_operations(program(params, state, params), "update")


CALLBACK = """
module @m {
  func.func public @main(%a: tensor<4x4xf32>, %b: tensor<4x4xf32>, %c: tensor<4x4xf32>)
      -> (tensor<4x4xf32>, tensor<4x4xf32>) {
    OPERATION
    return RESULT, %b : tensor<4x4xf32>, tensor<4x4xf32>
  }
}
"""
IMPURE = {
    "callback": "stablehlo.custom_call @xla_ffi_python_cpu_callback(%a) {has_side_effect = true} "
    ": (tensor<4x4xf32>) -> ()",
    "unknown": "%x = stablehlo.custom_call @anything(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>",
    "kernel": "%x = stablehlo.custom_call @tpu_custom_call(%a) "
    ": (tensor<4x4xf32>) -> tensor<4x4xf32>",
    "infeed": '%t = stablehlo.create_token : !stablehlo.token\n    %x:2 = "stablehlo.infeed"(%t) '
    '{infeed_config = ""} : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)',
    "outfeed": "%t = stablehlo.create_token : !stablehlo.token\n    "
    '%x = "stablehlo.outfeed"(%a, %t) {outfeed_config = ""} '
    ": (tensor<4x4xf32>, !stablehlo.token) -> !stablehlo.token",
    "send": "%t = stablehlo.create_token : !stablehlo.token\n    "
    '%x = "stablehlo.send"(%a, %t) '
    "{channel_handle = #stablehlo.channel_handle<handle = 1, type = 2>, is_host_transfer = true} "
    ": (tensor<4x4xf32>, !stablehlo.token) -> !stablehlo.token",
    "recv": '%t = stablehlo.create_token : !stablehlo.token\n    %x:2 = "stablehlo.recv"(%t) '
    "{channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>, is_host_transfer = true} "
    ": (!stablehlo.token) -> (tensor<4x4xf32>, !stablehlo.token)",
    "nested": "%p = stablehlo.constant dense<true> : tensor<i1>\n"
    '    %x = "stablehlo.if"(%p) ({ %y = stablehlo.custom_call @anything(%a) '
    ": (tensor<4x4xf32>) -> tensor<4x4xf32>\n stablehlo.return %y : tensor<4x4xf32> }, "
    "{ stablehlo.return %a : tensor<4x4xf32> }) : (tensor<i1>) -> tensor<4x4xf32>",
}


@pytest.mark.parametrize("name", IMPURE)
def test_a_program_that_does_more_than_compute_is_refused(name):
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    good = exported(lambda params, inner, record, extra: (params, inner))
    with mlir.make_ir_context():
        used = "%x" if name in ("unknown", "kernel", "nested") else "%a"  # else it is dropped
        text = CALLBACK.replace("OPERATION", IMPURE[name]).replace("RESULT", used)
        module = ir.Module.parse(text)
        code = jax.extend.mlir.serialize_portable_artifact(str(module), "1.9.0")
    program = dataclasses.replace(good, mlir_module_serialized=code)
    with pytest.raises(FormatError, match=r"only computes, found (stablehlo\.|custom_call @)"):
        load(bytes(program.serialize()))


def test_a_program_with_effects_or_without_checks_is_refused():
    good = exported(lambda params, inner, record, extra: (params, inner))
    disabled = (jax.export.DisabledSafetyCheck.custom_call("anything"),)
    with pytest.raises(FormatError, match="only computes"):
        untrusted.check_operations(
            dataclasses.replace(good, disabled_safety_checks=disabled), "update"
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda params, inner, record, extra: (inner, params, record),
        lambda params, inner, record, extra: ([params[0][:2]], inner),
        lambda params, inner, record, extra: ([], inner),
        lambda params, inner, record, extra: ([params[0].astype("int32")], inner),
        lambda params, inner, record, extra, switches: ([params[0][:2]], inner),
        lambda params, inner, record: (params, inner),
    ],
)
def test_a_program_that_returns_something_else_is_refused(function):
    with pytest.raises(FormatError, match="update"):
        jax.eval_shape(load(bytes(exported(function).serialize())), *SPECS, SWITCHES)


@pytest.mark.parametrize(
    "update", [lambda p, i, r, e: (p, i), lambda p, i, r, e, s: (p, i)], ids=["6", "7"]
)
def test_a_program_for_other_leaves_is_refused(update):
    function, switches = load(bytes(exported(update).serialize())), update_program.switches(1)
    other = [[np.zeros((3, 3), np.float32)]] * 3
    with pytest.raises(FormatError, match="cannot be called"):
        function(*other, [], switches)
    with pytest.raises(FormatError, match="cannot be called"):
        function([], [], [], [], switches)


def fuzz(name, count):
    return subprocess.run(
        [sys.executable, "-m", f"tests.fuzz.{name}", "--count", str(count)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=250,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )


@pytest.mark.slow
def test_a_short_fuzz_of_manifests_finds_nothing():
    done = fuzz("manifest", 500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted" in done.stdout


@pytest.mark.slow
def test_a_short_fuzz_of_updates_finds_nothing():
    done = fuzz("update", 100)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "FormatError" in done.stdout  # and not only inputs that end the parser
