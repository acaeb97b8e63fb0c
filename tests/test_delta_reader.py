"""Deltas written as real packs, and boxes of their leaves read from them."""

import contextlib
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax import arrays, codecs, redundancy
from adacheck_jax.boxes import Box
from adacheck_jax.deltas import DeltaReader
from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.lineage import DELTA
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Encoding, Leaf, Link, Pack
from tests.strategies import DTYPES, any_bits, boxes_in, cuts, shape_of

LINK = Link(0, "../0", "0" * 64)


@dataclasses.dataclass
class Step:
    """A delta: what it is about, and every leaf before and after it."""

    leaves: list
    stored: tuple
    encodings: list
    old: list
    new: list

    def write(self, directory):
        """Writes each process's pack from its own encodings, as each process does."""
        packs = tuple(self._pack(directory, process) for process in range(len(self.encodings)))
        self.manifest = DeltaManifest(1, None, False, LINK, 1, self.stored, packs, ())
        return self.reader(directory)

    def _pack(self, directory, process):
        unknown = Encoding.SAME * len(self.stored)
        own = [
            letters if each == process else unknown for each, letters in enumerate(self.encodings)
        ]
        plan = redundancy.plan_delta(self.leaves, self.stored, own)
        raw, differences = [], []
        for extent in plan.extents:
            new, old = (leaf[extent.leaf][extent.box.slices] for leaf in (self.new, self.old))
            if extent.encoding is Encoding.RAW:
                raw.append((extent.offset_bytes, new))
            else:
                planes = codecs.encode(extent.encoding, new, old)
                differences.append((extent.offset_bytes, planes))
        sizes_bytes = plan.raw_bytes[process], plan.difference_bytes[process]
        kinds = arrays.RAW, arrays.DIFFERENCE
        contents = list(zip(kinds, sizes_bytes, (raw, differences), strict=True))
        _, elided = arrays.write_pack(directory / DELTA / str(process), contents)
        return Pack(self.encodings[process], *sizes_bytes, elided)

    @property
    def base(self):
        return BaseManifest(0, None, tuple(self.leaves), (), None, "", len(self.encodings), {})

    def reader(self, directory, **changes):
        return DeltaReader(self.base, dataclasses.replace(self.manifest, **changes), directory)


def step_of(leaves, stored, encodings, seed=0, is_near=True):
    """A delta over leaves of random bits, which change as the encodings allow."""
    rng = np.random.default_rng(seed)
    old = [any_bits(rng, leaf.shape, leaf.dtype) for leaf in leaves]
    new = [array.copy() for array in old]
    for position, index in enumerate(stored):
        leaf = leaves[index]
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            if encodings[process][position] == Encoding.SAME:
                continue
            block = any_bits(rng, box.shape, leaf.dtype)
            if is_near:  # so that some chunks of planes are all zero
                kept = rng.integers(0, 2, box.shape).astype(bool)
                block = np.where(kept, old[index][box.slices], block)
            new[index][box.slices] = block
    return Step(leaves, tuple(stored), encodings, old, new)


def leaf_of(cuts, owners, dtype="float32", path="params/kernel"):
    itemsize_bytes = jnp.dtype(dtype).itemsize
    return Leaf(path, shape_of(cuts), dtype, itemsize_bytes, None, cuts, tuple(owners))


@st.composite
def steps(draw):
    process_count = draw(st.integers(1, 3))
    leaves = []
    for number in range(draw(st.integers(1, 3))):
        each = draw(cuts(max_length=9, max_pieces=3))
        count = len(leaf_of(each, ()).boxes)
        owners = [draw(st.integers(0, process_count - 1)) for _ in range(count)]
        leaves.append(leaf_of(each, owners, draw(st.sampled_from(DTYPES)), f"leaf{number}"))
    stored = sorted(draw(st.sets(st.sampled_from(range(len(leaves))), min_size=1)))
    letters = st.lists(st.sampled_from(sorted(Encoding)), min_size=len(stored))
    encodings = [
        "".join(draw(letters)[: len(stored)]).ljust(len(stored), Encoding.XOR)
        for _ in range(process_count)
    ]
    return step_of(leaves, stored, encodings, draw(st.integers(0, 2**32)), draw(st.booleans()))


