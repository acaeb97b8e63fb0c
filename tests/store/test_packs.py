"""Packs are read as they were written, in parts, and no damage of them is ever returned."""

import dataclasses
import itertools
import re
import shutil

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.store import volume_reader, zarr
from adacheck_jax.store.packs.arrays import COMPRESSED, RAW, Runs, laid_out
from adacheck_jax.store.packs.reader import PackArray, PackReader
from adacheck_jax.store.packs.writer import write_pack
from tests import support

DAMAGE = (FormatError, IntegrityError)
KINDS = pytest.mark.parametrize("kind", [RAW, COMPRESSED], ids=lambda kind: kind.name)


def small(kind, chunk_bytes, block_bytes=8):
    """A kind whose chunks and blocks are so small that a few bytes make many of them."""
    return dataclasses.replace(kind, max_chunk_bytes=chunk_bytes, block_bytes=block_bytes)


def write_sections(directory, contents):
    """Writes arrays of one section each."""
    written = write_pack(directory / "pack", [(kind, [data]) for kind, data in contents])
    return [left_out for (left_out,) in written]


def pack_reader(directory, *of):
    return support.pack_reader(directory / "pack", *of)


def write_one(directory, kind, data):
    (zeros,) = write_sections(directory, [(kind, data)])
    return zeros


@pytest.mark.parametrize("contents", [[], [RAW, COMPRESSED]], ids=["no", "empty"])
def test_an_empty_pack_declares_nothing_and_takes_no_room(contents, tmp_path):
    empty = np.empty(0, np.uint8)
    written = write_sections(tmp_path / "0", [(kind, empty) for kind in contents])
    assert written == [()] * len(contents)
    assert not data_files(tmp_path)
    for kind in contents:
        (found,) = pack_reader(tmp_path / "0", kind, 0).read([(0, 0)], what="leaf")
        assert found.size == 0


