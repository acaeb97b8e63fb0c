"""A process that reads and writes arrays for ever: no call leaves Python objects behind."""

import gc
import json
import uuid

import ml_dtypes  # noqa: F401  gives numpy bfloat16 and its kin
import numpy as np
import pytest
import tensorstore as ts

from adacheck_jax.format.boxes import Box
from adacheck_jax.store import volume_reader, volumes, zarr
from adacheck_jax.store.packs import arrays, reader, writer
from adacheck_jax.store.storage import kvstore
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import Location
from tests.support import write_volume

CALLS = 20
DTYPES = ("bool", "int4", "int8", "uint16", "float16", "bfloat16", "float32", "int64", "complex64")


def left_by(call):
    """Number of objects that each of many calls leaves behind."""
    for _ in range(5):
        call()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(CALLS):
        call()
    gc.collect()
    return (len(gc.get_objects()) - before) / CALLS


def piece(name, data, codec=None):
    return volumes.ArrayPiece(name, data.shape, data.shape, {Box.full(data.shape): data}, codec)


def test_packs_leave_nothing_behind(tmp_path):
    data = np.arange(5000, dtype=np.uint16).view(np.uint8)
    kinds = (arrays.RAW, arrays.COMPRESSED)
    writer.write_pack(tmp_path / "pack", [(kind, [data]) for kind in kinds])

    def read():
        for kind in kinds:
            array = reader.PackArray(tmp_path / "pack", kind, data.size)
            (found,) = array.read([(0, data.size)], what="all", checked=False)
            assert found.tobytes() == data.tobytes()

    assert left_by(read) < 0.5


def test_packs_in_memory_leave_nothing_behind():
    data = np.arange(100, dtype=np.uint8)
    top = Location(KvStore(f"memory://{uuid.uuid4().hex}"), "a")

    def write_and_read():
        place = top / uuid.uuid4().hex  # tensorstore remembers databases, also deleted ones
        writer.write_pack(place, [(arrays.RAW, [data])])
        (found,) = reader.PackArray(place, arrays.RAW, 100).read([(0, 100)], what="all")
        assert found.tobytes() == data.tobytes()
        place.delete()

    assert left_by(write_and_read) < 0.5


def test_volumes_leave_nothing_behind(tmp_path):
    pieces = [piece("a", np.arange(300.0)), piece("b", np.arange(300.0))]
    write_volume(tmp_path / "kept", pieces)

    def write_and_keep():
        names = f"{uuid.uuid4().hex}"
        assert write_volume(tmp_path / names, pieces) == {"b": "a"}
        earlier = [("kept", tmp_path / "kept")]
        assert volumes.keep(earlier, pieces, tmp_path / f"{names}.kept") == {
            "a": "kept",
            "b": "kept",
        }
        for store in volume_reader.opened(tmp_path / names, "ab"):
            assert store.read().result().tobytes() == pieces[0].blocks[Box.full((300,))].tobytes()
        assert not volume_reader.lost_chunks(zarr.database_in(tmp_path / names), "ab")

    assert left_by(write_and_keep) < 0.5


@pytest.mark.parametrize(
    "url", ["memory://a b%20c/d", "gs://bucket", "gs://bucket/a/b", "s3://bucket", "file:///tmp/a"]
)
def test_a_store_is_specified_as_tensorstore_does(url, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    expected = {"path": "", **ts.KvStore.Spec(f"{url}/").to_json()}
    assert kvstore._spec_of(f"{url}/") == expected


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [None, *zarr.CODECS])
@pytest.mark.parametrize("shape", [(), (6, 4)])
def test_metadata_are_stored_as_tensorstore_writes_them(tmp_path, dtype, codec, shape):
    """What an array looks like to a reader that has never heard of this library."""
    given = piece("a", np.zeros(shape, dtype), codec)
    write_volume(tmp_path, [given])
    context = ts.Context()
    spec = {"driver": "zarr3", "kvstore": "memory://a/", "metadata": given.metadata}
    ts.open(spec, create=True, context=context).result()
    written = ts.KvStore.open("memory://a/", context=context).result().read("zarr.json").result()
    (stored,) = volume_reader.stored_metadata(zarr.database_in(tmp_path), "a")
    assert stored == json.loads(written.value)
    assert json.dumps(stored["fill_value"]) == json.dumps(json.loads(written.value)["fill_value"])
