import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format import manifest_json
from adacheck_jax.format.manifest import (
    CHECKS,
    BaseManifest,
    Caution,
    Delta,
    DeltaManifest,
    Encoding,
    Grid,
    Leaf,
    Link,
    Pack,
    Replaced,
    Update,
)
from adacheck_jax.store.steps import manifest_file
from tests.strategies import cuts, shape_of

natural = st.integers(0, 2**40)
digest = st.binary(min_size=32, max_size=32).map(bytes.hex)
fingerprint = st.integers(0, 2**64 - 1)
naturals = st.lists(natural, max_size=4).map(tuple)
ascending = naturals.map(lambda numbers: tuple(sorted(set(numbers))))
texts = st.dictionaries(st.text(), st.text(), max_size=3)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def leaves(draw, path):
    grid = draw(cuts())
    count = math.prod(max(1, len(points) - 1) for points in grid)
    dtype = draw(st.sampled_from(sorted(manifests.ITEMSIZES_BYTES)))
    may_be_key = dtype == "uint32" and grid
    return Leaf(
        path=path,
        shape=shape_of(grid),
        dtype=dtype,
        itemsize_bytes=manifests.ITEMSIZES_BYTES[dtype],
        key_type=draw(st.sampled_from([None, "key<fry>"])) if may_be_key else None,
        cuts=grid,
        owners=tuple(draw(st.lists(natural, min_size=count, max_size=count))),
    )


@st.composite
def updates(draw, leaf_count):
    order = draw(st.permutations(range(leaf_count)))
    a, b, c, d = sorted(draw(st.integers(1, leaf_count)) for _ in range(4))
    computed = st.lists(st.sampled_from(order[1:b]), unique=True) if b > 1 else st.just([])
    return Update(
        params=tuple(order[1:a]),
        inner=tuple(order[a:b]),
        record=tuple(order[b:c]),
        extra=tuple(order[c:d]),
        counts=(order[0],),
        parts=((a - 1, b - a, c - b, d - c),),
        reducing=tuple(draw(computed)),
        passed=tuple(draw(computed)),
        placement=draw(st.text(max_size=8)),
        problem=draw(st.text()),
        programs=draw(st.dictionaries(st.sampled_from(["cpu", "cuda", "tpu"]), digest)),
        jax_version=draw(st.text()),
        pinned=draw(st.booleans()),
    )


def cautions(leaf_count):
    some = st.sets(st.integers(0, leaf_count - 1)) if leaf_count else st.just(set())
    return st.builds(Caution, reason=st.text(), distrusted=some.map(lambda own: tuple(sorted(own))))


@st.composite
def stale(draw, leaf_count, step, stored=()):
    """Ephemeral leaves, with the steps of their bits."""
    left = sorted(set(range(leaf_count)) - set(stored))
    some = draw(st.sets(st.sampled_from(left))) if left and step else ()
    return tuple((i, draw(st.integers(0, step - 1))) for i in sorted(some))


replaced = st.builds(
    Replaced, checksum=digest, depth=natural, files=st.lists(st.text(), max_size=3).map(tuple)
)


@st.composite
def bases(draw):
    paths = draw(st.lists(st.text(), max_size=6, unique=True))
    specs = tuple(draw(leaves(path)) for path in paths)
    some = st.integers(0, len(specs) - 1)
    none = st.just(())
    step = draw(natural)
    return BaseManifest(
        step=step,
        counts=draw(naturals),
        leaves=specs,
        fingerprints=tuple(draw(fingerprint) for _ in specs),
        update=draw(st.none() | updates(len(specs))) if specs else None,
        reason=draw(st.text()),
        aliases=draw(st.lists(st.tuples(some, some)).map(tuple) if specs else none),
        kept=draw(st.lists(st.tuples(some, natural)).map(tuple) if specs else none),
        process_count=1 + max((p for spec in specs for p in spec.owners), default=0),
        versions=draw(texts),
        environment=draw(texts),
        caution=draw(cautions(len(specs))),
        replaces=draw(st.none() | replaced),
        stale=draw(stale(len(specs), step)),
    )


