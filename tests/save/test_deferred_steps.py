"""Steps that are recorded, and written by the next save."""

import dataclasses
import functools
import gc
import json
import logging
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.adapter import directories
from adacheck_jax.cli.main import app
from adacheck_jax.device import transfer
from adacheck_jax.errors import IntegrityError, LineageError, StorageError
from adacheck_jax.format import manifest
from adacheck_jax.plan import situation
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.save import pending, share
from adacheck_jax.store import delta_writer
from adacheck_jax.store.packs import arrays, reader, writer
from adacheck_jax.store.steps import folders, lookup, manifest_file, roots
from tests import support
from tests.processes import launch, leaves
from tests.save import test_waiting

RUNS = {"dict": support.dict_run, "linen": support.linen_run, "nnx": support.nnx_run}


def one_device():
    return support.mesh_of((1, 1))


def train(manager, handler, run, steps, saved_too=()):
    """Records every step that can be, and saves the others; returns all states, and what was saved.

    Args:
        saved_too: steps that are saved though they were recorded.
    """
    states, saved = {}, []
    for _ in range(steps):
        run.advance()
        states[run.count] = support.host_copy(run.state)
        if not handler.record_step(run.state, run.count) or run.count in saved_too:
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            saved.append(run.count)
    manager.wait_until_finished()
    return states, saved


def recording(root, run, steps=10, saved_too=(), **options):
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    with support.manager_of(root, handler) as manager:
        return train(manager, handler, run, steps, saved_too)


def item(root, step):
    return root / str(step) / "default"


def manifest_of(root, step):
    return manifest_file.read(item(root, step))


def recorded_in(root, step):
    return [each.step for each in manifest_of(root, step).recorded]


def restored(root, saved, target, **options):
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(root, handler) as manager:
        state = manager.restore(saved, args=adacheck.RestoreArgs(target, **options))
    return state, handler.restored


def assert_all_restorable(root, states, saved, target):
    for step, expected in states.items():
        holder = min((each for each in saved if each >= step), default=None)
        if holder is not None:
            state, told = restored(root, holder, target, step=step)
            support.assert_same_bits(state, expected)
            assert (told.step, told.exact) == (step, True)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", RUNS)
def test_every_recorded_step_is_restored_bit_for_bit(kind, tmp_path):
    run = RUNS[kind](one_device())
    states, saved = recording(tmp_path, run, 10, saved_too=(7, 10))
    assert saved == [1, 7, 10]
    assert_all_restorable(tmp_path, states, saved, support.abstract(run.state))


@pytest.mark.slow
def test_a_recorded_step_is_restored_onto_another_mesh(tmp_path):
    run = support.dict_run(one_device(), dtype=jnp.bfloat16)
    states, saved = recording(tmp_path, run, 8, saved_too=(8,))
    assert_all_restorable(
        tmp_path, states, saved, support.abstract(run.state, support.mesh_of((4, 2)))
    )


def test_a_run_is_one_array_of_each_kind_with_the_steps_one_after_another(tmp_path):
    run = support.dict_run(one_device(), dtype=jnp.bfloat16)
    _, saved = recording(tmp_path, run, 12, saved_too=(12,))
    before, last = saved[-2:]
    found = manifest_of(tmp_path, last)
    assert recorded_in(tmp_path, last) == [*range(before + 1, last)]
    assert found.depth == last - 1
    sizes = [each.packs[0].raw_bytes for each in found.deltas]
    assert sizes == [sizes[0]] * len(sizes)
    array = reader.PackArray(folders.pack_in(item(tmp_path, last), 0), arrays.RAW, sum(sizes))
    assert array.stored_bytes == len(sizes) * sizes[0] > 0
    links = {
        path.name.partition(".")[0] for path in (item(tmp_path, last) / folders.LINEAGE).iterdir()
    }
    assert links == {*map(str, saved[:-1])}


def test_old_steps_may_go(tmp_path):
    run = support.dict_run(one_device())
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(tmp_path, handler, max_to_keep=1) as manager:
        states, _ = train(manager, handler, run, 12, saved_too=(8, 12))
        assert manager.all_steps() == [12]
    for step in range(1, 13):  # of all that it builds on too
        state, told = restored(tmp_path, 12, support.abstract(run.state), step=step)
        support.assert_same_bits(state, states[step])
        assert told.step == step


