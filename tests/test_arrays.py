import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax import arrays
from adacheck_jax.arrays import PackReader, write_pack
from adacheck_jax.errors import FormatError, IntegrityError

DTYPES = ["bool", "int4", "uint8", "bfloat16", "float32", "complex128"]
DAMAGE = (FormatError, IntegrityError)


@st.composite
def packs(draw):
    """The size of a pack and the blocks in it, with gaps between them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    end, blocks = 0, []
    for _ in range(draw(st.integers(0, 6))):
        dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        block = rng.integers(-4, 4, shape).astype(dtype)
        if draw(st.booleans()):
            block = block.T
        offset = end + draw(st.integers(0, 40))
        blocks.append((offset, block))
        end = offset + block.nbytes
    return end, blocks


@given(pack=packs())
def test_every_block_is_read_back_bit_for_bit(pack, tmp_path_factory):
    size_bytes, blocks = pack
    directory = tmp_path_factory.mktemp("pack") / "0"
    write_pack(directory, size_bytes, blocks)
    if not size_bytes:
        assert not directory.exists()
        return
    spans = [(offset, offset + block.nbytes) for offset, block in blocks]
    found = PackReader(directory, size_bytes).read(spans, what="leaf")
    assert [data.tobytes() for data in found] == [block.tobytes() for _, block in blocks]


def test_spans_across_chunks_are_read_whole(tmp_path):
    size_bytes = 2 * arrays.MAX_CHUNK_BYTES + 77
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    write_pack(tmp_path, size_bytes, [(0, data)])
    edge = -(-size_bytes // 3)
    spans = [(0, size_bytes), (edge - 3, edge + 5), (edge, edge), (size_bytes - 1, size_bytes)]
    found = PackReader(tmp_path, size_bytes).read(spans, what="leaf")
    assert [each.tobytes() for each in found] == [data[a:b].tobytes() for a, b in spans]


@pytest.mark.parametrize("more_bytes", [-1, 0, 1, 77])
def test_a_pack_takes_hardly_more_room_than_its_bytes(more_bytes, tmp_path):
    size_bytes = 2 * arrays.MAX_CHUNK_BYTES + more_bytes
    write_pack(tmp_path, size_bytes, [(0, np.ones(size_bytes, np.uint8))])
    assert sum(path.stat().st_size for path in data_files(tmp_path)) < size_bytes + 4096


def test_the_loss_of_a_pack_of_zeros_is_noticed(tmp_path):
    write_pack(tmp_path, 100, [(0, np.zeros(100, np.uint8))])
    reader = PackReader(tmp_path, 100)
    assert not reader.read([(0, 100)], what="leaf")[0].any()
    for path in data_files(tmp_path):
        path.unlink()
    with pytest.raises(DAMAGE):
        PackReader(tmp_path, 100).read([(0, 100)], what="leaf")


CONTENT = np.random.default_rng(1).integers(0, 256, 300, dtype=np.uint8)


@pytest.fixture
def pack(tmp_path):
    write_pack(tmp_path, CONTENT.size, [(0, CONTENT)])
    return tmp_path


def read_all(directory):
    whole = [(0, CONTENT.size)]
    return PackReader(directory, CONTENT.size).read(whole, what="params/kernel")[0]


def data_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_no_damaged_byte_of_any_file_is_ever_returned(pack):
    noticed = 0
    for path in data_files(pack):
        original = path.read_bytes()
        for position in range(len(original)):
            for mask in (0x01, 0x80):
                damaged = bytearray(original)
                damaged[position] ^= mask
                path.write_bytes(damaged)
                try:
                    found = read_all(pack)
                except DAMAGE:
                    noticed += 1
                else:  # a byte that no reader needs, such as the size of a superseded node
                    assert found.tobytes() == CONTENT.tobytes(), (path.name, position, mask)
        path.write_bytes(original)
    assert noticed > 2 * CONTENT.size


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
                assert found.tobytes() == CONTENT.tobytes(), (path.name, length)
        path.write_bytes(original)
    assert noticed > CONTENT.size


def test_every_file_is_needed(pack):
    for path in data_files(pack):
        original = path.read_bytes()
        path.unlink()
        with pytest.raises(DAMAGE):
            read_all(pack)
        path.write_bytes(original)


def test_damage_names_the_leaf_the_place_and_a_remedy(pack):
    largest = max(data_files(pack), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[data.index(CONTENT[100:110].tobytes())] ^= 1
    largest.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step") as caught:
        read_all(pack)
    assert str(pack) in str(caught.value)


@pytest.mark.parametrize("size_bytes", [CONTENT.size - 1, CONTENT.size + 1])
def test_a_pack_of_another_size_is_an_error_that_names_both(pack, size_bytes):
    with pytest.raises(FormatError, match=rf"{size_bytes} bytes, found .*\({CONTENT.size},\)"):
        PackReader(pack, size_bytes)


def test_a_missing_pack_is_an_error(tmp_path):
    with pytest.raises(FormatError, match="found none"):
        PackReader(tmp_path / "0", 10)


def test_a_pack_in_the_place_of_another_is_read_afresh(pack, tmp_path):
    other = tmp_path / "other"
    write_pack(other, CONTENT.size, [(0, CONTENT[::-1].copy())])
    assert read_all(other).tobytes() == CONTENT[::-1].tobytes()
    shutil.rmtree(other)
    write_pack(other, CONTENT.size, [(0, CONTENT)])
    assert read_all(other).tobytes() == CONTENT.tobytes()
