"""Lineages of which a step has become a base since it was saved."""

import dataclasses

import pytest

from adacheck_jax.errors import FormatError, IntegrityError, LineageError
from adacheck_jax.format.manifest import NO_CAUTION, Link, Replaced
from adacheck_jax.store import links
from adacheck_jax.store.steps import folders, lookup, manifest_file, marks, roots
from adacheck_jax.store.storage.location import at
from tests.format.test_manifest import A_BASE, A_DELTA

UPDATE = manifest_file.update_file("cpu")


@pytest.fixture
def root(tmp_path):
    return at(tmp_path)


def made(root, step):
    """A step directory as Orbax commits it."""
    (root / str(step) / marks.STEP_METADATA).write(b"")
    return root / str(step)


def save_base(root, step=10):
    item = made(root, step)
    (item / UPDATE).write(b"program")
    manifest_file.write(item, dataclasses.replace(A_BASE, step=step))
    return item


def save_delta(root, step, known, *, linked=True):
    """A delta that follows a lineage, linked as a save links it."""
    item, parent = made(root, step), known.entries[-1]
    if linked:
        links.link_ancestors(known, item)
    (item / f"adacheck/{folders.DELTA}.0.x").write(b"pack")
    reference = lookup.reference(item, parent.holder)
    delta = dataclasses.replace(
        A_DELTA,
        step=step,
        parent=Link(parent.manifest.step, reference, parent.manifest.saved_checksum),
        depth=parent.manifest.depth + 1,
        caution=NO_CAUTION,
        problem="",
    )
    manifest_file.write(item, delta)
    return item


def save_steps(root, last=13, *, linked=True):
    item = save_base(root)
    for step in range(11, last + 1):
        item = save_delta(root, step, lookup.resolve(item), linked=linked)
    return item


def compact(root, step, *, files=(manifest_file.FILE, UPDATE), **changes):
    """Puts a base into the place of a delta, as far as manifests tell."""
    item = root / str(step)
    old = manifest_file.read(item)
    (item / UPDATE).write(b"program")
    base = dataclasses.replace(
        A_BASE, step=step, kept=(), replaces=Replaced(old.checksum, old.depth, files)
    )
    (item / folders.LINEAGE).delete()
    (item / f"adacheck/{folders.DELTA}.0.x").delete()
    return manifest_file.write(item, dataclasses.replace(base, **changes))[0]


def steps_of(known):
    return [(each.manifest.step, each.is_link) for each in known.entries]


def test_steps_before_and_after_are_as_they_were(root):
    save_steps(root)
    before = {step: steps_of(lookup.resolve(root / f"{step}")) for step in (10, 11, 13)}
    compact(root, 12)
    assert {step: steps_of(lookup.resolve(root / f"{step}")) for step in before} == before
    assert [len(each.lineage.deltas) for each in roots.steps_of(root)] == [0, 1, 0, 3]


@pytest.mark.parametrize("step", [11, 12, 13])
def test_a_lineage_is_linked_from_its_newest_base_on(root, step):
    save_steps(root)
    known = lookup.resolve(root / "13")
    compact(root, 11)
    compact(root, step) if step > 11 else None
    found = lookup.resolve(save_delta(root, 14, known))
    assert steps_of(found) == [*((n, True) for n in range(step, 14)), (14, False)]
    assert found.manifest.depth == 4, "counted on in the line"
    assert (root / "14/adacheck/lineage").folders() == [f"{step}"]
    names = {each.name for each in (root / "14/adacheck/lineage").list(deep=False)}
    later = range(step + 1, 14)
    assert names == {f"{n}.{end}" for n in later for end in ("manifest.json", "delta.0.x")}
    for each in range(10, 14):
        (root / f"{each}").delete()
    assert lookup.resolve(root / "14").delta_count == 14 - step