@st.composite
def aliases(draw):
    """Pairs of extents, ascending, each of an earlier one that is no alias itself."""
    numbers = sorted(draw(st.sets(natural, max_size=6)))
    own, found = numbers[:1], []
    for number in numbers[1:]:
        if draw(st.booleans()):
            found.append((number, draw(st.sampled_from(own))))
        else:
            own.append(number)
    return tuple(found)


def packs(stored_count):
    letters = st.sampled_from(sorted(Encoding))
    bounds = st.lists(natural, max_size=6, unique=True).map(sorted)
    ranges = bounds.map(lambda ends: tuple(zip(ends[::2], ends[1::2], strict=False)))
    return st.builds(
        Pack,
        encodings=st.lists(letters, min_size=stored_count, max_size=stored_count).map("".join),
        aliases=aliases(),
        raw_bytes=natural,
        compressed_bytes=natural,
        raw_zeros=ranges,
        compressed_zeros=ranges,
        coded=st.lists(st.tuples(natural, natural), max_size=3).map(tuple),
    )


@st.composite
def runs(draw):
    """Successive deltas."""
    steps = sorted(draw(st.lists(natural, min_size=1, max_size=3, unique=True)))
    pack_count, leaf_count = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    run = []
    for step in steps:
        stored, counts = draw(ascending), draw(naturals)
        updates = st.sets(st.sampled_from(range(len(counts)))) if counts else st.just(set())
        own = st.lists(packs(len(stored)), min_size=pack_count, max_size=pack_count)
        digests = st.lists(fingerprint, min_size=leaf_count, max_size=leaf_count)
        run.append(
            Delta(
                step=step,
                counts=counts,
                updates=tuple(sorted(draw(updates))),
                stored=stored,
                unreplayed=draw(ascending),
                packs=tuple(draw(own)),
                fingerprints=tuple(draw(digests)),
                checked=draw(st.sampled_from(sorted(CHECKS))),
                stale=draw(stale(leaf_count, step, stored)),
            )
        )
    return run


@st.composite
def grids(draw, process_count):
    """Boxes of a leaf, of which each process may write some."""
    spec = draw(leaves(""))
    owner = st.integers(0, process_count - 1)
    return Grid(spec.cuts, tuple(draw(owner) for _ in spec.owners))


@st.composite
def deltas(draw):
    *recorded, own = draw(runs())
    recut = draw(st.booleans()) and own.packs
    return DeltaManifest(
        step=own.step,
        counts=own.counts,
        updates=own.updates,
        parent=draw(st.builds(Link, step=natural, reference=st.text(), checksum=digest)),
        depth=draw(st.integers(1 + len(recorded), 2**63 - 1)),
        stored=own.stored,
        unreplayed=own.unreplayed,
        packs=own.packs,
        fingerprints=own.fingerprints,
        checked=own.checked,
        stale=own.stale,
        recorded=tuple(recorded),
        problem=draw(st.text()),
        custom_metadata=draw(any_json),
        caution=draw(cautions(len(own.fingerprints))),
        grids=tuple(draw(grids(len(own.packs))) for _ in own.fingerprints) if recut else (),
    )