@contextlib.contextmanager
def chunks_of(chunk_bytes, **changes):
    """Chunks so small that boxes reach over many of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAW", "DIFFERENCE"):
            kind = getattr(arrays, name)
            kind = dataclasses.replace(kind, max_chunk_bytes=chunk_bytes, **changes)
            patch.setattr(arrays, name, kind)
        yield


@chunks_of(32)
@given(step=steps(), data=st.data())
def test_any_box_is_brought_from_the_old_bits_to_the_new_ones(step, data, tmp_path_factory):
    reader = step.write(tmp_path_factory.mktemp("step"))
    assert reader.stored == step.stored
    for index, leaf in enumerate(step.leaves):
        for _ in range(3):
            box = data.draw(boxes_in(leaf.shape))
            order = data.draw(st.sampled_from("CF"))
            block = np.array(step.old[index][box.slices], order=order)
            reader.patch(index, box, block)
            assert block.tobytes() == step.new[index][box.slices].tobytes(), (leaf, box)
        whole = step.old[index].copy()
        reader.patch(index, Box.full(leaf.shape), whole)
        assert whole.tobytes() == step.new[index].tobytes(), leaf


@chunks_of(32)
@given(step=steps(), data=st.data())
def test_a_leaf_that_is_stored_as_it_is_is_read_without_the_old_bits(step, data, tmp_path_factory):
    reader = step.write(tmp_path_factory.mktemp("step"))
    for index, leaf in enumerate(step.leaves):
        if index not in step.stored:
            assert not reader.holds_all_of(index)
            continue
        position = step.stored.index(index)
        letters = {step.encodings[owner][position] for owner in leaf.owners}
        assert reader.holds_all_of(index) == (letters == {Encoding.RAW})
        if reader.holds_all_of(index):
            box = data.draw(boxes_in(leaf.shape))
            found = reader.read(index, box)
            assert found.dtype == jnp.dtype(leaf.dtype)
            assert found.shape == box.shape
            assert found.tobytes() == step.new[index][box.slices].tobytes()


@given(letters=st.lists(st.sampled_from("rxs="), min_size=1, max_size=3), data=st.data())
def test_deltas_follow_one_another(letters, data, tmp_path_factory):
    leaf = leaf_of(((0, 3, 5), (0, 4)), (0, 0), "bfloat16")
    box = data.draw(boxes_in(leaf.shape))
    steps = [step_of([leaf], [0], [letter], seed) for seed, letter in enumerate(letters)]
    block = steps[0].old[0][box.slices].copy()
    for before, step in itertools.pairwise(steps):
        step.old = before.new
        if step.encodings == ["="]:
            step.new = step.old
    for step in steps:
        step.write(tmp_path_factory.mktemp("step")).patch(0, box, block)
        assert block.tobytes() == step.new[0][box.slices].tobytes()


@pytest.mark.parametrize("encoding", [Encoding.XOR, Encoding.SUBTRACT])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_rows_that_did_not_change_take_no_room_in_a_large_leaf(encoding, dtype, tmp_path):
    leaf = leaf_of(((0, 512, 1024), (0, 1024)), (0, 0), dtype)
    step = step_of([leaf], [0], [str(encoding)])
    step.new[0][...] = step.old[0]
    step.new[0][100:103, 7:] = any_bits(np.random.default_rng(1), (3, 1017), dtype)
    reader = step.write(tmp_path)
    (pack,) = step.manifest.packs
    assert pack.difference_bytes == step.new[0].nbytes
    assert pack.elided
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 20 * 3 * 1024
    for box in [Box((90, 5), (110, 1000)), Box((600, 0), (601, 1)), Box((500, 3), (530, 9))]:
        block = step.old[0][box.slices].copy()
        reader.patch(0, box, block)
        assert block.tobytes() == step.new[0][box.slices].tobytes()


@chunks_of(256, codecs=("bytes", "crc32c"))  # a row each, to be found among the stored bytes
@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.XOR, Encoding.SUBTRACT])
def test_only_the_rows_that_are_needed_are_read_and_their_damage_names_the_leaf(encoding, tmp_path):
    leaf = leaf_of(((0, 4, 8), (0, 256)), (0, 0), "uint8")
    step = step_of([leaf], [0], [str(encoding)], is_near=False)
    step.write(tmp_path)
    row = Box((5, 0), (6, 256))
    new, old = (each[0][row.slices] for each in (step.new, step.old))
    damage(tmp_path, (new if encoding is Encoding.RAW else codecs.encode(encoding, new, old)))

    reader = step.reader(tmp_path)
    for box in [Box((0, 0), (5, 256)), Box((6, 1), (8, 3)), Box((2, 9), (5, 10))]:
        block = step.old[0][box.slices].copy()
        reader.patch(0, box, block)
        assert block.tobytes() == step.new[0][box.slices].tobytes()
    for box in [row, Box((5, 3), (6, 4)), Box.full((8, 256))]:
        with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step"):
            reader.patch(0, box, step.old[0][box.slices].copy())


def damage(directory, content):
    """Changes one stored byte of some content."""
    for path in directory.rglob("*"):
        data = bytearray(path.read_bytes() if path.is_file() else b"")
        if content.tobytes() in data:
            data[data.index(content.tobytes()) + 3] ^= 0x40
            path.write_bytes(data)
            return
    raise AssertionError("the content is not stored")


@pytest.fixture
def simple(tmp_path):
    """Two leaves on two processes: the first stores differences and raw elements, and the second
    raw elements alone."""
    leaves = [leaf_of(((0, 2, 4), (0, 6)), (0, 1)), leaf_of(((0, 3),), (0,), path="bias")]
    step = step_of(leaves, [0, 1], ["xr", "r="], is_near=False)
    step.write(tmp_path)
    return step


@pytest.mark.parametrize("process", [0, 1])
def test_a_lost_pack_is_an_error_only_where_it_is_needed(simple, process, tmp_path):
    for path in sorted((tmp_path / DELTA / str(process)).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    reader = simple.reader(tmp_path)
    own = Box((2 * process, 0), (2 * process + 2, 6))
    other = Box((2 - 2 * process, 0), (4 - 2 * process, 6))
    block = simple.old[0][other.slices].copy()
    reader.patch(0, other, block)
    assert block.tobytes() == simple.new[0][other.slices].tobytes()
    with pytest.raises(FormatError, match="found none"):
        reader.patch(0, own, simple.old[0][own.slices].copy())


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("field", ["raw_bytes", "difference_bytes"])
@pytest.mark.parametrize("more_bytes", [-1, 1])
def test_a_pack_of_another_size_than_planned_is_an_error(
    simple, process, field, more_bytes, tmp_path
):
    packs = list(simple.manifest.packs)
    size_bytes = getattr(packs[process], field) + more_bytes
    packs[process] = dataclasses.replace(packs[process], **{field: size_bytes})
    with pytest.raises(IntegrityError, match="expected packs of"):
        simple.reader(tmp_path, packs=tuple(packs))


def test_a_pack_whose_encodings_are_of_other_sizes_is_an_error(simple, tmp_path):
    first, second = simple.manifest.packs
    for encodings in ("rr", "xx", "x=", "=r", "=="):
        packs = (dataclasses.replace(first, encodings=encodings), second)
        with pytest.raises(IntegrityError, match="expected packs of"):
            simple.reader(tmp_path, packs=packs)


def test_a_delta_of_other_processes_or_leaves_is_an_error(simple, tmp_path):
    packs = simple.manifest.packs
    for changes in ({"packs": packs[:1]}, {"packs": (*packs, packs[1])}, {"stored": (0, 2)}):
        with pytest.raises(IntegrityError, match="packs of 2 processes with some of 2 leaves"):
            simple.reader(tmp_path, **changes)


def test_a_lost_chunk_of_differences_is_not_taken_for_zeros(tmp_path):
    leaf = leaf_of(((0, 6), (0, 1 << 17)), (0,), "uint8")
    step = step_of([leaf], [0], ["x"])
    step.new[0][...] = step.old[0]
    step.new[0][0, 0] ^= 1
    step.write(tmp_path)
    (pack,) = step.manifest.packs
    assert pack.elided == ((1, 3),)
    block = step.old[0].copy()
    step.reader(tmp_path).patch(0, Box.full(leaf.shape), block)
    assert (block == step.new[0]).all()
    for elided in ((), ((1, 2),), ((2, 3),)):
        reader = step.reader(tmp_path, packs=(dataclasses.replace(pack, elided=elided),))
        with pytest.raises(IntegrityError, match="params/kernel"):
            reader.patch(0, Box.full(leaf.shape), step.old[0].copy())