@KINDS
@pytest.mark.parametrize("more_bytes", [-1, 0, 1, 77])
def test_a_pack_of_several_chunks_is_read_and_takes_hardly_more_room_than_its_bytes(
    kind, more_bytes, tmp_path
):
    size_bytes = 2 * kind.max_chunk_bytes + more_bytes
    data = np.random.default_rng(0).integers(1, 256, size_bytes, dtype=np.uint8)
    assert write_one(tmp_path, kind, data) == ()
    assert stored_bytes(tmp_path) < size_bytes + 4096
    edge = -(-size_bytes // 3)
    spans = [(0, size_bytes), (edge - 3, edge + 5), (edge, edge), (size_bytes - 1, size_bytes)]
    for checked in (True, False):
        found = pack_reader(tmp_path, kind, size_bytes).read(spans, what="leaf", checked=checked)
        assert [each.tobytes() for each in found] == [data[a:b].tobytes() for a, b in spans]


def test_one_array_is_compressed_and_the_other_is_not(tmp_path):
    data = np.random.default_rng(0).integers(0, 2, 100_000, dtype=np.uint8)
    write_one(tmp_path / "compressed", COMPRESSED, data)
    write_one(tmp_path / "raw", RAW, data)
    assert stored_bytes(tmp_path / "compressed") < data.size / 4
    assert stored_bytes(tmp_path / "raw") > data.size


# Runs of zeros.


@st.composite
def sparse(draw):
    """Bytes of which some runs are zero; others may be zero too, at the ends of blocks as well."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = np.zeros(draw(st.integers(0, 300)), np.uint8)
    for _ in range(draw(st.integers(0, 5))):
        start, stop = draw(spans_in(data.size))
        data[start:stop] = rng.integers(0, draw(st.sampled_from([2, 256])), stop - start)
    return data


kinds = st.builds(
    small, st.sampled_from([RAW, COMPRESSED]), st.integers(1, 400), st.sampled_from([8, 16, 24])
)


def spans_in(size_bytes):
    place = st.integers(0, size_bytes)
    return st.tuples(place, place).map(sorted).map(tuple)


def database_of(directory):
    return zarr.database_at(directory / "pack")


def kept_of(content, zeros, block_bytes):
    """Which bytes are not in blocks that are left out."""
    is_kept = np.ones(content.size, bool)
    for start, stop in zeros:
        is_kept[start * block_bytes : stop * block_bytes] = False
    return is_kept


@given(sections=st.lists(sparse(), min_size=1, max_size=4), kind=kinds, data=st.data())
def test_whole_blocks_of_zeros_are_left_out_and_any_span_of_any_section_is_read(
    sections, kind, data, tmp_path_factory
):
    start = tmp_path_factory.mktemp("pack") / "0/pack"
    (zeros,) = write_pack(start, [(kind, sections)])
    kept = []
    for each, left_out in zip(sections, zeros, strict=True):
        blocks = each[: each.size // kind.block_bytes * kind.block_bytes]
        blocks = blocks.reshape(-1, kind.block_bytes)
        declared = [block for a, b in left_out for block in range(a, b)]
        assert declared == [i for i, block in enumerate(blocks) if not block.any()]
        borders = [border for run in left_out for border in run]
        assert borders == sorted(set(borders))  # adjoining runs are one
        kept.append(each[kept_of(each, left_out, kind.block_bytes)])
    sizes = [(each.size, left_out) for each, left_out in zip(sections, zeros, strict=True)]
    starts, length_bytes = laid_out(start, kind, sizes)
    assert [*starts, length_bytes] == np.cumsum([0, *(each.size for each in kept)]).tolist()
    if length_bytes:
        (store,) = volume_reader.opened(zarr.database_at(start), [kind.name])
        assert np.array_equal(store.read().result(), np.concatenate(kept))
    else:
        assert not data_files(start.parent)
    array = PackArray(start, kind, length_bytes)
    for each, left_out, begin in zip(sections, zeros, starts, strict=True):
        reader = PackReader(array, each.size, left_out, begin)
        ends = [border * kind.block_bytes for run in left_out for border in run]
        spans = [*itertools.combinations([0, *ends, each.size], 2)]
        spans += data.draw(st.lists(spans_in(each.size), max_size=6))
        for checked in (True, False):
            found = reader.read(spans, what="leaf", checked=checked)
            assert [x.tobytes() for x in found] == [each[a:b].tobytes() for a, b in spans]
        reader.hold(data.draw(st.lists(spans_in(each.size), max_size=4)), what="step")
        for a, b in spans:
            (found,) = reader.read([(a, b)], what="leaf")
            assert found.tobytes() == each[a:b].tobytes()


@given(content=sparse(), block_bytes=st.sampled_from([8, 16, 24]), data=st.data())
def test_places_of_what_is_stored_are_those_that_are_left_without_zeros(content, block_bytes, data):
    """Also where blocks were left out that are others than a writer would leave out."""
    count = content.size // block_bytes
    cuts = sorted(data.draw(st.sets(st.integers(0, count))))
    zeros = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    is_kept = kept_of(content, zeros, block_bytes)
    places = Runs(content.size, zeros, small(RAW, 1, block_bytes))
    assert places.stored_bytes == is_kept.sum()
    for position in range(content.size + 1):
        assert places.stored(position) == is_kept[:position].sum()
    for start, stop in [(0, content.size), *data.draw(st.lists(spans_in(content.size)))]:
        kept = [i for a, b in places.kept(start, stop) for i in range(a, b)]
        assert kept == [i for i in range(start, stop) if is_kept[i]]
        assert all(a < b for a, b in places.kept(start, stop))


@KINDS
@pytest.mark.parametrize("zeros", [(), ((1, 2),), ((1, 2), (3, 4)), ((1, 2), (3, 6)), ((0, 6),)])
def test_zeros_that_are_declared_have_to_be_those_that_were_left_out(kind, zeros, tmp_path):
    kind = small(kind, 16)
    content = np.repeat(np.array([1, 0, 2, 0, 0, 3], np.uint8), 8)
    assert write_one(tmp_path, kind, content) == ((1, 2), (3, 5))
    if zeros == ((0, 6),):  # nothing is expected, and nothing is looked at
        found = pack_reader(tmp_path, kind, content.size, zeros).read([(0, 48)], what="leaf")
        assert not found[0].any()
        return
    with pytest.raises(FormatError, match=r"expected a pack of \d+ bytes.*restore another one"):
        pack_reader(tmp_path, kind, content.size, zeros)


@pytest.mark.parametrize("zeros", [((5, 7),), ((0, 1), (6, 7)), ((0, 100),)], ids=str)
def test_zeros_declared_beyond_the_end_are_an_error(zeros, tmp_path):
    with pytest.raises(FormatError, match=f"number {zeros[-1][1] - 1} was left out"):
        laid_out(tmp_path, small(RAW, 16), [(55, zeros)])  # the last block is not a whole one


def drop_chunk(directory, kind, chunk):
    database, key = database_of(directory) / f"{kind.name}/", f"c/{chunk}"
    assert key.encode() in database.list().result()
    database.delete_range(ts.KvStore.KeyRange(key, key + "\0")).result()


@KINDS
def test_a_missing_chunk_is_not_taken_for_zeros_and_spoils_only_the_spans_that_meet_it(
    kind, tmp_path
):
    kind = small(kind, 16)
    content = np.repeat(np.array([1, 0, 2, 4, 0, 0, 0, 3, 5, 6], np.uint8), 8)
    zeros = write_one(tmp_path, kind, content)
    assert zeros == ((1, 2), (4, 7))  # chunks: 1 2, 4 3, 5 6
    drop_chunk(tmp_path, kind, 1)
    reader = pack_reader(tmp_path, kind, content.size, zeros)
    for a, b in [(0, 24), (64, 80), (8, 16), (32, 56), (33, 33), (20, 24)]:
        assert reader.read([(a, b)], what="leaf")[0].tobytes() == content[a:b].tobytes()
    for span in [(24, 32), (23, 25), (31, 57), (56, 64), (0, 80)]:
        with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step"):
            reader.read([(0, 5), span], what="params/kernel")


# Damage.

CONTENT = np.random.default_rng(1).integers(0, 256, 300, dtype=np.uint8)
PLANES = np.random.default_rng(2).integers(0, 3, 300, dtype=np.uint8)
SMALL = small(COMPRESSED, 100, 40)
PLANES[100:200] = 0
PLANES_ZEROS = ((3, 5),)


@pytest.fixture
def pack(tmp_path):
    contents = [(RAW, CONTENT), (SMALL, PLANES)]
    assert write_sections(tmp_path, contents) == [(), PLANES_ZEROS]
    return tmp_path


def read_all(directory):
    readers = pack_reader(directory, RAW, 300), pack_reader(directory, SMALL, 300, PLANES_ZEROS)
    return [reader.read([(0, 300)], what="params/kernel")[0].tobytes() for reader in readers]


WHOLE = [CONTENT.tobytes(), PLANES.tobytes()]


def data_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def stored_bytes(directory):
    return sum(path.stat().st_size for path in data_files(directory))


@pytest.mark.first(1)
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_no_damaged_byte_of_any_file_is_ever_returned(mask, pack):
    """Changed, or with all behind it cut off; of an array's own bytes the leaf is named."""
    assert read_all(pack) == WHOLE
    changed, cut = [], []
    for path in data_files(pack):
        original = path.read_bytes()
        for position in range(len(original)):
            damaged = bytearray(original)
            damaged[position] ^= mask
            changed += refused(pack, path, damaged)
            if position % 7 == 0:
                cut += refused(pack, path, damaged[:position])
        path.unlink()
        with pytest.raises(DAMAGE):
            read_all(pack)
        path.write_bytes(original)
    assert len([each for each in changed if isinstance(each, IntegrityError)]) > CONTENT.size
    assert len(cut) > CONTENT.size / 7
    for each in changed + cut:
        assert re.search(f"{pack}.*(R|r)estore another", str(each))
        assert ("params/kernel" in str(each)) == isinstance(each, IntegrityError)


def refused(pack, path, damaged):
    """The error that some bytes of a file cause; none where no reader needs them."""
    path.write_bytes(damaged)
    try:
        assert read_all(pack) == WHOLE, (path.name, len(damaged))
    except DAMAGE as error:
        return [error]
    return []


@KINDS
def test_a_pack_of_another_size_or_kind_and_a_missing_one_are_errors_that_name_it(kind, tmp_path):
    (other,) = {RAW, COMPRESSED} - {kind}
    write_one(tmp_path, kind, CONTENT)
    for size in (1, CONTENT.size - 1, CONTENT.size + 1, 10 * CONTENT.size):
        with pytest.raises(FormatError, match=rf"{size} bytes, found .*\({CONTENT.size},\)"):
            pack_reader(tmp_path, kind, size)
    pack_reader(tmp_path, kind, CONTENT.size)
    for directory, each in ((tmp_path, other), (tmp_path / "0", kind)):
        with pytest.raises(FormatError, match="found none"):
            pack_reader(directory, each, CONTENT.size)


def test_a_pack_in_the_place_of_another_is_read_afresh(tmp_path):
    for content in (CONTENT, CONTENT[::-1].copy()):
        for kind in (RAW, COMPRESSED):
            write_one(tmp_path / "other", kind, content)
            (found,) = pack_reader(tmp_path / "other", kind, 300).read([(0, 300)], what="leaf")
            assert found.tobytes() == content.tobytes()
            shutil.rmtree(tmp_path / "other")


# What is held.


@KINDS
def test_what_is_held_is_not_read_again_until_it_is_let_go_of(kind, tmp_path):
    data = np.random.default_rng(0).integers(1, 256, 3000, dtype=np.uint8)
    write_one(tmp_path, kind, data)
    reader = pack_reader(tmp_path, small(kind, 1 << 18), data.size)
    reader.hold([(500, 700), (100, 500), (900, 900), (1000, 2000)], what="step")
    for start, stop in [(50, 300), (699, 701), (800, 1500), (150, 1500)]:  # held in part alone
        (found,) = reader.read([(start, stop)], what="leaf")
        assert found.tobytes() == data[start:stop].tobytes()
    for path in data_files(tmp_path):
        path.write_bytes(b"")
    spans = [(100, 700), (450, 550), (1000, 1000), (1999, 2000)]
    found = reader.read(spans, what="leaf")
    assert [each.tobytes() for each in found] == [data[a:b].tobytes() for a, b in spans]
    with pytest.raises(DAMAGE):
        reader.read([(699, 701)], what="leaf")
    reader.hold([], what="nothing")
    with pytest.raises(DAMAGE):
        reader.read(spans, what="leaf")


def test_a_large_pack_becomes_several_files_and_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "FILE_BYTES", 1 << 20)
    data = np.random.default_rng(0).integers(1, 255, (4 << 20) + 77, dtype=np.uint8)
    assert write_one(tmp_path, RAW, data) == ()
    assert len(data_files(tmp_path)) > 3
    (found,) = pack_reader(tmp_path, RAW, data.size).read([(0, data.size)], what="leaf")
    assert np.array_equal(found, data)