class TestWhatCannotBeRecorded:
    def test_before_the_first_save(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        assert not handler.record_step(run.advance())
        with support.manager_of(tmp_path, handler):
            assert not handler.record_step(run.advance())

    @pytest.mark.first(1)
    @pytest.mark.parametrize(
        "options",
        [
            {"delta": "bits"},
            {"max_deltas": 0},
            {"max_deltas": 1},
        ],
        ids=str,
    )
    def test_then_every_step_is_saved(self, options, tmp_path):
        run = support.dict_run(one_device())
        states, saved = recording(tmp_path, run, 6, **options)
        assert saved == [1, 2, 3, 4, 5, 6]
        assert_all_restorable(tmp_path, states, saved, support.abstract(run.state))

    def test_without_a_recorder(self, tmp_path):
        handler = adacheck.AdaCheckHandler()
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs({"w": jnp.ones(3)}))
            assert not handler.record_step({"w": jnp.ones(3)})

    def test_another_tree(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            train(manager, handler, run, 6)
            assert handler.record_step(run.advance())
            assert not handler.record_step({**run.advance(), "more": jnp.ones(2)})

    @pytest.mark.slow
    def test_more_than_the_memory_that_it_may_take(self, tmp_path, monkeypatch):
        run = support.dict_run(one_device(), dtype=jnp.bfloat16)
        record_bytes = 2 * sum(x.size for x in jax.tree.leaves(run.state["params"]))
        monkeypatch.setattr(situation, "most_bytes", lambda _: 3 * record_bytes + 100)
        states, saved = recording(tmp_path, run, 14)
        assert saved == [1, 5, 9, 13]
        assert_all_restorable(tmp_path, states, saved, support.abstract(run.state))

    @pytest.mark.slow
    def test_more_than_a_lineage_may_have(self, tmp_path):
        run = support.dict_run(one_device())
        states, saved = recording(tmp_path, run, 16, max_deltas=5)
        assert saved == [1, 6, 7, 12, 13]
        assert [manifest_of(tmp_path, step).depth for step in saved] == [0, 5, 0, 5, 0]
        assert_all_restorable(tmp_path, states, saved, support.abstract(run.state))


class TestNumbers:
    def test_by_default_one_more_than_the_last(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(10, args=adacheck.SaveArgs(run.advance()))
            assert handler.record_step(run.advance())
            assert handler.record_step(run.advance(), 15)
            assert handler.record_step(run.advance())
            manager.save(20, args=adacheck.SaveArgs(run.advance()))
            manager.wait_until_finished()
        assert recorded_in(tmp_path, 20) == [11, 15, 16]

    def test_a_saved_step_is_recorded_already(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(run.advance()))
            assert handler.record_step(run.state, 1)
            manager.save(2, args=adacheck.SaveArgs(run.advance()))
            manager.wait_until_finished()
        assert recorded_in(tmp_path, 2) == []

    @pytest.mark.parametrize("restarts", [False, True])
    def test_another_state_of_a_saved_step_is_an_error(self, tmp_path, restarts):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(run.advance()))
            manager.wait_until_finished()
        if restarts:
            handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            if restarts:
                target = support.abstract(run.state)
                run.state = manager.restore(1, args=adacheck.RestoreArgs(target))
            assert handler.record_step(run.state, 1)
            edited = jax.tree.map(lambda x: x + 1, run.state["params"])
            with pytest.raises(ValueError, match=r"step 1 as it was saved, .* and other bits in"):
                handler.record_step({**run.state, "params": edited}, 1)
            before = support.host_copy(run.advance())
            with pytest.raises(ValueError, match="step 1 as it was saved, with 1 updates, found"):
                handler.record_step(run.state, 1)
            assert handler.record_step(run.state, 2)
            manager.save(3, args=adacheck.SaveArgs(run.advance()))
            manager.wait_until_finished()
        state, _ = restored(tmp_path, 3, support.abstract(run.state), step=2)
        support.assert_same_bits(state, before)

    def test_a_step_that_was_not_saved_is_not_said_to_be_recorded(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(28, "full")

        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(run.advance()))
            manager.wait_until_finished()
            with monkeypatch.context() as patch:
                patch.setattr(share, "_write", fail)
                manager.save(2, args=adacheck.SaveArgs(run.advance()))
                with pytest.raises(Exception, match="full"):
                    manager.wait_until_finished()
            assert not handler.record_step(run.state, 2)

    def test_a_step_may_be_recorded_and_saved_again(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(run.advance()))
            assert handler.record_step(run.advance(), 2)
            assert handler.record_step(run.state, 2)
            expected = support.host_copy(run.state)
            assert handler.record_step(run.advance(), 3)
            manager.save(3, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
        assert recorded_in(tmp_path, 3) == [2]
        assert [each.has_update for each in manifest_of(tmp_path, 3).deltas] == [True, True]
        state, _ = restored(tmp_path, 3, support.abstract(run.state), step=2)
        support.assert_same_bits(state, expected)

    def test_an_earlier_one_is_an_error(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(5, args=adacheck.SaveArgs(run.advance()))
            with pytest.raises(ValueError, match="expected a step after 5, the last one, found 4"):
                handler.record_step(run.advance(), 4)

    def test_of_several_lines_are_an_error(self, tmp_path):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        for name in ("a", "b"):
            with support.manager_of(tmp_path / name, handler) as manager:
                manager.save(1, args=adacheck.SaveArgs(run.state))
        with pytest.raises(ValueError, match="one line of steps, found 2"):
            handler.record_step(run.state)

    def test_a_number_that_another_state_was_recorded_with_is_told(self, tmp_path, caplog):
        """A loop that records the state that it has just saved counts one too many."""
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(run.advance()))
            assert handler.record_step(run.state)  # taken for step 2
            assert handler.record_step(run.advance())  # for step 3
            assert handler.record_step(run.advance())  # for step 4
            run.advance()
            manager.save(4, args=adacheck.SaveArgs(jax.block_until_ready(run.state)))
            manager.wait_until_finished()
        assert "Step 4 was recorded with 3 updates and is saved with 4" in caplog.text
        expected = support.host_copy(run.state)
        state, _ = restored(tmp_path, 4, support.abstract(run.state))
        support.assert_same_bits(state, expected)


class TestWhatNoUpdateExplains:
    """A save after recorded steps is a delta, so that these have a place, whatever it holds."""

    def recorded(self, root):
        run = support.dict_run(one_device())
        handler = adacheck.AdaCheckHandler(run.recorder)
        manager = support.manager_of(root, handler)
        states, saved = train(manager, handler, run, 4)
        assert saved == [1]
        return run, handler, manager, states

    def assert_saved(self, root, run, manager, states):
        states[run.count] = support.host_copy(run.state)
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
        states[run.count + 1] = support.host_copy(run.advance())
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        saved = [1, run.count - 1, run.count]
        assert manager.all_steps() == saved
        found = manifest_of(root, saved[1])
        assert not found.has_update
        assert len(found.stored) == len(jax.tree.leaves(run.state))
        letters = map(manifest.Encoding, found.packs[0].encodings)
        assert not any(letter.is_difference for letter in letters)
        assert manifest_of(root, saved[2]).has_update
        assert_all_restorable(root, states, saved, support.abstract(run.state))
        manager.close()

    @pytest.mark.slow
    def test_an_update_that_was_not_recorded(self, tmp_path):
        run, handler, manager, states = self.recorded(tmp_path)
        run.advance()
        run.advance()
        assert not handler.record_step(jax.block_until_ready(run.state), run.count)
        self.assert_saved(tmp_path, run, manager, states)
        assert recorded_in(tmp_path, 6) == [2, 3, 4]

    @pytest.mark.slow
    def test_a_counter_that_was_set_by_hand(self, tmp_path):
        run, _, manager, states = self.recorded(tmp_path)
        run.advance()
        adam = run.state["opt_state"][1].adacheck_inner
        assert "count" in type(adam[0])._fields
        inner = (adam[0]._replace(count=adam[0].count + 7), *adam[1:])
        recorder = run.state["opt_state"][1]._replace(adacheck_inner=inner)
        run.state = {**run.state, "opt_state": (run.state["opt_state"][0], recorder)}
        states[5] = support.host_copy(run.state)
        manager.save(5, args=adacheck.SaveArgs(run.state))
        states[6] = support.host_copy(run.advance())
        manager.save(6, args=adacheck.SaveArgs(run.state))
        manager.close()
        found, after = manifest_of(tmp_path, 5), manifest_of(tmp_path, 6)
        paths = [leaf.path for leaf in manifest_of(tmp_path, 1).leaves]
        assert [paths[i] for i in found.unreplayed] == ["opt_state/1/adacheck_inner/0/count"]
        assert set(found.unreplayed) <= set(found.stored)
        assert (found.updates, after.updates, after.unreplayed) == ((0,), (0,), ())
        assert "adacheck_inner/0/count" in after.caution.reason
        assert_all_restorable(tmp_path, states, [1, 5, 6], support.abstract(run.state))

    @pytest.mark.slow
    def test_an_older_state(self, tmp_path):
        """Held by the caller, and brought back after recorded steps went astray."""
        run, handler, manager, states = self.recorded(tmp_path)
        old = jax.tree.map(jnp.copy, run.state)
        for step in (5, 6):
            states[step] = support.host_copy(run.advance())
            assert handler.record_step(run.state)
        run.state, run.count = old, 7
        self.assert_saved(tmp_path, run, manager, states)


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 2])
def test_a_look_at_an_older_step_loses_nothing(step, tmp_path):
    """Through a manager of its own, which is closed before the run is saved."""
    run = support.dict_run(one_device())
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(tmp_path, handler) as manager:
        states, saved = train(manager, handler, run, 6, saved_too=(3,))
        assert saved == [1, 3]
        with support.manager_of(tmp_path, handler) as another:
            args = adacheck.RestoreArgs(support.abstract(run.state), step=step)
            another.restore(3 if step else 1, args=args)
        states[7] = support.host_copy(run.advance())
        assert not handler.record_step(run.state, 7)
        manager.save(7, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
    assert recorded_in(tmp_path, 7) == [4, 5, 6]
    assert_all_restorable(tmp_path, states, [1, 3, 7], support.abstract(run.state))


def test_a_look_at_the_next_number_while_steps_are_recorded_loses_nothing(tmp_path):
    """A run that went back to step 2 looks at the step 5 of its other line."""
    run = support.dict_run(one_device())
    target = adacheck.RestoreArgs(support.abstract(run.state))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(1, 6):
            manager.save(step, args=adacheck.SaveArgs(run.advance()))
    handler = adacheck.AdaCheckHandler(run.recorder)
    states, answers = {}, {}
    with support.manager_of(tmp_path, handler) as manager:
        run.state, run.count = manager.restore(2, args=target), 100  # other batches
        for step in (3, 4, 5, 6):
            states[step] = support.host_copy(run.advance())
            if step == 5:
                manager.restore(5, args=target)
            if step < 6:
                answers[step] = handler.record_step(run.state, step)
        manager.save(6, args=adacheck.SaveArgs(run.state), force=True)
        manager.wait_until_finished()
    assert answers == {3: True, 4: True, 5: False}, "where it answers False the caller saves"
    for step in (3, 4, 6):
        state, _ = restored(tmp_path, 6, support.abstract(run.state), step=step)
        support.assert_same_bits(state, states[step])


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_that_cannot_be_looked_at_loses_nothing_in_silence(tmp_path, monkeypatch, is_known):
    """It is told of, and the steps after it go on."""
    run = support.dict_run(one_device())
    handler, states = adacheck.AdaCheckHandler(run.recorder), {}
    bring, failing, told, lost = pending.Pending._bring, [True], [], set()

    def fails(self):
        if self.step == 3 and failing:
            failing.clear()
            raise MemoryError("no room")
        bring(self)

    monkeypatch.setattr(pending.Pending, "_bring", fails)
    if not is_known:
        monkeypatch.setattr(transfer, "are_ready", lambda _: False)
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(1, args=adacheck.SaveArgs(run.advance()))
        manager.wait_until_finished()
        for step in (2, 3, 4, 5, 6):
            states[step] = support.host_copy(run.advance())
            try:
                if not handler.record_step(run.state, step):
                    manager.save(step, args=adacheck.SaveArgs(run.state), force=True)
            except adacheck.AdaCheckError as error:
                told.append(str(error))
                lost |= {*range(3, step + 1)}  # the later it is found, the more follow it
            handler.run.lines.only[1]._stager.finish()  # so that it is found before the next step
        for step in (7, 8):
            states[step] = support.host_copy(run.advance())
            manager.save(step, args=adacheck.SaveArgs(run.state), force=True)
            manager.wait_until_finished()
    assert not failing
    assert len(told) == 1
    assert "not saved: 3" in told[0]
    assert "MemoryError: no room" in told[0]
    kept = {each.step for each in roots.steps_of(tmp_path)}
    for step in sorted(states.keys() - lost):
        holder = min(each for each in kept if each >= step)
        state, _ = restored(tmp_path, holder, support.abstract(run.state), step=step)
        support.assert_same_bits(state, states[step])


def test_a_step_without_an_update_is_recorded(tmp_path):
    recorder = adacheck.Recorder(optax.sgd(1e-2))
    chain = optax.MultiSteps(recorder, 2)
    params = {"w": jnp.arange(64.0).reshape(8, 8)}
    state = {"params": params, "opt": chain.init(params), "n": jnp.int32(0)}

    @jax.jit
    def advance(state):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt = chain.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "n": state["n"] + 1}

    handler = adacheck.AdaCheckHandler(recorder, params_path="params")
    states = {}
    with support.manager_of(tmp_path, handler) as manager:
        for step in range(1, 9):
            state = jax.block_until_ready(advance(state))
            states[step] = support.host_copy(state)
            if not handler.record_step(state, step) or step == 8:
                manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        saved = manager.all_steps()
    assert saved == [1, 8]
    assert {each.has_update for each in manifest_of(tmp_path, 8).deltas} == {True, False}
    assert_all_restorable(tmp_path, states, saved, state)