A_LEAF = Leaf("params/kernel", (4, 6), "bfloat16", 2, None, ((0, 2, 4), (0, 6)), (0, 1))
A_COUNT = Leaf("count", (), "int32", 4, None, (), (0,))
A_BASE = BaseManifest(
    step=10,
    counts=(3,),
    leaves=(A_LEAF, A_COUNT),
    fingerprints=(0x0123456789ABCDEF, 7),
    update=Update(
        (0,),
        (),
        (),
        (),
        (1,),
        ((1, 0, 0, 0),),
        (0,),
        (0,),
        "",
        "",
        {"cpu": "ab" * 32},
        "0.10.2",
        True,
    ),
    reason="first",
    aliases=((1, 0),),
    kept=((0, 5),),
    process_count=2,
    versions={"jax": "0.10.2"},
    environment={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
    caution=Caution("step 9: params/kernel", (0,)),
)
A_DELTA = DeltaManifest(
    step=11,
    counts=(4,),
    updates=(0,),
    parent=Link(10, "../../10/default", "cd" * 32),
    depth=1,
    stored=(0, 1),
    unreplayed=(0,),
    packs=(
        Pack("xr", ((1, 0), (3, 2)), 4, 24, ((2, 3),), ((0, 1), (3, 5))),
        Pack("==", (), 0, 0, (), ()),
    ),
    fingerprints=(1, 2**64 - 1),
    checked="sample",
    problem="replay was not exact",
    custom_metadata={"loss": 0.5, "note": "a"},
    caution=Caution("step 11: params/kernel", (0, 1)),
)
A_RUN = dataclasses.replace(
    A_DELTA, step=12, counts=(5,), depth=2, recorded=(A_DELTA.deltas[0],), fingerprints=(2, 3)
)
A_RECUT = dataclasses.replace(
    A_DELTA, grids=(Grid(((0, 4), (0, 2, 4, 6)), (1, 0, 1)), Grid((), (1,)))
)
A_COMPACTED = dataclasses.replace(
    A_BASE, step=12, kept=(), replaces=Replaced("ef" * 32, 2, ("_METADATA", "d/0"))
)
EXAMPLES = pytest.mark.parametrize(
    "manifest",
    [A_BASE, A_DELTA, A_RUN, A_RECUT, A_COMPACTED],
    ids=["base", "delta", "run", "recut", "compacted"],
)


def decode(data):
    return manifest_json.decode(data, where="manifest.json")


def encode(manifest):
    return manifest_json.encode(manifest)[0]


def body_of(manifest):
    body = json.loads(encode(manifest))
    del body["checksum"]
    return body


def encode_body(body):
    """A manifest file with any body and the checksum that fits it."""
    return json.dumps({**body, "checksum": manifest_json.checksum_of(body)}).encode()


@given(bases() | deltas())
def test_decode_undoes_encode(manifest):
    found = decode(encode(manifest))
    assert len(found.checksum) == 64
    assert dataclasses.replace(found, checksum="") == manifest


@EXAMPLES
def test_what_readers_would_refuse_is_not_handed_out(manifest):
    data, found = manifest_json.sealed(manifest, where="manifest.json")
    assert (data, found) == (encode(manifest), decode(data))
    wrong = [{"counts": (-1,)}, {"fingerprints": (2**64,)}, {"custom_metadata": {1, 2}}]
    wrong = [each for each in wrong if hasattr(manifest, *each)]
    for each in wrong:
        with pytest.raises(FormatError, match="found one that cannot, and wrote nothing"):
            manifest_json.sealed(dataclasses.replace(manifest, **each), where="manifest.json")


def test_a_base_that_was_saved_as_one_says_nothing_of_compaction():
    assert "replaces" not in body_of(A_BASE)
    found = decode(encode(A_BASE))
    assert (found.depth, found.saved_checksum) == (0, found.checksum)


def test_a_compacted_step_keeps_the_name_and_the_number_by_which_deltas_follow_it():
    found = decode(encode(A_COMPACTED))
    assert (found.depth, found.saved_checksum) == (2, "ef" * 32)


@pytest.mark.parametrize("metadata", [{10: "a", 9: "b"}, {"1": "a", 1: "b"}, (1, (2,)), {None: 1}])
def test_metadata_that_json_changes_can_still_be_read(metadata):
    manifest = dataclasses.replace(A_DELTA, custom_metadata=metadata)
    found = decode(encode(manifest)).custom_metadata
    assert found == json.loads(json.dumps(metadata))


@given(bases() | deltas(), st.data())
def test_a_changed_byte_is_an_error(manifest, data):
    encoded = bytearray(encode(manifest))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255).filter(lambda b: b != encoded[position]))
    try:
        found = decode(bytes(encoded))
    except (FormatError, IntegrityError):
        return
    # JSON writes some values in two ways (1e5 and 1E5); nothing was lost.
    assert dataclasses.replace(found, checksum="") == manifest


@EXAMPLES
def test_every_flipped_bit_is_an_error(manifest):
    encoded = encode(manifest)
    for position in range(len(encoded)):
        for bit in range(8):
            changed = bytearray(encoded)
            changed[position] ^= 1 << bit
            with pytest.raises((FormatError, IntegrityError)):
                decode(bytes(changed))


@EXAMPLES
def test_every_truncation_is_an_error(manifest):
    encoded = encode(manifest)
    for length in range(len(encoded)):
        with pytest.raises(FormatError, match="truncated"):
            decode(encoded[:length])


