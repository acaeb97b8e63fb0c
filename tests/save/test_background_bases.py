"""Saved deltas become bases in the background, made of the shadow; no step is lost by it."""

from __future__ import annotations

import threading
import time

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import LatestN

import adacheck_jax as adacheck
from adacheck_jax.format import manifest_json
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.compaction import in_place, new_base
from adacheck_jax.store.steps import lookup, roots
from tests import support
from tests.save.test_checks import assert_all_restorable, kinds
from tests.support import abstract, host_copy, manager_of, mesh_of


@pytest.fixture(autouse=True)
def short_lineages(monkeypatch):
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))


def trained(root, run, handler, steps, *, settle=True, **options):
    """Saves each step; with ``settle`` a base that was begun is written before the next step."""
    saved = {}
    with manager_of(root, handler, **options) as manager:
        for _ in range(steps):
            run.advance()
            saved[run.count] = host_copy(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            if settle:
                handler.record_step(run.state, run.count)  # the same step: it is looked after
                pending = _bases(handler)._pending
                if pending is not None and pending.written is not None:
                    pending.written.exception()
    return saved


def _bases(handler):
    (saver,) = handler._run.lines._savers.values()
    return saver._bases


def bases_of(root):
    found = [step.manifest for step in roots.steps_of(root)]
    return [each.step for each in found if isinstance(each, BaseManifest)]


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("shape", [(1, 1), (4, 2)], ids=["one device", "eight devices"])
def test_the_loop_writes_one_base_and_the_shadow_the_others(tmp_path, shape):
    run = support.dict_run(mesh_of(shape))
    policy = adacheck.AdaptivePolicy(most_deltas=3)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=policy)
    saved = trained(tmp_path, run, handler, 9)
    assert bases_of(tmp_path) == [1, 4, 7]
    reasons = [roots.steps_of(tmp_path)[i].manifest.reason for i in (3, 6)]
    assert all("compacted" in each for each in reasons)
    assert lookup.resolve(tmp_path / "9" / "default").delta_count == 2
    assert_all_restorable(tmp_path, saved, run.state, mesh_of((2, 2)))
    target = abstract(run.state)
    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.PyTreeCheckpointHandler()) as stock:
        restore = ocp.args.PyTreeRestore(
            target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
        )
        for step in (4, 7):
            support.assert_same_bits(stock.restore(step, args=restore), saved[step])


def test_the_loop_reads_manifests_where_a_base_took_a_deltas_place_alone(tmp_path, monkeypatch):
    reads, decode = [], manifest_json.decode

    def decoded(data, *, where):
        if threading.current_thread() is threading.main_thread() and handler.last_save:
            reads.append(handler.last_save.step)
        return decode(data, where=where)

    monkeypatch.setattr(manifest_json, "decode", decoded)
    run = support.dict_run(mesh_of((1, 1)))
    policy = adacheck.AdaptivePolicy(most_deltas=3)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=policy)
    trained(tmp_path, run, handler, 9)
    read, followed = [*reads], lookup.resolve(tmp_path / "9" / "default")
    assert followed.base.step == 7
    assert read == [6, 6, 6]  # before save 7: steps 4, 5 and 6, each once