class TestWithoutWaiting:
    @pytest.mark.slow
    def test_a_step_is_recorded_while_it_computes_and_its_state_donated(self, tmp_path):
        run, expected = test_waiting.Run(), test_waiting.Run()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            saved = test_waiting.begin(manager, run)
            assert test_waiting.begin_without_saving(expected) == saved[3]
            for step in (4, 5, 6):
                run.advance(is_slow=True)
                assert handler.record_step(run.state, step)
                assert run.is_computing
                expected.advance(is_slow=True, rounds=1)
                saved[step] = test_waiting.bits_of(expected.state)
            run.advance(is_slow=True)
            test_waiting.save(manager, 7, run)
            assert run.is_computing
            run.advance()
            manager.wait_until_finished()
            assert recorded_in(tmp_path, 7) == [4, 5, 6]
            for step in (3, 4, 5, 6):
                found = manager.restore(7, args=adacheck.RestoreArgs(run.state, step=step))
                assert test_waiting.bits_of(found) == saved[step]

    @pytest.mark.slow
    def test_a_gap_that_was_not_seen_in_time_is_an_error(self, tmp_path):
        run = test_waiting.Run()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            saved = test_waiting.begin(manager, run)
            run.advance()
            run.advance(is_slow=True)
            assert handler.record_step(run.state, 5)
            run.advance()
            test_waiting.save(manager, 6, run)
            with pytest.raises(
                adacheck.AdaCheckError, match="recorded step 5: expected one update"
            ):
                manager.wait_until_finished()
            run.advance()
            test_waiting.save(manager, 7, run)
            manager.wait_until_finished()
            assert test_waiting.kind_of(tmp_path, 7) is manifest.BaseManifest
            found = manager.restore(3, args=adacheck.RestoreArgs(run.state))
            assert test_waiting.bits_of(found) == saved[3]

    @pytest.mark.slow
    def test_another_state_of_a_recorded_number_is_an_error(self, tmp_path):
        run = test_waiting.Run()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            saved = test_waiting.begin(manager, run)
            run.advance(is_slow=True)
            assert handler.record_step(run.state, 4)
            run.advance(is_slow=True)
            test_waiting.save(manager, 4, run)
            with pytest.raises(
                adacheck.AdaCheckError, match="step 4 as it was recorded, with 6 updates; found 7"
            ):
                manager.wait_until_finished()
            found = manager.restore(3, args=adacheck.RestoreArgs(run.state))
            assert test_waiting.bits_of(found) == saved[3]