def test_a_changed_value_is_told_apart_from_another_format():
    changed = encode(A_BASE).replace(b'"step":10', b'"step":11')
    with pytest.raises(IntegrityError, match=r"manifest\.json.*checksum"):
        decode(changed)


def test_an_unknown_format_version_names_both_versions():
    body = body_of(A_BASE)
    with pytest.raises(FormatError, match="expected format version 6 to 9, found 99"):
        decode(encode_body({**body, "format": 99}))


@given(any_json)
def test_other_json_is_an_error(value):
    with pytest.raises(FormatError):
        decode(json.dumps(value).encode())


@given(st.binary())
def test_bytes_that_are_no_json_are_an_error(data):
    with pytest.raises(FormatError):
        decode(data)


def test_deeply_nested_json_is_an_error():
    with pytest.raises(FormatError):
        decode(b"[" * 100_000)


@EXAMPLES
@given(data=st.data())
def test_a_field_with_another_value_is_an_error_or_a_manifest(manifest, data):
    body = body_of(manifest)
    target = body
    while True:  # any field at any depth
        keys = range(len(target)) if isinstance(target, list) else sorted(target)
        key = data.draw(st.sampled_from(keys))
        child = target[key]
        if not isinstance(child, dict | list) or not child or data.draw(st.booleans()):
            break
        target = child
    target[key] = data.draw(any_json)
    try:
        found = decode(encode_body(body))
    except FormatError:
        return
    assert isinstance(found, BaseManifest | DeltaManifest)


@pytest.mark.parametrize(
    "changes",
    [
        {"cuts": [[0, 2, 4], []]},
        {"cuts": [[0, 2, 4]]},
        {"cuts": [[2, 3, 4], [0, 6]]},
        {"cuts": [[0, 4, 2], [0, 6]]},
        {"cuts": [[4], [0, 6]], "owners": [0]},
        {"owners": [0]},
        {"owners": [0, -1]},
        {"owners": [0, 2]},
        {"shape": [4, 7]},
        {"shape": [4.0, 6]},
    ],
    ids=str,
)
def test_a_leaf_whose_boxes_do_not_fit_it_is_an_error(changes):
    body = body_of(A_BASE)
    body["leaves"][0].update(changes)
    with pytest.raises(FormatError):
        decode(encode_body(body))


@pytest.mark.parametrize(
    "grids",
    [
        [{"cuts": [[0, 4], [0, 6]], "owners": [0]}],
        [{"cuts": [[0, 4], [0, 6]], "owners": [2]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[0, 4], [0, 6]], "owners": [0, 0]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[0, 6, 4], [0, 6]], "owners": [0, 0]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[], [0, 6]], "owners": [0]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[0, 4], [0, 6]], "owners": [-1]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[0, 1]] * 40, "owners": [0]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[*range(5000)], [*range(5000)]], "owners": [0]}, {"cuts": [], "owners": [0]}],
        [{"cuts": [[0, 4], [0, 6]]}, {"cuts": [], "owners": [0]}],
        {},
        None,
    ],
    ids=lambda value: str(value)[:60],
)
def test_boxes_of_a_delta_that_are_none_are_an_error(grids):
    with pytest.raises(FormatError):
        decode(encode_body({**body_of(A_DELTA), "grids": grids}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprints", ["1" * 16]),
        ("fingerprints", ["1" * 16, "1" * 17]),
        ("fingerprints", ["1" * 16, "-1"]),
        ("fingerprints", "12"),
        ("step", True),
        ("step", 1.0),
        ("counts", -1),
        ("counts", [-1]),
        ("counts", None),
        ("environment", {"XLA_FLAGS": 1}),
        ("caution", None),
        ("caution", {"reason": "", "distrusted": [2]}),
        ("caution", {"reason": "", "distrusted": [1, 0]}),
        ("caution", {"reason": None, "distrusted": []}),
        ("kind", "other"),
    ],
)
def test_a_field_that_cannot_be_is_an_error(field, value):
    body = body_of(A_BASE)
    with pytest.raises(FormatError):
        decode(encode_body({**body, field: value}))


