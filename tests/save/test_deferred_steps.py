"""Steps that are recorded, and written by the next save."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.adapter import directories
from adacheck_jax.cli.main import app
from adacheck_jax.errors import IntegrityError, LineageError, StorageError
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.encodings.table import ENCODINGS
from adacheck_jax.plan import situation
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.save import pending
from adacheck_jax.store import delta_writer
from adacheck_jax.store.packs import arrays, reader, writer
from adacheck_jax.store.steps import folders, lookup, manifest_file, roots
from tests import support
from tests.processes import launch, leaves
from tests.save.loop import Loop, computing, holders, manifest_of
from tests.update.test_separate import separate_run

RUNS = {"dict": support.dict_run, "linen": support.linen_run, "nnx": support.nnx_run}


@pytest.fixture
def loop(tmp_path):
    return Loop(tmp_path)


def item(root, step):
    return root / str(step) / "default"


def recorded_in(root, step):
    return [each.step for each in manifest_of(root, step).recorded]


def restored(root, saved, target, **options):
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(root, handler) as manager:
        state = manager.restore(saved, args=adacheck.RestoreArgs(target, **options))
    return state, handler.restored


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", RUNS)
def test_every_recorded_step_is_restored_bit_for_bit(kind, tmp_path):
    loop = Loop(tmp_path, RUNS[kind](support.mesh_of((1, 1))))
    assert loop.keep(7) == "srrrrrr"
    loop.put()
    assert loop.keep(3) == "rrr"
    loop.put()
    assert loop.check(support.mesh_of((4, 2)) if kind == "dict" else None) == "BRR"
    assert (recorded_in(tmp_path, 7), recorded_in(tmp_path, 10)) == ([2, 3, 4, 5, 6], [8, 9])
    _, told = restored(tmp_path, 10, support.abstract(loop.run.state), step=9)
    assert (told.step, told.exact) == (9, True)


def test_a_run_is_one_array_of_each_kind_with_the_steps_one_after_another(tmp_path):
    """And old steps may go: it has links to all that it builds on."""
    run = support.dict_run(support.mesh_of((1, 1)), dtype=jnp.bfloat16)
    loop = Loop(tmp_path, run, manager={"max_to_keep": 1})
    loop.keep(5)
    loop.put()
    loop.keep(4)
    loop.put()
    loop.manager.wait_until_finished()
    assert loop.manager.all_steps() == [9]
    found = manifest_of(tmp_path, 9)
    assert recorded_in(tmp_path, 9) == [6, 7, 8]
    assert found.depth == 8
    sizes = [each.packs[0].raw_bytes for each in found.deltas]
    assert sizes == [sizes[0]] * 4
    array = reader.PackArray(folders.pack_in(item(tmp_path, 9), 0), arrays.RAW, sum(sizes))
    assert array.stored_bytes == 4 * sizes[0] > 0
    links = {
        path.name.partition(".")[0] for path in (item(tmp_path, 9) / folders.LINEAGE).iterdir()
    }
    assert links == {"1", "5"}
    for step, expected in loop.states.items():
        state, told = restored(tmp_path, 9, support.abstract(loop.run.state), step=step)
        support.assert_same_bits(state, expected)
        assert told.step == step


@pytest.mark.first(3, slow=5)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_deltas": 5}, "srrrrssrrrrss"),
        ({"max_deltas": 1}, "ssss"),
        ({"delta": "bits"}, "ssss"),
        ({"memory": 3}, "srrrsrrrsrrrs"),
        ({"max_deltas": 0}, "ssss"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_saved(options, expected, tmp_path, monkeypatch):
    run = support.dict_run(support.mesh_of((1, 1)), dtype=jnp.bfloat16)
    if records := options.pop("memory", 0):  # that the memory has room for
        record_bytes = 2 * sum(x.size for x in jax.tree.leaves(run.state["params"]))
        monkeypatch.setattr(situation, "most_bytes", lambda _: records * record_bytes + 100)
    loop = Loop(tmp_path, run, **options)
    assert loop.keep(len(expected)) == expected
    loop.check()


def test_nothing_is_recorded_before_a_save_of_another_tree_or_without_a_recorder(tmp_path, caplog):
    run = support.dict_run(support.mesh_of((1, 1)))
    assert not adacheck.AdaCheckHandler(run.recorder).record_step(run.state)
    loop = Loop(tmp_path, run)
    loop.train()
    assert not loop.record()
    assert loop.keep(6) == "srrrrr"
    assert not loop.handler.record_step({**loop.train(), "more": jnp.ones(2)})
    loop.manager.close()
    assert "Recorded steps that are not saved: 3 to 7; a manager is closed." in caplog.text
    with support.manager_of(tmp_path / "other", handler := adacheck.AdaCheckHandler()) as manager:
        manager.save(1, args=adacheck.SaveArgs({"w": jnp.ones(3)}))
        assert not handler.record_step({"w": jnp.ones(3)})


def test_steps_are_numbered_by_the_caller_or_one_after_another(tmp_path, loop):
    loop.number = 9
    loop.save()
    assert loop.record(), "it is saved already"
    for number, is_given in ((11, False), (15, True), (15, True), (16, False)):
        if number != loop.number:
            loop.train()
        loop.number = number
        assert loop.record() if is_given else loop.handler.record_step(loop.run.state)
        loop.note()
    with pytest.raises(ValueError, match="expected a step after 16, the last one, found 4"):
        loop.handler.record_step(loop.run.state, 4)
    loop.put()
    assert loop.check() == "BR"
    assert recorded_in(tmp_path, 16) == [11, 15]
    assert all(each.has_update for each in manifest_of(tmp_path, 16).deltas)


def test_steps_of_several_lines_are_an_error(tmp_path, loop):
    with support.manager_of(tmp_path / "b", loop.handler) as manager:
        manager.save(1, args=adacheck.SaveArgs(loop.run.state))
        loop.save()
        with pytest.raises(ValueError, match="one line of steps, found 2"):
            loop.record()
    loop.manager.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_another_state_of_a_saved_step_is_an_error(loop, restarts):
    loop.save()
    if restarts:
        loop.reopen()
    assert loop.record()
    other = {**loop.run.state, "params": jax.tree.map(lambda x: x + 1, loop.run.state["params"])}
    with pytest.raises(ValueError, match=r"step 1 as it was saved, .* and other bits in"):
        loop.handler.record_step(other, 1)
    loop.train()
    with pytest.raises(ValueError, match="step 1 as it was saved, with 1 updates, found"):
        loop.handler.record_step(loop.run.state, 1)
    assert loop.record()
    loop.save()
    loop.check()


def test_a_number_that_another_state_was_recorded_with_is_told(loop, caplog):
    """A loop that records the state that it has just saved counts one too many."""
    loop.save()
    for number in (2, 3, 4):
        loop.number = number
        assert loop.handler.record_step(loop.run.state)
        loop.note()
        loop.run.advance()
    loop.put()
    assert loop.check() == "BD"
    assert "Step 4 was recorded with 3 updates and is saved with 4" in caplog.text


# --- states that no update explains -------------------------------------------------------------

COUNT = "opt_state/1/adacheck_inner/0/count"


@pytest.mark.first(1, slow=2)
@pytest.mark.parametrize("what", ["an older state", "an update that was not recorded"])
def test_a_save_after_recorded_steps_is_a_delta_whatever_it_holds(tmp_path, what):
    """So that these have a place; it compares with nothing, not even what no update explains."""
    loop = Loop(tmp_path, support.nnx_run(support.mesh_of((1, 1))))
    assert loop.keep(4) == "srrr"
    if what == "an older state":
        old = jax.tree.map(jnp.copy, loop.run.state)
        assert loop.keep(2) == "rr"
        loop.run.state = old
        loop.number += 1
    else:
        jax.block_until_ready(loop.train(2))
        assert not loop.record()
    number = loop.number
    loop.put()
    loop.save()
    assert loop.check() == "BDR"
    found = manifest_of(tmp_path, number)
    assert len(found.stored) == len(jax.tree.leaves(loop.run.state))
    assert not any(
        ENCODINGS[letter].needs_old for letter in map(Encoding, found.packs[0].encodings)
    )


@pytest.mark.slow
def test_a_counter_that_was_set_by_hand_behind_recorded_steps_is_stored(tmp_path, loop):
    assert loop.keep(4) == "srrr"
    loop.train()
    loop.edit(COUNT, lambda x: x + 7)
    loop.put()
    loop.save()
    assert loop.check() == "BRR"
    assert (loop.unreplayed(5), loop.unreplayed(6)) == ({COUNT}, set())
    assert COUNT in loop.stored(5)
    assert COUNT in manifest_of(tmp_path, 6).caution.reason


def test_a_step_without_an_update_is_recorded(tmp_path):
    recorder = adacheck.Recorder(optax.sgd(1e-2))
    chain = optax.MultiSteps(recorder, 2)
    params = {"w": jnp.arange(64.0).reshape(8, 8)}

    @jax.jit
    def advance(state, _):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt = chain.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    run = support.Run(recorder, {"params": params, "opt": chain.init(params)}, advance)
    loop = Loop(tmp_path, run, params_path="params")
    assert loop.keep(7) == "srrrrrr"
    loop.put()
    loop.save(3)
    support.wait_for_compilers()
    with computing():  # an update, or none: it is told in the background
        assert loop.keep(2) == "rr"
        for _ in range(2):
            loop.train()
            loop.put()
        loop.manager.wait_until_finished()
    loop.check()
    found = [each.has_update for each in manifest_of(tmp_path, 7).deltas]
    assert {*found} == {True, False}


def test_an_edited_step_takes_none_of_the_recorded_ones_before_it_along(tmp_path, loop):
    """A swap of params for an evaluation, say, behind the update counter's back."""
    assert loop.keep(4) == "srrr"
    loop.edit("params/in/kernel", lambda x: x + 1)
    loop.number += 1
    assert loop.record()  # it has no update, so that nothing is replayed
    with pytest.raises(adacheck.AdaCheckError, match=r"not saved: 5, .*kernel changed without"):
        loop.put_and_wait()
    loop.forget(5)
    loop.train()
    loop.save()
    loop.check()
    assert holders(tmp_path)[4] > 4, "the steps before are written with the next one"


