"""What happens when the step that is asked for cannot be had."""

from __future__ import annotations

import logging

import pytest

import adacheck_jax as adacheck
from adacheck_jax import lineage, manifest
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
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
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