class TestRestoring:
    def saved(self, root):
        run = support.dict_run(one_device())
        states, saved = recording(root, run, 10, saved_too=(7, 10))
        assert saved == [1, 7, 10]
        return run, states

    @pytest.mark.first(1)
    @pytest.mark.parametrize("step", [9, 7, 1], ids=["recorded", "saved", "the base"])
    def test_the_next_save_is_a_base(self, step, tmp_path):
        run, states = self.saved(tmp_path)
        handler = adacheck.AdaCheckHandler(run.recorder)
        with support.manager_of(tmp_path, handler) as manager:
            target = support.abstract(run.state)
            run.state = manager.restore(10, args=adacheck.RestoreArgs(target, step=step))
            support.assert_same_bits(run.state, states[step])
            assert not handler.record_step(run.advance(), 11)
            expected = support.host_copy(run.state)
            manager.save(11, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
        assert isinstance(manifest_of(tmp_path, 11), manifest.BaseManifest)
        support.assert_same_bits(restored(tmp_path, 11, target)[0], expected)

    def test_a_step_that_another_save_holds_is_named_in_the_error(self, tmp_path):
        run, _ = self.saved(tmp_path)
        with pytest.raises(
            LineageError, match=r"found the steps 1 to 7\. Restore it from step 10\."
        ):
            restored(tmp_path, 7, support.abstract(run.state), step=9)
        with pytest.raises(LineageError, match="expected step 99 in what was saved there"):
            restored(tmp_path, 10, support.abstract(run.state), step=99)

    @pytest.mark.slow
    def test_of_a_damaged_run_it_falls_back_to_what_is_whole(self, tmp_path, caplog, monkeypatch):
        for name in ("RAW", "COMPRESSED"):  # several chunks a step
            kind = dataclasses.replace(getattr(arrays, name), max_chunk_bytes=1 << 13)
            monkeypatch.setattr(arrays, name, kind)
        run, states = self.saved(tmp_path)
        damage_end(item(tmp_path, 10))
        with pytest.raises(IntegrityError):
            restored(tmp_path, 10, support.abstract(run.state))
        with caplog.at_level(logging.WARNING):
            state, told = restored(tmp_path, 10, support.abstract(run.state), skip_damaged=True)
        assert told.step == 9
        support.assert_same_bits(state, states[told.step])
        assert f"Restored step {told.step} instead of step 10" in caplog.text
        state, told = restored(tmp_path, 10, support.abstract(run.state), skip_damaged=True, step=8)
        support.assert_same_bits(state, states[8])


@pytest.mark.slow
def test_steps_between_those_of_the_managers_interval_are_recorded(tmp_path):
    """The loop of the README."""
    run = support.dict_run(one_device())
    handler = adacheck.AdaCheckHandler(run.recorder)
    saved, states = [], {}
    with support.manager_of(tmp_path, handler, save_interval_steps=6, max_to_keep=2) as manager:
        for step in range(15):
            state = run.advance()
            states[step] = support.host_copy(state)
            if manager.should_save(step) or not handler.record_step(state, step):
                assert manager.save(step, args=adacheck.SaveArgs(state), force=True)
                saved.append(step)
        manager.save(step, args=adacheck.SaveArgs(state), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [12, 14]
    assert {0, 6, 12} <= {*saved} <= {0, 1, 2, 6, 12}
    for step in (3, 6, 11, 13, 14):
        state, _ = restored(tmp_path, 14, support.abstract(run.state), step=step)
        support.assert_same_bits(state, states[step])


@pytest.mark.first(1)
@pytest.mark.parametrize("more", [{}, {"seed": np.arange(4)}], ids=["devices", "and the host"])
def test_a_step_is_let_go_of_as_it_is_packed(more, tmp_path, monkeypatch):
    """A run is as large as memory allows: it and all its packs do not fit."""
    run = support.dict_run(one_device())
    handler = adacheck.AdaCheckHandler(run.recorder)
    held, alive = [], []

    def packed(delta, *args, pack=delta_writer.DeltaWriter.packed):
        held.extend(weakref.ref(x) for each in delta.blocks.values() for x in each.values())
        return pack(delta, *args)

    def stored(*args, write=delta_writer.write):
        gc.collect()
        alive.append(sum(each() is not None for each in held))
        return write(*args)

    monkeypatch.setattr(delta_writer.DeltaWriter, "packed", packed)
    monkeypatch.setattr(delta_writer, "write", stored)
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(1, args=adacheck.SaveArgs({**run.advance(), **more}))
        for step in range(2, 8):
            assert handler.record_step({**run.advance(), **more}, step)
        manager.save(8, args=adacheck.SaveArgs({**run.advance(), **more}))
        manager.wait_until_finished()
    assert len(held) > 7
    # Those of the last step are what the next one is compared with.
    assert alive
    assert alive[0] <= len(held) // 7


def damage_end(directory):
    """Changes a byte of what is stored of the last step."""
    size_bytes = manifest_file.read(directory).packs[0].raw_bytes
    pack = delta_reader.readers_of(lookup.resolve(directory))[-1]._pack(0, arrays.RAW)
    (end,) = pack.read([(size_bytes - 64, size_bytes)], what="the end")
    (path,) = (path for path in support.pack_files(directory) if end.tobytes() in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(end.tobytes())] ^= 1
    path.write_bytes(content)


def test_a_run_is_verified_and_shown(tmp_path):
    run = support.dict_run(one_device())
    recording(tmp_path, run, 8, saved_too=(8,))
    thorough = CliRunner().invoke(app, ["verify", str(tmp_path), "--replay"])
    assert thorough.exit_code == 0, thorough.output
    listed = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "120"})
    assert "6 deferred" in listed.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path), "8"], env={"COLUMNS": "120"})
    assert "steps 2 to 7" in shown.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path), "5", "--json"])
    told = json.loads(shown.output)
    assert (told["step"], told["kind"], told["base"], told["depth"]) == (5, "deferred", 1, 4)
    assert (told["reason"], told["replayed_count"], told["recorded"]) == ("one update", 4, [])
    told = json.loads(CliRunner().invoke(app, ["ls", str(tmp_path), "--json"]).output)
    assert told["steps"][-1]["recorded"] == [2, 3, 4, 5, 6, 7]
    damage_end(item(tmp_path, 8))
    assert CliRunner().invoke(app, ["verify", str(tmp_path), "--read-data"]).exit_code == 1


