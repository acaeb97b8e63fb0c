"""A base's save that returns before its state is on the host."""

import threading

import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import transfer, xla_call
from adacheck_jax.save import commit
from tests import support


@pytest.fixture(params=["loops", "host"])
def engine(request, monkeypatch):
    """Who takes the fingerprints: the devices, or the host from what is staged."""
    assert xla_call.wait()
    if request.param == "host":
        monkeypatch.setattr(xla_call, "is_ready", lambda: False)


def taken_of(monkeypatch):
    """The leaves that anybody has brought to the host so far."""
    taken, get = [], transfer.Staged.__getitem__

    def noted(self, index):
        taken.append(index)
        return get(self, index)

    monkeypatch.setattr(transfer.Staged, "__getitem__", noted)
    return taken


def save_all(root, run, steps, **options):
    """Saves every step, keeping the guard; gives what was saved."""
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2, **options)
    saved = {}
    with support.manager_of(root, handler) as manager:
        for step in range(steps):
            handler.wait_until_staged()
            run.advance()  # donates the state that was saved last
            saved[step] = support.host_copy(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        for step, expected in saved.items():
            restored = manager.restore(step, args=adacheck.RestoreArgs(run.state))
            support.assert_same_bits(restored, expected)


@pytest.mark.covering(1)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)], ids=str)
def test_steps_whose_states_were_donated_after_the_guard_restore(mesh, tmp_path):
    save_all(tmp_path, support.dict_run(support.mesh_of(mesh)), 7, returns_early=True)


@pytest.fixture
def go_on(monkeypatch):
    """What is saved is written only once this is set."""
    event, write = threading.Event(), commit.Save.write

    def later(self, directory):
        assert event.wait(60)
        write(self, directory)

    monkeypatch.setattr(commit.Save, "write", later)
    return event


@pytest.mark.parametrize("early", [True, False])
def test_a_base_returns_before_it_is_on_the_host(early, tmp_path, monkeypatch, go_on):
    run = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=0, returns_early=early)
    with support.manager_of(tmp_path, handler) as manager:
        taken = taken_of(monkeypatch)
        manager.save(0, args=adacheck.SaveArgs(run.advance()))
        assert bool(taken) != early
        handler.wait_until_staged()
        assert taken
        go_on.set()


def test_a_state_that_was_donated_before_the_guard_is_refused(tmp_path, go_on):
    run = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=0, returns_early=True)
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(0, args=adacheck.SaveArgs(run.advance()))
        run.advance()
        go_on.set()
        with pytest.raises(Exception, match="deleted"):
            manager.wait_until_finished()
        manager.reload()
        manager.save(1, args=adacheck.SaveArgs(run.state))
        handler.wait_until_staged()
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
