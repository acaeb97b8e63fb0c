"""A process that was killed gets its state back from memory: whole and exact, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.save.recovery.journal import Journal
from adacheck_jax.update.elements import host_fold
from tests import support
from tests.save.test_checks import assert_all_restorable, kinds
from tests.support import host_copy, manager_of, mesh_of, save_steps


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 1024)


@pytest.fixture
def memory(tmp_path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


def handler_of(run: support.Run, memory: Path, **options: Any) -> adacheck.AdaCheckHandler:
    return adacheck.AdaCheckHandler(run.recorder, shadow_directory=memory, **options)


def file_of(memory: Path) -> Path:
    (path,) = memory.iterdir()
    return path


def told(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [x for x in caplog.records if "not recovered" in x.getMessage()]
    return record.getMessage()


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        x, y = (np.asarray(transfer.raw(each)) for each in (a, b))
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def trained(root: Path, memory: Path, count: int = 3, **options: Any) -> support.Run:
    """A run that saved some steps, and ended."""
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(root, handler_of(run, memory, **options)) as manager:
        save_steps(manager, run, count)
    return run


def recovered(run: support.Run, root: Path, memory: Path) -> adacheck.RecoveredStep | None:
    handler = handler_of(run, memory)
    found = handler.recover(root, support.abstract(run.state))
    handler.close()
    return found


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)], ids=["one device", "eight devices"])
def test_the_next_save_after_a_recovery_is_a_delta_of_the_newest_step(root, memory, shape):
    run = support.dict_run(mesh_of(shape))
    with manager_of(root, handler_of(run, memory)) as manager:
        saved = save_steps(manager, run, 3)
    handler = handler_of(run, memory)
    with manager_of(root, handler) as manager:
        found = handler.recover(root, support.abstract(run.state))
        assert found is not None
        assert found.step == 3
        assert handler.restored is not None
        assert handler.restored.exact
        assert_same(found.state, saved[3])
        run.state = found.state
        saved |= save_steps(manager, run, 2)
    assert kinds(root) == ["B", "R", "R", "R", "R"]
    assert [each.checked for each in support_deltas(root)] == ["full"] * 4
    assert_all_restorable(root, saved, run.state, mesh_of((2, 2)))


def support_deltas(root: Path) -> list[Any]:
    from tests.save.test_checks import deltas_of

    return [*deltas_of(root).values()]


def test_a_recorded_step_is_recovered_and_the_next_save_is_a_base(root, memory):
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run, memory)
    with manager_of(root, handler) as manager:
        save_steps(manager, run, 2)
        for _ in range(3):
            run.advance()
            assert handler.record_step(run.state, run.count)
    expected = host_copy(run.state)
    handler = handler_of(run, memory)
    with manager_of(root, handler) as manager:
        found = handler.recover(root, run.state)
        assert found is not None
        assert found.step == 5
        assert_same(found.state, expected)
        run.state = found.state
        saved = save_steps(manager, run, 2)
        assert_same(recovered_after(handler, run, root, memory).state, run.state)
    assert kinds(root) == ["B", "R", "B", "R"]
    assert_all_restorable(root, saved, run.state)


def recovered_after(handler, run, root, memory) -> adacheck.RecoveredStep:
    handler.close()
    found = recovered(run, root, memory)
    assert found is not None
    return found


class Stopped(BaseException):
    """The process ends here."""


def stopped(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, *, after: bool
) -> None:
    """Ends a process at a call of a function; what it would do afterwards is not done."""
    inner, calls = getattr(owner, name), []

    def act(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) < at:
            return inner(*args, **options)
        if after and len(calls) == at:
            inner(*args, **options)
        raise RuntimeError("the process ends here")

    monkeypatch.setattr(owner, name, act)


def stop(
    root, memory, monkeypatch, owner, name, at, *, after
) -> tuple[support.Run, dict[int, Any]]:
    """A run that records three steps, and is stopped in the fold of the last one."""
    run = support.dict_run(mesh_of((1, 1)))
    handler = handler_of(run, memory)
    states = {}
    with manager_of(root, handler) as manager:
        states |= save_steps(manager, run, 2)
        (saver,) = handler._run._savers.values()
        saver._shadow._thread.submit(int).result()  # it is at step 2 now
        with monkeypatch.context() as patch:
            stopped(patch, owner, name, at, after=after)
            run.advance()
            states[3] = host_copy(run.state)
            assert handler.record_step(run.state, run.count)
            saver._shadow._thread.submit(int).result()
    return run, states


CHUNKS = 17


@pytest.mark.first(3)
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("at", [9, 1, 18, *range(2, 9), *range(10, 18)])
def test_a_fold_that_was_stopped_at_any_chunk_is_gone_on_with(root, memory, monkeypatch, at, after):
    """The first note is that of the header, then one comes after each chunk."""
    run, states = stop(root, memory, monkeypatch, Journal, "note", at, after=after)
    with monkeypatch.context() as patch:
        counts = []
        inner = Journal.note
        patch.setattr(Journal, "note", lambda self, n: (counts.append(n), inner(self, n)))
        found = recovered(run, root, memory)
    assert found is not None
    assert found.step == 3
    assert_same(found.state, states[3])
    done = at - 1 if after else max(at - 2, 0)
    assert counts == [*range(done + 1, CHUNKS + 1)]
