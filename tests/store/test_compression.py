"""Whatever compression is chosen, steps have their bits, and take the bytes that it promises."""

import os

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError, tells_of_absence
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.store import volume_reader, volumes, zarr
from adacheck_jax.store.steps import manifest_file
from tests import support
from tests.support import write_volume


def encodings(root, step):
    return set(manifest_file.read(root / str(step) / "default").packs[0].encodings)


@pytest.mark.parametrize(
    ("chosen", "codec"),
    [({}, None), ({"compression": "fast"}, "blosc"), ({"compression": "small"}, "zstd")],
    ids=["default", "fast", "small"],
)
def test_steps_restore_whatever_the_codec(chosen, codec, tmp_path):
    run = support.dict_run(support.mesh_of((1, 1)))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, **chosen)) as manager:
        saved = support.save_steps(manager, run, 3)
        for step, expected in saved.items():
            restored = manager.restore(step, args=adacheck.RestoreArgs(run.state))
            support.assert_same_bits(restored, expected)
    assert (Encoding.EXPONENTS in encodings(tmp_path, 3)) == (codec is not None)
    assert codec or encodings(tmp_path, 3) == {Encoding.RAW}
    packs = support.pack_files(tmp_path / "3" / "default")
    text = b"".join(path.read_bytes() for path in packs)
    assert {name for name in ("blosc", "zstd") if name.encode() in text} == ({codec} - {None})


def test_without_compression_differences_are_compressed_all_the_same(tmp_path):
    """They exist for nothing else; whole leaves beside them are stored as they are."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 16).astype(np.float32)
    new = (old.view(np.uint32) + rng.integers(0, 2, old.size, np.uint32)).view(np.float32)
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step, each in enumerate((old, new)):
            manager.save(step, args=adacheck.SaveArgs({"x": jnp.asarray(each)}))
            manager.wait_until_finished()
        restored = manager.restore(1, args=adacheck.RestoreArgs())
    assert np.array_equal(np.asarray(restored["x"]).view(np.uint32), new.view(np.uint32))
    assert encodings(tmp_path, 1) & {Encoding.XOR, Encoding.SUBTRACT}
    sizes = [path.stat().st_size for path in support.pack_files(tmp_path / "1" / "default")]
    assert sum(sizes) < new.nbytes / 4


# Bases.


def noise_state(rng):
    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape) * 0.02, dtype)

    return {
        "kernel": noise(300, 200),
        "half": noise(500, 70, dtype=jnp.bfloat16),
        "bytes": rng.integers(0, 256, 50_000, dtype=np.uint8),
        "complex": rng.standard_normal((40, 50)) + 1j,
        "mask": rng.integers(0, 2, (100, 90)).astype(bool),
        "bias": noise(7),
        "step": 3,
    }


def base_bytes(root, step=0):
    files = (root / str(step) / "default/adacheck/base").rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def test_stock_orbax_reads_bases_whatever_the_codec_and_compressed_ones_are_smaller(tmp_path):
    sizes_bytes, state = {}, noise_state(np.random.default_rng(0))
    for chosen in ("none", "fast", "small"):
        handler, root = adacheck.AdaCheckHandler(compression=chosen), tmp_path / chosen
        with support.manager_of(root, handler) as manager:
            manager.save(0, args=adacheck.SaveArgs(state))
        with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as stock:
            found = stock.restore(0, args=ocp.args.StandardRestore(state))
        support.assert_same_bits(found, support.host_copy(state))
        sizes_bytes[chosen] = base_bytes(root)
    assert max(sizes_bytes["small"], sizes_bytes["fast"]) < 0.9 * sizes_bytes["none"]


@pytest.mark.first(1, slow=3)
@pytest.mark.parametrize("chosen", ["small", "fast", "none"])
def test_a_base_that_follows_another_has_its_codecs(chosen, tmp_path):
    run = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, compression=chosen)
    with support.manager_of(tmp_path, handler) as manager:
        saved = support.save_steps(manager, run, 2)
        manager.wait_until_finished()
        support.compact(tmp_path, 2)
        restored = manager.restore(2, args=adacheck.RestoreArgs(run.state))
        support.assert_same_bits(restored, saved[2])
    found = []
    for step in (1, 2):
        files = [*(tmp_path / f"{step}/default/adacheck/base").rglob("d/*")]
        assert files
        text = b"".join(each.read_bytes() for each in files)
        found.append({name for name in ("lz4", "zstd") if f'"{name}"'.encode() in text})
    assert found == [{"none": set(), "fast": {"lz4"}, "small": {"zstd"}}[chosen]] * 2


def test_equal_chunks_in_different_codecs_are_both_written(tmp_path):
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    blocks = {Box.full(array.shape): array}
    parts = [
        volumes.ArrayPiece(name, array.shape, array.shape, blocks, codec)
        for name, codec in (("a", None), ("b", "lz4"), ("c", "lz4"))
    ]
    assert write_volume(tmp_path, parts) == {"c": "b"}
    for part in parts:
        ((_, found),) = volume_reader.pieces(zarr.database_in(tmp_path), part.name)
        assert np.array_equal(found, array)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "cut off"])
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_a_file_of_values_that_is_gone_is_told_from_one_that_is_cut_off(tmp_path, codec, is_gone):
    """Of a step that is being deleted the files go one by one; from a gone one nothing is read."""
    values = np.random.default_rng(0).integers(0, 255, 1 << 20).astype(np.uint8)
    metadata = zarr.metadata("uint8", values.shape, [1 << 16], zarr.chain(codec))
    database = zarr.database_in(tmp_path / "db")
    store = zarr.array_in(database, "a", metadata, create=True).result()
    store.write(values).result()
    zarr.array_in(database, "b", metadata, create=True).result()  # keys move to a file of their own
    assert store.read().result().tobytes() == values.tobytes()
    for file in [x for x in tmp_path.rglob("*") if x.is_file() and x.stat().st_size > 1 << 16]:
        if is_gone:
            file.unlink()
        else:
            os.truncate(file, 1 << 15)
    for chunk in range(16):
        with pytest.raises(ValueError, match=r"\S") as raised:
            store[chunk << 16 : (chunk + 1) << 16].read().result()
        error = IntegrityError("it cannot be read")
        error.__cause__ = raised.value
        assert tells_of_absence(error) == is_gone, raised.value
