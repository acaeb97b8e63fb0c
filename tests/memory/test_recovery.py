"""A process that was killed gets its state back from memory: whole and exact, or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter.arguments import RestoreInfo
from adacheck_jax.device import transfer
from adacheck_jax.memory.files import shadow_file, step_file
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.shadow_file import ShadowFile
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.holdings import Held
from adacheck_jax.update import program
from adacheck_jax.update.elements import host_fold
from tests import support
from tests.save.test_checks import assert_all_restorable, deltas_of, kinds
from tests.support import host_copy, manager_of, mesh_of, save_steps

CHUNKS = 17
"""Chunks that an update of the usual run computes."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 1024)


@pytest.fixture
def memory(tmp_path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


def handler_of(
    recorder: Any,
    memory: Path,
    *,
    follows: bool = True,
    most_bytes: int | None = None,
    records: Literal[True] | None = None,
    **options: Any,
) -> adacheck.AdaCheckHandler:
    directory = memory if follows else None
    shadow = adacheck.Shadow(directory=directory, bytes=most_bytes, records=records)
    return adacheck.AdaCheckHandler(recorder, shadow=shadow, **options)


def file_of(memory: Path) -> Path:
    (path,) = memory.iterdir()
    return path


def told(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [x for x in caplog.records if "not recovered" in x.getMessage()]
    return record.getMessage()


def assert_same(found: Any, expected: Any) -> None:
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(transfer.raw(leaf)) for leaf in pair)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def trained(
    root: Path, memory: Path, count: int = 3, **options: Any
) -> tuple[support.Run, dict[int, Any]]:
    """A run that saved some steps, and ended; its states."""
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(root, handler_of(run.recorder, memory, **options)) as manager:
        saved = save_steps(manager, run, count)
    return run, saved


def recovered(recorder: Any, root: Path, memory: Path, state: Any) -> tuple[int, Any] | None:
    """The step that a new process recovers; None where it is refused."""
    handler = handler_of(recorder, memory)
    try:
        return handler.recover(root, state)
    finally:
        handler.close()


def recovered_run(run: support.Run, root: Path, memory: Path) -> tuple[int, Any] | None:
    return recovered(run.recorder, root, memory, support.abstract(run.state))


def wait_for_shadow(handler: adacheck.AdaCheckHandler) -> None:
    (saver,) = handler._run.lines._savers.values()
    saver._stager.finish()  # the line's worker, which gives the shadow its steps
    saver._shadow._thread.submit(int).result()


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("shape", [(1, 1), (4, 2)], ids=["one device", "eight devices"])
def test_the_next_save_after_a_recovery_is_a_delta_of_the_newest_step(root, memory, shape):
    run = support.dict_run(mesh_of(shape))
    with manager_of(root, handler_of(run.recorder, memory)) as manager:
        saved = save_steps(manager, run, 3)
    handler = handler_of(run.recorder, memory)
    with manager_of(root, handler) as manager:
        found = handler.recover(root, support.abstract(run.state))
        assert found is not None
        assert found[0] == 3
        assert handler.restored is not None
        assert handler.restored.exact
        assert_same(found[1], saved[3])
        run.state = found[1]
        saved |= save_steps(manager, run, 2)
    assert kinds(root) == ["B", "R", "R", "R", "R"]
    assert [each.checked for each in deltas_of(root).values()] == ["full"] * 4
    assert_all_restorable(root, saved, run.state, mesh_of((2, 2)))


def test_a_recorded_step_is_recovered_and_the_next_save_is_a_base(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run.recorder, memory)
    with manager_of(root, handler) as manager:
        save_steps(manager, run, 2)
        for _ in range(3):
            run.advance()
            assert handler.record_step(run.state, run.count)
        expected = host_copy(run.state)
    handler = handler_of(run.recorder, memory)
    with manager_of(root, handler) as manager:
        found = handler.recover(root, run.state)  # of arrays, as a resume block may have them
        assert found is not None
        assert found[0] == 5
        assert_same(found[1], expected)
        run.state = found[1]
        saved = save_steps(manager, run, 2)
    assert kinds(root) == ["B", "R", "B", "R"]
    assert_all_restorable(root, saved, run.state)
    found = recovered_run(run, root, memory)
    assert found is not None
    assert found[0] == 7
    assert_same(found[1], saved[7])


def test_a_state_is_recovered_onto_another_mesh(root, memory):
    run, saved = trained(root, memory)
    other = support.abstract(run.state, mesh_of((2, 2)))
    found = recovered(run.recorder, root, memory, other)
    assert found is not None
    assert_same(found[1], saved[3])
    shardings = [jax.tree.map(lambda x: x.sharding, tree) for tree in (found[1], other)]
    assert shardings[0] == shardings[1]


def stop(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int, *, after: bool
) -> tuple[support.Run, dict[int, Any]]:
    """A run that ends in the shadow's work for step 3, after two saved ones; its states.

    Args:
        root: of the checkpoints.
        memory: directory of the shadow.
        monkeypatch: the fixture.
        name: method of the journal in which it ends.
        at: number of the call in which it ends.
        after: whether that call is made.
    """
    run = support.dict_run(mesh_of((1, 1)))
    handler, calls, inner = handler_of(run.recorder, memory), [0], getattr(Journal, name)

    def ends(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] < at or (after and calls[0] == at):
            inner(*args, **options)
        if calls[0] >= at:
            raise RuntimeError("the process ends here")

    with manager_of(root, handler) as manager:
        states = save_steps(manager, run, 2)
        wait_for_shadow(handler)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, name, ends)
            run.advance()
            states[3] = host_copy(run.state)
            assert handler.record_step(run.state, run.count)
            wait_for_shadow(handler)
    assert calls[0] == at
    return run, states