@pytest.mark.slow
def test_a_look_at_a_step_of_another_line_lets_no_lineage_grow(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(
        run.recorder, max_deltas=adacheck.AdaptivePolicy(most_deltas=3)
    )
    saved = trained(tmp_path, run, handler, 12)
    run.advance()  # an update that is not saved: the next step begins another line
    with manager_of(tmp_path, handler) as manager:
        for number in range(16):
            run.advance()
            saved[run.count] = host_copy(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            if number == 2:
                manager.restore(11, args=adacheck.RestoreArgs(abstract(run.state)))
    assert max(len(step.lineage.deltas) for step in roots.steps_of(tmp_path)) <= 6
    assert len(bases_of(tmp_path)) >= 6
    assert_all_restorable(tmp_path, saved, run.state)


def test_what_a_killed_process_left_of_a_base_goes_with_the_next_one(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    saved = trained(tmp_path, run, handler, 2)
    left = tmp_path / ".adacheck-2.default.compaction.orbax-checkpoint-tmp"
    (left / "adacheck" / "base").mkdir(parents=True)
    (left / "adacheck" / "base" / "part").write_bytes(bytes(1000))
    saved |= trained(tmp_path, run, handler, 6)
    assert len(bases_of(tmp_path)) > 1
    assert [each.name for each in tmp_path.iterdir() if not each.name.isdecimal()] == []
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_number_of_deltas_is_kept_to(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    saved = trained(
        tmp_path,
        run,
        adacheck.AdaCheckHandler(run.recorder, max_deltas=2),
        6,
    )
    assert kinds(tmp_path) == ["B", "R", "R", "B", "R", "R"]
    reasons = [each.manifest.reason for each in roots.steps_of(tmp_path)[3:4]]
    assert not any("compacted" in each for each in reasons)
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.parametrize(
    ("module", "name", "base"),
    [(new_base, "write", 5), (in_place, "_move", 6)],
    ids=["written", "moved"],
)
def test_where_a_base_cannot_be_made_in_the_background_the_loop_writes_it(
    tmp_path, monkeypatch, module, name, base
):
    def fails(*args, **kwargs):
        raise OSError("no space")

    monkeypatch.setattr(module, name, fails)
    run = support.dict_run(mesh_of((1, 1)))
    saved = trained(tmp_path, run, adacheck.AdaCheckHandler(run.recorder), 10)
    assert bases_of(tmp_path)[:2] == [1, base]  # once it had failed
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_base_that_takes_long_lets_the_lineage_grow_to_twice_its_length(tmp_path, monkeypatch):
    is_over = []

    def slow(*args, **kwargs):
        while not is_over:
            time.sleep(0.01)
        raise OSError("given up")

    monkeypatch.setattr(new_base, "write", slow)
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        for step in range(1, 10):
            run.advance()
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
        is_over.append(True)
    assert kinds(tmp_path) == ["B", *"RRRRRR", "B", "R"]


def test_a_step_stays_while_a_base_is_made_of_it_whatever_the_policy_says(tmp_path, monkeypatch):
    may_write, write = threading.Event(), new_base.write

    def slow(*args, **kwargs):
        assert may_write.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(new_base, "write", slow)
    run, keep = support.dict_run(mesh_of((1, 1))), adacheck.KeepLineage(LatestN(2))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    saved, listed = {}, {}
    with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
        for step in range(1, 11):
            run.advance()
            saved[step] = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            listed[step] = [*manager.all_steps()]
            if step == 6:  # with six deltas the line is full, and the loop would write a base
                may_write.set()
                _bases(handler)._pending.written.result()
        newest = lookup.resolve(tmp_path / "10" / "default")
        assert listed[3] == [2, 3]
        assert listed[6] == [4, 5, 6]
        assert 4 not in listed[10]
    assert newest.base.step >= 4
    assert "compacted" in newest.base.reason
    kept = {step: saved[step] for step in (9, 10)}
    assert_all_restorable(tmp_path, kept, run.state)


def test_a_step_of_which_no_base_can_be_made_does_not_stay(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_base, "write", fails)
    run, keep = support.dict_run(mesh_of((1, 1))), adacheck.KeepLineage(LatestN(2))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    trained(tmp_path, run, handler, 10, settle=False, preservation_policy=keep)
    assert [each.step for each in roots.steps_of(tmp_path)] == [9, 10]


def test_a_base_that_waits_for_its_place_holds_up_no_other_handlers(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    first = adacheck.AdaCheckHandler(run.recorder)
    saved = {}
    with manager_of(tmp_path, first) as manager:
        for step in range(1, 6):
            run.advance()
            saved[step] = host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
        _bases(first)._pending.written.result()
        second = adacheck.AdaCheckHandler(run.recorder)
        saved |= trained(tmp_path, run, second, 5)
        second.close()
    assert 9 in bases_of(tmp_path)
    first.close()
    assert bases_of(tmp_path) == [1, 4, 6, 9]
    assert_all_restorable(tmp_path, saved, run.state)


def test_no_base_is_made_in_the_background_where_that_is_refused(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    trained(
        tmp_path,
        run,
        adacheck.AdaCheckHandler(run.recorder, shadow=adacheck.Shadow(background_bases=False)),
        6,
    )
    assert kinds(tmp_path) == ["B", "R", "R", "R", "B", "R"]


def test_without_room_for_a_copy_the_loop_writes_bases(tmp_path, monkeypatch):
    monkeypatch.setattr(ShadowThread, "has_room_for_copy", False)
    run = support.dict_run(mesh_of((1, 1)))
    trained(tmp_path, run, adacheck.AdaCheckHandler(run.recorder), 6)
    assert kinds(tmp_path) == ["B", "R", "R", "R", "B", "R"]


def test_recorded_steps_go_on_while_a_base_is_made(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    saved = {}
    with manager_of(tmp_path, handler) as manager:
        for step in range(1, 16):
            run.advance()
            saved[step] = host_copy(run.state)
            if step % 2 or not handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state))
    assert_all_restorable(tmp_path, saved, run.state)
    assert len(bases_of(tmp_path)) > 1
