"""What happens when the step that is asked for cannot be had."""

from __future__ import annotations

import errno
import logging
import os
import shutil

import pytest

import adacheck_jax as adacheck
from adacheck_jax import audit, lineage, manifest
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
        (item(root, step) / lineage.BASE).rglob("*"), key=lambda p: p.is_file() and p.stat().st_size
    )
    data = support.with_flipped_data(largest.read_bytes())
    largest.write_bytes(data)  # in place: the deltas that link it are damaged too


def restore(root, run, step, **options):
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(run.state), **options)
        return manager.restore(step, args=args), handler.restored


def test_a_bad_step_is_an_error_unless_an_older_one_is_asked_for(saved):
    root, run, states = saved
    (item(root, 6) / manifest.FILE).unlink()
    with pytest.raises(adacheck.FormatError):
        restore(root, run, 6)
    state, info = restore(root, run, 6, fallback=True)
    assert info.step == 5
    support.assert_same_bits(state, states[5])


def test_a_good_step_is_what_is_restored(saved, caplog):
    root, run, states = saved
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6, fallback=True)
    assert info.step == 6
    support.assert_same_bits(state, states[6])
    assert not caplog.records


def test_every_step_of_a_damaged_lineage_is_skipped_and_told(saved, caplog):
    root, run, states = saved
    damage_base(root, 4)
    with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
        state, info = restore(root, run, 6, fallback=True)
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
    with pytest.raises(adacheck.IntegrityError, match="/3/"):
        restore(root, run, 3, fallback=True)


def test_what_the_caller_got_wrong_is_no_reason_to_fall_back(saved):
    root, run, _ = saved
    wrong = {"other": support.abstract(run.state)["step"]}
    args = adacheck.RestoreArgs(wrong, fallback=True)
    with support.manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:  # noqa: SIM117
        with pytest.raises(adacheck.MismatchError):
            manager.restore(6, args=args)


def test_training_goes_on_from_an_older_step(saved):
    root, run, states = saved
    damage_base(root, 4)
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(root, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(run.state), fallback=True)
        run.state = manager.restore(6, args=args)
        run.count = handler.restored.step
        for step in (4, 5, 6):
            manager.delete(step)
        again = support.save_steps(manager, run, 3)
        for step in (4, 5, 6):
            assert [x.tobytes() for x in again[step]] == [x.tobytes() for x in states[step]]
            target = adacheck.RestoreArgs(support.abstract(run.state))
            support.assert_same_bits(manager.restore(step, args=target), states[step])


class TestLatestRestorable:
    def test_the_newest_step_of_a_whole_root(self, saved, caplog):
        root, _, states = saved
        with caplog.at_level(logging.WARNING, logger="adacheck_jax"):
            assert adacheck.latest_restorable(root) == max(states)
        assert not caplog.records

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

    def test_what_it_finds_can_be_restored(self, saved):
        root, run, states = saved
        (item(root, 6) / manifest.FILE).unlink()
        (item(root, 5) / lineage.LINEAGE / "4" / manifest.FILE).unlink()
        step = adacheck.latest_restorable(root)
        assert step == 4
        support.assert_same_bits(restore(root, run, step)[0], states[step])

    def test_a_root_without_steps_has_none(self, tmp_path):
        assert adacheck.latest_restorable(tmp_path / "absent") is None
        assert adacheck.latest_restorable(tmp_path) is None

    def test_where_nothing_verifies_the_newest_steps_error_is_raised(self, saved):
        root, _, _ = saved
        for step in range(1, STEPS + 1):
            (item(root, step) / manifest.FILE).write_bytes(b"{}")
        with pytest.raises(adacheck.FormatError, match="/6/"):
            adacheck.latest_restorable(root)

    def test_all_items_of_a_step_have_to_verify_or_the_one_that_is_named(self, saved):
        root, _, _ = saved
        shutil.copytree(item(root, 6), root / "6" / "other")
        (root / "6" / "other" / manifest.FILE).unlink()
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


def test_a_step_that_cannot_be_read_now_is_no_reason_to_fall_back(saved, monkeypatch):
    root, run, states = saved
    with monkeypatch.context() as patch:
        refusing(patch, f"/6/default/{manifest.FILE}", errno.EACCES)
        with pytest.raises(adacheck.StorageError, match=r"/6/.*Permission denied.*try again"):
            restore(root, run, 6, fallback=True)
        with pytest.raises(adacheck.StorageError, match=r"/6/.*Permission denied"):
            adacheck.latest_restorable(root)
    support.assert_same_bits(restore(root, run, 6)[0], states[6])


def test_a_bad_sector_is(saved, monkeypatch):
    root, run, _ = saved
    refusing(monkeypatch, f"/6/default/{manifest.FILE}", errno.EIO)
    assert restore(root, run, 6, fallback=True)[1].step == 5
    assert adacheck.latest_restorable(root) == 5


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
    assert not caplog.records
    assert not audit.verify_root(tmp_path).damaged_count