@pytest.mark.first(3)
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("at", [9, 1, CHUNKS + 1, *range(2, 9), *range(10, CHUNKS + 1)])
def test_a_fold_that_was_stopped_at_any_chunk_is_gone_on_with(root, memory, monkeypatch, at, after):
    """The first note comes with the header, and one after each chunk."""
    run, states = stop(root, memory, monkeypatch, "note", at, after=after)
    counts, note = list[int](), Journal.note
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", lambda self, n: (counts.append(n), note(self, n)))
        found = recovered_run(run, root, memory)
    assert found is not None
    assert found[0] == 3
    assert_same(found[1], states[3])
    done = at - 1 if after else max(at - 2, 0)
    assert counts == [*range(done + 1, CHUNKS + 1)]


@pytest.mark.parametrize(
    ("name", "after"), [("receive", False), ("receive", True), ("begin", False)]
)
def test_before_its_header_a_step_is_the_one_before(root, memory, monkeypatch, name, after):
    run, states = stop(root, memory, monkeypatch, name, 1, after=after)
    found = recovered_run(run, root, memory)
    assert found is not None
    assert found[0] == 2
    assert_same(found[1], states[2])


def test_a_recovery_that_is_killed_is_made_again(root, memory, monkeypatch):
    run, states = stop(root, memory, monkeypatch, "note", 4, after=True)
    note = Journal.note

    def ends(self: Journal, count: int) -> None:
        note(self, count)
        if count == 9:
            raise RuntimeError("the process ends here")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", ends)
        with pytest.raises(RuntimeError, match="ends here"):
            recovered_run(run, root, memory)
    for _ in range(2):
        found = recovered_run(run, root, memory)
        assert found is not None
        assert found[0] == 3
        assert_same(found[1], states[3])


def test_a_header_that_is_torn_at_any_byte_is_the_one_before(tmp_path):
    file = ShadowFile(tmp_path / "file", 100, 3000, 100)
    file.create({})
    headers = [{"step": n, "sums": [n * 7919**k for k in range(9)]} for n in range(4)]
    for number, header in enumerate(headers[:3]):
        file.write_header(number, header)
    place = file._place(3 % 2)
    before = place.copy()
    file.write_header(3, headers[3])
    after, (last, one_before) = place.copy(), file.headers()
    assert (last["step"], one_before["step"]) == (3, 2)
    length = 1 + int(np.flatnonzero(before != after)[-1])
    for count in range(length):
        place[:count], place[count:] = after[:count], before[count:]
        assert [each["step"] for each in file.headers()] in ([2, 1], [2])
    file.close()


