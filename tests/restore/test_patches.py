"""Deltas written as real packs, and boxes of their leaves read from them."""

import contextlib
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format import pack_plan
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.format.encodings import codes
from adacheck_jax.format.encodings.form import Code, Encoding
from adacheck_jax.format.encodings.table import ENCODINGS
from adacheck_jax.format.manifest import (
    BaseManifest,
    DeltaManifest,
    Grid,
    Leaf,
    Link,
    Pack,
)
from adacheck_jax.restore.deltas.delta_reader import DeltaReader
from adacheck_jax.store.packs import arrays, writer
from adacheck_jax.store.steps import folders, lineage
from tests import support
from tests.strategies import DTYPES, any_bits, boxes_in, cuts, shape_of

LINK = Link(0, "../0", "0" * 64)
BY_ITSELF = {letter for letter, each in ENCODINGS.items() if not each.needs_old}
ROW_BY_ROW = [letter for letter, each in ENCODINGS.items() if not each.has_own_size]


@dataclasses.dataclass
class Step:
    """A delta: what it is about, and every leaf before and after it."""

    leaves: list
    stored: tuple
    encodings: list
    old: list
    new: list
    aliases: list = dataclasses.field(default_factory=list)

    def write(self, directory):
        """Writes each process's pack from its own encodings, as each process does."""
        packs = tuple(self._pack(directory, process) for process in range(len(self.encodings)))
        self.manifest = DeltaManifest(
            *(1, (), (), self.stored, (), packs, (0,) * len(self.leaves), "stored"),
            parent=LINK,
            depth=1,
        )
        return self.reader(directory)

    def _pack(self, directory, process):
        unknown = Encoding.SAME * len(self.stored)
        own = [
            letters if each == process else unknown for each, letters in enumerate(self.encodings)
        ]
        own_aliases = self.aliases[process] if self.aliases else ()
        aliases = [own_aliases if each == process else () for each in range(len(own))]
        content, sizes = {}, []
        for index, letter in zip(self.stored, self.encodings[process], strict=True):
            for box in self.leaves[index].boxes_of(process) if letter != Encoding.SAME else ():
                new, old = (each[index][box.slices] for each in (self.new, self.old))
                content[index, box] = low, high = support.encoded(letter, new, old)
                if ENCODINGS[letter].has_own_size:
                    sizes.append((low.size, high.size))
        own_sizes = [sizes if each == process else () for each in range(len(own))]
        plan = pack_plan.plan_delta(self.leaves, self.stored, own, aliases, own_sizes)
        skipped = {first for first, _ in own_aliases}
        raw, compressed = [], []
        for extent in (x for i, x in enumerate(plan.extents) if i not in skipped):
            low, high = content[extent.leaf, extent.box]
            raw.append((extent.raw_start, low))
            compressed.append((extent.compressed_start, high))
        sizes_bytes = plan.raw_bytes[process], plan.compressed_bytes[process]
        kinds = arrays.RAW, arrays.COMPRESSED
        contents = [
            (kind, [support.filled(size, blocks)])
            for kind, size, blocks in zip(kinds, sizes_bytes, (raw, compressed), strict=True)
        ]
        written = writer.write_pack(folders.pack_in(directory, process), contents)
        zeros = [left_out for (left_out,) in written]
        return Pack(self.encodings[process], own_aliases, *sizes_bytes, *zeros, tuple(sizes))

    @property
    def base(self):
        return BaseManifest(
            *(0, (), tuple(self.leaves), (0,) * len(self.leaves), None, "", (), ()),
            *(len(self.encodings), {}),
        )

    def reader(self, directory, **changes):
        manifest = dataclasses.replace(self.manifest, **changes)
        before = lineage.LineageStep(self.base, directory)
        return DeltaReader(lineage.LineageStep(manifest, directory).behind(before))


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
            if is_near:  # so that some blocks of zeros are left out, of planes and of elements
                kept = rng.integers(0, 2, box.shape).astype(bool)
                block = np.where(kept, old[index][box.slices], block)
                if rng.integers(0, 2):
                    block = np.where(rng.integers(0, 8, box.shape) > 0, np.zeros_like(block), block)
            new[index][box.slices] = block
    return Step(leaves, tuple(stored), encodings, old, new)


def leaf_of(cuts, owners, dtype="float32", path="params/kernel"):
    itemsize_bytes = jnp.dtype(dtype).itemsize
    return Leaf(path, shape_of(cuts), dtype, itemsize_bytes, None, cuts, tuple(owners))