def test_a_recorded_step_that_is_not_what_it_was_is_found_by_replay(tmp_path):
    run = support.dict_run(one_device())
    recording(tmp_path, run, 5, saved_too=(5,))
    found = manifest_of(tmp_path, 5)
    first, *rest = found.recorded
    other = dataclasses.replace(first, fingerprints=(1, *first.fingerprints[1:]))
    manifest_file.write(item(tmp_path, 5), dataclasses.replace(found, recorded=(other, *rest)))
    assert CliRunner().invoke(app, ["verify", str(tmp_path), "--replay"]).exit_code == 1
    with pytest.raises(IntegrityError, match="leaves of step 2 do not have the bits"):
        restored(tmp_path, 5, support.abstract(run.state), step=2)
    restored(tmp_path, 5, support.abstract(run.state), step=3)


def test_what_is_recorded_and_never_saved_is_told(tmp_path, caplog):
    run = support.dict_run(one_device())
    recording(tmp_path, run, 6)
    assert "Recorded steps that are not saved: 2 to 6; a manager is closed." in caplog.text


def test_a_save_that_fails_takes_the_recorded_steps_with_it_and_the_next_is_a_base(
    tmp_path, monkeypatch
):
    run = support.dict_run(one_device())
    handler = adacheck.AdaCheckHandler(run.recorder)
    recorded = threading.Event()

    def full(*_):
        recorded.wait(60)
        raise OSError(28, "No space left on device")

    with support.manager_of(tmp_path, handler) as manager:
        states, _ = train(manager, handler, run, 4)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_pack", full)
            manager.save(5, args=adacheck.SaveArgs(run.advance()))
            assert handler.record_step(run.advance(), 6)  # the failure is not known yet
            recorded.set()
            with pytest.raises(StorageError):
                manager.wait_until_finished()
        states[7] = support.host_copy(run.advance())
        manager.save(7, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        states[8] = support.host_copy(run.advance())
        assert handler.record_step(run.state, 8)
        states[9] = support.host_copy(run.advance())
        manager.save(9, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
    assert isinstance(manifest_of(tmp_path, 7), manifest.BaseManifest)
    for holder, step in ((1, 1), (7, 7), (9, 8), (9, 9)):
        state, _ = restored(tmp_path, holder, support.abstract(run.state), step=step)
        support.assert_same_bits(state, states[step])


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 2)])
def test_several_processes_record_alike(tmp_path, processes, devices):
    launch("record", 2, tmp_path / "run", tmp_path / "out", devices=2)
    saved = [step.step for step in roots.steps_of(tmp_path / "run")]
    assert saved == [1, 6, 9]
    assert recorded_in(tmp_path / "run", 6) == [2, 3, 4, 5]
    assert len(manifest_of(tmp_path / "run", 6).packs) == 2
    launch("restore-recorded", processes, tmp_path / "run", tmp_path / "again", devices)
    for step in (4, 8):
        restored = leaves(tmp_path / f"again-restored{step}.npz")
        assert restored == leaves(tmp_path / f"out-saved{step}.npz")