@pytest.mark.parametrize(
    "update", [{"params": [1]}, {"params": [2]}, {"counts": None}, {"counts": [0]}, {"pinned": 1}]
)
def test_an_update_over_leaves_that_are_not_there_or_taken_twice_is_an_error(update):
    body = body_of(A_BASE)
    body["update"].update(update)
    with pytest.raises(FormatError):
        decode(encode_body(body))


def test_an_update_may_consume_its_own_counter_and_no_leaf_twice():
    update = Update((0,), (), (), (1,), (1,), ((1, 0, 0, 1),), (), (), "", "", {}, "0.10.2", True)
    body = body_of(dataclasses.replace(A_BASE, update=update))
    assert decode(encode_body(body)).update == update
    for wrong in (
        {"extra": [0]},
        {"extra": [1, 1], "parts": [[1, 0, 0, 2]]},
        {"counts": [1, 1], "parts": [[1, 0, 0, 1], [0, 0, 0, 0]]},
        {"record": [1], "extra": [], "parts": [[1, 0, 1, 0]]},
    ):
        changed = {**body, "update": {**body["update"], **wrong}}
        with pytest.raises(FormatError, match="leaf indices repeat"):
            decode(encode_body(changed))


@pytest.mark.parametrize("field", ["reducing", "passed"])
@pytest.mark.parametrize("indices", [[1], [0, 1], [2], [-1], [0.0], 0, None], ids=str)
def test_what_the_update_does_with_leaves_that_it_does_not_compute_is_an_error(field, indices):
    body = body_of(A_BASE)
    body["update"][field] = indices
    with pytest.raises(FormatError):
        decode(encode_body(body))


def test_a_leaf_that_the_update_consumes_is_neither_reducing_nor_passed_through():
    update = Update((), (), (0,), (), (1,), ((0, 0, 1, 0),), (), (), "", "", {}, "0.10.2", True)
    for field in ("reducing", "passed"):
        body = body_of(dataclasses.replace(A_BASE, update=update))
        assert decode(encode_body(body)).update == update
        body["update"][field] = [0]
        with pytest.raises(FormatError, match="not computed by the update"):
            decode(encode_body(body))


@pytest.mark.parametrize("encodings", ["", "x", "xrr", "xx=="])
def test_a_pack_with_too_few_or_too_many_encodings_is_an_error(encodings):
    for process in range(2):
        body = body_of(A_DELTA)
        body["packs"][process]["encodings"] = encodings
        with pytest.raises(FormatError, match=f"{len(encodings)} encodings of 2 stored leaves"):
            decode(encode_body(body))


@pytest.mark.parametrize("encodings", ["xz", "X=", "x ", "x\x00", "rá", [1, 2], None, 2])
def test_an_unknown_encoding_is_an_error(encodings):
    body = body_of(A_DELTA)
    body["packs"][0]["encodings"] = encodings
    with pytest.raises(FormatError):
        decode(encode_body(body))


@pytest.mark.parametrize("letter", sorted(Encoding))
def test_every_encoding_has_one_letter_that_is_read_again(letter):
    assert len(letter) == 1
    body = body_of(A_DELTA)
    body["packs"][0]["encodings"] = str(letter) * 2
    assert decode(encode_body(body)).packs[0].encodings == letter * 2


NO_PAIRS = [
    [[0]],
    [[0, 1, 2]],
    [[]],
    [[-1, 2]],
    [[0, 1.0]],
    [[False, 1]],
    [["0", "1"]],
    [0, 1],
    "01",
]
ZEROS = pytest.mark.parametrize("field", ["raw_zeros", "compressed_zeros"])


def with_pack(**changes):
    body = body_of(A_DELTA)
    body["packs"][0].update(changes)
    return encode_body(body)


@pytest.mark.parametrize("field", ["aliases", "raw_zeros", "compressed_zeros"])
@pytest.mark.parametrize("pairs", NO_PAIRS, ids=str)
def test_zeros_and_aliases_that_are_no_pairs_of_numbers_are_an_error(field, pairs):
    with pytest.raises(FormatError):
        decode(with_pack(**{field: pairs}))