@st.composite
def steps(draw, *dtypes):
    """A step of a few kinds of leaves, the first of a given type, some of whose boxes are equal."""
    process_count = draw(st.integers(1, 3))
    types = [*dtypes, *draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))]
    kinds = [(draw(cuts(max_length=9, max_pieces=3)), each) for each in types]
    leaves = []
    for number in range(draw(st.integers(1, 4))):
        each, dtype = draw(st.sampled_from(kinds)) if number else kinds[0]
        count = len(leaf_of(each, ()).boxes)
        owners = [draw(st.integers(0, process_count - 1)) for _ in range(count)]
        leaves.append(leaf_of(each, owners, dtype, f"leaf{number}"))
    stored = sorted(draw(st.sets(st.sampled_from(range(len(leaves))), min_size=1)))
    few = st.sampled_from(draw(st.lists(st.sampled_from(Encoding), min_size=1, max_size=3)))
    encodings = ["".join(draw(few) for _ in stored) for _ in range(process_count)]
    step = step_of(leaves, stored, encodings, draw(st.integers(0, 2**32)), draw(st.booleans()))
    if draw(st.booleans()):
        step.aliases = draw(repeated(step))
    return step


@st.composite
def repeated(draw, step):
    """Gives boxes the bits of earlier ones of the same process, and tells which."""
    own = [[] for _ in step.encodings]
    aliases = [{} for _ in own]
    for position, index in enumerate(step.stored):
        leaf = step.leaves[index]
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            if (letter := step.encodings[process][position]) == Encoding.SAME:
                continue
            kind, boxes = (leaf.dtype, letter, box.shape), own[process]
            alike = [k for k, each in enumerate(boxes) if each[0] == kind]
            source = draw(st.sampled_from([None, *alike]))
            if source is not None and source not in aliases[process]:
                _, other, other_box = boxes[source]
                for each in (step.old, step.new):
                    each[index][box.slices] = each[other][other_box.slices]
                aliases[process][len(boxes)] = source
            boxes.append((kind, index, box))
    return [tuple(each.items()) for each in aliases]