@pytest.mark.slow
def test_damage_anywhere_is_refused_or_harms_nothing(root, memory, caplog):
    run, saved = trained(root, memory)
    path = file_of(memory)
    whole = path.read_bytes()
    rng, results = np.random.default_rng(0), []
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    first = [0, 16, 30, *np.flatnonzero(np.frombuffer(whole[:40000], np.uint8))[-40::10]]
    for at in [*first, *rng.choice(used, 12)]:
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        found = recovered_run(run, root, memory)
        results.append(found is not None)
        if found is not None:
            assert_same(found[1], saved[3])
    assert {*results} == {False, True}
    assert "does not have the bits that were trained, in " in caplog.text
    path.write_bytes(whole)
    assert recovered_run(run, root, memory) is not None


def forget_boot(monkeypatch, run, root, memory):
    monkeypatch.setattr(step_file, "boot", lambda: "another")


def change_settings(monkeypatch, run, root, memory):
    monkeypatch.setattr(program, "environment", lambda: {"XLA_FLAGS": "--xla_cpu_something"})


def change_update(monkeypatch, run, root, memory):
    run.recorder = support.dict_run(mesh_of((1, 1)), optax.adamw(3e-2)).recorder


def change_optimizer(monkeypatch, run, root, memory):
    other = support.dict_run(mesh_of((1, 1)), optax.contrib.muon(1e-2))  # of no copy on the host
    run.recorder, run.state = other.recorder, other.state


def change_leaves(monkeypatch, run, root, memory):
    run.state = {**run.state, "more": jnp.zeros(3)}


def change_chunks(monkeypatch, run, root, memory):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 2048)


def cut_off(monkeypatch, run, root, memory):
    os.truncate(file_of(memory), file_of(memory).stat().st_size - 4096)


def cut_to_nothing(monkeypatch, run, root, memory):
    os.truncate(file_of(memory), 10)


def move_root(monkeypatch, run, root, memory):
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))


def save_on_without_it(monkeypatch, run, root, memory):
    with manager_of(root, handler_of(run.recorder, memory, follows=False)) as manager:
        manager.restore(3, args=adacheck.RestoreArgs(support.abstract(run.state)))
        save_steps(manager, run, 1)


def save_something_else(monkeypatch, run, root, memory):
    shutil.rmtree(root / "3")
    run.state = {**run.state, "step": run.state["step"] + 7}
    with manager_of(root, handler_of(run.recorder, memory, follows=False)) as manager:
        manager.save(3, args=adacheck.SaveArgs(run.state))


def take_in_another_process(monkeypatch, run, root, memory):
    descriptor = os.open(file_of(memory), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forget_boot, "the machine was started anew since"),
        (change_settings, "its process had other settings of arithmetic"),
        (change_update, "its update is another one: another optimizer"),
        (change_optimizer, "its state has other leaves: another model, or another optimizer"),
        (change_leaves, "its state has other leaves"),
        (change_chunks, "its elements lie in another order"),
        (cut_off, "it was cut off"),
        (cut_to_nothing, "has no states of"),
        (move_root, "has no states of .*elsewhere; there are some of .*root"),
        (save_on_without_it, "it is of step 3, and storage has step 4"),
        (save_something_else, "storage has another state as step 3"),
        (take_in_another_process, "another process that runs"),
    ],
)
def test_what_is_of_something_else_is_refused_and_says_why(
    root, memory, monkeypatch, caplog, change, reason
):
    run, _ = trained(root, memory)
    with monkeypatch.context() as patch:
        change(patch, run, root, memory)
        assert recovered_run(run, root, memory) is None
    assert re.search(reason, told(caplog))


def test_a_file_of_records_that_was_cut_off_is_told_as_such(root, memory, caplog):
    run, _ = trained(root, memory, records=True)
    cut_off(None, run, root, memory)
    assert recovered_run(run, root, memory) is None
    assert "it was cut off" in told(caplog)


def test_a_file_that_was_cut_off_at_its_beginning_is_named(root, memory, caplog):
    run, _ = trained(root, memory)
    cut_to_nothing(None, run, root, memory)
    assert recovered_run(run, root, memory) is None
    assert f"{file_of(memory)}: its part of the state is not taken: it does not" in caplog.text


