"""Bases as volumes: written, kept from earlier ones, and merged into what stock readers read."""

import dataclasses
import itertools
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_jax.format import boxes
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.store import volumes, zarr
from adacheck_jax.store.storage.location import Location
from adacheck_jax.store.volumes import ArrayPiece
from tests.strategies import DTYPES, any_bits, cuts, shape_of
from tests.support import write_volume

seeds = st.integers(0, 3)
STORABLE = [dtype for dtype in DTYPES if dtype != "uint4"]  # which a base stores as uint8


def part_of(name, array, chunk_shape=None, cuts=None):
    """All of an array, cut as given."""
    boxes = [Box.full(array.shape)] if cuts is None else grid(cuts)
    blocks = {box: array[(*box.slices, ...)] for box in boxes}
    return ArrayPiece(name, array.shape, chunk_shape or array.shape, blocks)


def noise(*shape, seed=0, dtype="float32"):
    return any_bits(np.random.default_rng(seed), shape, dtype)


def flipped(array, position):
    """The same elements but for one bit."""
    array = array.copy()
    array.reshape(-1).view(np.uint8)[position // 8 % array.nbytes] ^= 1 << position % 8
    return array


def database(directory):
    return {"driver": "ocdbt", "base": f"file://{directory}/"}


def stock(directory, name):
    """An array as stock tensorstore opens it, told no more than where it is."""
    spec = {
        "driver": "zarr3",
        "kvstore": {**database(directory), "path": f"{name}/"},
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, read=True).result()


def keys_of(directory):
    found = ts.KvStore.open(database(directory)).result().list().result()
    return sorted(key.decode() for key in found)


def expected_keys(part):
    counts = [-(-a // b) for a, b in zip(part.shape, part.chunk_shape, strict=True)]
    indices = itertools.product(*map(range, counts))
    chunks = [f"{part.name}/" + "/".join(["c", *map(str, index)]) for index in indices]
    return [f"{part.name}/zarr.json", *chunks]


def check(directory, arrays, parts):
    """Checks that a database has these arrays, all their chunks, and nothing else."""
    assert keys_of(directory) == sorted(itertools.chain(*map(expected_keys, parts)))
    for part in parts:
        store, array = stock(directory, part.name), arrays[part.name]
        assert store.dtype.numpy_dtype == array.dtype
        assert store.shape == part.shape
        assert (store.chunk_layout.read_chunk.shape or ()) == part.chunk_shape
        assert np.asarray(store.read().result()).tobytes() == array.tobytes(), part.name


def data_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def size_of(directory):
    return sum(path.stat().st_size for path in data_files(directory))


# Written, merged and read.


@st.composite
def states(draw):
    """Arrays by name and their parts, some of them equal in whole or in part."""
    arrays, parts = {}, []
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for number in range(draw(st.integers(1, 5))):
        each = draw(cuts(max_length=20, max_pieces=3).filter(lambda c: math.prod(shape_of(c))))
        dtype = draw(st.sampled_from(STORABLE))
        if parts and draw(st.booleans()):  # of the same bits as another one, otherwise cut
            former = draw(st.sampled_from(sorted(arrays)))
            array = arrays[former]
            if array.dtype != bool and draw(st.booleans()):
                array = array.view(f"u{array.itemsize}") if array.itemsize <= 8 else array
            each = tuple(
                (0, *sorted(draw(st.sets(st.integers(1, n), max_size=2)) - {n}), n)
                for n in array.shape
            )
            if draw(st.booleans()):  # a bit off
                array = flipped(array, 8 * draw(st.integers(0, array.nbytes - 1)))
        else:
            kinds = st.sampled_from(["noise", "zeros", "repeating"])
            array = {
                "noise": any_bits(rng, shape_of(each), dtype),
                "zeros": np.zeros(shape_of(each), jnp.dtype(dtype)),
                "repeating": np.resize(any_bits(rng, (6,), dtype), shape_of(each)),
            }[draw(kinds)]
        chunk_shape = boxes.chunk_shape(
            each, array.itemsize, draw(st.sampled_from([1, 64, 400, 1 << 20]))
        )
        name = f"leaf{number}.x"
        arrays[name] = array
        parts.append(part_of(name, array, chunk_shape, each))
    return arrays, parts


def contents_of(part, shared_bytes):
    """Of each chunk its place and everything that decides what is stored; small ones are alone."""
    for box, block in part.blocks.items():
        counts = [-(-a // b) for a, b in zip(box.shape, part.chunk_shape, strict=True)]
        for index in np.ndindex(*counts):
            start = [i * n for i, n in zip(index, part.chunk_shape, strict=True)]
            ends = zip(start, part.chunk_shape, strict=True)
            data = block[(*(slice(a, a + n) for a, n in ends), ...)]
            place = tuple(a + b for a, b in zip(box.start, start, strict=True))
            edge = (data.shape, part.chunk_shape) if data.shape != part.chunk_shape else ()
            own = (part.name, place) if data.nbytes < shared_bytes else ()
            yield place, (own, data.dtype.name, edge, data.tobytes())


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("shared_bytes", [0, 64, 256])
@pytest.mark.parametrize("transaction_bytes", [0, 500, 1 << 28])
@given(drawn=states())
@settings(max_examples=15)
def test_stock_readers_read_what_was_written_once_and_merged(
    shared_bytes, transaction_bytes, drawn, tmp_path_factory
):
    arrays, parts = drawn
    directory = tmp_path_factory.mktemp("item")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volumes, "_MIN_SHARED_BYTES", shared_bytes)
        patch.setattr(volumes, "_TRANSACTION_BYTES", transaction_bytes)
        aliases = write_volume(directory / "base/0", parts)
    check(directory / "base/0", arrays, parts)
    volumes.merge(directory, {"base/0": None})
    check(directory, arrays, parts)
    names, expected = {}, {}
    for part in parts:
        own = tuple(contents_of(part, shared_bytes))
        if (first := names.setdefault(own, part.name)) != part.name:
            expected[part.name] = first
    assert aliases == expected


@pytest.mark.parametrize("dtype", STORABLE)
def test_every_type_of_elements_is_stored(dtype, tmp_path):
    arrays, parts = {}, []
    for shape in [(), (1,), (5, 3), (300,), (129, 9)]:
        array = noise(*shape, dtype=dtype)
        for name in "ab":
            arrays[f"{name}{shape}"] = array
            parts.append(part_of(f"{name}{shape}", array, tuple(-(-n // 2) for n in shape)))
    write_volume(tmp_path / "base/0", parts)
    volumes.merge(tmp_path, {"base/0": None})
    check(tmp_path, arrays, parts)


def test_a_checkpoint_refers_to_its_volumes_by_their_place_in_it(tmp_path):
    array = noise(4096)
    part = part_of("a", array)
    write_volume(tmp_path / "before/base/0", [part])
    before = size_of(tmp_path)
    volumes.merge(tmp_path / "before", {"base/0": None})
    assert size_of(tmp_path) < before + 4096
    (tmp_path / "before").rename(tmp_path / "after")
    check(tmp_path / "after", {"a": array}, [part])
    flip(tmp_path, array[1000:1010].tobytes())
    with pytest.raises(ValueError, match="DATA_LOSS"):
        stock(tmp_path / "after", "a").read().result()
    shutil.rmtree(tmp_path / "after/base")
    with pytest.raises(ValueError, match="DATA_LOSS"):
        stock(tmp_path / "after", "a").read().result()


def flip(directory, content):
    for path in data_files(directory):
        data = bytearray(path.read_bytes())
        if content in data:
            data[data.index(content) + 1] ^= 4
            path.unlink()  # and not through a hard link
            path.write_bytes(data)
            return
    raise AssertionError("the content is not stored")


# Equal chunks.


def test_equal_chunks_are_stored_once_also_of_other_arrays(tmp_path):
    array = noise(8, 4096)
    parts = [part_of(name, array, (4, 4096)) for name in "abc"]
    parts.append(part_of("flat", array.reshape(-1), (4 * 4096,)))
    parts.append(part_of("half", array[4:], (4, 4096)))
    parts.append(part_of("mixed", np.concatenate([array[4:], array[:4]]), (4, 4096)))
    assert write_volume(tmp_path, parts) == {"b": "a", "c": "a"}
    assert size_of(tmp_path) < array.nbytes + 8192
    check(tmp_path, {each.name: whole(each) for each in parts}, parts)


def test_a_key_that_begins_others_is_referred_to_alone(tmp_path):
    """Of 25 chunks c/1 is the source of c/2, and c/10 has no part in c/20."""
    first, second = (noise(25 * 100, seed=seed) for seed in range(2))
    second[200:400] = first[100:300]
    parts = [part_of(name, array, (100,)) for name, array in (("a", first), ("b", second))]
    assert write_volume(tmp_path, parts) == {}
    assert size_of(tmp_path) < 2 * first.nbytes - 800 + 8192
    check(tmp_path, {"a": first, "b": second}, parts)


# What has not changed is kept.


@pytest.fixture
def former(tmp_path):
    """A volume of an earlier base: arrays a, b, c, of one size."""
    arrays = {name: noise(40, 100, seed=i) for i, name in enumerate("abc")}
    write_volume(tmp_path / "old", parts_of(arrays))
    return arrays


def parts_of(arrays, codec=None):
    parts = [part_of(name, array, (20, 100)) for name, array in arrays.items()]
    return [dataclasses.replace(each, codec=codec) for each in parts]


def keep(root, arrays, volume="7.0"):
    return volumes.keep([(volume, root / "old")], parts_of(arrays), root / "new/kept")


def linked(root, volume="7.0"):
    return data_files(root / "new/kept" / volume)


def merged(root, kept, parts):
    """Writes and merges what is not kept, as a base does, and checks the whole."""
    rest = [part for part in parts if part.name not in kept]
    contents: dict = {}
    if rest:
        write_volume(root / "new/base/0", rest)
        contents["base/0"] = None
    for name, volume in kept.items():
        contents.setdefault(f"kept/{volume}", []).append(name)
    volumes.merge(root / "new", contents)
    check(root / "new", {each.name: whole(each) for each in parts}, parts)


def whole(part):
    (array,) = part.blocks.values()
    return array


FATES = {
    "same": lambda array, _: part_of("", array, (20, 100)),
    "bit": lambda array, n: part_of("", flipped(array, n), (20, 100)),
    "type": lambda array, _: part_of("", array.view(np.int32), (20, 100)),
    "shape": lambda array, _: part_of("", array.reshape(-1, 50), (20, 50)),
    "part": lambda array, _: part_of("", array[:20], (20, 100)),
    "chunks": lambda array, _: part_of("", array, (10, 100)),
    "codec": lambda array, _: part_of("", array, (20, 100)),
    "gone": lambda array, _: None,
}


@given(data=st.data())
@settings(max_examples=25)
def test_a_volume_is_kept_for_what_is_the_same_if_that_is_half_of_it(data, tmp_path_factory):
    """What is taken out of a volume by a name brings along what lies below that name."""
    root = tmp_path_factory.mktemp("run")
    arrays, parts, same = {}, [], []
    codec, *others = data.draw(st.permutations([*zarr.CODECS.values()]))
    for name in ("a", "a/b", "c", "a.d", "ab"):
        shape, seed = data.draw(st.sampled_from([(40, 100), (80, 100)])), data.draw(seeds)
        arrays[name] = noise(*shape, seed=seed) if seed else np.zeros(shape, np.float32)
        fate = data.draw(st.sampled_from([*["same"] * 8, *FATES]))
        part = FATES[fate](arrays[name], data.draw(st.integers(0, 2**20)))
        changes = {"name": name, "codec": others[0] if fate == "codec" else codec}
        parts += [] if part is None else [dataclasses.replace(part, **changes)]
        same += [name] if fate == "same" and name != "a" else []
    write_volume(root / "old", parts_of(arrays, codec))
    files = data_files(root / "old")
    is_kept = sum(arrays[name].nbytes for name in same) >= size_of(root / "old") / 2
    expected = dict.fromkeys(same, "7.0") if is_kept else {}
    assert volumes.keep([("7.0", root / "old")], parts, root / "new/kept") == expected
    assert data_files(root / "old") == files
    links = {path.stat().st_ino for path in linked(root)}
    assert links == ({path.stat().st_ino for path in files} if is_kept else set())
    assert (root / "new/kept/7.0").exists() == is_kept
    merged(root, expected, parts)
    shutil.rmtree(root / "old")  # the earlier base is deleted
    check(root / "new", {each.name: whole(each) for each in parts}, parts)
    earlier = [("9.0", root / "gone"), ("7.0", root / "new/kept/7.0")]  # and kept once more
    assert volumes.keep(earlier, parts, root / "third/kept") == expected


def test_of_what_other_processes_wrote_nothing_is_compared_kept_or_taken_for_zeros(tmp_path):
    zeros, upper = np.zeros((40, 100), np.float32), Box((0, 0), (20, 100))
    mine = ArrayPiece("a", (40, 100), (20, 100), {upper: zeros[:20]})
    write_volume(tmp_path / "old", [mine])
    assert volumes.keep([("7.0", tmp_path / "old")], [mine], tmp_path / "x") == {"a": "7.0"}
    assert keep(tmp_path, {"a": zeros}) == {}
    volumes.merge(tmp_path, {"old": None})
    store = stock(tmp_path, "a")
    assert not np.asarray(store[:20].read().result()).any()
    with pytest.raises(ValueError, match="missing"):
        store.read().result()


def test_a_volume_that_cannot_be_worth_it_is_neither_linked_nor_read(former, monkeypatch, tmp_path):
    def unexpected(*args):
        raise AssertionError("linked or read")

    with monkeypatch.context() as patch:
        patch.setattr(Location, "adopt", unexpected)
        patch.setattr(volumes, "_holds", unexpected)
        assert keep(tmp_path, {"a": former["a"]}) == {}
        assert keep(tmp_path, {"other": former["a"]}) == {}

    def refused(*args, **kwargs):
        raise OSError("cross-device link")

    monkeypatch.setattr("os.link", refused)
    assert keep(tmp_path, former) == {}
    assert not (tmp_path / "new/kept/7.0").exists()


def test_an_array_is_taken_from_the_latest_volume_that_has_it(former, tmp_path):
    write_volume(tmp_path / "older", parts_of({**former, "d": noise(40, 100, seed=4)}))
    arrays = {**former, "d": noise(40, 100, seed=4)}
    earlier = [("7.0", tmp_path / "old"), ("3.0", tmp_path / "older")]
    parts = parts_of(arrays)
    assert volumes.keep(earlier, parts, tmp_path / "x") == dict.fromkeys("abc", "7.0")
    assert not (tmp_path / "x/3.0").exists()  # for the sake of one array of four
    found = volumes.keep(earlier[::-1], parts, tmp_path / "y")
    assert found == dict.fromkeys("abcd", "3.0")
    assert not (tmp_path / "y/7.0").exists()


@pytest.mark.parametrize("step", ["_keys", "adopt", "_holds", "linked"])
def test_a_volume_that_vanishes_meanwhile_is_kept_if_it_was_linked(
    former, step, monkeypatch, tmp_path
):
    owner, name = (Location, "adopt") if step == "adopt" else (volumes, step)
    name = "_holds" if step == "linked" else name
    before = getattr(owner, name)

    def vanishing(*args):
        shutil.rmtree(tmp_path / "old", ignore_errors=True)
        if step == "_holds":
            shutil.rmtree(args[0], ignore_errors=True)
        return before(*args)

    monkeypatch.setattr(owner, name, vanishing)
    kept = keep(tmp_path, former)
    assert kept == (dict.fromkeys("abc", "7.0") if step == "linked" else {})
    assert (tmp_path / "new/kept/7.0").exists() == bool(kept)
    merged(tmp_path, kept, parts_of(former))


@pytest.mark.parametrize("how", ["flipped", "truncated", "deleted"])
def test_no_damage_of_a_volume_is_ever_kept_or_raised(how, tmp_path):
    arrays = {name: noise(2, 100, seed=i) for i, name in enumerate("abc")}

    def parts():
        return [part_of(name, array, (1, 100)) for name, array in arrays.items()]

    write_volume(tmp_path / "old", parts())
    let_go, number = 0, itertools.count()
    for path in data_files(tmp_path / "old"):
        original = path.read_bytes()
        stride = max(1, len(original) // 60) if how != "deleted" else len(original)
        for position in range(0, len(original), stride):
            path.unlink()
            if how == "flipped":
                damaged = bytearray(original)
                damaged[position] ^= 0x20
                path.write_bytes(damaged)
            elif how == "truncated":
                path.write_bytes(original[:position])
            item = tmp_path / f"{next(number)}"
            kept = volumes.keep([("7.0", tmp_path / "old")], parts(), item / "kept")
            let_go += len(kept) < 3
            if kept:  # whatever is kept is right
                volumes.merge(item, {"kept/7.0": list(kept)})
                for name in kept:
                    found = np.asarray(stock(item, name).read().result())
                    assert found.tobytes() == arrays[name].tobytes()
            else:
                assert not (item / "kept/7.0").exists()
            path.write_bytes(original)
    assert let_go > (0 if how == "deleted" else 30)
    assert len(volumes.keep([("7.0", tmp_path / "old")], parts(), tmp_path / "x")) == 3
