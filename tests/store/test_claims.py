"""Two writers of one step: one of them saves it, the other is told, and no file is mixed."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.save import commit, share
from adacheck_jax.store import claims
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of


def wait_for_removal(path, before):
    """Until the second one's Orbax has made its own directory."""
    for _ in range(6000):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino != before:
                return
        time.sleep(0.01)
    raise AssertionError(f"{path} is still there")


def left_in(root):
    """Everything below a root that is ours, and only there while a step is written."""
    marks = (roots.PROBE_PREFIX, ".claim.")
    return [path for path in root.rglob("*") if path.name.startswith(marks)]


@pytest.mark.parametrize(("owner", "method"), [(share, "_write"), (commit, "_committed")])
def test_the_later_of_two_writers_saves_the_step_and_the_other_is_told(
    tmp_path, monkeypatch, owner, method
):
    """While the first one writes its data, or just before it would write the manifest."""
    run = support.dict_run(mesh_of((1, 1)))
    first, second = (manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) for _ in range(2))
    reached, goes_on, inner = threading.Event(), threading.Event(), getattr(owner, method)

    def held(save, *args):
        if not reached.is_set():
            reached.set()
            assert goes_on.wait(60)
        return inner(save, *args)

    def save(manager):
        state = jax.tree.map(jnp.copy, run.advance())
        manager.save(1, args=adacheck.SaveArgs(state))
        return host_copy(state)

    monkeypatch.setattr(owner, method, held)
    save(first)
    assert reached.wait(60)
    directory = tmp_path / f"1{roots.TMP_SUFFIX}" / f"default{roots.TMP_SUFFIX}"
    kept = os.open(directory, os.O_RDONLY)  # so that its inode is not given again
    two = save(second)
    wait_for_removal(directory, os.fstat(kept).st_ino)
    os.close(kept)
    goes_on.set()
    told = r"expected one writer, found that another handler or process.*a root of its own"
    with pytest.raises(StorageError, match=told):
        first.wait_until_finished()
    second.wait_until_finished()
    assert not left_in(tmp_path)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        target = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(1, args=target), two)
    first.close()
    second.close()


def test_a_handler_saves_a_step_again_after_it_failed(tmp_path, monkeypatch):
    run = support.dict_run(mesh_of((1, 1)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = support.save_steps(manager, run, 2)
        state, inner = run.advance(), share._write

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(share, "_write", full)
        manager.save(3, args=adacheck.SaveArgs(state))
        with pytest.raises(StorageError, match="No space left"):
            manager.wait_until_finished()
        monkeypatch.setattr(share, "_write", inner)
        manager.save(3, args=adacheck.SaveArgs(state), force=True)
        manager.wait_until_finished()
        assert not left_in(tmp_path)
        saved[3] = host_copy(state)
        for step, expected in saved.items():
            assert_same_bits(
                manager.restore(step, args=adacheck.RestoreArgs(abstract(state))), expected
            )


def test_a_directory_that_another_writer_has_removed_is_not_made_anew(tmp_path, monkeypatch):
    """Removed after the last look at the claim: the other one's mkdir would find a directory."""
    run, removed = support.dict_run(mesh_of((1, 1))), []

    def remove(directory):
        shutil.rmtree(directory)
        removed.append(directory)

    monkeypatch.setattr(claims, "remove", remove)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        manager.save(1, args=adacheck.SaveArgs(run.advance()))
        with pytest.raises(StorageError, match=r"/1/default: expected one writer"):
            manager.wait_until_finished()
        assert [directory.exists() for directory in removed] == [False]
