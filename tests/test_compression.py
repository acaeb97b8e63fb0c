import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adacheck_jax as adacheck
from adacheck_jax import arrays, codecs, compression, manifest
from adacheck_jax.arrays import FAST, SMALL
from adacheck_jax.compression import Speed, Storage
from adacheck_jax.manifest import Encoding
from tests import support

speeds = st.builds(Speed, st.floats(0.9, 100), st.floats(1e6, 1e11))


def needed_s(storage_bytes_s, speed):
    return 1 / speed.bytes_s + 1 / (speed.ratio * storage_bytes_s)


@given(st.floats(1e5, 1e11), speeds, speeds)
def test_nothing_is_chosen_that_takes_longer_than_storing_the_bytes(storage_bytes_s, fast, small):
    chosen = compression.choose(storage_bytes_s, {FAST: fast, SMALL: small})
    times = {None: 1 / storage_bytes_s}
    times |= {k: needed_s(storage_bytes_s, s) for k, s in ((FAST, fast), (SMALL, small))}
    assert times[chosen] == min(times.values())


def test_slow_storage_is_worth_more_time_than_fast():
    known = {FAST: Speed(1.9, 8e8), SMALL: Speed(2.4, 2.2e8)}
    chosen = [compression.choose(x, known) for x in (1e7, 2e8, 5e9)]
    assert chosen == [SMALL, FAST, None]
    assert compression.choose(None, {}) is SMALL


def test_small_writes_tell_nothing_of_the_storage():
    storage = Storage()
    storage.note(1000, 1.0)
    assert storage.bytes_s is None
    storage.note(10**8, 0.5)
    storage.note(0, 1.0)
    assert storage.bytes_s == 2e8


def exponents_of_noise():
    noise = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    return codecs.exponents(noise)


def test_each_codec_is_measured_by_what_it_makes_of_the_bytes():
    found = compression.measured(exponents_of_noise())
    assert list(found) == [FAST, SMALL]
    assert found[SMALL].ratio > found[FAST].ratio > 1.5
    assert all(speed.bytes_s > 0 for speed in found.values())


@pytest.mark.parametrize("kind", [FAST, SMALL], ids=lambda kind: kind.codecs[1])
def test_what_a_codec_wrote_is_read_back(kind, tmp_path):
    data = np.concatenate([exponents_of_noise()] * 40)
    assert arrays.write_pack(tmp_path, [(kind, data)]) == [()]
    (found,) = arrays.PackReader(tmp_path, arrays.COMPRESSED, data.size).read(
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
            assert jax.tree.all(
                jax.tree.map(
                    lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(),
                    support.host_copy(restored),
                    expected,
                )
            )
    assert (Encoding.EXPONENTS in encodings(tmp_path, 3)) == (codec is not None)
    text = b"".join(path.read_bytes() for path in (tmp_path / "3").rglob("*") if path.is_file())
    assert {name for name in ("blosc", "zstd") if name.encode() in text} == ({codec} - {None})


def test_where_the_storage_is_fast_exponents_are_stored_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(Storage, "note", lambda self, *_: setattr(self, "bytes_s", 1e13))
    run = support.dict_run(support.mesh_of((1, 1)))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(3):
            manager.save(step, args=adacheck.SaveArgs(run.advance()))
    assert Encoding.EXPONENTS not in encodings(tmp_path, 2)
