import dataclasses
import itertools
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.arrays import DIFFERENCE, RAW, PackReader, write_pack
from adacheck_jax.errors import FormatError, IntegrityError
from tests.strategies import DTYPES, any_bits

DAMAGE = (FormatError, IntegrityError)
KINDS = pytest.mark.parametrize("kind", [RAW, DIFFERENCE], ids=lambda kind: kind.name)


@st.composite
def packs(draw):
    """The size of an array and the blocks in it, with gaps between them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    end, blocks = 0, []
    for _ in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        block = any_bits(rng, shape, draw(st.sampled_from(DTYPES)))
        if draw(st.booleans()):
            block = block.T
        if draw(st.booleans()):
            block = np.zeros_like(block)
        offset = end + draw(st.integers(0, 40))
        blocks.append((offset, block))
        end = offset + block.nbytes
    return end, blocks


def in_small_chunks(kind, chunk_bytes):
    return dataclasses.replace(kind, max_chunk_bytes=chunk_bytes)


def write_one(directory, kind, data):
    (elided,) = write_pack(directory, [(kind, data.size, [(0, data)])])
    return elided


@given(raw=packs(), difference=packs(), chunk_bytes=st.integers(1, 400))
def test_every_block_is_read_back_bit_for_bit(raw, difference, chunk_bytes, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pack") / "0"
    kinds = [in_small_chunks(kind, chunk_bytes) for kind in (RAW, DIFFERENCE)]
    contents = [(kind, *pack) for kind, pack in zip(kinds, (raw, difference), strict=True)]
    for (kind, size_bytes, blocks), elided in zip(
        contents, write_pack(directory, contents), strict=True
    ):
        if not size_bytes:
            assert elided == ()
            with pytest.raises(FormatError, match="found none"):
                PackReader(directory, kind, 0)
            continue
        spans = [(offset, offset + block.nbytes) for offset, block in blocks]
        found = PackReader(directory, kind, size_bytes, elided).read(spans, what="leaf")
        assert [data.tobytes() for data in found] == [block.tobytes() for _, block in blocks]


@pytest.mark.parametrize("contents", [[], [(RAW, 0, []), (DIFFERENCE, 0, [])]], ids=["no", "empty"])
def test_an_empty_pack_elides_nothing_and_takes_no_room(contents, tmp_path):
    assert write_pack(tmp_path / "0", contents) == [()] * len(contents)
    assert not data_files(tmp_path)


@KINDS
def test_spans_across_chunks_are_read_whole(kind, tmp_path):
    size_bytes = 2 * kind.max_chunk_bytes + 77
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    assert write_one(tmp_path, kind, data) == ()
    edge = -(-size_bytes // 3)
    spans = [(0, size_bytes), (edge - 3, edge + 5), (edge, edge), (size_bytes - 1, size_bytes)]
    found = PackReader(tmp_path, kind, size_bytes).read(spans, what="leaf")
    assert [each.tobytes() for each in found] == [data[a:b].tobytes() for a, b in spans]


@KINDS
@pytest.mark.parametrize("more_bytes", [-1, 0, 1, 77])
def test_a_pack_takes_hardly_more_room_than_its_bytes(kind, more_bytes, tmp_path):
    size_bytes = 2 * kind.max_chunk_bytes + more_bytes
    data = np.random.default_rng(0).integers(1, 256, size_bytes, dtype=np.uint8)
    write_one(tmp_path, kind, data)
    assert sum(path.stat().st_size for path in data_files(tmp_path)) < size_bytes + 4096


def test_differences_are_compressed_and_raw_elements_are_not(tmp_path):
    data = np.random.default_rng(0).integers(0, 2, 100_000, dtype=np.uint8)
    write_one(tmp_path / "difference", DIFFERENCE, data)
    write_one(tmp_path / "raw", RAW, data)
    size_bytes = {
        each: sum(path.stat().st_size for path in data_files(tmp_path / each))
        for each in ("difference", "raw")
    }
    assert size_bytes["difference"] < data.size / 4
    assert size_bytes["raw"] > data.size


@st.composite
def sparse(draw):
    """Bytes of which some runs are zero, and the size of their largest chunk."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size_bytes = draw(st.integers(1, 300))
    data = np.zeros(size_bytes, np.uint8)
    for _ in range(draw(st.integers(0, 4))):
        start, stop = sorted(draw(st.tuples(*[st.integers(0, size_bytes)] * 2)))
        data[start:stop] = rng.integers(0, 256, stop - start)
    return data, draw(st.integers(1, 60))


