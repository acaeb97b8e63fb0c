import dataclasses

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adacheck_jax as adacheck
from adacheck_jax.format import manifest, planes
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Encoding
from adacheck_jax.store import compression, volumes, zarr
from adacheck_jax.store import packs as arrays
from adacheck_jax.store.compression import Speed, Storage
from tests import support

speeds = st.builds(Speed, st.floats(0.9, 100), st.floats(1e6, 1e11))


def needed_s(storage_bytes_s, speed):
    return 1 / speed.bytes_s + 1 / (speed.ratio * storage_bytes_s)


@given(st.floats(1e5, 1e11), speeds, speeds)
def test_nothing_is_chosen_that_takes_longer_than_storing_the_bytes(storage_bytes_s, fast, small):
    chosen = compression.choose(storage_bytes_s, {"lz4": fast, "zstd": small})
    times = {None: 1 / storage_bytes_s}
    times |= {k: needed_s(storage_bytes_s, s) for k, s in (("lz4", fast), ("zstd", small))}
    assert times[chosen] == min(times.values())


def test_slow_storage_is_worth_more_time_than_fast():
    known = {"lz4": Speed(1.9, 8e8), "zstd": Speed(2.4, 2.2e8)}
    chosen = [compression.choose(x, known) for x in (1e7, 2e8, 5e9)]
    assert chosen == ["zstd", "lz4", None]


def test_small_writes_tell_nothing_of_the_storage():
    storage = Storage()
    storage.note(1000, 1.0)
    assert storage.bytes_s is None
    storage.note(10**8, 0.5)
    storage.note(0, 1.0)
    assert storage.bytes_s == 2e8


def exponents_of_noise():
    noise = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    return planes.exponents(noise)


def test_each_codec_is_measured_by_what_it_makes_of_the_bytes():
    found = compression.measured(exponents_of_noise())
    assert found.keys() == {"lz4", "zstd"}
    assert found["zstd"].ratio > found["lz4"].ratio > 1.5
    assert all(speed.bytes_s > 0 for speed in found.values())


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_a_codec_wrote_is_read_back(codec, tmp_path):
    data = np.concatenate([exponents_of_noise()] * 40)
    assert arrays.write_pack(tmp_path / "pack", [(arrays.COMPRESSED, [data])], codec) == [[()]]
    (found,) = support.pack_reader(tmp_path / "pack", arrays.COMPRESSED, data.size).read(
        [(0, data.size)], what="leaf"
    )
    assert found.tobytes() == data.tobytes()


def encodings(root, step):
    return set(manifest.read(root / str(step) / "default").packs[0].encodings)


@pytest.mark.parametrize(
    ("chosen", "codec"), [("none", None), ("fast", "blosc"), ("small", "zstd"), ("auto", "zstd")]
)
def test_steps_restore_whatever_the_codec(chosen, codec, tmp_path):
    run = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, compression=chosen)
    saved = {}
    with support.manager_of(tmp_path, handler) as manager:
        for step in range(4):
            saved[step] = support.host_copy(run.advance())
            manager.save(step, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        for step, expected in saved.items():
            restored = manager.restore(step, args=adacheck.RestoreArgs(run.state))
            support.assert_same_bits(restored, expected)
    assert (Encoding.EXPONENTS in encodings(tmp_path, 3)) == (codec is not None)
    packs = support.pack_files(tmp_path / "3" / "default")
    text = b"".join(path.read_bytes() for path in packs)
    assert {name for name in ("blosc", "zstd") if name.encode() in text} == ({codec} - {None})


def test_where_the_storage_is_fast_exponents_are_stored_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(Storage, "note", lambda self, *_: setattr(self, "bytes_s", 1e13))
    run = support.dict_run(support.mesh_of((1, 1)))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(3):
            manager.save(step, args=adacheck.SaveArgs(run.advance()))
    assert Encoding.EXPONENTS not in encodings(tmp_path, 2)


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


@pytest.mark.parametrize("chosen", ["none", "fast", "small", "auto"])
def test_stock_orbax_reads_bases_whatever_the_codec(chosen, tmp_path):
    state = noise_state(np.random.default_rng(0))
    handler = adacheck.AdaCheckHandler(compression=chosen)
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as stock:
        found = stock.restore(0, args=ocp.args.StandardRestore(state))
    support.assert_same_bits(found, support.host_copy(state))


def test_compressed_bases_are_smaller(tmp_path):
    sizes_bytes = {}
    for chosen in ("none", "fast", "small"):
        state = noise_state(np.random.default_rng(0))
        handler = adacheck.AdaCheckHandler(compression=chosen)
        with support.manager_of(tmp_path / chosen, handler) as manager:
            manager.save(0, args=adacheck.SaveArgs(state))
        sizes_bytes[chosen] = base_bytes(tmp_path / chosen)
    assert sizes_bytes["small"] < 0.9 * sizes_bytes["none"]
    assert sizes_bytes["fast"] < 0.9 * sizes_bytes["none"]


def test_a_base_is_compressed_by_itself_only_where_the_storage_is_known_to_be_slow(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Storage, "note", lambda self, *_: setattr(self, "bytes_s", 1e5))
    handler = adacheck.AdaCheckHandler()
    rng = np.random.default_rng(0)
    with support.manager_of(tmp_path, handler) as manager:
        for step in range(2):
            manager.save(step, args=adacheck.SaveArgs(noise_state(rng)))
    assert base_bytes(tmp_path, 1) < 0.9 * base_bytes(tmp_path, 0)


def test_equal_leaves_of_compressed_bases_share_their_bytes(tmp_path):
    array = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    sizes_bytes = {}
    for count in (1, 3):
        root = tmp_path / str(count)
        state = {str(i): array.copy() for i in range(count)}
        with support.manager_of(root, adacheck.AdaCheckHandler(compression="small")) as manager:
            manager.save(0, args=adacheck.SaveArgs(state))
            found = manager.restore(0, args=adacheck.RestoreArgs())
        assert all(np.array_equal(each, array) for each in found.values())
        sizes_bytes[count] = base_bytes(root)
    assert sizes_bytes[3] < 1.02 * sizes_bytes[1]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_an_earlier_base_holds_in_a_codec_is_kept(codec, tmp_path):
    array = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    part = volumes.Part("a", array.shape, (100, 200), {Box.full(array.shape): array}, codec)
    volumes.write(tmp_path / "0", [part])
    plain = dataclasses.replace(part, codec=None)
    assert volumes.keep([("0", tmp_path / "0")], [plain], tmp_path / "kept") == {"a": "0"}
    other = dataclasses.replace(plain, blocks={Box.full(array.shape): array + 1})
    assert volumes.keep([("0", tmp_path / "0")], [other], tmp_path / "other") == {}


def test_equal_chunks_in_different_codecs_are_both_written(tmp_path):
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    blocks = {Box.full(array.shape): array}
    parts = [
        volumes.Part(name, array.shape, array.shape, blocks, codec)
        for name, codec in (("a", None), ("b", "lz4"), ("c", "lz4"))
    ]
    assert volumes.write(tmp_path, parts) == {"c": "b"}
    for part in parts:
        ((_, found),) = volumes.ArrayReader(zarr.database_in(tmp_path), part.name).pieces()
        assert np.array_equal(found, array)