def test_a_file_that_is_of_another_user_is_refused(root, memory, monkeypatch, caplog):
    run, _ = trained(root, memory)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert recovered_run(run, root, memory) is None
    assert "expected a file of this user's" in told(caplog)


def test_the_file_is_the_users_own_and_stays(root, memory):
    trained(root, memory)
    path = file_of(memory)
    assert path.name == "default.0.adacheck-shadow"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700


def test_a_run_of_another_state_takes_the_file(tmp_path, root, memory):
    trained(root, memory)
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"a": jnp.ones((90, 80))}
    state, root = {"params": params, "opt": recorder.init(params)}, tmp_path / "other"
    with manager_of(root, handler_of(recorder, memory)) as manager:
        manager.save(1, args=adacheck.SaveArgs(state))
    found = recovered(recorder, root, memory, state)
    assert found is not None
    assert_same(found[1], state)
    assert len([*memory.iterdir()]) == 1


def not_a_file(monkeypatch, memory):
    (memory / "default.0.adacheck-shadow").mkdir(parents=True)


def full(monkeypatch, memory):
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shadow_file.os, "posix_fallocate", fails)


def taken(monkeypatch, memory):
    memory.mkdir()
    descriptor = os.open(memory / "default.0.adacheck-shadow", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_a_file, "Is a directory"),
        (full, "No space left"),
        (taken, "another process"),
    ],
)
def test_without_a_file_the_shadow_lies_in_memory_of_the_process(
    root, memory, monkeypatch, caplog, spoil, reason
):
    spoil(monkeypatch, memory)
    run, _ = trained(root, memory)
    assert [each.checked for each in deltas_of(root).values()] == ["full"] * 2
    (record,) = [r for r in caplog.records if "ends with this process" in r.getMessage()]
    assert reason in record.getMessage()
    assert spoil is not full or not [*memory.iterdir()]
    assert recovered_run(run, root, memory) is None


def test_a_leaf_that_replay_gets_wrong_is_recovered(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run.recorder, memory)
    with manager_of(root, handler) as manager:
        save_steps(manager, run, 2)
        for _ in range(2):
            run.advance()
            run.state["params"]["in"]["kernel"] *= 1.5
            jax.block_until_ready(run.state)  # so that it is stored
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
        last = host_copy(run.state)
        assert deltas_of(root)[4].unreplayed
        handler.close()
        found = recovered_run(run, root, memory)
        assert found is not None
        assert found[0] == 4
        assert_same(found[1], last)


