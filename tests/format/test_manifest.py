"""Manifests are read as they were written, by every version, and no other bytes are taken."""

import dataclasses
import functools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format import manifest_json, manifest_records
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.manifest import (
    NO_CAUTION,
    BaseManifest,
    Caution,
    DeltaManifest,
    Grid,
    Leaf,
    Link,
    Pack,
    Replaced,
    Update,
)
from adacheck_jax.store.steps import manifest_file

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
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

encode = manifest_json.encode


def decode(data):
    return manifest_json.decode(data, where="manifest.json")


def body_of(manifest):
    body = json.loads(encode(manifest))
    del body["checksum"]
    return body


def encode_body(body):
    """A manifest file with any body and the checksum that fits it."""
    return json.dumps({**body, "checksum": manifest_json.checksum_of(body)}).encode()


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


@EXAMPLES
@given(data=st.data())
def test_a_changed_byte_and_a_truncation_are_errors(manifest, data):
    encoded = bytearray(encode(manifest))
    position = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(FormatError, match="truncated"):
        decode(bytes(encoded[:position]))
    encoded[position] = data.draw(st.integers(0, 255).filter(lambda b: b != encoded[position]))
    with pytest.raises((FormatError, IntegrityError)):
        decode(bytes(encoded))


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
def test_a_field_with_another_value_is_an_error_or_is_read_and_written_as_it_is(manifest, data):
    body = target = body_of(manifest)
    while True:  # any field at any depth
        keys = target.keys() - {"format"} if isinstance(target, dict) else range(len(target))
        key = data.draw(st.sampled_from(sorted(keys)))
        child = target[key]
        if not isinstance(child, dict | list) or not child or data.draw(st.booleans()):
            break
        target = child
    alike = {int: st.integers(0, 2**63), str: st.text()}.get(type(child), any_json)
    target[key] = data.draw(alike | any_json)
    try:
        found = decode(encode_body(body))
    except FormatError:
        return
    left_out = {key for key in manifest_records.LEFT_OUT if not body.get(key, True)}
    assert body_of(found) == {key: body[key] for key in body.keys() - left_out}


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
NO_RANGES = [[[0, 2], [1, 3]], [[2, 3], [0, 1]], [[0, 1], [1, 2]]]
REFUSED = [
    # Place of a field, a manifest, values that the field cannot have, and the message.
    ("leaves/0/cuts", A_BASE, OTHER_CUTS),
    ("leaves/0", A_BASE, [{"cuts": [[4], [0, 6]], "owners": [0]}]),
    ("leaves/0/owners", A_BASE, [[0], [0, -1], [0, 2]]),
    ("leaves/0/shape", A_BASE, [[4, 7], [4.0, 6]]),
    ("leaves/0", A_BASE, [{"shape": [2**60], "cuts": [[0, 2**60]], "owners": [0]}], "an array of"),
    ("leaves/0", A_BASE, [{"shape": [2**59], "cuts": [[0, 2**59]], "owners": [0]}], "bytes of le"),
    ("described", A_BASE, [{"../x": "ab"}], "array_metadatas/process_0"),
    ("grids", A_DELTA, [[{"cuts": WHOLE, "owners": [0]}], {}, None, [{"cuts": WHOLE}, SCALAR]]),
    ("grids", A_DELTA, [[{"cuts": cuts, "owners": own}, SCALAR] for cuts, own in NO_GRIDS]),
    ("fingerprints", A_BASE, [["1" * 16], ["1" * 16, "1" * 17], ["1" * 16, "-1"], "12"]),
    ("step", A_BASE, [True, 1.0]),
    ("counts", A_BASE, [-1, [-1], None]),
    ("environment", A_BASE, [{"XLA_FLAGS": 1}]),
    ("kind", A_BASE, ["other"]),
    *(("caution", each, [None]) for each in (A_BASE, A_DELTA)),
    ("caution/reason", A_BASE, [None]),
    ("caution/distrusted", A_BASE, [[2], [1, 0]]),
    *(("caution/distrusted", each, [[2]]) for each in (A_DELTA, A_RUN)),
    ("update", A_BASE, [{"params": [1]}, {"params": [2]}, {"counts": None}, {"counts": [0]}]),
    ("update/pinned", A_BASE, [1]),
    ("update/programs", A_BASE, [{"../cpu": "ab" * 32}], "the name of a platform"),
    ("update/parts", A_BASE, [[[0, 1, 0, 0]], []], "do not make up the update's leaves"),
    ("depth", A_RUN, [1], "delta number 1 of its lineage with 1 before it"),
    ("recorded/0/packs", A_RUN, [[]], "different numbers of packs"),
    ("update", A_CONSUMING, CONSUMED_TWICE, "leaf indices repeat"),
    *(
        row
        for field in ("update/reducing", "update/passed")
        for row in (
            (field, A_BASE, [[1], [0, 1], [2], [-1], [0.0], 0, None]),
            (field, A_RECORDING, [[0]], "not computed by the update"),
        )
    ),
    *(
        (f"packs/{n}/encodings", A_DELTA, [each], f"{len(each)} encodings of 2 stored leaves")
        for n in (0, 1)
        for each in ("", "x", "xrr", "xx==")
    ),
    (
        "recorded/0/packs/0/encodings",
        A_RUN,
        ["xz", "X=", "x ", "x\x00", "rá", [1, 2], None, 2],
    ),
    ("packs/0/aliases", A_DELTA, [*NO_PAIRS, "01"]),
    ("packs/0/aliases", A_DELTA, [[[3, 2], [1, 0]], [[1, 0], [1, 0]]], "do not ascend"),
    ("packs/0/aliases", A_DELTA, [[[1, 1]], [[1, 2]], [[1, 0], [2, 3]]], "of later extents"),
    ("packs/0/aliases", A_DELTA, [[[2, 0], [2, 1]]], "do not ascend"),
    ("packs/0/aliases", A_DELTA, [[[1, 0], [2, 1]], [[1, 0], [3, 2], [4, 3]]], "alias of an alias"),
    *(
        row
        for field in ("packs/0/raw_zeros", "packs/0/compressed_zeros")
        for row in (
            (field, A_DELTA, [*NO_PAIRS, "01"]),
            (field, A_DELTA, [[[3, 1]], [[1, 1]], *NO_RANGES], "do not ascend"),
        )
    ),
    *(
        (f"packs/1/{field}", A_DELTA, [-1, 1.0, True, None, "4"])
        for field in ("raw_bytes", "compressed_bytes")
    ),
    *(
        (field, A_BASE, [*NO_PAIRS, "01", [[2, 0]], [[0, 0], [7, 1]]])
        for field in ("aliases", "kept")
    ),
    ("aliases", A_BASE, [[[0, 2]]], "outside the state"),
    ("stale", A_STALE, [[[0, 5]], [[9, 1]], [[1, 1], [1, 1]], [[1, 10**6]], [[1]], 3]),
    *(
        (f"{place}{field}", manifest, values)
        for place, manifest in (("", A_DELTA), ("", A_RUN), ("recorded/0/", A_RUN))
        for field, values in NO_UPDATES.items()
    ),
]


