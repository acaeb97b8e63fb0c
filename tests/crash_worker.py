"""Saves steps while each call that changes the disk is counted, copied or failed.

Usage: crash_worker.py MODE STEP DIRECTORY DELTA [STRIDE]

The calls are those that tests/disk_shim.c sees, if it is loaded (LD_PRELOAD, and its path in
DISK_SHIM); else those that Python makes. MODE ``copies`` copies the root before every call of the
save of STEP, and goes on from each copy as a new process would. ``fail`` saves STEP again and
again, with another call that fails each time: once, or with all that follow, as on a full disk.
``log`` writes what was called. STRIDE tries every so many calls. Step 4 is a delta whose retention
deletes a base, step 5 a base that keeps a volume of the first. Prints one JSON line.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from orbax.checkpoint._src.multihost import multihost

import adacheck_jax as adacheck
from adacheck_jax import arrays, volumes
from adacheck_jax import manifest as manifests
from benchmarks.crashes import KEPT_STEPS, Run, compile_once, digest

multihost._DEFAULT_BARRIER_TIMEOUT = 5
"""Seconds for which Orbax waits for directories that cannot be made; 300 otherwise."""

OFF, COUNT, COPY, FAIL_ONCE, FULL, EXIT = range(6)
LAST = 8


class Disk:
    """The shim that was loaded with this process."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ["DISK_SHIM"])

    def arm(self, root: Path, out: Path, mode: int, at: int = 0, error: int = 0) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._shim.disk_arm(
            os.fsencode(root), os.fsencode(out), mode, ctypes.c_long(at), ctypes.c_int(error)
        )

    def disarm(self) -> int:
        return self._shim.disk_disarm()

    @property
    def has_fired(self) -> bool:
        return bool(self._shim.disk_fired())