def test_a_typed_key_keeps_no_step_from_being_recorded(tmp_path):
    """JAX places its elements now by P(), now by P(None), which are the same."""
    whole = jax.NamedSharding(support.mesh_of((2, 4)), jax.P())
    recorder = adacheck.Recorder(optax.sgd(0.1, 0.9))
    params = {"w": jnp.ones((8, 8))}
    state = {"params": params, "opt_state": recorder.init(params), "key": jax.random.key(0)}

    @functools.partial(jax.jit, out_shardings=whole)
    def step_of(state):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.split(state["key"])[0]
        return {"params": params, "opt_state": opt_state, "key": key}

    state = jax.device_put(state, whole)
    with adacheck.checkpoint_manager(tmp_path, recorder) as manager:
        for step in range(6):
            state = step_of(state)
            if step < 2:
                assert manager.save(step, args=adacheck.SaveArgs(state))
            else:
                assert manager.handler.record_step(state, step)


def test_no_step_is_recorded_behind_a_save_that_was_refused(tmp_path, monkeypatch):
    """Of several processes none would see that it is two updates from the last."""
    monkeypatch.setattr(transfer, "are_ready", lambda _: False)
    run, states = support.dict_run(one_device()), {}
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(1, args=adacheck.SaveArgs(run.advance()))
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(directories, "_why_unwritable", lambda _: "it is read-only")
            with pytest.raises(StorageError, match="read-only"):
                manager.save(2, args=adacheck.SaveArgs(run.advance()))
        manager.reload()
        assert not handler.record_step(run.advance(), 3)
        for step in (3, 4, 5):
            states[step] = support.host_copy(run.state)
            if step == 3 or not handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state), force=True)
                manager.wait_until_finished()
            run.advance()
        manager.save(6, args=adacheck.SaveArgs(run.state), force=True)
    assert recorded_in(tmp_path, 6) == [4, 5]
    assert_all_restorable(tmp_path, states, [3, 6], support.abstract(run.state))