@ZEROS
@pytest.mark.parametrize(
    "ranges", [[[3, 1]], [[1, 1]], [[0, 2], [1, 3]], [[2, 3], [0, 1]], [[0, 1], [1, 2]]], ids=str
)
def test_zeros_that_do_not_ascend_are_an_error(field, ranges):
    with pytest.raises(FormatError, match="do not ascend"):
        decode(with_pack(**{field: ranges}))


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([[3, 2], [1, 0]], "do not ascend"),
        ([[1, 0], [1, 0]], "do not ascend"),
        ([[2, 0], [2, 1]], "do not ascend"),
        ([[1, 1]], "of later extents"),
        ([[1, 2]], "of later extents"),
        ([[1, 0], [2, 3]], "of later extents"),
        ([[1, 0], [2, 1]], "an alias of an alias"),
        ([[1, 0], [3, 2], [4, 3]], "an alias of an alias"),
    ],
    ids=str,
)
def test_aliases_that_no_writer_would_declare_are_an_error(pairs, problem):
    with pytest.raises(FormatError, match=problem):
        decode(with_pack(aliases=pairs))


@pytest.mark.parametrize("pairs", [[], [[1, 0], [2, 0]], [[2, 0], [3, 1]], [[9, 8]]], ids=str)
def test_aliases_of_earlier_extents_are_read(pairs):
    assert decode(with_pack(aliases=pairs)).packs[0].aliases == tuple(map(tuple, pairs))


@pytest.mark.parametrize("field", ["aliases", "kept"])
@pytest.mark.parametrize("pairs", [*NO_PAIRS, [[2, 0]], [[0, 0], [7, 1]]], ids=str)
def test_pairs_with_leaves_that_are_not_there_are_an_error(field, pairs):
    body = body_of(A_BASE)
    with pytest.raises(FormatError):
        decode(encode_body({**body, field: pairs}))


def test_a_leaf_that_has_the_data_of_one_that_is_not_there_is_an_error():
    body = body_of(A_BASE)
    with pytest.raises(FormatError, match="outside the state"):
        decode(encode_body({**body, "aliases": [[0, 2]]}))
    assert decode(encode_body({**body, "kept": [[0, 2]]})).kept == ((0, 2),)  # a step, no leaf


@pytest.mark.parametrize("field", ["raw_bytes", "compressed_bytes"])
@pytest.mark.parametrize("value", [-1, 1.0, True, None, "4"])
def test_a_pack_of_no_possible_size_is_an_error(field, value):
    body = body_of(A_DELTA)
    body["packs"][1][field] = value
    with pytest.raises(FormatError):
        decode(encode_body(body))


PLACES = {
    "base": (A_BASE, lambda body: body),
    "leaf": (A_BASE, lambda body: body["leaves"][0]),
    "replaced": (A_COMPACTED, lambda body: body["replaces"]),
    "update": (A_BASE, lambda body: body["update"]),
    "delta": (A_DELTA, lambda body: body),
    "parent": (A_DELTA, lambda body: body["parent"]),
    "pack": (A_DELTA, lambda body: body["packs"][1]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_field_is_an_error(place):
    manifest, within = PLACES[place]
    for field in within(body_of(manifest)):
        body = body_of(manifest)
        del within(body)[field]
        with pytest.raises(FormatError):
            decode(encode_body(body))


def test_a_state_without_recorder_has_no_count():
    base = dataclasses.replace(A_BASE, update=None, counts=())
    for manifest in (base, dataclasses.replace(A_DELTA, counts=(), updates=())):
        assert decode(encode(manifest)).counts == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("updates", [1]),
        ("updates", [0, 0]),
        ("updates", [-1]),
        ("updates", True),
        ("counts", []),
        ("unreplayed", [1, 0]),
        ("unreplayed", [-1]),
        ("checked", "prove"),
        ("checked", None),
        ("caution", {"reason": "", "distrusted": [2]}),
    ],
)
def test_a_delta_of_updates_that_cannot_be_is_an_error(field, value):
    for manifest in (A_DELTA, A_RUN):
        body = body_of(manifest)
        with pytest.raises(FormatError):
            decode(encode_body({**body, field: value}))
        if field != "caution" and body["recorded"]:
            body["recorded"][0][field] = value
            with pytest.raises(FormatError):
                decode(encode_body(body))