class Interpreter:
    """The same without a compiler: fails what Python does to the disk, and calls of tensorstore."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._root, self._mode, self._at, self._error, self._count = "", OFF, 0, 0, 0
        self.has_fired = False
        sys.addaudithook(self._audit)
        self._wrap(os, "fsync")
        self._wrap(arrays, "write_pack")
        for name in ("write", "keep", "merge"):
            self._wrap(volumes, name)

    def _wrap(self, module: Any, name: str) -> None:
        inner = getattr(module, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self._call()
            result = inner(*args, **kwargs)
            if module is not os:
                self._call()  # it fails although all was written
            return result

        setattr(module, name, outer)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._mode == OFF:
            return
        changes = event in {"os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            changes = bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
        # Names relative to an open directory: only the deletion of steps has them.
        if changes and str(args[0]).startswith((self._root, *"0123456789")):
            self._call(event not in {"os.remove", "os.rmdir"})

    def _call(self, makes: bool = True) -> None:
        with self._lock:
            if self._mode == OFF:
                return
            self._count += 1
            if self._count == self._at or (self._mode == FULL and makes and self._count > self._at):
                self.has_fired = True
                raise OSError(self._error, os.strerror(self._error))

    def arm(self, root: Path, out: Path, mode: int, at: int = 0, error: int = 0) -> None:
        self._root, self._at, self._error, self._count = str(root), at, error, 0
        self.has_fired, self._mode = False, mode

    def disarm(self) -> int:
        self._mode = OFF
        return self._count


class Exam:
    """The steps of one run, each with its state and digest."""

    def __init__(self, directory: Path, delta: str, disk: Any) -> None:
        compile_once(directory / "compiled")
        self.run, self.directory, self.disk = Run(delta), directory, disk
        self.states: dict[int, Any] = {}
        self.digests: dict[int, str] = {}
        state = self.run.new_state()
        for step in range(1, LAST + 3):
            state = self.run.advance(state, step)
            self.states[step] = jax.tree.map(jnp.copy, state)
            self.digests[step] = digest(state)
        self.problems: list[str] = []
        self.half_deleted = 0

    def save(self, manager: Any, step: int) -> None:
        manager.save(step, args=adacheck.SaveArgs(jax.tree.map(jnp.copy, self.states[step])))
        manager.wait_until_finished()

    def prepare(self, root: Path, step: int) -> None:
        """Saves all that comes before a step."""
        with self.run.open_manager(root) as manager:
            for each in range(1, step):
                self.save(manager, each)

    def check(self, manager: Any, what: str, allowed: Mapping[int, bool]) -> int:
        """Restores every listed step.

        Args:
            manager: a new one, or one that has reloaded.
            what: for the report.
            allowed: the steps that may be listed, and whether they must.

        Returns:
            The newest step.
        """
        listed = manager.all_steps()
        newest = max(listed, default=0)
        must = {step for step, is_needed in allowed.items() if is_needed}
        if not must <= set(listed) <= set(allowed):
            self.problems.append(f"{what}: listed {listed}, expected {allowed}")
        for step in listed:
            try:
                found = digest(self.run.restore(manager, step))
            except Exception as error:
                if step <= newest - KEPT_STEPS:
                    self.half_deleted += 1  # Orbax deletes in place; refused, and no wrong bits
                else:
                    self.problems.append(f"{what}: step {step}: {type(error).__name__}: {error}")
            else:
                if found != self.digests[step]:
                    self.problems.append(f"{what}: step {step} has other bits")
        return newest

    def go_on(self, root: Path, what: str, allowed: Mapping[int, bool]) -> None:
        """Does what a new process does with a root, and two steps more."""
        with self.run.open_manager(root) as manager:
            newest = self.check(manager, what, allowed)
            if newest:  # the newest last: training goes on from it
                self.run.restore(manager, newest)
            for step in (newest + 1, newest + 2):
                self.save(manager, step)
        with self.run.open_manager(root) as manager:
            listed = {each: True for each in range(newest, newest + 3) if each}
            if newest == 0:
                listed = {1: True, 2: True}
            self.check(manager, f"{what}, two steps later", listed)
        left = [path.name for path in root.iterdir() if not path.name.isdecimal()]
        if left:
            self.problems.append(f"{what}: left behind: {left}")
        for path in root.rglob("*"):
            if path.name.startswith(".") and path.name.endswith((".tmp", ".__lock")):
                self.problems.append(f"{what}: left behind: {path.relative_to(root)}")

    def kind(self, root: Path, step: int) -> str:
        found = manifests.read(root / str(step) / "default")
        return "delta" if isinstance(found, manifests.DeltaManifest) else "base"

    def copies(self, step: int, stride: int) -> dict[str, Any]:
        root, out = self.directory / "root", self.directory / "copies"
        self.prepare(root, step)
        manager = self.run.open_manager(root)
        if step > 1:
            self.run.restore(manager, step - 1)
        self.disk.arm(root, out, COPY)
        self.save(manager, step)
        manager.close()
        calls = self.disk.disarm()
        copies = sorted(
            (path for path in out.iterdir() if path.is_dir()), key=lambda p: int(p.name)
        )
        before = {each: each == step - 1 for each in range(max(1, step - 3), step + 1)}
        newest = []
        for number, copy in enumerate(copies):
            if number % stride and number < len(copies) - 3:
                continue
            listed = [int(path.name) for path in copy.iterdir() if path.name.isdecimal()]
            newest.append(max(listed, default=0) == step)
            self.go_on(copy, f"copy {copy.name}", before)
            shutil.rmtree(copy)
        kind = self.kind(root, step)
        if newest != sorted(newest):
            self.problems.append("the step came and went")
        return {"kind": kind, "calls": calls, "tried": len(newest), "had_step": sum(newest)}

    def _save_after(self, manager: Any, step: int, has_raised: bool) -> None:
        """The save that follows one that may have failed."""
        try:
            self.save(manager, step)
        except OSError as late:  # Orbax's store of metadata tells its own error here
            if not has_raised or manifests.FILE in str(late):
                raise
            self.save(manager, step)

    def fail(self, step: int, stride: int) -> dict[str, Any]:
        source = self.directory / "source"
        self.prepare(source, step)
        tried = committed = raised = 0
        for mode, error in ((FAIL_ONCE, errno.EIO), (FULL, errno.ENOSPC)):
            at = 1
            while True:
                root = self.directory / "root"
                shutil.copytree(source, root)  # links become copies; they are not what is tested
                what = f"{'once' if mode == FAIL_ONCE else 'from'} {at}"
                manager = self.run.open_manager(root)
                if step > 1:
                    self.run.restore(manager, step - 1)
                self.disk.arm(root, self.directory / "logs" / what, mode, at, error)
                try:
                    self.save(manager, step)
                except Exception as refused:
                    raised += 1
                    has_raised = True
                    name = type(refused).__name__
                else:
                    has_raised, name = False, ""
                fired = self.disk.has_fired
                self.disk.disarm()
                # The same process goes on: the next save must work, and be exact.
                is_there = (root / str(step)).exists()
                committed += is_there
                try:
                    with contextlib.suppress(Exception):  # one error to save, another to wait
                        manager.wait_until_finished()
                    with contextlib.suppress(Exception):
                        manager.reload()
                    self._save_after(manager, step + 1, has_raised)
                    listed = {each: each > step for each in range(step - 2, step + 2)}
                    listed[step] = not has_raised
                    listed = {k: v for k, v in listed.items() if k > 0}
                    self.check(manager, f"{what} ({name}), goes on", listed)
                    manager.close()
                    del listed[step - 2]
                except Exception as problem:
                    trace = traceback.format_exc(limit=-3)
                    self.problems.append(f"{what} ({name}): {problem!r}: {trace}")
                try:
                    with self.run.open_manager(root) as manager:
                        self.check(
                            manager,
                            f"{what} ({name}), restarted",
                            {
                                each: each > step or (each == step and not has_raised)
                                for each in range(max(step - 2, 1), step + 2)
                            },
                        )
                except Exception as problem:
                    self.problems.append(f"{what} ({name}), restarted: {problem!r}")
                shutil.rmtree(root)
                if not fired:
                    break
                tried += 1
                at += stride
        return {"tried": tried, "raised": raised, "committed": committed}

    def log(self, step: int) -> dict[str, Any]:
        root, out = self.directory / "root", self.directory / "log"
        self.prepare(root, step)
        manager = self.run.open_manager(root)
        if step > 1:
            self.run.restore(manager, step - 1)
        self.disk.arm(root, out, COUNT)
        self.save(manager, step)
        manager.close()
        return {"kind": self.kind(root, step), "calls": self.disk.disarm()}


def main() -> None:
    """Reads the command line, and prints what was found."""
    mode, step, directory, delta, *rest = sys.argv[1:]
    stride = int(rest[0]) if rest else 1
    exam = Exam(Path(directory), delta, Disk() if "DISK_SHIM" in os.environ else Interpreter())
    if mode == "copies":
        result = exam.copies(int(step), stride)
    elif mode == "fail":
        result = exam.fail(int(step), stride)
    else:
        result = exam.log(int(step))
    print(json.dumps({**result, "half_deleted": exam.half_deleted, "problems": exam.problems}))


if __name__ == "__main__":
    main()