# --- looks at other steps -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 2])
def test_a_look_at_an_older_step_loses_nothing(step, tmp_path, loop):
    """Through a manager of its own, which is closed before the run is saved."""
    assert loop.keep(3) == "srr"
    loop.put()
    assert loop.keep(3) == "rrr"
    loop.manager.wait_until_finished()
    with support.manager_of(tmp_path, loop.handler) as another:
        args = adacheck.RestoreArgs(support.abstract(loop.run.state), step=step)
        another.restore(3 if step else 1, args=args)
    assert loop.keep() == "s"
    loop.check()
    assert recorded_in(tmp_path, 7) == [4, 5, 6]


def test_a_look_at_the_next_number_while_steps_are_recorded_loses_nothing(loop):
    """A run that went back to step 2 looks at the step 5 of its other line."""
    target = adacheck.RestoreArgs(support.abstract(loop.run.state))
    loop.save(5)
    loop.reopen(2)
    loop.run.count = 100  # other batches
    assert loop.keep(2) == "rr"
    loop.train()
    loop.manager.restore(5, args=target)
    assert not loop.record(), "where it answers False the caller saves"
    loop.train()
    loop.put(force=True)
    loop.manager.wait_until_finished()
    loop.forget(5)  # that of the other line is all there is
    for step in (3, 4, 6):
        state, _ = restored(loop.root, 6, support.abstract(loop.run.state), step=step)
        support.assert_same_bits(state, loop.states[step])
    loop.manager.close()


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_that_cannot_be_looked_at_loses_nothing_in_silence(loop, monkeypatch, is_known):
    """It is told of, and the steps after it go on."""
    bring, failing, told = pending.Pending._bring, [True], []

    def fails(self):
        if self.step == 3 and failing:
            failing.clear()
            raise MemoryError("no room")
        bring(self)

    monkeypatch.setattr(pending.Pending, "_bring", fails)
    with computing(not is_known):
        loop.save()
        for _ in range(5):
            try:
                loop.keep()
            except adacheck.AdaCheckError as error:
                told.append(str(error))
                for step in range(3, loop.number + 1):  # the later it is found, the more follow it
                    loop.states.pop(step, None)
            loop.handler.run.lines.only[1].finish()  # so that the next step knows of it
        for _ in range(2):
            loop.train()
            loop.put(force=True)
            loop.manager.wait_until_finished()
    assert not failing
    (message,) = told
    assert "not saved: 3" in message
    assert "MemoryError: no room" in message
    loop.check()