def as_version_7(body):
    """The body of a manifest as the release before wrote it."""

    def delta(own):
        packs = [{key: x for key, x in each.items() if key != "coded"} for each in own["packs"]]
        return {**{key: x for key, x in own.items() if key != "stale"}, "packs": packs}

    if body["kind"] == "base":
        return {key: x for key, x in {**body, "format": 7}.items() if key != "stale"}
    recorded = [delta(each) for each in body["recorded"]]
    return {**delta(body), "recorded": recorded, "format": 7}


def as_version_6(body):
    """The body of a manifest as the release before that wrote it."""
    body = as_version_7(body)

    def delta(own):
        own = {**own, "count": own["counts"][0] if own["counts"] else None}
        own["has_update"] = bool(own["updates"])
        for field in ("counts", "updates", "unreplayed", "checked"):
            del own[field]
        return own

    body = {**body, "format": 6}
    del body["caution"]
    if body["kind"] == "delta":
        return {**delta(body), "recorded": [delta(each) for each in body["recorded"]]}
    del body["environment"]
    body["count"] = next(iter(body.pop("counts")), None)
    if body["update"] is not None:
        update = {**body["update"], "count": body["update"]["counts"][0]}
        del update["counts"], update["pinned"]
        body["update"] = update
    return body


@EXAMPLES
def test_the_format_version_before_is_read(manifest):
    found = decode(encode_body(as_version_6(body_of(manifest))))
    unknown = {"caution": manifests.NO_CAUTION}
    if isinstance(manifest, BaseManifest):
        update = dataclasses.replace(manifest.update, pinned=False)
        unknown |= {"environment": {}, "update": update}
    else:

        def told(each):
            return {"checked": "" if each.has_update else "stored", "unreplayed": ()}

        unknown |= told(manifest)
        unknown["recorded"] = tuple(
            dataclasses.replace(each, **told(each)) for each in manifest.recorded
        )
    assert dataclasses.replace(found, checksum="") == dataclasses.replace(manifest, **unknown)


@EXAMPLES
def test_format_version_7_is_read(manifest):
    found = decode(encode_body(as_version_7(body_of(manifest))))
    assert dataclasses.replace(found, checksum="") == manifest


@pytest.mark.parametrize("as_before", [as_version_6, as_version_7])
@pytest.mark.parametrize("manifest", [A_BASE, A_DELTA, A_RUN], ids=["base", "delta", "run"])
def test_a_missing_field_of_the_format_version_before_is_an_error(manifest, as_before):
    whole = as_before(body_of(manifest))
    for field in whole:
        with pytest.raises(FormatError):
            decode(encode_body({key: whole[key] for key in whole if key != field}))


def test_a_missing_manifest_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(FormatError, match=r"manifest\.json.*No such file"):
        manifest_file.read(tmp_path)


@pytest.mark.parametrize("pairs", [[[0, 5]], [[9, 1]], [[1, 1], [1, 1]], [[1, 10**6]], [[1]], 3])
def test_stale_leaves_that_cannot_be_are_an_error(pairs):
    own = dataclasses.replace(A_DELTA, stored=(0,), fingerprints=(1, 2, 3))
    packs = tuple(dataclasses.replace(each, encodings="r") for each in own.packs)
    body = body_of(dataclasses.replace(own, packs=packs, stale=((1, 5), (2, 5))))
    decode(encode_body(body))
    with pytest.raises(FormatError):
        decode(encode_body({**body, "stale": pairs}))


def test_a_file_too_large_for_a_manifest_is_not_read(tmp_path):
    path = tmp_path / manifest_file.FILE
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(manifest_json.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(FormatError, match="at most"):
        manifest_file.read(tmp_path)


@EXAMPLES
def test_read_gives_what_write_wrote_and_leaves_no_other_file(manifest, tmp_path):
    manifest_file.write(tmp_path, manifest)
    assert dataclasses.replace(manifest_file.read(tmp_path), checksum="") == manifest
    assert [p.name for p in (tmp_path / manifest_file.DIRECTORY).iterdir()] == ["manifest.json"]


def test_the_bytes_of_a_manifest_do_not_depend_on_the_order_of_a_mapping():
    one = dataclasses.replace(A_BASE, versions={"a": "1", "b": "2"})
    two = dataclasses.replace(A_BASE, versions={"b": "2", "a": "1"})
    assert encode(one) == encode(two)