def test_a_parent_known_from_before_is_followed_in_its_new_form(root):
    save_steps(root, 12)
    known = lookup.resolve(root / "12")
    stamp = at(root / "12" / manifest_file.FILE).stamp
    names = links.files_of(known.entries[-1])
    compact(root, 12)
    links.link_ancestors(known, root / "13", names, stamp)
    assert (root / "13/adacheck/lineage").folders() == ["12"]
    assert not [*(root / "13/adacheck/lineage").list(deep=False)]


def test_a_base_that_is_being_deleted_is_not_linked(root):
    save_steps(root)
    known = lookup.resolve(root / "13")
    compact(root, 12)
    (root / "12" / UPDATE).delete()
    found = lookup.resolve(save_delta(root, 14, known))
    assert steps_of(found)[0] == (10, True), "its links hold the old lineage"
    (root / "13/adacheck/lineage").delete()
    with pytest.raises(LineageError, match="was deleted while this one was saved"):
        save_delta(root, 15, lookup.resolve(root / "14").to(13))


def test_what_an_interrupted_compaction_left_is_not_linked(root):
    save_steps(root)
    for name in (UPDATE, "adacheck/base/0/d", "_METADATA", "adacheck/tree_metadata"):
        (root / "13" / name).write(b"new")
    found = lookup.resolve(save_delta(root, 14, lookup.resolve(root / "13")))
    assert len(found.entries) == 5
    names = {each.name for each in (root / "14/adacheck/lineage").list(deep=False)}
    assert names >= {"13.manifest.json", "13.delta.0.x"}
    assert not [name for name in names if "update" in name or "tree" in name]
    compact(root, 14)
    for name in ("adacheck/lineage/10/x", "adacheck/delta.0.x", "adacheck/tree_metadata"):
        (root / "14" / name).write(b"old")
    save_delta(root, 15, lookup.resolve(root / "14"))
    top = root / "15/adacheck/lineage"
    found = {each.below(top / "14") for each in (top / "14").list()}
    assert found == {marks.STEP_METADATA, UPDATE, manifest_file.FILE}


def test_without_links_the_base_is_found_by_reference(root):
    save_steps(root, linked=False)
    known = {step: lookup.resolve(root / f"{step}") for step in (11, 12)}
    compact(root, 12)
    found = lookup.resolve(root / "13")
    assert [each.manifest.step for each in found.entries] == [12, 13]
    assert (found.delta_count, found.manifest.depth) == (1, 3)
    assert [lookup.resolve(root / f"{n}").checksums == x.checksums for n, x in known.items()] == [
        True,
        False,
    ]
    following = lookup.follow([lookup.resolve(root / "12")], root / "13")
    assert [each.manifest.step for each in following.entries] == [12, 13]


def test_a_base_of_another_delta_or_number_is_no_parent(root):
    item = save_steps(root, linked=False)
    checksum = manifest_file.read(item).parent.checksum
    compact(root, 12, replaces=Replaced(checksum, 7, ()))
    with pytest.raises(IntegrityError, match="expected delta number 8 of its line, found 3"):
        lookup.resolve(item)
    base = manifest_file.read(root / "12")
    manifest_file.write(root / "12", dataclasses.replace(base, replaces=Replaced("0" * 64, 2, ())))
    with pytest.raises(LineageError, match="was saved again or replaced"):
        lookup.resolve(item)


def test_a_step_that_becomes_a_base_while_it_is_looked_up_is_found(root, monkeypatch):
    save_steps(root)
    for step in (10, 11, 12):
        (root / f"{step}").delete()
    find, calls = lookup._find, []

    def compacted_meanwhile(*args):
        calls.append(args)
        if len(calls) == 1:
            compact(root, 13)
        return find(*args)

    monkeypatch.setattr(lookup, "_find", compacted_meanwhile)
    assert steps_of(lookup.resolve(root / "13")) == [(13, False)]
    (root / "13" / manifest_file.FILE).delete()
    with pytest.raises(FormatError, match="found none"):
        lookup.resolve(root / "13")
