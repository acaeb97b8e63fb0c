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
from tests.save.loop import Loop, assert_all_restorable, manifest_of
from tests.support import abstract, host_copy, manager_of, mesh_of


@pytest.fixture(autouse=True)
def short_lineages(monkeypatch):
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))


def trained(root, run, handler, steps, *, settles=True, **options):
    """Saves each step; a base that was begun is written before the next step, if it ``settles``."""
    saved = {}
    with manager_of(root, handler, **options) as manager:
        for _ in range(steps):
            run.advance()
            saved[run.count] = host_copy(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            if settles:
                settle(handler, run.state, run.count)
    return saved


def settle(handler, state, step):
    """Waits until a base that was begun is written."""
    handler.record_step(state, step)  # the same step: it is looked after
    pending = _bases(handler)._pending
    if pending is not None and pending.written is not None:
        pending.written.exception()


def _bases(handler):
    (saver,) = handler.run.lines._savers.values()
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
    loop = Loop(tmp_path, max_deltas=adacheck.AdaptivePolicy(most_deltas=3))
    for _ in range(12):
        loop.save()
        settle(loop.handler, loop.run.state, loop.number)
    loop.run.advance()  # an update that is not saved: the next step begins another line
    for number in range(16):
        loop.save()
        if number == 2:
            target = support.abstract(loop.run.state)
            loop.manager.restore(11, args=adacheck.RestoreArgs(target))
    loop.check()
    assert max(len(step.lineage.deltas) for step in roots.steps_of(tmp_path)) <= 6
    assert len(bases_of(tmp_path)) >= 6


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_deltas": 2}, "BRRBRR"),
        ({"shadow": adacheck.Shadow(background_bases=False)}, "BRRRBR"),
        ({"has_room": False}, "BRRRBR"),
    ],
    ids=str,
)
def test_the_loop_writes_bases_where_the_shadow_does_not(tmp_path, monkeypatch, options, expected):
    if not options.pop("has_room", True):
        monkeypatch.setattr(ShadowThread, "has_room_for_copy", False)
    loop = Loop(tmp_path, **options)
    loop.save(6)
    assert loop.check() == expected
    assert not any("compacted" in manifest_of(tmp_path, step).reason for step in bases_of(tmp_path))


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
    loop = Loop(tmp_path)
    loop.save(9)
    is_over.append(True)
    assert loop.check() == "BRRRRRRBR"


def test_a_step_stays_while_a_base_is_made_of_it_whatever_the_policy_says(tmp_path, monkeypatch):
    may_write, write = threading.Event(), new_base.write

    def slow(*args, **kwargs):
        assert may_write.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(new_base, "write", slow)
    keep, listed = adacheck.KeepLineage(LatestN(2)), {}
    loop = Loop(tmp_path, keep_lineage=keep, manager={"preservation_policy": keep})
    for step in range(1, 11):
        loop.save()
        listed[step] = [*loop.manager.all_steps()]
        if step == 6:  # with six deltas the line is full, and the loop would write a base
            may_write.set()
            _bases(loop.handler)._pending.written.result()
    newest = lookup.resolve(tmp_path / "10" / "default")
    assert listed[3] == [2, 3]
    assert listed[6] == [4, 5, 6]
    assert 4 not in listed[10]
    assert newest.base.step >= 4
    assert "compacted" in newest.base.reason
    loop.forget(*(step for step in range(1, 11) if step not in listed[10]))
    loop.check()


def test_a_step_of_which_no_base_can_be_made_does_not_stay(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_base, "write", fails)
    run, keep = support.dict_run(mesh_of((1, 1))), adacheck.KeepLineage(LatestN(2))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    trained(tmp_path, run, handler, 10, settles=False, preservation_policy=keep)
    assert [each.step for each in roots.steps_of(tmp_path)] == [9, 10]


def test_a_base_that_waits_for_its_place_holds_up_no_other_handlers(tmp_path):
    first = Loop(tmp_path)
    first.save(5)
    _bases(first.handler)._pending.written.result()
    second = adacheck.AdaCheckHandler(first.run.recorder)
    first.states |= trained(tmp_path, first.run, second, 5)
    second.close()
    assert 9 in bases_of(tmp_path)
    first.handler.close()
    assert bases_of(tmp_path) == [1, 4, 6, 9]
    first.check()


def test_recorded_steps_go_on_while_a_base_is_made(tmp_path):
    loop = Loop(tmp_path)
    for step in range(1, 16):
        loop.train()
        if step % 2 or not loop.record():
            loop.put()
    loop.check()
    assert len(bases_of(tmp_path)) > 1
