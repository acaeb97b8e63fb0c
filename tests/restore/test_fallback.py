"""What happens when the step that is asked for cannot be had."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, IntegrityError, MismatchError, StorageError
from adacheck_jax.restore import replay
from adacheck_jax.store.steps import folders, lookup, manifest_file
from adacheck_jax.tools import audit
from tests import support

STEPS = 6
MANIFEST = manifest_file.FILE
BAD = (FormatError, IntegrityError)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Two lineages of three steps each; and one of six, of which the last has a directory."""
    top, found = tmp_path_factory.mktemp("roots"), {}
    for name, most, kept in (("two", 2, None), ("alone", 20, 1)):
        run = support.dict_run(support.mesh_of((2, 2)))
        handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=most)
        with support.manager_of(top / name, handler, max_to_keep=kept) as manager:
            found[name] = (top / name, run, support.save_steps(manager, run, STEPS))
    return found


@pytest.fixture
def given(roots, tmp_path):
    """A copy of one of these roots to be damaged, the run, and what each step was."""

    def copied(name):
        root, run, states = roots[name]
        return support.copied(root, tmp_path / "run"), dataclasses.replace(run), states

    return copied


@pytest.fixture
def saved(given):
    return given("two")


def item(root, step):
    return root / str(step) / "default"


def flip(files, *, in_place, bits=1):
    """Changes the largest of some files: for all steps that link it, or for one."""
    path = max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)
    data = support.with_flipped_data(path.read_bytes(), bits)
    if not in_place:
        path.unlink()
    path.write_bytes(data)


def damage_base(base):
    """Changes all its arrays: of a base's record, later steps read nothing."""
    flip(base.rglob("*"), in_place=True, bits=9)


def restore(root, run, number, *, knows=True, **options):
    handler = adacheck.AdaCheckHandler(run.recorder if knows else None)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(run.state), **options)
        state = manager.restore(number, args=args)
    assert handler.restored is not None
    return state, handler.restored


@pytest.fixture
def told(caplog):
    """Messages of the library at the level of warnings."""
    caplog.set_level(logging.WARNING, logger="adacheck_jax")
    return lambda: [x.message for x in caplog.records if x.name.startswith("adacheck_jax")]


@dataclasses.dataclass(frozen=True)
class Case:
    """A damage of a root, and what is restored then.

    Attributes:
        root: name of the root.
        damage: makes it.
        found: steps that are restored instead of some, where another may be; None for an error.
        latest: the newest restorable step; None for an error.
        asked: steps that are restored if one of a directory's lineage is asked for, by its number.
        skipped: directories that are passed over, by the step.
        knows: whether the handler has a recorder, which could stand in for a lost update.
    """

    root: str
    damage: Callable[[Path], object]
    found: dict[int, int | None]
    latest: int | None
    asked: dict[int, int] = dataclasses.field(default_factory=dict)
    skipped: tuple[int, ...] = (6,)
    knows: bool = True