def test_a_save_that_fails_takes_the_recorded_steps_with_it_and_the_next_is_a_base(
    tmp_path, loop, monkeypatch
):
    may_fail = threading.Event()

    def full(*_):
        may_fail.wait(60)
        raise OSError(28, "No space left on device")

    assert loop.keep(4) == "srrr"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_pack", full)
        loop.train()
        loop.put()
        assert loop.keep() == "r", "the failure is not known yet"
        may_fail.set()
        loop.fail(StorageError, "No space left", 2, 3, 4, 5, 6)
    assert not loop.record(), "it is not saved, nor recorded"
    loop.save()
    assert loop.keep(2) == "rr"
    loop.put()
    assert loop.check() == "BBR"


def test_no_step_is_recorded_behind_a_save_that_was_refused(tmp_path, loop, monkeypatch):
    """Of several processes none would see that it is two updates from the last."""
    with computing():
        loop.save()
        loop.train()
        with monkeypatch.context() as patch:
            patch.setattr(directories, "_why_unwritable", lambda _: "it is read-only")
            with pytest.raises(StorageError, match="read-only"):
                loop.put()
        loop.forget()
        loop.manager.reload()
        assert loop.keep() == "s"
        loop.manager.wait_until_finished()
        assert loop.keep(2) == "rr"
        loop.train()
        loop.put(force=True)
    loop.check()
    assert recorded_in(tmp_path, 6) == [4, 5]


