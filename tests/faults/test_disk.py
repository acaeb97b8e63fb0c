"""Disks that are full, slow, broken, shut or gone: one error, and no committed step is harmed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import lookup, manifest_file
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps


@pytest.fixture
def small_disk():
    """A file system of its own, where that may be mounted."""
    place = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        place.rmdir()
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
    place.rmdir()


def attempt(manager, run):
    """Trains and saves one step; gives every error that save and wait raise."""
    run.advance()
    errors = []
    for call in (
        lambda: manager.save(run.count, args=adacheck.SaveArgs(run.state)),
        manager.wait_until_finished,
        manager.wait_until_finished,
    ):
        try:
            call()
        except Exception as error:
            errors.append(error)
    return errors


def recover(manager, run, root):
    """Two steps after a failure; they are saved, whatever Orbax still has to say of the last one.

    Its own writer of ``_CHECKPOINT_METADATA`` keeps an error until the wait after the next save.
    """
    saved = {}
    for _ in range(2):
        for error in attempt(manager, run):
            assert isinstance(error, (OSError, StorageError))
        assert (root / str(run.count)).exists()
        saved[run.count] = host_copy(run.state)
    return saved


def restored(root, step, run):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(abstract(run.state)))


def is_base(root, step):
    return isinstance(manifest_file.read(root / str(step) / "default"), manifest.BaseManifest)


def assert_unharmed(root, run, saved):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        assert list(manager.all_steps()) == sorted(saved)
    for step, expected in saved.items():
        assert_same_bits(restored(root, step, run), expected)


def test_a_full_disk(small_disk):
    run = support.dict_run(mesh_of((2, 2)))
    root, ballast = small_disk / "root", small_disk / "ballast"
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        for left in (16_384, 32_768, 65_536):
            found = os.statvfs(small_disk)
            with open(ballast, "wb") as file:
                size = found.f_bavail * found.f_bsize - left
                os.posix_fallocate(file.fileno(), 0, size)
            errors = attempt(manager, run)
            ballast.unlink()
            assert [type(error) for error in errors] == [StorageError]
            assert "No space left" in str(errors[0])
            if (root / str(run.count)).exists():  # all of it but Orbax's note of the time
                saved[run.count] = host_copy(run.state)
            saved |= recover(manager, run, root)
    assert_unharmed(root, run, saved)


@pytest.mark.slow
def test_a_read_only_disk_is_told_at_once_and_training_goes_on(small_disk):
    run = support.dict_run(mesh_of((2, 2)))
    root = small_disk / "root"
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        errors = attempt(manager, run)
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        assert [type(error) for error in errors] == [StorageError]
        assert "is not writable: its disk is read-only" in str(errors[0])
        saved |= save_steps(manager, run, 2)
        assert not is_base(root, 5)
    assert_unharmed(root, run, saved)


@pytest.mark.parametrize(
    "target",
    ["adacheck_jax.store.packs.writer.write_pack", "adacheck_jax.store.volumes.Volume.write"],
)
def test_a_root_that_vanishes_while_a_save_is_in_flight(tmp_path, monkeypatch, target):
    run = support.dict_run(mesh_of((2, 2)))
    root = tmp_path / "root"
    options = {"max_deltas": 20 if "packs" in target else 0}
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder, **options)) as manager:
        save_steps(manager, run, 2)
        with monkeypatch.context() as patch:

            def gone(*_args, **_kwargs):
                shutil.rmtree(root)
                raise OSError(5, "Input/output error")

            patch.setattr(target, gone)
            errors = attempt(manager, run)
        assert len(errors) == 1
        root.mkdir(exist_ok=True)  # Orbax may have made it again
        saved = save_steps(manager, run, 2)
    assert is_base(root, 4)
    assert_unharmed(root, run, saved)


def test_an_error_of_the_disk_is_raised_once(tmp_path, monkeypatch):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        with monkeypatch.context() as patch:

            def broken(*_args, **_kwargs):
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr("adacheck_jax.store.storage.posix.os.fsync", broken)
            errors = attempt(manager, run)
        assert [type(error) for error in errors] == [StorageError]
        assert errors[0].__cause__.errno == errno.EIO
        assert str(tmp_path / "3" / "default") in str(errors[0])
        saved |= save_steps(manager, run, 2)
    assert_unharmed(tmp_path, run, saved)


def test_a_slow_disk_does_not_hold_up_training(tmp_path, monkeypatch):
    run = support.dict_run(mesh_of((2, 2)))
    from adacheck_jax.store.packs import writer

    go_on, write = threading.Event(), writer.write_pack

    def slow(*args, **kwargs):
        assert go_on.wait(60)
        return write(*args, **kwargs)

    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        monkeypatch.setattr(writer, "write_pack", slow)
        run.advance()
        saved[3] = host_copy(run.state)
        manager.save(3, args=adacheck.SaveArgs(run.state))
        for _ in range(3):  # donates what is being saved
            run.advance()
        go_on.set()
        manager.wait_until_finished()
    assert_unharmed(tmp_path, run, saved)


@pytest.mark.slow
def test_two_managers_on_one_root_never_make_a_mixture(tmp_path):
    """By mistake: every step is that of the one who saved it, or is refused."""
    runs = [support.dict_run(mesh_of((2, 2))) for _ in range(2)]
    runs[1].advance()
    saved = {}
    managers = [manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) for run in runs]
    for step in range(8):
        run = runs[step % 2]
        run.advance()
        managers[step % 2].save(step, args=adacheck.SaveArgs(run.state))
        saved[step] = host_copy(run.state)
    for manager in managers:
        manager.wait_until_finished()
        manager.close()
    assert_unharmed(tmp_path, runs[0], saved)
    for step in range(2, 8):
        parent = lookup.resolve(tmp_path / str(step) / "default").entries[-2].manifest
        assert parent.step == step - 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("copies", [False, True])
def test_a_reader_beside_a_trainer_that_deletes(tmp_path, copies, steps):
    """An evaluator gets a step bit for bit, or an error: never other bits."""
    run, root = support.dict_run(mesh_of((2, 2))), tmp_path / "root"
    saved, outcomes, done = {}, [], threading.Event()

    def read():
        number = 0
        while not done.is_set():
            steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdecimal())
            place = root
            try:
                step = steps[-1 - number % min(2, len(steps))]
                if copies:
                    place = tmp_path / f"copy{number}"
                    shutil.copytree(root / str(step), place / str(step))
                found = restored(place, step, run)
            except (adacheck.AdaCheckError, OSError, shutil.Error, ValueError) as error:
                outcomes.append(error)
            else:
                assert_same_bits(found, saved[step])
                outcomes.append(None)
            number += 1

    def guarded():
        try:
            read()
        except BaseException as error:
            outcomes.append(AssertionError(error))

    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=3)
    with manager_of(root, handler, max_to_keep=2) as manager:
        saved |= save_steps(manager, run, 1)
        reader = threading.Thread(target=guarded)
        reader.start()
        for _ in range(steps):
            run.advance()
            saved[run.count] = host_copy(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        deadline_s = time.monotonic() + 60
        while None not in outcomes and time.monotonic() < deadline_s:  # nothing is deleted now
            time.sleep(0.01)
        done.set()
        reader.join(60)
    assert not [each for each in outcomes if isinstance(each, AssertionError)]
    assert None in outcomes