CASES = {
    "manifest": Case("two", lambda r: (item(r, 6) / MANIFEST).unlink(), {6: 5, 5: 5}, 5),
    "base of a lineage": Case(
        "two", lambda r: damage_base(item(r, 4) / folders.BASE), {6: 3, 2: 2}, 3, skipped=(6, 5, 4)
    ),
    "oldest base": Case("two", lambda r: damage_base(item(r, 1) / folders.BASE), {3: None}, 6),
    "link": Case(
        "two",
        lambda r: [
            (item(r, 6) / MANIFEST).unlink(),
            (item(r, 5) / folders.LINEAGE / "4" / MANIFEST).unlink(),
        ],
        {6: 5, 4: 4},  # which its directory holds too
        4,
        skipped=(6, 5),
    ),
    "all": Case(
        "two",
        lambda r: [(item(r, n) / MANIFEST).write_bytes(b"{}") for n in range(1, STEPS + 1)],
        {6: None},
        None,
    ),
    # Steps that a bad step's directory links, and that have no directories of their own.
    "own pack": Case(
        "alone",
        lambda r: flip(support.pack_files(item(r, 6)), in_place=False),
        {6: 5},
        None,
        {4: 4},
    ),
    "own index": Case("alone", lambda r: support.pack_index(item(r, 6)).unlink(), {6: 5}, None),
    "own manifest": Case("alone", lambda r: (item(r, 6) / MANIFEST).unlink(), {6: 5}, None, {4: 4}),
    "record of 4": Case(
        "alone",
        lambda r: support.other_record(lookup.resolve(item(r, 6)).to(4)),
        {6: 3},
        None,
        {5: 3, 2: 2},
    ),
    "own base": Case(
        "alone",
        lambda r: damage_base(item(r, 6) / folders.LINEAGE / "1"),
        {6: None},
        None,
    ),
    "own update": Case(
        "alone",
        lambda r: (item(r, 6) / folders.LINEAGE / "1" / manifest_file.update_file("cpu")).unlink(),
        {6: 1},
        None,
        knows=False,
    ),
}
QUICK = ("manifest", "link", "own pack")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]
)
def test_a_bad_step_is_an_error_unless_an_older_one_is_asked_for(given, told, name):
    case = CASES[name]
    root, run, states = given(case.root)
    case.damage(root)

    def assert_found(expected, number, **options):
        state, info = restore(root, run, number, knows=case.knows, **options)
        assert info.step == expected
        support.assert_same_bits(state, states[expected])

    (wanted, expected), *others = case.found.items()
    with pytest.raises(BAD, match=f"/{wanted}/"):
        restore(root, run, wanted, knows=case.knows)
    if expected is None:
        with pytest.raises(BAD, match=f"/{wanted}/"):
            restore(root, run, wanted, skip_damaged=True)
    else:
        assert_found(expected, wanted, skip_damaged=True)
        *skipped, last = told()
        skipped = [each for each in skipped if each.startswith("Skipping a step")]
        assert len(skipped) == len(case.skipped)
        for step, message in zip(case.skipped, skipped, strict=True):
            assert f"/{step}/default" in message
        assert last == f"Restored step {expected} instead of step {wanted}."
    for step, other in others:  # an older step that is whole
        assert_found(other, step, skip_damaged=True)
    for step, other in case.asked.items():
        assert_found(other, wanted, step=step, skip_damaged=other != step)
    if case.latest is None:
        with pytest.raises(BAD, match="/6/"):
            adacheck.latest_restorable(root)
    else:
        assert adacheck.latest_restorable(str(root)) == case.latest


def test_later_steps_that_are_there_are_told_where_an_older_one_is_taken(given, told):
    root, run, _ = given("two")
    (item(root, 2) / MANIFEST).unlink()
    (item(root, 6) / MANIFEST).unlink()
    assert restore(root, run, 2, skip_damaged=True)[1].step == 1
    assert told()[-1] == "Restored step 1 instead of step 2. Later ones were not tried: 3 to 5."


def test_a_good_step_is_what_is_restored(saved, told, tmp_path):
    root, run, states = saved
    state, info = restore(root, run, 6, skip_damaged=True)
    assert info.step == 6
    support.assert_same_bits(state, states[6])
    assert adacheck.latest_restorable(root) == max(states)
    other = dataclasses.replace(run, state={"other": run.state["step"]})
    with pytest.raises(MismatchError):  # of the caller: no reason to fall back
        restore(root, other, 6, skip_damaged=True)
    assert not told()
    for empty in (tmp_path / "absent", tmp_path):
        assert adacheck.latest_restorable(empty / "x") is None


@pytest.mark.slow
def test_training_goes_on_from_an_older_step(saved):
    root, run, states = saved
    damage_base(item(root, 4) / folders.BASE)
    handler = adacheck.AdaCheckHandler(run.recorder)
    target = support.abstract(run.state)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(target, skip_damaged=True)
        run.state = manager.restore(6, args=args)
        run.count = handler.restored.step
        for step in (4, 5, 6):
            manager.delete(step)
        support.save_steps(manager, run, 3)
    support.assert_steps(root, states, run.state)


