"""Bases as volumes: written, kept from earlier ones, and merged into what stock readers read."""

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
from adacheck_jax.store import volumes
from adacheck_jax.store.storage.location import Location
from adacheck_jax.store.volumes import ArrayPiece
from tests.strategies import DTYPES, any_bits, cuts, shape_of
from tests.support import write_volume

STORABLE = [dtype for dtype in DTYPES if dtype != "uint4"]  # which a base stores as uint8


def part_of(name, array, chunk_shape=None, cuts=None):
    """All of an array, cut as given."""
    boxes = [Box.full(array.shape)] if cuts is None else grid(cuts)
    blocks = {box: array[(*box.slices, ...)] for box in boxes}
    return ArrayPiece(name, array.shape, chunk_shape or array.shape, blocks)


def noise(*shape, seed=0, dtype="float32"):
    return any_bits(np.random.default_rng(seed), shape, dtype)


def changed(array):
    """The same elements but for a bit of the last one."""
    array = array.copy()
    array.reshape(-1).view(np.uint8)[-1] ^= 1
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
            each = tuple(
                (0, *sorted(draw(st.sets(st.integers(1, n), max_size=2)) - {n}), n)
                for n in array.shape
            )
            if array.size and draw(st.booleans()):  # a bit off
                array = array.copy()
                array.reshape(-1).view(np.uint8)[draw(st.integers(0, array.nbytes - 1))] ^= 1
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


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("shared_bytes", [0, 64, 256])
@pytest.mark.parametrize("transaction_bytes", [0, 500, 1 << 28])
@given(drawn=states())
@settings(max_examples=15)
def test_stock_readers_read_what_was_written_and_merged(
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
    for name, other in aliases.items():
        assert name != other
        assert set(np.unique(flat(arrays[name]))) <= set(np.unique(flat(arrays[other])))


def flat(array):
    return array.reshape(-1).view(np.uint8)


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


def test_equal_chunks_are_stored_once(tmp_path):
    array = noise(8, 4096)
    parts = [part_of(name, array, (4, 4096)) for name in "abc"]
    parts.append(part_of("flat", array.reshape(-1), (4 * 4096,)))
    parts.append(part_of("half", array[4:], (4, 4096)))
    aliases = write_volume(tmp_path, parts)
    assert aliases == {"b": "a", "c": "a"}  # the others share chunks, but are not equal to it
    assert size_of(tmp_path) < array.nbytes + 8192
    arrays = dict.fromkeys("abc", array)
    check(tmp_path, {**arrays, "flat": array.reshape(-1), "half": array[4:]}, parts)


def test_only_arrays_of_equal_bits_and_type_are_aliases(tmp_path):
    a, b = noise(8192), noise(8192, seed=1)
    mixed, own = np.concatenate([a[:4096], b[:4096]]), np.concatenate([a[:4096], changed(b[:4096])])
    bits = [0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001]
    arrays = {
        **{"a": a, "b": b, "mixed": mixed, "own": own, "tiled": np.tile(a[:4096], 6)},
        **{"integers": a.view(np.int32), "complex": a.view(np.complex64)},
        **{f"{each:x}": np.full(4096, each, np.uint32).view(np.float32) for each in bits},
    }
    parts = [part_of(name, array, (4096,)) for name, array in arrays.items()]
    assert write_volume(tmp_path, parts) == {}
    assert size_of(tmp_path) < a.nbytes * 4 + 4096 * 4 * 7 + 16_384
    check(tmp_path, arrays, parts)


def after(length, seed, rest):
    return np.concatenate([noise(length, seed=seed), rest])


def shifted():
    first, second = (noise(25 * 100, seed=seed) for seed in range(2))
    second[200:400] = first[100:300]
    return first, second


SMALL, LEAST, SQUARE, (FIRST, SECOND) = noise(63), noise(64), noise(40, 60), shifted()
CORNERS = {
    "too small": ({"a": (SMALL, (63,)), "b": (SMALL, (63,))}, {}),
    "large enough": ({"a": (LEAST, (64,)), "b": (LEAST, (64,))}, {"b": "a"}),
    "several axes at the edge": (
        {"a": (SQUARE, (18, 40)), "b": (SQUARE, (18, 40)), "c": (np.zeros_like(SQUARE), (18, 40))},
        {"b": "a"},
    ),
    # Of 25 chunks c/1 is the source of c/2, and c/10 has no part in c/20.
    "a key that begins others": ({"a": (FIRST, (100,)), "b": (SECOND, (100,))}, {}),
    # As large as one another, but not what is stored of them: that is a whole chunk each.
    "filled up otherwise": (
        {
            "a": (after(100, 1, LEAST), (100,)),
            "b": (after(90, 2, LEAST), (90,)),
            "c": (after(100, 3, LEAST), (100,)),
            "whole": (LEAST, (64,)),
        },
        {},
    ),
}


@pytest.mark.parametrize("name", CORNERS)
def test_chunks_are_shared_only_with_such_that_are_stored_alike(name, tmp_path):
    given, aliases = CORNERS[name]
    parts = [part_of(each, array, chunks) for each, (array, chunks) in given.items()]
    assert write_volume(tmp_path, parts) == aliases
    check(tmp_path, {each: array for each, (array, _) in given.items()}, parts)


def test_no_transaction_holds_more_than_its_share_unless_one_array_does(monkeypatch, tmp_path):
    sizes = []
    monkeypatch.setattr(volumes, "_TRANSACTION_BYTES", 10_000)
    batches = volumes.batches

    def noted(sizes_bytes, most_bytes):
        for batch in batches(sizes_bytes, most_bytes):
            sizes.append([sizes_bytes[n] for n in batch])
            yield batch

    monkeypatch.setattr(volumes, "batches", noted)
    lengths = [500, 1000, 900, 1100, 5000, 10, 0, 1200]
    arrays = {f"{i}": noise(n, seed=i) for i, n in enumerate(lengths) if n}
    arrays["copy"] = arrays["4"].copy()  # referred to, so that it counts for nothing
    parts = [part_of(name, array) for name, array in arrays.items()]
    assert write_volume(tmp_path, parts) == {"copy": "4"}
    assert sizes == [[2000, 4000, 3600], [4400], [20000], [40, 4800, 0]]
    check(tmp_path, arrays, parts)


# Volumes of several processes.


@given(each=cuts(max_length=12, max_pieces=3), data=st.data())
@settings(max_examples=20)
def test_volumes_of_several_processes_make_one_array(each, data, tmp_path_factory):
    shape = shape_of(each)
    if not math.prod(shape):
        return
    directory = tmp_path_factory.mktemp("item")
    array, other = noise(*shape), noise(*shape, seed=1, dtype="bfloat16")
    chunk_shape = boxes.chunk_shape(each, 4, data.draw(st.sampled_from([4, 64, 1 << 20])))
    own = [{}, {}, {}]
    for box in grid(each):
        own[data.draw(st.integers(0, 2))][box] = array[(*box.slices, ...)]
    for process, blocks in enumerate(own):
        parts = [ArrayPiece("shared", shape, chunk_shape, blocks)] if blocks else []
        parts.append(part_of(f"own{process}", other))
        write_volume(directory / f"base/{process}", parts)
    volumes.merge(directory, {f"base/{process}": None for process in range(3)})
    whole = [part_of("shared", array, chunk_shape)]
    whole += [part_of(f"own{process}", other) for process in range(3)]
    check(directory, {"shared": array, **{f"own{p}": other for p in range(3)}}, whole)


def test_a_merge_with_names_takes_these_alone(tmp_path):
    arrays = {name: noise(600, seed=i) for i, name in enumerate(["a", "ab", "a.b", "b", "c"])}
    parts = {name: part_of(name, array, (200,)) for name, array in arrays.items()}
    write_volume(tmp_path / "base/0", list(parts.values()))
    newer = {"ab": noise(600, seed=9), "c": noise(600, seed=10)}
    write_volume(tmp_path / "base/1", [part_of(n, array, (200,)) for n, array in newer.items()])
    volumes.merge(tmp_path, {"base/0": ["a", "b"], "base/1": None})
    taken = ["a", "b", "ab", "c"]
    check(tmp_path, {**arrays, **newer}, [parts[name] for name in taken])


# What has not changed is kept.


@pytest.fixture
def former(tmp_path):
    """A volume of an earlier base: arrays a, b, c, of one size."""
    arrays = {name: noise(40, 100, seed=i) for i, name in enumerate("abc")}
    write_volume(tmp_path / "old", parts_of(arrays))
    return arrays


def parts_of(arrays):
    return [part_of(name, array, (20, 100)) for name, array in arrays.items()]


def keep(root, arrays, volume="7.0"):
    return volumes.keep([(volume, root / "old")], parts_of(arrays), root / "new/kept")


def linked(root, volume="7.0"):
    return data_files(root / "new/kept" / volume)


def merged(root, kept, arrays):
    """Writes and merges what is not kept, as a base does, and checks the whole."""
    rest = {name: array for name, array in arrays.items() if name not in kept}
    contents: dict = {}
    if rest:
        write_volume(root / "new/base/0", parts_of(rest))
        contents["base/0"] = None
    for name, volume in kept.items():
        contents.setdefault(f"kept/{volume}", []).append(name)
    volumes.merge(root / "new", contents)
    check(root / "new", arrays, parts_of(arrays))


def test_arrays_that_have_not_changed_are_linked_and_not_written(former, tmp_path):
    kept = keep(tmp_path, former)
    assert kept == dict.fromkeys("abc", "7.0")
    assert len(linked(tmp_path)) == len(data_files(tmp_path / "old"))
    old = {path.stat().st_ino for path in data_files(tmp_path / "old")}
    assert {path.stat().st_ino for path in linked(tmp_path)} == old
    merged(tmp_path, kept, former)
    before = [path.read_bytes() for path in linked(tmp_path)]
    shutil.rmtree(tmp_path / "old")  # the earlier base is deleted
    assert [path.read_bytes() for path in linked(tmp_path)] == before
    check(tmp_path / "new", former, parts_of(former))


@pytest.mark.parametrize("place", [0, 1234, 3999])
@pytest.mark.parametrize("bit", [1, 1 << 31])
def test_an_array_of_which_a_bit_changed_is_never_kept(former, place, bit, tmp_path):
    arrays = {name: array.copy() for name, array in former.items()}
    arrays["b"].reshape(-1).view(np.uint32)[place] ^= bit
    if place == 0:
        (tmp_path / "old").rename(tmp_path / "random")
        former = {name: np.zeros_like(array) for name, array in arrays.items()}
        write_volume(tmp_path / "old", parts_of(former))  # of zeros, one of which has a sign
        arrays = {name: array.copy() for name, array in former.items()}
        arrays["b"].reshape(-1).view(np.uint32)[place] ^= bit
    kept = keep(tmp_path, arrays)
    assert kept == {"a": "7.0", "c": "7.0"}
    merged(tmp_path, kept, arrays)


def test_an_array_of_another_type_shape_or_cut_is_not_kept(former, tmp_path):
    others = {
        "type": part_of("a", former["a"].view(np.int32), (20, 100)),
        "shape": part_of("a", former["a"].reshape(80, 50), (20, 50)),
        "part of the shape": part_of("a", former["a"][:20], (20, 100)),
        "chunks": part_of("a", former["a"], (10, 100)),
    }
    rest = parts_of({name: former[name] for name in "bc"})
    for name, other in others.items():
        kept = volumes.keep([("7.0", tmp_path / "old")], [other, *rest], tmp_path / name)
        assert kept == {"b": "7.0", "c": "7.0"}, name


def test_only_the_boxes_that_a_process_holds_are_compared(former, tmp_path):
    upper = {Box((0, 0), (20, 100)): former["a"][:20]}
    mine = ArrayPiece("a", (40, 100), (20, 100), upper)
    write_volume(tmp_path / "mine", [mine])  # the other half was another process's
    assert volumes.keep([("7.0", tmp_path / "mine")], [mine], tmp_path / "x") == {"a": "7.0"}
    whole = part_of("a", former["a"], (20, 100))
    assert volumes.keep([("7.0", tmp_path / "mine")], [whole], tmp_path / "y") == {}


def test_what_a_process_did_not_write_is_missing_and_not_zero(tmp_path):
    zeros = np.zeros((40, 100), np.float32)
    upper = ArrayPiece("a", (40, 100), (20, 100), {Box((0, 0), (20, 100)): zeros[:20]})
    write_volume(tmp_path / "old", [upper])
    assert keep(tmp_path, {"a": zeros}) == {}
    volumes.merge(tmp_path, {"old": None})
    store = stock(tmp_path, "a")
    assert not np.asarray(store[:20].read().result()).any()
    with pytest.raises(ValueError, match="missing"):
        store.read().result()


@pytest.mark.parametrize(
    ("names", "other", "is_kept"),
    [
        ("a", "", False),
        ("ab", "", True),
        ("abc", "", True),
        ("abc", "a", True),
        ("abc", "ab", False),
    ],
)
def test_a_volume_is_kept_for_half_of_its_bytes_and_not_for_less(
    former, names, other, is_kept, tmp_path
):
    arrays = {n: changed(former[n]) if n in other else former[n] for n in names}
    same = [n for n in names if n not in other]
    assert keep(tmp_path, arrays) == (dict.fromkeys(same, "7.0") if is_kept else {})
    assert (tmp_path / "new/kept/7.0").exists() == bool(linked(tmp_path)) == is_kept
    assert len(data_files(tmp_path / "old")) > 0


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


def test_a_volume_that_is_kept_is_kept_again(former, tmp_path):
    assert keep(tmp_path, former)
    shutil.rmtree(tmp_path / "old")
    second = tmp_path / "third/kept"
    earlier = [("9.0", tmp_path / "gone"), ("7.0", tmp_path / "new/kept/7.0")]
    assert volumes.keep(earlier, parts_of(former), second) == dict.fromkeys("abc", "7.0")
    volumes.merge(tmp_path / "third", {"kept/7.0": list("abc")})
    check(tmp_path / "third", former, parts_of(former))


def test_equal_chunks_are_kept_with_what_they_refer_to(tmp_path):
    arrays = {name: noise(40, 100) for name in "abc"}
    write_volume(tmp_path / "old", parts_of(arrays))
    arrays["a"] = changed(arrays["a"])  # to which the others refer
    kept = keep(tmp_path, arrays)
    assert kept == {"b": "7.0", "c": "7.0"}
    merged(tmp_path, kept, arrays)


def test_an_array_whose_name_begins_a_path_to_another_is_written_again(tmp_path):
    """Taken out of a volume by its name, it would bring along the other one as it was."""
    arrays = {name: noise(40, 100, seed=i) for i, name in enumerate(["a", "a/b", "c", "a.d", "ab"])}
    write_volume(tmp_path / "old", parts_of(arrays))
    arrays["a/b"] = changed(arrays["a/b"])
    kept = keep(tmp_path, arrays)
    assert kept == dict.fromkeys(["c", "a.d", "ab"], "7.0")
    merged(tmp_path, kept, arrays)


@pytest.mark.parametrize("lost", ["", "d", "manifest.ocdbt", "*"])
def test_a_volume_that_vanished_is_not_kept_and_nothing_is_raised(former, lost, tmp_path):
    for path in (tmp_path / "old").glob(lost) if lost else [tmp_path / "old"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert keep(tmp_path, former) == {}
    assert not (tmp_path / "new/kept/7.0").exists()
    merged(tmp_path, {}, former)


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
    merged(tmp_path, kept, former)


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