def test_a_leaf_that_is_put_over_the_copy_as_it_lies_has_a_moment_without_a_step(
    root, memory, monkeypatch, caplog
):
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run.recorder, memory)

    def ends(*_: Any, **__: Any) -> None:
        raise RuntimeError("the process ends here")

    with manager_of(root, handler) as manager:
        save_steps(manager, run, 2)
        run.advance()
        run.state["params"]["in"]["kernel"] *= 1.5
        jax.block_until_ready(run.state)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "begin", ends)
            manager.save(3, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            wait_for_shadow(handler)
    assert recovered_run(run, root, memory) is None
    assert "its process ended while it took a whole state" in told(caplog)


@pytest.mark.slow
def test_a_state_of_all_kinds_of_leaves_is_recovered(root, memory):
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    recorder = adacheck.Recorder(tx)
    params = {"w": jnp.ones((70, 90)), "b": jnp.zeros(3), "scale": jnp.ones(())}

    def begin():
        return {
            "params": params,
            "opt": recorder.init(params),
            "keys": jax.random.split(jax.random.key(5), 3),
            "low": jnp.arange(11, dtype=jnp.bfloat16),
            "flags": jnp.array([True, False]),
            "empty": jnp.zeros((0, 4)),
            "host": np.arange(4.0),
            "number": 0,
        }

    @jax.jit
    def step(params, opt, rate):
        rates = {**opt.adacheck_inner.hyperparams, "learning_rate": rate}
        inner = opt.adacheck_inner._replace(hyperparams=rates)
        opt = opt._replace(adacheck_inner=inner)
        updates, opt = recorder.update(jax.tree.map(jnp.cos, params), opt, params)
        return optax.apply_updates(params, updates), opt

    state = begin()
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )
    with manager_of(root, handler_of(recorder, memory)) as manager:
        for number in range(1, 5):
            state["params"], state["opt"] = step(
                state["params"], state["opt"], jnp.float32(1e-2 / number)
            )
            state["keys"] = jax.random.split(state["keys"][0], 3)
            state["low"] = state["low"] + 1
            state["host"], state["number"] = state["host"] * 2, number
            manager.save(number, args=adacheck.SaveArgs(state))
    assert kinds(root) == ["B", "R", "R", "R"]
    found = recovered(recorder, root, memory, abstract)
    assert found is not None
    assert found[0] == 4
    assert_same(found[1], state)
    assert jax.tree.map(type, found[1]) == jax.tree.map(type, state)
    assert found[1]["keys"].dtype == state["keys"].dtype


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("shape", [(1, 1), (4, 2)], ids=["one device", "eight devices"])
def test_a_python_number_that_became_an_array_is_recovered_as_a_number(root, memory, shape):
    run = support.dict_run(mesh_of(shape))
    state = {**support.dict_run(mesh_of(shape)).state, "step": 0}  # as TrainState.create makes it
    with manager_of(root, handler_of(run.recorder, memory)) as manager:
        save_steps(manager, run, 3)
    handler = handler_of(run.recorder, memory)
    with manager_of(root, handler) as manager:
        found = handler.recover(root, state)
        assert found is not None
        assert type(found[1]["step"]) is int
        assert found[1]["step"] == 3
        assert_same({**found[1], "step": run.state["step"]}, run.state)
        run.state = {**found[1], "step": jnp.int32(found[1]["step"])}
        saved = save_steps(manager, run, 2)
    assert_all_restorable(root, saved, run.state)