@pytest.mark.slow
def test_files_that_steps_share_are_replayed_once(saved, caplog, monkeypatch):
    root, run, states = saved
    directories = [item(root, step) for step in (6, 5)]
    support.other_record(lookup.resolve(directories[0]).to(5))
    for path in support.pack_files(directories[1]) + [support.pack_index(directories[1])]:
        path.unlink()
    place = item(root, 6) / folders.LINEAGE
    for path in place.glob("5.delta.*"):
        os.link(path, directories[1] / manifest_file.DIRECTORY / path.name.removeprefix("5."))
    looks, look = [], replay.newest_exact
    counted = lambda *a, **k: looks.append(1) or look(*a, **k)  # noqa: E731
    monkeypatch.setattr(replay, "newest_exact", counted)
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6, skip_damaged=True)
    assert (info.step, len(looks)) == (4, 1)
    support.assert_same_bits(state, states[4])
    assert "/5/default: it has the files of a bad step" in caplog.text


@pytest.mark.slow
def test_a_newer_step_of_another_directory_comes_first(given):
    root, run, states = given("alone")
    shutil.copytree(root / "6", root / "5")  # no links: what is damaged in one is not in other
    own = item(root, 5)
    shutil.rmtree(own / folders.LINEAGE / "5", ignore_errors=True)
    for path in (own / manifest_file.DIRECTORY).glob("*"):
        if path.is_file():
            path.unlink()
    for path in (own / folders.LINEAGE).glob("5.*"):
        path.rename(own / manifest_file.DIRECTORY / path.name.removeprefix("5."))
    support.other_record(lookup.resolve(item(root, 6)).to(3))
    state, info = restore(root, run, 6, skip_damaged=True)
    assert info.step == 5
    support.assert_same_bits(state, states[5])


@pytest.mark.slow
def test_the_newest_restorable_step_is_found_by_reading_all_items_unless_told(saved, told):
    root, _, _ = saved
    shutil.copytree(item(root, 6), root / "6" / "other")
    (root / "6" / "other" / MANIFEST).unlink()
    assert adacheck.latest_restorable(root) == 5
    assert adacheck.latest_restorable(root, "default") == 6
    before = len(told())
    damage_base(item(root, 4) / folders.BASE)
    assert adacheck.latest_restorable(root, "default", read_data=False) == 6
    assert adacheck.latest_restorable(root, "default") == 3
    messages = told()[before:]
    assert [m.split(",")[0] for m in messages] == [f"Skipping step {n}" for n in (6, 5, 4)]
    assert all("/default" in message for message in messages)


@pytest.mark.slow
def test_a_bad_sector_is_damage_and_a_step_that_cannot_be_read_now_is_not(saved, monkeypatch):
    root, run, states = saved
    opened = os.open

    def refusing(number):
        """Lets reads of a file fail as the operating system would."""

        def refuse(path, *args, **options):
            if f"/6/default/{MANIFEST}" in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *args, **options)

        monkeypatch.setattr(os, "open", refuse)

    refusing(errno.EACCES)
    with pytest.raises(StorageError, match=r"/6/.*Permission denied.*try again"):
        restore(root, run, 6, skip_damaged=True)
    with pytest.raises(StorageError, match=r"/6/.*Permission denied"):
        adacheck.latest_restorable(root)
    refusing(errno.EIO)
    assert restore(root, run, 6, skip_damaged=True)[1].step == 5
    assert adacheck.latest_restorable(root) == 5
    monkeypatch.undo()
    support.assert_same_bits(restore(root, run, 6)[0], states[6])


def test_steps_that_were_swapped_are_told_and_a_number_of_the_callers_own_is_no_swap(
    saved, told, tmp_path
):
    root, run, states = saved
    (root / "3").rename(root / "x")
    (root / "6").rename(root / "3")
    (root / "x").rename(root / "6")
    state, info = restore(root, run, 6)
    assert info.step == 3
    support.assert_same_bits(state, states[3])
    (message,) = told()
    assert "expected what was saved as step 6, found what was saved as step 3" in message
    found = {s.step: [d.message for d in s.damage] for s in audit.verify_root(root).steps}
    assert [step for step, messages in found.items() if messages] == [3, 6]
    own = tmp_path / "own"
    with support.manager_of(own, adacheck.AdaCheckHandler(run.recorder)) as manager:
        manager.save(1, args=adacheck.SaveArgs(state, step=1000))
    assert restore(own, run, 1)[1].step == 1000
    assert len(told()) == 1
    assert not audit.verify_root(own).damaged_count