@contextlib.contextmanager
def chunks_of(chunk_bytes, block_bytes=8, **changes):
    """Chunks and blocks so small that boxes reach over many of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAW", "COMPRESSED"):
            kind = getattr(arrays, name)
            kind = dataclasses.replace(
                kind, max_chunk_bytes=chunk_bytes, block_bytes=block_bytes, **changes
            )
            patch.setattr(arrays, name, kind)
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@chunks_of(32)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_any_box_is_brought_to_the_new_bits_and_read_if_it_is_stored_by_itself(
    dtype, data, tmp_path_factory
):
    step = data.draw(steps(dtype))
    reader = step.write(tmp_path_factory.mktemp("step"))
    assert reader.delta.stored == step.stored
    for index, leaf in enumerate(step.leaves):
        letters = {
            step.encodings[owner][step.stored.index(index)] if index in step.stored else ""
            for owner in leaf.owners
        }
        is_whole = index in step.stored and letters.issubset(BY_ITSELF)
        assert reader.stores_whole(index) == is_whole
        for box in [*(data.draw(boxes_in(leaf.shape)) for _ in range(3)), Box.full(leaf.shape)]:
            block = np.array(step.old[index][box.slices], order=data.draw(st.sampled_from("CF")))
            reader.patch(index, box, block)
            assert block.tobytes() == step.new[index][box.slices].tobytes(), (leaf, box)
            if is_whole:
                (found,) = reader.read([(index, box)])
                assert (found.dtype, found.shape) == (jnp.dtype(leaf.dtype), box.shape)
                assert found.tobytes() == block.tobytes()
        if index in step.stored and not is_whole:
            with pytest.raises(IntegrityError, match=rf"{leaf.path}.*stored by itself"):
                reader.read([(index, Box.full(leaf.shape))])


@st.composite
def recut(draw, before):
    """A step behind another one, in boxes of its own, of another number of processes."""
    process_count = draw(st.integers(1, 3))
    leaves = []
    for leaf in before.leaves:
        inner = [draw(st.sets(st.integers(1, n - 1))) if n > 1 else () for n in leaf.shape]
        each = tuple((0, *sorted(x), n)[: n + 1] for x, n in zip(inner, leaf.shape, strict=True))
        owners = [draw(st.integers(0, process_count - 1)) for _ in grid(each)]
        leaves.append(dataclasses.replace(leaf, cuts=each, owners=tuple(owners)))
    letters = st.sampled_from(Encoding)
    stored = range(draw(st.integers(0, len(leaves))))
    encodings = ["".join(draw(letters) for _ in stored) for _ in range(process_count)]
    step, old = step_of(leaves, stored, encodings, draw(st.integers(0, 2**32))), before.new
    new = [array.copy() for array in old]
    for position, index in enumerate(stored):
        for box, process in zip(leaves[index].boxes, leaves[index].owners, strict=True):
            if encodings[process][position] != Encoding.SAME:
                new[index][box.slices] = step.new[index][box.slices]
    return dataclasses.replace(step, old=old, new=new)


@given(first=steps(), data=st.data())
def test_deltas_in_boxes_of_their_own_are_read_one_after_another(first, data, tmp_path_factory):
    second = data.draw(recut(first))
    third = data.draw(recut(second))
    readers = [first.write(tmp_path_factory.mktemp("step"))]
    for step in (second, third):
        directory = tmp_path_factory.mktemp("step")
        step.write(directory)
        grids = tuple(Grid(leaf.cuts, leaf.owners) for leaf in step.leaves)
        manifest = dataclasses.replace(step.manifest, grids=grids)
        entry = lineage.LineageStep(manifest, directory).behind(readers[-1]._entry)
        assert entry.leaves == tuple(step.leaves)
        readers.append(DeltaReader(entry))
    for index, leaf in enumerate(first.leaves):
        box = data.draw(boxes_in(leaf.shape))
        block = np.array(first.old[index][box.slices])
        for reader, step in zip(readers, (first, second, third), strict=True):
            reader.patch(index, box, block)
            assert block.tobytes() == step.new[index][box.slices].tobytes()


@pytest.mark.parametrize(
    "aliases",
    [((1, 1),), ((0, 1),), ((1, 7),), ((7, 0),), ((2, 0),), ((3, 0),)],
    ids=["of itself", "later", "nothing", "of nothing", "another size", "another encoding"],
)
def test_parts_that_are_called_equal_and_cannot_be_are_an_error(aliases, tmp_path):
    boxes = ((0, 4, 8),), (0, 0)
    leaves = [leaf_of(*boxes), leaf_of(((0, 3),), (0,)), leaf_of(((0, 4),), (0,))]
    step = step_of(leaves, [0, 1, 2], ["rrp"])
    step.write(tmp_path)
    (pack,) = step.manifest.packs
    with pytest.raises(IntegrityError, match="tells of parts that cannot be so"):
        step.reader(tmp_path, packs=(dataclasses.replace(pack, aliases=aliases),))
    with pytest.raises(IntegrityError, match="expected packs of"):  # one that could be, and is not
        step.reader(tmp_path, packs=(dataclasses.replace(pack, aliases=((1, 0),)),))


def keeps_zeros(encoding):
    zeros = np.zeros(8, np.float32)
    return not np.concatenate(support.encoded(encoding, zeros, zeros)).any()


@pytest.mark.parametrize("encoding", [*filter(keeps_zeros, ROW_BY_ROW)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_rows_of_zeros_or_that_did_not_change_take_no_room(encoding, dtype, tmp_path):
    leaf = leaf_of(((0, 512, 1024), (0, 1024)), (0, 0), dtype)
    step = step_of([leaf], [0], [str(encoding)])
    step.new[0][...] = step.old[0] if ENCODINGS[encoding].needs_old else 0
    step.new[0][100:103, 7:] = any_bits(np.random.default_rng(1), (3, 1017), dtype)
    reader = step.write(tmp_path)
    (pack,) = step.manifest.packs
    raw, compressed = (each.size for each in support.encoded(encoding, step.new[0], step.old[0]))
    assert (pack.raw_bytes, pack.compressed_bytes) == (raw, compressed)
    assert (bool(pack.raw_zeros), bool(pack.compressed_zeros)) == (raw > 0, compressed > 0)
    stored = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert stored < 20 * 3 * 1024 * leaf.itemsize_bytes / 4 + 4096
    for box in [Box((90, 5), (110, 1000)), Box((600, 0), (601, 1)), Box((500, 3), (530, 9))]:
        block = step.old[0][box.slices].copy()
        reader.patch(0, box, block)
        assert block.tobytes() == step.new[0][box.slices].tobytes()


@chunks_of(256, is_compressed=False)  # a row each, to be found among the stored bytes
@pytest.mark.parametrize("encoding", ROW_BY_ROW)
def test_only_the_rows_that_are_needed_are_read_and_their_damage_names_the_leaf(encoding, tmp_path):
    leaf = leaf_of(((0, 4, 8), (0, 256)), (0, 0), "uint8")
    step = step_of([leaf], [0], [str(encoding)], is_near=False)
    step.write(tmp_path)
    row = Box((5, 0), (6, 256))
    new, old = (each[0][row.slices] for each in (step.new, step.old))
    damage(tmp_path, max(support.encoded(encoding, new, old), key=len))

    reader = step.reader(tmp_path)
    for box in [Box((0, 0), (5, 256)), Box((6, 1), (8, 3)), Box((2, 9), (5, 10))]:
        block = step.old[0][box.slices].copy()
        reader.patch(0, box, block)
        assert block.tobytes() == step.new[0][box.slices].tobytes()
    for box in [row, Box((5, 3), (6, 4)), Box.full((8, 256))]:
        with pytest.raises(IntegrityError, match=r"params/kernel.*Restore another step"):
            reader.patch(0, box, step.old[0][box.slices].copy())


def test_a_code_is_decoded_once_and_other_bytes_are_an_error(tmp_path, monkeypatch):
    leaf = leaf_of(((0, 64), (0, 8)), (0,), "bfloat16")
    step = step_of([leaf], [0], ["c"])
    reader = step.write(tmp_path / "0")
    decode, sizes = codes.decode, []

    def counted(stream, block):
        sizes.append(block.size)
        decode(stream, block)

    boxes = [Box((start, 0), (start + 8, 8)) for start in range(0, 64, 8)]
    with monkeypatch.context() as patch:
        patch.setattr(codes, "decode", counted)
        found = reader.read([(0, box) for box in boxes])
    assert sizes == [512]
    for box, block in zip(boxes, found, strict=True):
        assert block.tobytes() == step.new[0][box.slices].tobytes()
    other = Code(np.full(5, 9, np.uint8), np.zeros(0, np.uint8))
    monkeypatch.setattr(codes, "encode", lambda block: other)
    reader = step.write(tmp_path / "1")
    message = r"expected a code of params/kernel.*unknown kind 9.*Restore another step"
    for read in (lambda: reader.read([(0, boxes[0])]), reader.check):
        with pytest.raises(IntegrityError, match=message):
            read()


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
    for path in (*support.pack_files(tmp_path, process), support.pack_index(tmp_path, process)):
        path.unlink()
    reader = simple.reader(tmp_path)
    own = Box((2 * process, 0), (2 * process + 2, 6))
    other = Box((2 - 2 * process, 0), (4 - 2 * process, 6))
    block = simple.old[0][other.slices].copy()
    reader.patch(0, other, block)
    assert block.tobytes() == simple.new[0][other.slices].tobytes()
    with pytest.raises(FormatError, match="found none"):
        reader.patch(0, own, simple.old[0][own.slices].copy())


def test_packs_other_than_planned_are_an_error(simple, tmp_path):
    first, second = packs = simple.manifest.packs
    wrong = [
        {"packs": (*packs[:n], dataclasses.replace(packs[n], **{field: size}), *packs[n + 1 :])}
        for n, field in itertools.product((0, 1), ("raw_bytes", "compressed_bytes"))
        for size in (getattr(packs[n], field) - 1, getattr(packs[n], field) + 1)
    ]
    wrong += [
        {"packs": (dataclasses.replace(first, encodings=each), second)}
        for each in ("rr", "xx", "x=", "=r", "==")
    ]
    for changes in wrong:
        with pytest.raises(IntegrityError, match="expected packs of"):
            simple.reader(tmp_path, **changes)
    for changes in ({"packs": packs[:1]}, {"packs": (*packs, second)}):
        with pytest.raises(IntegrityError, match="expected packs of 2 processes, as the step"):
            simple.reader(tmp_path, **changes)
    with pytest.raises(IntegrityError, match="packs of 2 leaves, found leaves up to 2"):
        simple.reader(tmp_path, stored=(0, 2))


@pytest.mark.parametrize("letter", "xp")
def test_what_is_not_stored_and_not_declared_is_not_taken_for_zeros(letter, tmp_path):
    leaf = leaf_of(((0, 6), (0, 1 << 17)), (0,), "uint8")
    step = step_of([leaf], [0], [letter])
    step.new[0][...] = step.old[0] if letter == "x" else 0
    step.new[0][0, 0] ^= 1
    step.write(tmp_path)
    (pack,) = step.manifest.packs
    assert pack.compressed_zeros == ((1, 12),)
    block = step.old[0].copy()
    step.reader(tmp_path).patch(0, Box.full(leaf.shape), block)
    assert (block == step.new[0]).all()
    for zeros in ((), ((1, 11),), ((2, 12),), ((1, 13),)):
        packs = (dataclasses.replace(pack, compressed_zeros=zeros),)
        with pytest.raises(FormatError, match=r"estore another"):
            step.reader(tmp_path, packs=packs).patch(0, Box.full(leaf.shape), step.old[0].copy())