@pytest.mark.slow
def test_copies_of_what_separate_update_returned_are_saved_and_not_recorded(tmp_path):
    recorder = adacheck.Recorder(optax.contrib.muon(1e-2))
    update = adacheck.separate_update(recorder)
    params = {"w": jnp.linspace(-1.0, 1.0, 72 * 64).reshape(64, 72)}
    state, states = {"params": params, "opt": recorder.init(params)}, {}
    handler = adacheck.AdaCheckHandler(recorder)
    with support.manager_of(tmp_path, handler) as manager:
        for step in range(4):
            grads = jax.tree.map(jnp.sin, state["params"])
            new, opt = update(grads, state["opt"], state["params"])
            state = {"params": new, "opt": opt}
            copied = jax.device_get(state)
            states[step] = support.host_copy(copied)
            if not (step and handler.record_step(copied, step)):
                manager.save(step, args=adacheck.SaveArgs(copied), force=True)
                manager.wait_until_finished()
        manager.save(4, args=adacheck.SaveArgs(copied), force=True)
    holders = sorted(each.step for each in roots.steps_of(tmp_path))
    assert 1 in holders, "it was not recorded: nothing but a save sees the whole state"
    for step, expected in states.items():
        holder = min(each for each in holders if each >= step)
        found, _ = restored(tmp_path, holder, state, step=step)
        support.assert_same_bits(found, expected)
