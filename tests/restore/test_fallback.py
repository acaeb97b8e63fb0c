"""What happens when the step that is asked for cannot be had."""

from __future__ import annotations

import errno
import logging
import os
import shutil

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, IntegrityError, MismatchError, StorageError
from adacheck_jax.restore import replay
from adacheck_jax.store.steps import folders, lookup, manifest_file
from adacheck_jax.tools import audit
from tests import support

STEPS = 6


@pytest.fixture
def saved(tmp_path):
    """Two lineages of three steps each, and what each step was."""
    run = support.dict_run(support.mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with support.manager_of(tmp_path, handler) as manager:
        states = support.save_steps(manager, run, STEPS)
    return tmp_path, run, states


def item(root, step):
    return root / str(step) / "default"


def damage_base(root, step):
    largest = max(
        (item(root, step) / folders.BASE).rglob("*"), key=lambda p: p.is_file() and p.stat().st_size
    )
    data = support.with_flipped_data(largest.read_bytes())
    largest.write_bytes(data)  # in place: the deltas that link it are damaged too


def restore(root, run, number, **options):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(run.state), **options)
        return manager.restore(number, args=args), handler.restored


def test_a_bad_step_is_an_error_unless_an_older_one_is_asked_for(saved):
    root, run, states = saved
    (item(root, 6) / manifest_file.FILE).unlink()
    with pytest.raises(FormatError):
        restore(root, run, 6)
    state, info = restore(root, run, 6, skip_damaged=True)
    assert info.step == 5
    support.assert_same_bits(state, states[5])


def test_a_good_step_is_what_is_restored(saved, caplog):
    root, run, states = saved
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6, skip_damaged=True)
    assert info.step == 6
    support.assert_same_bits(state, states[6])
    assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]


@pytest.mark.slow
def test_every_step_of_a_damaged_lineage_is_skipped_and_told(saved, caplog):
    root, run, states = saved
    damage_base(root, 4)
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6, skip_damaged=True)
    assert info.step == 3
    support.assert_same_bits(state, states[3])
    skipped = [m for m in caplog.messages if m.startswith("Skipping a step")]
    assert len(skipped) == 3
    assert all(
        f"/{step}/default" in message for step, message in zip((6, 5, 4), skipped, strict=True)
    )
    assert caplog.messages[-1] == "Restored step 3 instead of step 6."


def test_no_newer_step_and_no_other_item_is_taken(saved):
    root, run, _ = saved
    damage_base(root, 1)
    with pytest.raises(IntegrityError, match="/3/"):
        restore(root, run, 3, skip_damaged=True)


def test_what_the_caller_got_wrong_is_no_reason_to_fall_back(saved):
    root, run, _ = saved
    wrong = {"other": support.abstract(run.state)["step"]}
    args = adacheck.RestoreArgs(wrong, skip_damaged=True)
    with support.manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:  # noqa: SIM117
        with pytest.raises(MismatchError):
            manager.restore(6, args=args)


@pytest.mark.slow
def test_training_goes_on_from_an_older_step(saved):
    root, run, states = saved
    damage_base(root, 4)
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(run.state), skip_damaged=True)
        run.state = manager.restore(6, args=args)
        run.count = handler.restored.step
        for step in (4, 5, 6):
            manager.delete(step)
        again = support.save_steps(manager, run, 3)
        for step in (4, 5, 6):
            assert [x.tobytes() for x in again[step]] == [x.tobytes() for x in states[step]]
            target = adacheck.RestoreArgs(support.abstract(run.state))
            support.assert_same_bits(manager.restore(step, args=target), states[step])