@pytest.mark.slow
def test_each_step_is_recovered_by_the_next_process_also_one_without_an_update(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    expected = None
    for number in range(1, 7):
        handler = handler_of(run.recorder, memory)
        with manager_of(root, handler) as manager:
            found = handler.recover(root, support.abstract(run.state))
            if found is not None:
                assert found[0] == number - 1
                assert_same(found[1], expected)
                run.state = found[1]
            if number in (3, 4):
                run.state["step"] += 5
            else:
                run.advance()
            expected = host_copy(run.state)
            assert (found is None) == (number == 1)
            manager.save(number, args=adacheck.SaveArgs(run.state))
    assert kinds(root) == [*"BRDDRR"]
    assert [each.checked for each in deltas_of(root).values()] == [
        *("full", "stored", "stored", "full", "full")
    ]


def test_who_wants_to_recover_is_told_that_there_is_no_shadow(root, memory, caplog):
    trained(root, memory, most_bytes=1000)
    (record,) = [r for r in caplog.records if "nothing can be recovered" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert not memory.exists()


@pytest.mark.slow
def test_a_handler_that_was_closed_goes_on(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run.recorder, memory, max_deltas=2)
    for _ in range(2):
        with manager_of(root, handler) as manager:
            save_steps(manager, run, 2)
    with manager_of(root, handler) as manager:
        saved = save_steps(manager, run, 4)
    # Until the next base there is none.
    checks = [each.checked for each in deltas_of(root).values()]
    assert checks == ["full", "sample", "sample", "sample", "full"]
    found = recovered_run(run, root, memory)
    assert found is not None
    assert found[0] == 8
    assert_same(found[1], saved[8])


def test_several_items_are_told_apart_by_their_names(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    states = {"one": run.state, "two": {**run.state, "step": run.state["step"] + 1}}
    handlers = {name: handler_of(run.recorder, memory) for name in states}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        args = {name: adacheck.SaveArgs(state) for name, state in states.items()}
        manager.save(1, args=ocp.args.Composite(**args))
    for name, state in states.items():
        handler = handler_of(run.recorder, memory)
        with pytest.raises(ValueError, match="those of one, two"):
            handler.recover(root, state)
        found = handler.recover(root, state, item=name)
        handler.close()
        assert found is not None
        assert_same(found[1], state)


def test_a_handler_without_a_directory_has_nothing_to_recover(root):
    with pytest.raises(ValueError, match="expected a handler whose shadow has a directory"):
        adacheck.AdaCheckHandler().recover(root, {})


@pytest.mark.parametrize("options", [{"delta": "bits"}, {"max_deltas": 0}], ids=str)
def test_a_directory_without_a_shadow_is_an_error(memory, options):
    recorder = adacheck.Recorder(optax.sgd(0.1))
    with pytest.raises(ValueError, match="there is no shadow to lie in it"):
        handler_of(recorder, memory, **options)


def test_a_directory_without_a_recorder_is_an_error(memory):
    with pytest.raises(ValueError, match="expected a recorder with Shadow"):
        handler_of(None, memory)


@pytest.mark.parametrize("directory", ["", 5, "gs://bucket/run"], ids=repr)
def test_a_directory_of_no_machine_is_an_error(directory):
    with pytest.raises(ValueError, match=r"Shadow\(directory=...\) to be a directory of this"):
        handler_of(adacheck.Recorder(optax.sgd(0.1)), directory)


def test_an_item_that_is_not_there_is_named(root, memory, caplog):
    run, _ = trained(root, memory)
    handler = handler_of(run.recorder, memory)
    assert handler.recover(root, run.state, item="other") is None
    assert re.search(
        r"no states of item 'other' of .*root; .*root \(item 'default'\)", told(caplog)
    )


@pytest.mark.parametrize("items", [None, {"notes": ocp.JsonCheckpointHandler()}])
def test_one_call_restores_from_memory_or_else_from_storage(root, memory, items, caplog):
    run = support.dict_run(mesh_of((1, 1)))
    shadow = adacheck.Shadow(directory=memory)

    def manager() -> Any:
        return adacheck.checkpoint_manager(root, run.recorder, shadow=shadow, items=items)

    def args() -> Any:
        own = adacheck.SaveArgs(run.state)
        return own if items is None else ocp.args.Composite(state=own, notes=ocp.args.JsonSave({}))

    with manager() as own:
        assert own.restore_newest(support.abstract(run.state)) is None
        assert not [x for x in caplog.records if x.levelno >= logging.WARNING], (
            "it is the first run"
        )
        for step in (1, 2):
            run.advance()
            own.save(step, args=args())
        own.wait_until_finished()
        run.advance()
        assert own.handler.record_step(run.state, 3)
        wait_for_shadow(own.handler)
        expected = host_copy(run.state)
        own.handler.run.lines.only[1]._planner.line.give_up(0, "they are to be in memory alone")
    with manager() as own:
        step, state = own.restore_newest(support.abstract(run.state))
        assert (step, own.latest_step()) == (3, 2)
        assert own.handler.restored == RestoreInfo(3, 0, (), 0.0, source="memory")
        assert_same(state, expected)
    is_behind = "the other items are in storage, of step 2: 1 behind" in caplog.text
    assert is_behind == (items is not None)
    shutil.rmtree(memory)
    with manager() as own:
        step, _ = own.restore_newest(support.abstract(run.state))
        assert step == 2
        assert own.handler.restored.source == "storage"
    assert "has no states of" in told(caplog)  # storage has steps, and their memory is missing


@pytest.mark.parametrize("is_used", [False, True])
def test_files_of_an_earlier_run_make_room_unless_a_process_has_them(
    root, memory, monkeypatch, is_used
):
    earlier = FilePlace(str(memory), str(root), "default", "a run of two", 1, 2)
    told = {"format": step_file._FORMAT, "held": Held({}).to_json()}
    file = ShadowFile(earlier.path, 1 << 14, 1000, 1000)
    file.create(told | {name: getattr(earlier, name) for name in step_file._PLACE})
    if not is_used:
        file.close()
    allocate, refused = os.posix_fallocate, []

    def allocated(*args: Any) -> None:
        if earlier.path.exists() and not is_used:
            refused.append(args)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*args)

    monkeypatch.setattr(shadow_file.os, "posix_fallocate", allocated)
    run, saved = trained(root, memory)
    assert earlier.path.exists() == is_used
    assert len(refused) == (not is_used)
    file.close(remove=is_used)
    found = recovered_run(run, root, memory)
    assert found is not None
    assert_same(found[1], saved[3])
