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
from typing import Any

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
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.shadow_file import ShadowFile
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.holdings import Held
from adacheck_jax.update import program
from adacheck_jax.update.elements import host_fold
from tests import support
from tests.save.loop import Loop, checked, kinds
from tests.support import host_copy, manager_of, mesh_of

KERNEL = "params/in/kernel"
CHUNKS = 17
"""Chunks that an update of the usual run computes."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 1024)


KINDS = pytest.mark.parametrize("records", [None, True], ids=["state", "records"])
"""What lies in the files: the state, or a base and the records since it."""


class Memory(Loop):
    """A loop whose states lie in files of memory, too."""

    def __init__(self, path: Path, run: support.Run | None = None, **options: Any) -> None:
        """Settings of its shadow are among the options: records, bytes and directory."""
        self.memory, about = path / "memory", {"directory": path / "memory"}
        about |= {x: options.pop(x) for x in ("records", "bytes", "directory") if x in options}
        super().__init__(path / "root", run, shadow=adacheck.Shadow(**about), **options)

    def settle(self) -> None:
        """Waits until the shadow has what was saved and recorded."""
        wait_for_shadow(self.handler)

    def recovered(self, state: Any = None, *, mesh: Any = None) -> int | None:
        """The step that a new process recovers, with its bits; None where it is refused."""
        state = support.abstract(self.run.state, mesh) if state is None else state
        found = recovered(self.run.recorder, self.root, self.memory, state)
        if found is None:
            return None
        assert_same(found[1], self.states[found[0]])
        assert jax.tree.map(lambda x: x.sharding, found[1]) == jax.tree.map(
            lambda x: x.sharding, state
        )
        return found[0]

    def go_on(self) -> int | None:
        """Goes on in a new process from the step that it recovers, if there is one."""
        self.manager.close()
        self.open()
        found = self.handler.recover(self.root, support.abstract(self.run.state))
        if found is None:
            return None
        assert self.handler.restored is not None
        assert (self.handler.restored.exact, self.handler.restored.source) == (True, "memory")
        self.number, self.run.state = found
        assert_same(found[1], self.states[self.number])
        return self.number


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


def recovered(recorder: Any, root: Path, memory: Path, state: Any) -> tuple[int, Any] | None:
    """The step that a new process recovers; None where it is refused."""
    handler = adacheck.AdaCheckHandler(recorder, shadow=adacheck.Shadow(directory=memory))
    try:
        return handler.recover(root, state)
    finally:
        handler.close()


def wait_for_shadow(handler: adacheck.AdaCheckHandler) -> None:
    (saver,) = handler.run.lines._savers.values()
    saver.finish()  # the line's worker, which gives the shadow its steps
    saver._shadow._thread.submit(int).result()


@pytest.fixture
def trained(tmp_path: Path) -> Memory:
    """A run that saved three steps, and ended."""
    with Memory(tmp_path) as loop:
        loop.save(3)
    return loop


@pytest.mark.covering(1, quick=1)
@KINDS
@pytest.mark.parametrize("shape", [(4, 2), (1, 1)], ids=["eight devices", "one device"])
def test_the_next_save_after_a_recovery_is_a_delta_of_the_newest_step(tmp_path, shape, records):
    loop = Memory(tmp_path, support.dict_run(mesh_of(shape)), records=records)
    loop.save(3)
    for count in (2, 4):
        assert loop.go_on() == count + 1
        if records:
            assert loop.handler.restored.replayed_count == count
        loop.save(2)
    assert loop.check(mesh_of((2, 2))) == "BRRRRRR"
    assert checked(loop.root) == ["sample" if records else "full"] * 6


@KINDS
def test_a_recorded_step_is_recovered_on_any_mesh_and_the_next_save_is_a_base(tmp_path, records):
    loop = Memory(tmp_path, support.dict_run(mesh_of((4, 2))), records=records)
    loop.save(2)
    assert loop.keep(3) == "rrr"
    loop.settle()
    loop.handler.run.lines.only[1]._shadow.close()
    assert loop.recovered() == loop.recovered(mesh=mesh_of((2, 2))) == 5
    assert loop.recovered(loop.run.state) == 5  # of arrays, as a resume block may have them
    assert loop.go_on() == 5
    loop.save(2)
    loop.forget(3, 4, 5)
    assert loop.check() == "BRBR"
    assert loop.recovered() == 7


def stop(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at: int,
    *,
    after: bool,
    **options: Any,
) -> Memory:
    """A run that ends in the shadow's work for step 3, after two saved ones.

    Args:
        path: of its files.
        monkeypatch: the fixture.
        owner: class of the method in which it ends.
        name: the method.
        at: number of the call in which it ends.
        after: whether that call is made.
        options: those of the handler.
    """
    loop, calls, inner = Memory(path, **options), [0], getattr(owner, name)

    def ends(*args: Any, **given: Any) -> Any:
        calls[0] += 1
        if calls[0] < at or (after and calls[0] == at):
            inner(*args, **given)
        if calls[0] >= at:
            raise RuntimeError("the process ends here")

    with loop:
        loop.save(2)
        loop.settle()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, ends)
            assert loop.keep() == "r"
            loop.settle()
    assert calls[0] == at
    return loop


@pytest.mark.first(3)
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("at", [9, 1, CHUNKS + 1, *range(2, 9), *range(10, CHUNKS + 1)])
def test_a_fold_that_was_stopped_at_any_chunk_is_gone_on_with(tmp_path, monkeypatch, at, after):
    """The first note comes with the header, and one after each chunk."""
    loop = stop(tmp_path, monkeypatch, Journal, "note", at, after=after)
    counts, note = list[int](), Journal.note
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", lambda self, n: (counts.append(n), note(self, n)))
        assert loop.recovered() == 3
    done = at - 1 if after else max(at - 2, 0)
    assert counts == [*range(done + 1, CHUNKS + 1)]


@pytest.mark.parametrize(
    ("owner", "name", "after", "step"),
    [
        *((Journal, "receive", each, 2) for each in (False, True)),
        (Journal, "begin", False, 2),
        *((RecordLog, "append", each, 2) for each in (False, True)),
        (RecordLog, "begin", False, 2),
        (RecordLog, "begin", True, 3),
    ],
)
def test_before_its_header_a_step_is_the_one_before(
    tmp_path, monkeypatch, owner, name, after, step
):
    records = True if owner is RecordLog else None
    loop = stop(tmp_path, monkeypatch, owner, name, 1, after=after, records=records)
    assert loop.recovered() == step


def test_a_recovery_that_is_killed_is_made_again(tmp_path, monkeypatch):
    loop = stop(tmp_path, monkeypatch, Journal, "note", 4, after=True)
    note = Journal.note

    def ends(self: Journal, count: int) -> None:
        note(self, count)
        if count == 9:
            raise RuntimeError("the process ends here")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", ends)
        with pytest.raises(RuntimeError, match="ends here"):
            loop.recovered()
    assert loop.recovered() == loop.recovered() == 3


@KINDS
def test_while_a_whole_state_is_taken_over_the_file_has_no_step(
    tmp_path, monkeypatch, caplog, records
):
    """A leaf that replay gets wrong is put over a copy as it lies, and a base over the records."""
    loop = Memory(tmp_path, records=records, **({"max_deltas": 1} if records else {}))

    def ends(*_: Any, **__: Any) -> None:
        raise RuntimeError("the process ends here")

    with loop:
        loop.save(2)
        loop.train()
        if not records:
            loop.edit(KERNEL, lambda x: x * 1.5)
        jax.block_until_ready(loop.run.state)
        with monkeypatch.context() as patch:
            patch.setattr(RecordLog if records else Journal, "begin", ends)
            loop.put_and_wait()
            loop.settle()
    assert loop.recovered() is None
    assert "its process ended while it took a whole state" in told(caplog)


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


@pytest.mark.parametrize(
    "records",
    [pytest.param(None, marks=pytest.mark.slow, id="state"), pytest.param(True, id="records")],
)
def test_damage_anywhere_is_refused_or_harms_nothing(tmp_path, records, caplog):
    with Memory(tmp_path, records=records) as loop:
        loop.save(3)
    path = file_of(loop.memory)
    with path.open("rb") as file:
        used = np.flatnonzero(np.frombuffer(file.read(1 << 20), np.uint8))
    rng, results = np.random.default_rng(0), []
    for at in [0, 16, 30, *used[used < 40000][-40::10], *rng.choice(used, 16)]:
        with path.open("r+b") as file:
            file.seek(int(at))
            byte = file.read(1)
            file.seek(int(at))
            file.write(bytes([byte[0] ^ 1 << int(rng.integers(8))]))
            file.flush()
            results.append(loop.recovered() is not None)
            file.seek(int(at))
            file.write(byte)
    assert {*results} == {False, True}
    assert records or "does not have the bits that were trained, in " in caplog.text
    assert loop.recovered() == 3


def forget_boot(monkeypatch, loop):
    monkeypatch.setattr(step_file, "boot", lambda: "another")


def change_settings(monkeypatch, loop):
    monkeypatch.setattr(program, "environment", lambda: {"XLA_FLAGS": "--xla_cpu_something"})


def change_update(monkeypatch, loop):
    loop.run.recorder = support.dict_run(mesh_of((1, 1)), optax.adamw(3e-2)).recorder


def change_optimizer(monkeypatch, loop):
    other = support.dict_run(mesh_of((1, 1)), optax.contrib.muon(1e-2))  # of no copy on the host
    loop.run.recorder, loop.run.state = other.recorder, other.state


def change_leaves(monkeypatch, loop):
    loop.run.state = {**loop.run.state, "more": jnp.zeros(3)}


def change_chunks(monkeypatch, loop):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 2048)


def change_user(monkeypatch, loop):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def cut_off(monkeypatch, loop):
    path = file_of(loop.memory)
    os.truncate(path, path.stat().st_size - 4096)


def cut_to_nothing(monkeypatch, loop):
    os.truncate(file_of(loop.memory), 10)


def move_root(monkeypatch, loop):
    loop.root.rename(loop.root.with_name("elsewhere"))
    loop.root.symlink_to(loop.root.with_name("elsewhere"))


def save_on_without_it(monkeypatch, loop):
    loop.options["shadow"] = adacheck.Shadow()
    loop.reopen(3)
    loop.save()
    loop.manager.close()


def save_something_else(monkeypatch, loop):
    shutil.rmtree(loop.root / "3")
    loop.options["shadow"] = adacheck.Shadow()
    loop.edit("step", lambda x: x + 7)
    loop.open()
    loop.put()
    loop.manager.close()


def take_in_another_process(monkeypatch, loop):
    descriptor = os.open(file_of(loop.memory), os.O_RDWR)
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
        (change_user, "expected a file of this user's"),
        (cut_off, "it was cut off"),
        (cut_to_nothing, "has no states of"),
        (move_root, "has no states of .*elsewhere; there are some of .*root"),
        (save_on_without_it, "it is of step 3, and storage has step 4"),
        (save_something_else, "storage has another state as step 3"),
        (take_in_another_process, "another process that runs"),
    ],
)
def test_what_is_of_something_else_is_refused_and_says_why(
    trained, monkeypatch, caplog, change, reason
):
    with monkeypatch.context() as patch:
        change(patch, trained)
        assert trained.recovered() is None
    assert re.search(reason, told(caplog))
    if change is cut_to_nothing:
        named = f"{file_of(trained.memory)}: its part of the state is not taken: it does not"
        assert named in caplog.text


def test_a_file_of_records_that_was_cut_off_is_told_as_such(tmp_path, caplog):
    with Memory(tmp_path, records=True) as loop:
        loop.save(3)
    cut_off(None, loop)
    assert loop.recovered() is None
    assert "it was cut off" in told(caplog)


def test_the_file_is_the_users_own_and_stays(trained):
    path = file_of(trained.memory)
    assert path.name == "default.0.adacheck-shadow"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(trained.memory.stat().st_mode) == 0o700


def test_a_run_of_another_state_takes_the_file(tmp_path, trained):
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"a": jnp.ones((90, 80))}
    state = {"params": params, "opt": recorder.init(params)}
    run = support.Run(recorder, state, lambda state, _: state)
    (tmp_path / "other").mkdir()
    with Memory(tmp_path / "other", run, directory=trained.memory) as loop:
        loop.number = 1
        loop.put()
    loop.memory = trained.memory
    assert loop.recovered() == 1
    assert len([*loop.memory.iterdir()]) == 1


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
    tmp_path, monkeypatch, caplog, spoil, reason
):
    spoil(monkeypatch, tmp_path / "memory")
    with Memory(tmp_path) as loop:
        loop.save(3)
    assert checked(loop.root) == ["full"] * 2
    (record,) = [r for r in caplog.records if "ends with this process" in r.getMessage()]
    assert reason in record.getMessage()
    assert spoil is not full or not [*loop.memory.iterdir()]
    assert loop.recovered() is None


@pytest.mark.slow
def test_a_state_of_all_kinds_of_leaves_is_recovered(tmp_path):
    root, memory = tmp_path / "root", tmp_path / "memory"
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
    shadow = adacheck.Shadow(directory=memory)
    handler = adacheck.AdaCheckHandler(recorder, shadow=shadow)
    with manager_of(root, handler) as manager:
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
def test_a_python_number_that_became_an_array_is_recovered_as_a_number(tmp_path, shape):
    run = support.dict_run(mesh_of(shape))
    state = {**support.dict_run(mesh_of(shape)).state, "step": 0}  # as TrainState.create makes it
    loop = Memory(tmp_path, run)
    loop.save(3)
    loop.manager.close()
    loop.open()
    found = loop.handler.recover(loop.root, state)
    assert found is not None
    assert type(found[1]["step"]) is int
    assert found[1]["step"] == 3
    assert_same({**found[1], "step": run.state["step"]}, run.state)
    run.state = {**found[1], "step": jnp.int32(found[1]["step"])}
    loop.save(2)
    loop.check()


@pytest.mark.slow
@KINDS
def test_each_step_is_recovered_by_the_next_process_whatever_it_is(tmp_path, records):
    """Also one without an update, and one that replay gets wrong."""
    loop = Memory(tmp_path, records=records)
    for step in range(1, 8):
        assert loop.go_on() == (None if step == 1 else step - 1)
        if step in (3, 4):
            loop.train(0)
            loop.edit("step", lambda x: x + 5)
        else:
            loop.train()
        if step in (5, 7):
            loop.edit(KERNEL, lambda x: x * 1.5)
        jax.block_until_ready(loop.run.state)  # so that it is stored
        loop.put()
    assert loop.check() == "BRDDRRR"
    assert [step for step in loop.deltas if loop.unreplayed(step)] == [5, 7]
    assert checked(loop.root)[1:3] == ["stored"] * 2
    assert loop.recovered() == 7


def test_who_wants_to_recover_is_told_that_there_is_no_shadow(tmp_path, caplog):
    with Memory(tmp_path, bytes=1000) as loop:
        loop.save(2)
    (record,) = [r for r in caplog.records if "nothing can be recovered" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert not loop.memory.exists()


@pytest.mark.slow
def test_a_handler_that_was_closed_goes_on(tmp_path):
    loop = Memory(tmp_path, max_deltas=2)
    for count in (2, 2, 4):
        loop.save(count)
        loop.manager.close()
        loop.manager = manager_of(loop.root, loop.handler)
    # Until the next base there is none.
    assert checked(loop.root) == ["full", "sample", "sample", "sample", "full"]
    loop.manager.close()
    assert loop.recovered() == 8


def test_several_items_are_told_apart_by_their_names(tmp_path):
    run, root = support.dict_run(mesh_of((1, 1))), tmp_path / "root"
    shadow = adacheck.Shadow(directory=tmp_path / "memory")
    states = {"one": run.state, "two": {**run.state, "step": run.state["step"] + 1}}
    handlers = {name: adacheck.AdaCheckHandler(run.recorder, shadow=shadow) for name in states}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        args = {name: adacheck.SaveArgs(state) for name, state in states.items()}
        manager.save(1, args=ocp.args.Composite(**args))
    for name, state in states.items():
        handler = adacheck.AdaCheckHandler(run.recorder, shadow=shadow)
        with pytest.raises(ValueError, match="those of one, two"):
            handler.recover(root, state)
        found = handler.recover(root, state, item=name)
        handler.close()
        assert found is not None
        assert_same(found[1], state)


def test_a_handler_without_a_directory_has_nothing_to_recover(tmp_path):
    with pytest.raises(ValueError, match="expected a handler whose shadow has a directory"):
        adacheck.AdaCheckHandler().recover(tmp_path, {})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"delta": "bits"}, "there is no shadow to lie in it"),
        ({"max_deltas": 0}, "there is no shadow to lie in it"),
        ({"recorder": None}, r"expected a recorder with Shadow"),
        *(
            ({"directory": each}, r"Shadow\(directory=...\) to be a directory of this")
            for each in ("", 5, "gs://bucket/run")
        ),
    ],
    ids=str,
)
def test_a_directory_that_no_shadow_can_lie_in_is_an_error(tmp_path, options, told):
    options = {"recorder": adacheck.Recorder(optax.sgd(0.1)), "directory": tmp_path, **options}
    with pytest.raises(ValueError, match=told):
        adacheck.AdaCheckHandler(
            shadow=adacheck.Shadow(directory=options.pop("directory")), **options
        )


def test_an_item_that_is_not_there_is_named(trained, caplog):
    trained.open()
    with trained:
        found = trained.handler.recover(trained.root, trained.run.state, item="other")
    assert found is None
    assert re.search(
        r"no states of item 'other' of .*root; .*root \(item 'default'\)", told(caplog)
    )


@pytest.mark.parametrize("items", [None, {"notes": ocp.JsonCheckpointHandler()}])
def test_one_call_restores_from_memory_or_else_from_storage(tmp_path, items, caplog):
    root, memory = tmp_path / "root", tmp_path / "memory"
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


def test_a_step_whose_root_was_emptied_is_recovered_with_a_warning(trained, caplog):
    assert trained.recovered() == 3
    assert "in storage" not in caplog.text
    shutil.rmtree(trained.root)
    assert trained.recovered() == 3
    (found,) = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert f"{trained.root} has no step in storage: step 3 is recovered from memory" in found
    assert f"({trained.memory}). To begin anew, remove that directory" in found


@pytest.mark.parametrize("is_used", [False, True])
def test_files_of_an_earlier_run_make_room_unless_a_process_has_them(
    tmp_path, monkeypatch, is_used
):
    where = str(tmp_path / "memory"), str(tmp_path / "root")
    earlier = FilePlace(*where, "default", "a run of two", 1, 2)
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
    with Memory(tmp_path) as loop:
        loop.save(3)
    assert earlier.path.exists() == is_used
    assert len(refused) == (not is_used)
    file.close(remove=is_used)
    assert loop.recovered() == 3
