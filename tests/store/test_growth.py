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
from adacheck_jax.store.storage.location import Location, at
from tests.support import write_volume

CALLS = 20
DTYPES = ("bool", "int4", "int8", "uint16", "float16", "bfloat16", "float32", "int64", "complex64")


def piece(name, data, codec=None):
    return volumes.ArrayPiece(name, data.shape, data.shape, {Box.full(data.shape): data}, codec)


def write_and_read_packs(top):
    data, place = np.arange(5000, dtype=np.uint16).view(np.uint8), top / uuid.uuid4().hex
    kinds = (arrays.RAW, arrays.COMPRESSED)
    writer.write_pack(place, [(kind, [data]) for kind in kinds])
    for kind in kinds:
        array = reader.PackArray(place, kind, data.size)
        (found,) = array.read([(0, data.size)], what="all", checked=False)
        assert found.tobytes() == data.tobytes()
    place.delete()


def write_and_keep_volumes(top):
    """Of other names each time: tensorstore remembers databases, also deleted ones."""
    pieces, place = [piece(name, np.arange(300.0)) for name in "ab"], top / uuid.uuid4().hex
    assert write_volume(place, pieces) == {"b": "a"}
    kept = volumes.keep([("kept", place)], pieces, place.with_name(f"{place.name}.kept"))
    assert kept == ({"a": "kept", "b": "kept"} if top.on_file_system else {})
    for store in volume_reader.opened(zarr.database_in(place), "ab"):
        assert store.read().result().tobytes() == pieces[0].blocks[Box.full((300,))].tobytes()
    assert not volume_reader.lost_chunks(zarr.database_in(place), "ab")


@pytest.mark.parametrize("storage", ["file system", "memory"])
@pytest.mark.parametrize("call", [write_and_read_packs, write_and_keep_volumes])
def test_a_call_leaves_nothing_behind(storage, call, tmp_path):
    memory = Location(KvStore(f"memory://{uuid.uuid4().hex}"), "a")
    top = at(tmp_path) if storage == "file system" else memory
    for _ in range(5):
        call(top)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(CALLS):
        call(top)
    gc.collect()
    assert (len(gc.get_objects()) - before) / CALLS < 0.5


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
@pytest.mark.parametrize("codec", zarr.CODECS.values())
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
    assert json.dumps(stored, sort_keys=True) == json.dumps(
        json.loads(written.value), sort_keys=True
    )
