import dataclasses
import functools
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format import manifest_json
from adacheck_jax.format.manifest import (
    CHECKS,
    NO_CAUTION,
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
def test_a_file_has_what_was_written_and_what_readers_would_refuse_is_not_written(
    manifest, tmp_path
):
    written, _ = manifest_file.write(tmp_path, manifest)
    data = (tmp_path / manifest_file.FILE).read_bytes()
    assert manifest_file.read(tmp_path) == written == decode(encode(manifest))
    assert dataclasses.replace(written, checksum="") == manifest
    assert [p.name for p in (tmp_path / manifest_file.DIRECTORY).iterdir()] == ["manifest.json"]
    wrong = [{"counts": (-1,)}, {"fingerprints": (2**64,)}, {"custom_metadata": {1, 2}}]
    for each in (each for each in wrong if hasattr(manifest, *each)):
        with pytest.raises(FormatError, match="found one that cannot, and wrote nothing"):
            manifest_file.write(tmp_path, dataclasses.replace(manifest, **each))
    assert (tmp_path / manifest_file.FILE).read_bytes() == data


def test_a_compacted_step_keeps_the_name_and_the_number_by_which_deltas_follow_it():
    found = decode(encode(A_COMPACTED))
    assert (found.depth, found.saved_checksum) == (2, "ef" * 32)
    assert "replaces" not in body_of(A_BASE)
    found = decode(encode(A_BASE))
    assert (found.depth, found.saved_checksum) == (0, found.checksum)


@pytest.mark.parametrize("metadata", [{10: "a", 9: "b"}, {"1": "a", 1: "b"}, (1, (2,)), {None: 1}])
def test_metadata_that_json_changes_can_still_be_read(metadata):
    manifest = dataclasses.replace(A_DELTA, custom_metadata=metadata)
    assert decode(encode(manifest)).custom_metadata == json.loads(json.dumps(metadata))


def test_the_bytes_of_a_manifest_do_not_depend_on_the_order_of_a_mapping():
    one, two = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert len({encode(dataclasses.replace(A_BASE, versions=each)) for each in (one, two)}) == 1


# Files that are damaged or no manifests.


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
def test_every_flipped_bit_and_every_truncation_is_an_error(manifest):
    encoded = encode(manifest)
    for position in range(len(encoded)):
        with pytest.raises(FormatError, match="truncated"):
            decode(encoded[:position])
        for bit in range(8):
            changed = bytearray(encoded)
            changed[position] ^= 1 << bit
            with pytest.raises((FormatError, IntegrityError)):
                decode(bytes(changed))


def test_changed_values_other_versions_and_lost_or_huge_files_are_told_apart(tmp_path):
    with pytest.raises(IntegrityError, match=r"manifest\.json.*checksum"):
        decode(encode(A_BASE).replace(b'"step":10', b'"step":11'))
    with pytest.raises(FormatError, match="expected format version 6 to 9, found 99"):
        decode(encode_body({**body_of(A_BASE), "format": 99}))
    with pytest.raises(FormatError, match=r"manifest\.json.*No such file"):
        manifest_file.read(tmp_path)
    (tmp_path / manifest_file.DIRECTORY).mkdir()
    with open(tmp_path / manifest_file.FILE, "wb") as file:
        file.truncate(manifest_json.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(FormatError, match="at most"):
        manifest_file.read(tmp_path)


@given(any_json.map(lambda value: json.dumps(value).encode()) | st.binary())
@example(b"[" * 100_000)
def test_other_json_and_other_bytes_are_an_error(data):
    with pytest.raises(FormatError):
        decode(data)


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


# Fields that no writer would write, with a checksum that fits.

A_CONSUMING = dataclasses.replace(  # an update may consume its own counter, and no leaf twice
    A_BASE,
    update=Update((0,), (), (), (1,), (1,), ((1, 0, 0, 1),), (), (), "", "", {}, "0.10.2", True),
)
A_RECORDING = dataclasses.replace(
    A_BASE,
    update=Update((), (), (0,), (), (1,), ((0, 0, 1, 0),), (), (), "", "", {}, "0.10.2", True),
)
A_STALE = dataclasses.replace(
    A_DELTA,
    stored=(0,),
    fingerprints=(1, 2, 3),
    packs=tuple(dataclasses.replace(each, encodings="r") for each in A_DELTA.packs),
    stale=((1, 5), (2, 5)),
)
NO_PAIRS = [[[0]], [[0, 1, 2]], [[]], [[-1, 2]], [[0, 1.0]], [[False, 1]], [["0", "1"]], [0, 1]]
OTHER_CUTS = [[[0, 2, 4], []], [[0, 2, 4]], [[2, 3, 4], [0, 6]], [[0, 4, 2], [0, 6]]]
SCALAR = {"cuts": [], "owners": [0]}
WHOLE = [[0, 4], [0, 6]]
NO_GRIDS = [
    (WHOLE, [2]),
    (WHOLE, [0, 0]),
    ([[0, 6, 4], [0, 6]], [0, 0]),
    ([[], [0, 6]], [0]),
    (WHOLE, [-1]),
    ([[0, 1]] * 40, [0]),
    ([[*range(5000)]] * 2, [0]),
]
NO_UPDATES = {
    "updates": [[1], [0, 0], [-1], True],
    "counts": [[]],
    "unreplayed": [[1, 0], [-1]],
    "checked": ["prove", None],
}
CONSUMED_TWICE = [
    {"extra": [0]},
    {"extra": [1, 1], "parts": [[1, 0, 0, 2]]},
    {"counts": [1, 1], "parts": [[1, 0, 0, 1], [0, 0, 0, 0]]},
    {"record": [1], "extra": [], "parts": [[1, 0, 1, 0]]},
]
REFUSED = [
    ("leaves/0/cuts", [(A_BASE, each) for each in OTHER_CUTS]),
    ("leaves/0", [(A_BASE, {"cuts": [[4], [0, 6]], "owners": [0]})]),
    ("leaves/0/owners", [(A_BASE, each) for each in ([0], [0, -1], [0, 2])]),
    ("leaves/0/shape", [(A_BASE, each) for each in ([4, 7], [4.0, 6])]),
    (
        "grids",
        [
            *((A_DELTA, each) for each in ([{"cuts": WHOLE, "owners": [0]}], {}, None)),
            (A_DELTA, [{"cuts": WHOLE}, SCALAR]),
            *((A_DELTA, [{"cuts": cuts, "owners": own}, SCALAR]) for cuts, own in NO_GRIDS),
        ],
    ),
    (
        "fingerprints",
        [(A_BASE, each) for each in (["1" * 16], ["1" * 16, "1" * 17], ["1" * 16, "-1"], "12")],
    ),
    ("step", [(A_BASE, True), (A_BASE, 1.0)]),
    ("counts", [(A_BASE, each) for each in (-1, [-1], None)]),
    ("environment", [(A_BASE, {"XLA_FLAGS": 1})]),
    ("kind", [(A_BASE, "other")]),
    ("caution", [(each, None) for each in (A_BASE, A_DELTA)]),
    ("caution/reason", [(A_BASE, None)]),
    ("caution/distrusted", [(A_BASE, [2]), (A_BASE, [1, 0]), (A_DELTA, [2]), (A_RUN, [2])]),
    (
        "update",
        [
            *((A_BASE, each) for each in ({"params": [1]}, {"params": [2]}, {"counts": None})),
            *((A_BASE, each) for each in ({"counts": [0]}, {"pinned": 1})),
            *((A_CONSUMING, each, "leaf indices repeat") for each in CONSUMED_TWICE),
        ],
    ),
    *(
        (
            f"update/{field}",
            [
                *((A_BASE, each) for each in ([1], [0, 1], [2], [-1], [0.0], 0, None)),
                (A_RECORDING, [0], "not computed by the update"),
            ],
        )
        for field in ("reducing", "passed")
    ),
    *(
        (
            f"packs/{n}/encodings",
            [
                (A_DELTA, each, f"{len(each)} encodings of 2 stored leaves")
                for each in ("", "x", "xrr", "xx==")
            ],
        )
        for n in (0, 1)
    ),
    (
        "recorded/0/packs/0/encodings",
        [(A_RUN, each) for each in ("xz", "X=", "x ", "x\x00", "rá", [1, 2], None, 2)],
    ),
    (
        "packs/0/aliases",
        [
            *((A_DELTA, each) for each in (*NO_PAIRS, "01")),
            *((A_DELTA, each, "do not ascend") for each in ([[3, 2], [1, 0]], [[1, 0], [1, 0]])),
            *(
                (A_DELTA, each, "of later extents")
                for each in ([[1, 1]], [[1, 2]], [[1, 0], [2, 3]])
            ),
            (A_DELTA, [[2, 0], [2, 1]], "do not ascend"),
            (A_DELTA, [[1, 0], [2, 1]], "an alias of an alias"),
            (A_DELTA, [[1, 0], [3, 2], [4, 3]], "an alias of an alias"),
        ],
    ),
    *(
        (
            f"packs/0/{field}",
            [
                *((A_DELTA, each) for each in (*NO_PAIRS, "01")),
                *((A_DELTA, each, "do not ascend") for each in ([[3, 1]], [[1, 1]])),
                (A_DELTA, [[0, 2], [1, 3]], "do not ascend"),
                (A_DELTA, [[2, 3], [0, 1]], "do not ascend"),
                (A_DELTA, [[0, 1], [1, 2]], "do not ascend"),
            ],
        )
        for field in ("raw_zeros", "compressed_zeros")
    ),
    *(
        (f"packs/1/{field}", [(A_DELTA, each) for each in (-1, 1.0, True, None, "4")])
        for field in ("raw_bytes", "compressed_bytes")
    ),
    *(
        (field, [(A_BASE, each) for each in (*NO_PAIRS, "01", [[2, 0]], [[0, 0], [7, 1]])])
        for field in ("aliases", "kept")
    ),
    (
        "stale",
        [
            (A_STALE, each)
            for each in ([[0, 5]], [[9, 1]], [[1, 1], [1, 1]], [[1, 10**6]], [[1]], 3)
        ],
    ),
    *(
        (f"{place}{field}", [(each, value) for each in manifests for value in values])
        for place, manifests in {"": (A_DELTA, A_RUN), "recorded/0/": (A_RUN,)}.items()
        for field, values in NO_UPDATES.items()
    ),
    ("aliases", [(A_BASE, [[0, 2]], "outside the state")]),
]


def with_field(manifest, place, value):
    """The body of a manifest with another value; fields of a dictionary that has them."""
    body = body_of(manifest)
    *way, key = (int(each) if each.isdecimal() else each for each in place.split("/"))
    holder = functools.reduce(lambda found, each: found[each], way, body)
    is_merged = isinstance(holder, dict) and isinstance(holder.get(key), dict) and value
    holder[key] = holder[key] | value if is_merged else value
    return body


@pytest.mark.parametrize(("place", "cases"), REFUSED, ids=[place for place, _ in REFUSED])
def test_a_field_that_cannot_be_is_an_error(place, cases):
    for manifest, value, *message in cases:
        decode(encode(manifest))
        with pytest.raises(FormatError, match=message[0] if message else None):
            decode(encode_body(with_field(manifest, place, value)))


@pytest.mark.parametrize(
    ("manifest", "place", "value"),
    [
        (A_BASE, "kept", [[0, 2]]),  # a step, no leaf
        *((A_DELTA, "packs/0/encodings", str(letter) * 2) for letter in Encoding),
        *(
            (A_DELTA, "packs/0/aliases", each)
            for each in ([], [[1, 0], [2, 0]], [[2, 0], [3, 1]], [[9, 8]])
        ),
        *((each, "counts", []) for each in (dataclasses.replace(A_BASE, update=None),)),
        (dataclasses.replace(A_DELTA, updates=()), "counts", []),
    ],
    ids=str,
)
def test_a_field_that_can_be_is_read(manifest, place, value):
    body = with_field(manifest, place, value)
    assert body_of(decode(encode_body(body))) == body


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


# Versions before.


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


def known_in_version_6(manifest):
    """A manifest without what version 6 did not tell."""
    if isinstance(manifest, BaseManifest):
        update = dataclasses.replace(manifest.update, pinned=False)
        return dataclasses.replace(manifest, caution=NO_CAUTION, environment={}, update=update)

    def told(each, **changes):
        checked = "" if each.has_update else "stored"
        return dataclasses.replace(each, checked=checked, unreplayed=(), **changes)

    recorded = tuple(map(told, manifest.recorded))
    return told(manifest, caution=NO_CAUTION, recorded=recorded)


@EXAMPLES
@pytest.mark.parametrize("as_before", [as_version_6, as_version_7])
def test_the_format_versions_before_are_read_and_miss_no_field(manifest, as_before):
    whole = as_before(body_of(manifest))
    found = dataclasses.replace(decode(encode_body(whole)), checksum="")
    assert found == (known_in_version_6(manifest) if as_before is as_version_6 else manifest)
    optional = {"replaces", "grids"}
    for field in whole.keys() - optional:
        with pytest.raises(FormatError):
            decode(encode_body({key: whole[key] for key in whole if key != field}))