def test_a_gap_that_was_not_seen_in_time_is_an_error(loop):
    loop.save(3)
    support.wait_for_compilers()
    with computing():
        jax.block_until_ready(loop.train(2))
        assert loop.record()
        loop.train()
        with pytest.raises(adacheck.AdaCheckError, match="recorded step 4: expected one update"):
            loop.put_and_wait()  # it is told by either
        loop.forget(4, 5)
        loop.manager.reload()
    loop.save(2)
    assert loop.check() == "BRRBR"


# --- saves at an interval -----------------------------------------------------------------------


def test_every_step_of_a_run_that_saves_at_intervals_is_recorded_or_saved(tmp_path, caplog):
    """Of a resumed run too."""
    loop = Loop(tmp_path, manager={"save_interval_steps": 5})
    loop.number = -1
    for step in range(12):
        if step == 6:
            loop.manager.wait_until_finished()
            loop.reopen()
        loop.train()
        is_recorded = loop.record()
        assert is_recorded == (step > 0)  # there is nothing yet that the first one follows
        loop.note()
        args = adacheck.SaveArgs(loop.run.state)
        saved = loop.manager.save(step, args=args, force=not is_recorded)
        assert saved == (step % 5 == 0)
    loop.put(force=True)  # the last is in memory
    assert loop.check() == "BRRR"
    assert not [r for r in caplog.records if r.name.startswith("adacheck") and r.levelno > 20]