def with_field(manifest, place, value):
    """The body of a manifest with another value; fields of a dictionary that has them."""
    body = body_of(manifest)
    *way, key = (int(each) if each.isdecimal() else each for each in place.split("/"))
    holder = functools.reduce(lambda found, each: found[each], way, body)
    old = holder.get(key) if isinstance(holder, dict) else holder[key]
    holder[key] = old | value if isinstance(old, dict) and value else value
    return body


@pytest.mark.parametrize("case", REFUSED, ids=[row[0] for row in REFUSED])
def test_a_field_that_cannot_be_is_an_error(case):
    place, manifest, values, *message = case
    decode(encode(manifest))
    for value in values:
        with pytest.raises(FormatError, match=message[0] if message else None):
            decode(encode_body(with_field(manifest, place, value)))


@pytest.mark.parametrize(
    ("manifest", "place", "value"),
    [
        (A_BASE, "kept", [[0, 2]]),  # a step, no leaf
        (A_BASE, "replica", "gpu:3"),
        (A_DELTA, "packs/0/coded", [[5, 6]]),
        (A_STALE, "stale", [[1, 5], [2, 10]]),
        *((A_DELTA, "packs/0/encodings", str(letter) * 2) for letter in Encoding),
        *(
            (A_DELTA, "packs/0/aliases", each)
            for each in ([], [[1, 0], [2, 0]], [[2, 0], [3, 1]], [[9, 8]])
        ),
        (dataclasses.replace(A_BASE, update=None), "counts", []),
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


def without(value, names):
    """A JSON value without fields of these names, at any depth."""
    if isinstance(value, dict):
        return {key: without(each, names) for key, each in value.items() if key not in names}
    return [without(each, names) for each in value] if isinstance(value, list) else value


def as_version_7(body):
    """The body of a manifest as the release before the last one wrote it."""
    return {**without(body, {"coded", "stale"}), "format": 7}


def as_version_6(body):
    """The body of a manifest as the release before that wrote it."""
    body = as_version_7(body)
    for own in (body, *body.get("recorded", ()), body.get("update", {})):
        if own:
            own["count"] = next(iter(own["counts"]), None)
        if "updates" in own:
            own["has_update"] = bool(own["updates"])
    later = {"counts", "updates", "unreplayed", "checked", "caution", "environment", "pinned"}
    return {**without(body, later), "format": 6}


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