def chunks_of(data, chunk_bytes):
    """The spans of the chunks: as few as can be, all of one size but the last."""
    count = -(-data.size // chunk_bytes)
    each = -(-data.size // count)
    return [(start, min(start + each, data.size)) for start in range(0, data.size, each)]


@given(drawn=sparse(), data=st.data())
def test_any_span_across_elided_and_written_chunks_is_read_whole(drawn, data, tmp_path_factory):
    content, chunk_bytes = drawn
    directory = tmp_path_factory.mktemp("pack")
    kind = in_small_chunks(DIFFERENCE, chunk_bytes)
    elided = write_one(directory, kind, content)
    place = st.integers(0, content.size)
    spans = data.draw(st.lists(st.tuples(place, place).map(sorted).map(tuple), max_size=8))
    spans += chunks_of(content, chunk_bytes)
    found = PackReader(directory, kind, content.size, elided).read(spans, what="leaf")
    assert [each.tobytes() for each in found] == [content[a:b].tobytes() for a, b in spans]


@given(drawn=sparse())
def test_the_declared_chunks_are_those_that_are_all_zero_and_no_others_are_left_out(
    drawn, tmp_path_factory
):
    content, chunk_bytes = drawn
    directory = tmp_path_factory.mktemp("pack")
    kind = in_small_chunks(DIFFERENCE, chunk_bytes)
    elided = write_one(directory, kind, content)
    declared = [chunk for start, stop in elided for chunk in range(start, stop)]
    chunks = chunks_of(content, chunk_bytes)
    assert declared == [i for i, (a, b) in enumerate(chunks) if not content[a:b].any()]
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(elided))
    undeclared = PackReader(directory, kind, content.size)
    for i, span in enumerate(chunks):
        if i in declared:
            with pytest.raises(IntegrityError, match="Restore another step"):
                undeclared.read([span], what="leaf")
        else:
            (found,) = undeclared.read([span], what="leaf")
            assert found.tobytes() == content[slice(*span)].tobytes()


def test_a_missing_chunk_that_is_not_declared_spoils_only_the_spans_that_meet_it(tmp_path):
    kind = in_small_chunks(DIFFERENCE, 10)
    content = np.repeat(np.array([1, 0, 2, 0, 0, 3], np.uint8), 10)
    assert write_one(tmp_path, kind, content) == ((1, 2), (3, 5))
    reader = PackReader(tmp_path, kind, 60, ((1, 2), (3, 4)))
    for a, b in [(0, 40), (50, 60), (15, 35), (40, 40)]:
        assert reader.read([(a, b)], what="leaf")[0].tobytes() == content[a:b].tobytes()
    for span in [(40, 50), (39, 41), (49, 51), (0, 60)]:
        with pytest.raises(IntegrityError, match="params/kernel"):
            reader.read([(0, 5), span], what="params/kernel")


def test_zero_differences_take_no_room(tmp_path):
    size_bytes = 4 * DIFFERENCE.max_chunk_bytes
    elided = write_one(tmp_path, DIFFERENCE, np.zeros(size_bytes, np.uint8))
    assert elided == ((0, 4),)
    assert sum(path.stat().st_size for path in data_files(tmp_path)) < 4096
    spans = [(0, size_bytes), (5, 5), (size_bytes - 1, size_bytes)]
    found = PackReader(tmp_path, DIFFERENCE, size_bytes, elided).read(spans, what="leaf")
    assert [(each.size, each.any()) for each in found] == [(b - a, False) for a, b in spans]
    with pytest.raises(IntegrityError):
        PackReader(tmp_path, DIFFERENCE, size_bytes).read([(0, 1)], what="leaf")


@KINDS
def test_the_loss_of_a_pack_of_zeros_is_noticed(kind, tmp_path):
    elided = write_one(tmp_path, kind, np.zeros(100, np.uint8))
    assert elided == (() if kind is RAW else ((0, 1),))
    reader = PackReader(tmp_path, kind, 100, elided)
    assert not reader.read([(0, 100)], what="leaf")[0].any()
    for path in data_files(tmp_path):
        path.unlink()
    with pytest.raises(DAMAGE):
        PackReader(tmp_path, kind, 100, elided).read([(0, 100)], what="leaf")


CONTENT = np.random.default_rng(1).integers(0, 256, 300, dtype=np.uint8)
DIFFERENCES = np.random.default_rng(2).integers(0, 3, 300, dtype=np.uint8)
SMALL = in_small_chunks(DIFFERENCE, 100)
DIFFERENCES[100:200] = 0


@pytest.fixture
def pack(tmp_path):
    contents = [(RAW, 300, [(0, CONTENT)]), (SMALL, 300, [(0, DIFFERENCES)])]
    assert write_pack(tmp_path, contents) == [(), ((1, 2),)]
    return tmp_path


def read_all(directory):
    readers = PackReader(directory, RAW, 300), PackReader(directory, SMALL, 300, ((1, 2),))
    return [reader.read([(0, 300)], what="params/kernel")[0].tobytes() for reader in readers]


WHOLE = [CONTENT.tobytes(), DIFFERENCES.tobytes()]


def data_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_no_damaged_byte_of_any_file_is_ever_returned(mask, pack):
    noticed = 0
    for path in data_files(pack):
        original = path.read_bytes()
        for position in range(len(original)):
            damaged = bytearray(original)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            try:
                found = read_all(pack)
            except DAMAGE:
                noticed += 1
            else:  # a byte that no reader needs, such as the size of a superseded node
                assert found == WHOLE, (path.name, position)
        path.write_bytes(original)
    assert noticed > CONTENT.size


def test_no_truncated_file_is_ever_read(pack):
    noticed = 0
    for path in data_files(pack):
        original = path.read_bytes()
        for length in range(len(original)):
            path.write_bytes(original[:length])
            try:
                found = read_all(pack)
            except DAMAGE:
                noticed += 1
            else:
                assert found == WHOLE, (path.name, length)
        path.write_bytes(original)
    assert noticed > CONTENT.size


def test_every_file_is_needed(pack):
    for path in data_files(pack):
        original = path.read_bytes()
        path.unlink()
        with pytest.raises(DAMAGE):
            read_all(pack)
        path.write_bytes(original)


def test_both_arrays_of_a_pack_are_read(pack):
    assert read_all(pack) == WHOLE


def largest_of(directory):
    return max(data_files(directory), key=lambda path: path.stat().st_size)


def test_damage_names_the_leaf_the_place_and_a_remedy(pack):
    path = next(p for p in data_files(pack) if CONTENT[100:110].tobytes() in p.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(CONTENT[100:110].tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step") as caught:
        read_all(pack)
    assert str(pack) in str(caught.value)


def test_damage_in_compressed_bytes_is_an_integrity_error_that_names_the_leaf(tmp_path):
    content = np.random.default_rng(3).integers(0, 5, 3000, dtype=np.uint8)
    write_one(tmp_path, DIFFERENCE, content)
    path = largest_of(tmp_path)
    original = path.read_bytes()
    assert content[:50].tobytes() not in original
    start = original.index(b"\x28\xb5\x2f\xfd")  # the frame that zstd made
    for position in range(start, start + 600, 7):
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        reader = PackReader(tmp_path, DIFFERENCE, content.size)
        with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step"):
            reader.read([(0, 1)], what="params/kernel")


@KINDS
@pytest.mark.parametrize("size_bytes", [1, CONTENT.size - 1, CONTENT.size + 1, 10 * CONTENT.size])
def test_a_pack_of_another_size_is_an_error_that_names_both(kind, size_bytes, pack):
    with pytest.raises(FormatError, match=rf"{size_bytes} bytes, found .*\({CONTENT.size},\)"):
        PackReader(pack, kind, size_bytes)


@KINDS
def test_a_missing_pack_is_an_error(kind, tmp_path):
    with pytest.raises(FormatError, match="found none"):
        PackReader(tmp_path / "0", kind, 10)


@pytest.mark.parametrize(("written", "other"), [(RAW, DIFFERENCE), (DIFFERENCE, RAW)])
def test_one_array_of_a_pack_does_not_stand_in_for_the_other(written, other, tmp_path):
    write_one(tmp_path, written, CONTENT)
    PackReader(tmp_path, written, CONTENT.size)
    with pytest.raises(FormatError, match="found none"):
        PackReader(tmp_path, other, CONTENT.size)


def test_a_pack_in_the_place_of_another_is_read_afresh(tmp_path):
    for content in (CONTENT, CONTENT[::-1].copy()):
        for kind in (RAW, DIFFERENCE):
            write_one(tmp_path / "other", kind, content)
            (found,) = PackReader(tmp_path / "other", kind, 300).read([(0, 300)], what="leaf")
            assert found.tobytes() == content.tobytes()
            shutil.rmtree(tmp_path / "other")