def test_a_step_that_is_neither_recorded_nor_saved_is_told_once(tmp_path, caplog):
    loop = Loop(tmp_path, max_deltas=2, manager={"save_interval_steps": 5})
    loop.number = -1
    with loop:
        for step in range(6):
            loop.train()
            if not loop.record():  # else the interval refuses it
                loop.manager.save(step, args=adacheck.SaveArgs(loop.run.state))
    (told,) = [r.getMessage() for r in caplog.records if "neither" in r.getMessage()]
    assert told.startswith("Step 2 was neither recorded nor saved: record_step answered False")
    assert "max_deltas=2" in told
    assert "force=True" in told


# --- restoring ----------------------------------------------------------------------------------


@pytest.fixture
def saved(loop):
    """A run of which steps 1, 7 and 10 were saved, and all others recorded."""
    loop.keep(7)
    loop.put()
    loop.keep(3)
    loop.put()
    loop.manager.close()
    return loop


@pytest.mark.first(1)
@pytest.mark.parametrize("step", [9, 7, 1], ids=["recorded", "saved", "the base"])
def test_behind_a_restored_step_the_next_save_is_a_base(step, saved):
    saved.open()
    args = adacheck.RestoreArgs(support.abstract(saved.run.state), step=step)
    saved.run.state = saved.manager.restore(10, args=args)
    support.assert_same_bits(saved.run.state, saved.states[step])
    assert saved.keep() == "s"
    assert saved.check() == "BRRB"


def test_a_step_that_another_save_holds_is_named_in_the_error(tmp_path, saved):
    target = support.abstract(saved.run.state)
    with pytest.raises(LineageError, match=r"found the steps 1 to 7\. Restore it from step 10\."):
        restored(tmp_path, 7, target, step=9)
    with pytest.raises(LineageError, match="expected step 99 in what was saved there"):
        restored(tmp_path, 10, target, step=99)


def damage_end(directory):
    """Changes a byte of what is stored of the last step."""
    size_bytes = manifest_file.read(directory).packs[0].raw_bytes
    pack = delta_reader.readers_of(lookup.resolve(directory))[-1]._pack(0, arrays.RAW)
    (end,) = pack.read([(size_bytes - 64, size_bytes)], what="the end")
    (path,) = (path for path in support.pack_files(directory) if end.tobytes() in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(end.tobytes())] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_run_falls_back_to_what_is_whole(tmp_path, caplog, monkeypatch):
    for name in ("RAW", "COMPRESSED"):  # several chunks a step
        kind = dataclasses.replace(getattr(arrays, name), max_chunk_bytes=1 << 13)
        monkeypatch.setattr(arrays, name, kind)
    loop = Loop(tmp_path)
    loop.keep(9)
    loop.put()
    loop.manager.close()
    damage_end(item(tmp_path, 9))
    target = support.abstract(loop.run.state)
    with pytest.raises(IntegrityError):
        restored(tmp_path, 9, target)
    with caplog.at_level(logging.WARNING):
        state, told = restored(tmp_path, 9, target, skip_damaged=True)
    assert told.step == 8
    assert "Restored step 8 instead of step 9" in caplog.text
    support.assert_same_bits(state, loop.states[8])
    state, _ = restored(tmp_path, 9, target, skip_damaged=True, step=7)
    support.assert_same_bits(state, loop.states[7])


def of_command(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "120"})