@pytest.fixture
def alone(tmp_path):
    """A lineage of six steps of which only the last has a directory, and what each step was."""
    run = support.dict_run(support.mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(tmp_path, handler, max_to_keep=1) as manager:
        states = support.save_steps(manager, run, STEPS)
        assert manager.all_steps() == [STEPS]
    return tmp_path, run, states


def damage_own_pack(root, step):
    path = max(support.pack_files(item(root, step)), key=lambda each: each.stat().st_size)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(support.with_flipped_data(data))


class TestInsideALineage:
    """Steps that a bad step's directory links can be had, without directories of their own."""

    @pytest.mark.slow
    @pytest.mark.first(1)
    @pytest.mark.parametrize("what", ["pack", "manifest", "index"])
    def test_the_step_before_a_damaged_one(self, alone, what, caplog):
        root, run, states = alone
        if what == "pack":
            damage_own_pack(root, 6)
        elif what == "index":
            support.pack_index(item(root, 6)).unlink()
        else:
            (item(root, 6) / manifest_file.FILE).unlink()
        with pytest.raises((IntegrityError, FormatError)):
            restore(root, run, 6)
        with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
            state, info = restore(root, run, 6, skip_damaged=True)
        assert info.step == 5
        support.assert_same_bits(state, states[5])
        assert caplog.messages[-1] == "Restored step 5 instead of step 6."
        state, info = restore(root, run, 6, step=4)
        assert info.step == 4
        support.assert_same_bits(state, states[4])
        with pytest.raises((IntegrityError, FormatError), match="/6/"):
            adacheck.latest_restorable(root)  # it names steps that have directories of their own

    @pytest.mark.slow
    def test_the_newest_one_that_replay_reproduces(self, alone, caplog):
        root, run, states = alone
        support.other_record(lookup.resolve(item(root, 6)).to(4))
        with pytest.raises(IntegrityError, match="do not have the bits"):
            restore(root, run, 6)
        with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
            state, info = restore(root, run, 6, skip_damaged=True)
        assert info.step == 3
        support.assert_same_bits(state, states[3])
        assert sum(m.startswith("Skipping a step") for m in caplog.messages) == 1
        assert restore(root, run, 6, skip_damaged=True, step=5)[1].step == 3
        assert restore(root, run, 6, skip_damaged=True, step=2)[1].step == 2

    @pytest.mark.slow
    def test_the_base_where_the_update_is_lost(self, alone):
        root, run, states = alone
        (item(root, 6) / folders.LINEAGE / "1" / manifest_file.update_file("cpu")).unlink()
        args = adacheck.RestoreArgs(support.abstract(run.state), skip_damaged=True)
        handler = adacheck.AdaCheckHandler()  # which has no recorder that could stand in
        with support.manager_of(root, handler) as manager:
            support.assert_same_bits(manager.restore(6, args=args), states[1])
        assert handler.restored.step == 1

    def test_nothing_is_left_of_a_lineage_whose_base_is_damaged(self, alone):
        root, run, _ = alone
        places = (item(root, 6) / folders.LINEAGE / "1").rglob("*")
        path = max(places, key=lambda p: p.is_file() and p.stat().st_size)
        path.write_bytes(support.with_flipped_data(path.read_bytes()))
        with pytest.raises(IntegrityError, match="/6/"):
            restore(root, run, 6, skip_damaged=True)
        with pytest.raises(IntegrityError, match="/6/"):
            adacheck.latest_restorable(root)

    @pytest.mark.slow
    def test_files_that_steps_share_are_replayed_once(self, saved, caplog, monkeypatch):
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
    def test_a_newer_step_of_another_directory_comes_first(self, alone, tmp_path):
        root, run, states = alone
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


class TestLatestRestorable:
    def test_the_newest_step_of_a_whole_root(self, saved, caplog):
        root, _, states = saved
        with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
            assert adacheck.latest_restorable(root) == max(states)
        assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]

    @pytest.mark.slow
    def test_a_flipped_bit_is_found_by_reading_alone(self, saved, caplog):
        root, _, _ = saved
        damage_base(root, 4)
        assert adacheck.latest_restorable(root, read_data=False) == 6
        with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
            assert adacheck.latest_restorable(str(root)) == 3
        assert [m.split(",")[0] for m in caplog.messages] == [
            f"Skipping step {step}" for step in (6, 5, 4)
        ]
        assert all("/default" in message for message in caplog.messages)

    @pytest.mark.slow
    def test_what_it_finds_can_be_restored(self, saved):
        root, run, states = saved
        (item(root, 6) / manifest_file.FILE).unlink()
        (item(root, 5) / folders.LINEAGE / "4" / manifest_file.FILE).unlink()
        assert adacheck.latest_restorable(root) == 4
        support.assert_same_bits(restore(root, run, 4)[0], states[4])

    def test_a_root_without_steps_has_none(self, tmp_path):
        assert adacheck.latest_restorable(tmp_path / "absent") is None
        assert adacheck.latest_restorable(tmp_path) is None

    @pytest.mark.slow
    def test_where_nothing_verifies_the_newest_steps_error_is_raised(self, saved):
        root, _, _ = saved
        for step in range(1, STEPS + 1):
            (item(root, step) / manifest_file.FILE).write_bytes(b"{}")
        with pytest.raises(FormatError, match="/6/"):
            adacheck.latest_restorable(root)

    @pytest.mark.slow
    def test_all_items_of_a_step_have_to_verify_or_the_one_that_is_named(self, saved):
        root, _, _ = saved
        shutil.copytree(item(root, 6), root / "6" / "other")
        (root / "6" / "other" / manifest_file.FILE).unlink()
        assert adacheck.latest_restorable(root) == 5
        assert adacheck.latest_restorable(root, "default") == 6


def refusing(monkeypatch, what, number):
    """Lets reads of some files fail as the operating system would."""
    opened = os.open

    def refuse(path, *args, **options):
        if what in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.slow
def test_a_step_that_cannot_be_read_now_is_no_reason_to_fall_back(saved, monkeypatch):
    root, run, states = saved
    with monkeypatch.context() as patch:
        refusing(patch, f"/6/default/{manifest_file.FILE}", errno.EACCES)
        with pytest.raises(StorageError, match=r"/6/.*Permission denied.*try again"):
            restore(root, run, 6, skip_damaged=True)
        with pytest.raises(StorageError, match=r"/6/.*Permission denied"):
            adacheck.latest_restorable(root)
    support.assert_same_bits(restore(root, run, 6)[0], states[6])


@pytest.mark.slow
def test_a_bad_sector_is(saved, monkeypatch):
    root, run, _ = saved
    refusing(monkeypatch, f"/6/default/{manifest_file.FILE}", errno.EIO)
    assert restore(root, run, 6, skip_damaged=True)[1].step == 5
    assert adacheck.latest_restorable(root) == 5


@pytest.mark.slow
def test_steps_that_were_swapped_are_told(saved, caplog):
    root, run, states = saved
    (root / "3").rename(root / "x")
    (root / "6").rename(root / "3")
    (root / "x").rename(root / "6")
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6)
    assert info.step == 3
    support.assert_same_bits(state, states[3])
    assert "expected what was saved as step 6, found what was saved as step 3" in caplog.text
    found = {s.step: [d.message for d in s.damage] for s in audit.verify_root(root).steps}
    assert [step for step, messages in found.items() if messages] == [3, 6]


def test_a_number_of_the_callers_own_is_no_swap(tmp_path, caplog):
    run = support.dict_run(support.mesh_of((2, 2)))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        manager.save(1, args=adacheck.SaveArgs(run.advance(), step=1000))
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        assert restore(tmp_path, run, 1)[1].step == 1000
    assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]
    assert not audit.verify_root(tmp_path).damaged_count