def test_a_run_is_verified_and_shown_and_what_is_wrong_is_found(tmp_path, loop):
    loop.keep(8)
    loop.put()
    loop.manager.close()
    thorough = of_command("verify", tmp_path, "--replay")
    assert thorough.exit_code == 0, thorough.output
    assert "6 deferred" in of_command("ls", tmp_path).output
    assert "steps 2 to 7" in of_command("inspect", tmp_path, 8).output
    told = json.loads(of_command("inspect", tmp_path, 5, "--json").output)
    assert (told["step"], told["kind"], told["base"], told["depth"]) == (5, "deferred", 1, 4)
    assert (told["reason"], told["replayed_count"], told["recorded"]) == ("one update", 4, [])
    told = json.loads(of_command("ls", tmp_path, "--json").output)
    assert told["steps"][-1]["recorded"] == [2, 3, 4, 5, 6, 7]
    found = manifest_of(tmp_path, 8)
    first, *rest = found.recorded
    other = dataclasses.replace(first, fingerprints=(1, *first.fingerprints[1:]))
    manifest_file.write(item(tmp_path, 8), dataclasses.replace(found, recorded=(other, *rest)))
    assert of_command("verify", tmp_path, "--replay").exit_code == 1
    target = support.abstract(loop.run.state)
    with pytest.raises(IntegrityError, match="leaves of step 2 do not have the bits"):
        restored(tmp_path, 8, target, step=2)
    restored(tmp_path, 8, target, step=3)
    manifest_file.write(item(tmp_path, 8), found)
    damage_end(item(tmp_path, 8))
    assert of_command("verify", tmp_path, "--read-data").exit_code == 1


# --- memory, processes, keys --------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize("more", [{}, {"seed": np.arange(4)}], ids=["devices", "and the host"])
def test_a_step_is_let_go_of_as_it_is_packed(more, loop, monkeypatch):
    """A run is as large as memory allows: it and all its packs do not fit."""
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
    with loop:
        args = lambda: adacheck.SaveArgs({**loop.train(), **more})  # noqa: E731
        loop.manager.save(1, args=args())
        for step in range(2, 8):
            assert loop.handler.record_step({**loop.train(), **more}, step)
        loop.manager.save(8, args=args())
    assert len(held) > 7
    # Those of the last step are what the next one is compared with.
    assert alive
    assert alive[0] <= len(held) // 7


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 2)])
def test_several_processes_record_alike(tmp_path, processes, devices):
    launch("record", 2, tmp_path / "run", tmp_path / "out", devices=2)
    assert [step.step for step in roots.steps_of(tmp_path / "run")] == [1, 6, 9]
    assert recorded_in(tmp_path / "run", 6) == [2, 3, 4, 5]
    assert len(manifest_of(tmp_path / "run", 6).packs) == 2
    launch("restore-recorded", processes, tmp_path / "run", tmp_path / "again", devices)
    for step in (4, 8):
        found = leaves(tmp_path / f"again-restored{step}.npz")
        assert found == leaves(tmp_path / f"out-saved{step}.npz")


def test_a_typed_key_keeps_no_step_from_being_recorded(tmp_path):
    """JAX places its elements now by P(), now by P(None), which are the same."""
    whole = jax.NamedSharding(support.mesh_of((2, 4)), jax.P())
    recorder = adacheck.Recorder(optax.sgd(0.1, 0.9))
    params = {"w": jnp.ones((8, 8))}
    state = {"params": params, "opt_state": recorder.init(params), "key": jax.random.key(0)}

    @functools.partial(jax.jit, out_shardings=whole)
    def step_of(state, _):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.split(state["key"])[0]
        return {"params": params, "opt_state": opt_state, "key": key}

    run = support.Run(recorder, jax.device_put(state, whole), step_of)
    loop = Loop(tmp_path, run)
    loop.save(2)
    assert loop.keep(4) == "rrrr"
    loop.put()
    loop.check()


@pytest.mark.slow
def test_copies_of_what_separate_update_returned_are_saved_and_not_recorded(tmp_path):
    """Nothing but a save sees the whole state."""
    run: Any = separate_run(support.mesh_of((1, 1)), optax.contrib.muon(1e-2))
    loop, devices = Loop(tmp_path, run), run.train_step
    run.train_step = lambda state, data: jax.device_get(devices(jax.device_put(state), data))
    assert loop.keep(3)[:2] == "ss"
    loop.put(force=True)
    loop.manager.close()
    where = holders(tmp_path)
    for step, expected in loop.states.items():
        options = {} if where[step] == step else {"step": step}
        found, _ = restored(tmp_path, where[step], loop.run.state, **options)
        support.assert_same_bits(found, expected)
