"""Stops a save at every single operation that changes the disk, and fails each of them.

    python -m tests.campaigns.operations once full --save delta --directory DIRECTORY

The operations are those that ``disk_shim.c`` sees, where it is loaded (see :mod:`.shim`):
every call that the process makes. Without it they are those that Python makes, and the calls of
tensorstore (:class:`Interpreter`). In each mode one step is saved, by turns:

* ``stopped`` (needs the shim) copies the root before every operation, and goes on from each copy
  as a new process would that finds what a killed one left.
* ``once`` fails another operation each time (EIO), and no other.
* ``full`` fails an operation and all that follow but deletions (ENOSPC), as a full disk does.
* ``log`` writes down what was called, and fails nothing.

Prints JSON: for each mode how many operations were tried, and for each problem its kind: ``lost``
(a committed step is gone or cannot be restored), ``wrong`` (other bits), ``other``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import math
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from orbax.checkpoint._src.multihost import multihost

import adacheck_jax as adacheck
from adacheck_jax.format import manifest as manifests
from adacheck_jax.store import volumes
from adacheck_jax.store.packs import writer
from adacheck_jax.store.steps import manifest_file
from tests.campaigns import command, shim
from tests.campaigns.crashes import KEPT_STEPS, Run, digest
from tests.support import compile_once

multihost._DEFAULT_BARRIER_TIMEOUT = 5
"""Seconds for which Orbax waits for directories that cannot be made; 300 otherwise."""

OFF, COUNT, COPY, FAIL_ONCE, FULL, EXIT, HANG = range(7)
FAILURES = {"once": (FAIL_ONCE, errno.EIO), "full": (FULL, errno.ENOSPC)}
SAVES = {"delta": 4, "base": 5}
"""Steps to save: a delta whose retention deletes a base, a base that keeps an earlier volume."""
LAST = 8


class Disk:
    """The shim that was loaded with this process."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ[shim.VARIABLE])

    def arm(self, root: Path, out: Path, mode: int, at: int = 0, error: int = 0) -> None:
        """Begins to look at what is done under a root.

        Args:
            root: of the checkpoints.
            out: for the log and the copies.
            mode: one of those above.
            at: the number of an operation, from 1.
            error: number of the error to fail with.
        """
        out.mkdir(parents=True, exist_ok=True)
        self._shim.disk_arm(
            os.fsencode(root), os.fsencode(out), mode, ctypes.c_long(at), ctypes.c_int(error)
        )

    def disarm(self) -> int:
        """Looks no more; the number of operations since it began."""
        return self._shim.disk_disarm()

    @property
    def has_fired(self) -> bool:
        """Whether an operation was failed."""
        return bool(self._shim.disk_fired())


class Interpreter:
    """The same without a compiler: fails what Python does to the disk, and calls of tensorstore."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._root, self._mode, self._at, self._error, self._count = "", OFF, 0, 0, 0
        self.has_fired = False
        sys.addaudithook(self._audit)
        self._wrap(os, "fsync")
        self._wrap(writer, "write_pack")
        self._wrap(volumes.Volume, "write")
        for name in ("keep", "merge"):
            self._wrap(volumes, name)

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self._call()
            result = inner(*args, **kwargs)
            if owner is not os:
                self._call()  # it fails although all was written
            return result

        setattr(owner, name, outer)

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
        """As :meth:`Disk.arm`, but for copies and the log."""
        self._root, self._at, self._error, self._count = str(root), at, error, 0
        self.has_fired, self._mode = False, mode

    def disarm(self) -> int:
        """As :meth:`Disk.disarm`."""
        self._mode = OFF
        return self._count


class Exam:
    """The steps of one run, each with its state and digest.

    Args:
        directory: to work in.
        delta: as the handler takes it.
        disk: a :class:`Disk` or an :class:`Interpreter`.
        stop_s: when no more operations are tried, on the monotonic clock.
    """

    def __init__(self, directory: Path, delta: str, disk: Any, stop_s: float) -> None:
        compile_once(directory / "compiled")
        self.run, self.directory, self.disk = Run(delta), directory, disk
        self.states: dict[int, Any] = {}
        self.digests: dict[int, str] = {}
        state = self.run.new_state()
        for step in range(1, LAST + 3):
            state = self.run.advance(state, step)
            self.states[step] = jax.tree.map(jnp.copy, state)
            self.digests[step] = digest(state)
        self.problems: list[dict[str, str]] = []
        self.half_deleted = 0
        self._stop_s = stop_s

    def note(self, kind: str, what: str) -> None:
        """Remembers a problem: it is ``lost``, ``wrong`` or ``other``."""
        self.problems.append({"kind": kind, "what": what})

    def is_late(self) -> bool:
        """Whether no more operations are to be tried."""
        return time.monotonic() > self._stop_s

    def save(self, manager: Any, step: int) -> None:
        """Saves a step, and waits for it."""
        manager.save(step, args=adacheck.SaveArgs(jax.tree.map(jnp.copy, self.states[step])))
        manager.wait_until_finished()

    def prepare(self, root: Path, step: int) -> None:
        """Saves all that comes before a step."""
        with self.run.open_manager(root) as manager:
            for each in range(1, step):
                self.save(manager, each)

    def _ready(self, root: Path, step: int) -> Any:
        """A manager of a root, with all that the save of a step needs to be a delta."""
        manager = self.run.open_manager(root)
        if step > 1:
            self.run.restore(manager, step - 1)
        return manager

    def check(self, manager: Any, what: str, allowed: Mapping[int, bool]) -> int:
        """Restores every listed step.

        Args:
            manager: a new one, or one that has reloaded.
            what: for the report.
            allowed: the steps that may be listed, and whether they must.

        Returns:
            The newest step.
        """
        listed = set(manager.all_steps())
        newest = max(listed, default=0)
        must = {step for step, is_needed in allowed.items() if is_needed}
        if not must <= listed:
            self.note("lost", f"{what}: listed {sorted(listed)}, expected {allowed}")
        if not listed <= set(allowed):
            self.note("other", f"{what}: listed {sorted(listed)}, expected {allowed}")
        for step in listed:
            try:
                found = digest(self.run.restore(manager, step))
            except Exception as error:
                if step <= newest - KEPT_STEPS:
                    self.half_deleted += 1  # Orbax deletes in place; refused, and no wrong bits
                else:
                    self.note("lost", f"{what}: step {step}: {type(error).__name__}: {error}")
            else:
                if found != self.digests[step]:
                    self.note("wrong", f"{what}: step {step} has other bits")
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
            self.note("other", f"{what}: left behind: {left}")
        for path in root.rglob("*"):
            if path.name.startswith(".") and path.name.endswith((".tmp", ".__lock")):
                self.note("other", f"{what}: left behind: {path.relative_to(root)}")

    def kind(self, root: Path, step: int) -> str:
        """Whether a step that was saved is a delta or a base."""
        found = manifest_file.read(root / str(step) / "default")
        return "delta" if isinstance(found, manifests.DeltaManifest) else "base"

    def stopped(self, step: int, stride: int) -> dict[str, Any]:
        """Goes on from what the disk held before each operation."""
        root, out = self.directory / "stopped", self.directory / "copies"
        self.prepare(root, step)
        manager = self._ready(root, step)
        self.disk.arm(root, out, COPY)
        self.save(manager, step)
        manager.close()
        calls = self.disk.disarm()
        copies = sorted((path for path in out.iterdir() if path.is_dir()), key=_number)
        before = {each: each == step - 1 for each in range(max(1, step - 3), step + 1)}
        chosen = [c for i, c in enumerate(copies) if i % stride == 0 or i >= len(copies) - 3]
        newest: list[bool] = []
        for copy in chosen:
            if self.is_late():
                break
            listed = [int(path.name) for path in copy.iterdir() if path.name.isdecimal()]
            newest.append(max(listed, default=0) == step)
            try:
                self.go_on(copy, f"copy {copy.name}", before)
            except Exception as problem:
                self.note("other", f"copy {copy.name}: {problem!r}: {_last_lines()}")
            shutil.rmtree(copy)
            progress("stopped", len(newest), len(chosen))
        if newest != sorted(newest):
            self.note("other", "the step came and went")
        return {
            "kind": self.kind(root, step),
            "operations": calls,
            "tried": len(newest),
            "had_step": sum(newest),
            "is_whole": len(newest) == len(chosen),
        }

    def failed(self, name: str, step: int, stride: int) -> dict[str, Any]:
        """Fails the operations of a save, in one of :data:`FAILURES`' ways."""
        source = self.directory / f"{name}-source"
        self.prepare(source, step)
        counts = {"tried": 0, "raised": 0, "committed": 0}
        at, has_fired = 1, True
        while has_fired and not self.is_late():
            root = self.directory / name
            shutil.copytree(source, root)  # links become copies; they are not what is tested
            has_fired, has_raised, is_there, operations = self._fail_one(root, name, step, at)
            if has_fired:
                counts["tried"] += 1
                counts["raised"] += has_raised
                counts["committed"] += is_there
                progress(name, counts["tried"])
            else:  # none was failed, so these are all of a save's
                counts["operations"] = operations
            shutil.rmtree(root)
            at += stride
        return {**counts, "kind": self._kind_of_next(source, step), "is_whole": not has_fired}

    def _kind_of_next(self, source: Path, step: int) -> str:
        """Whether the step that follows those in a root is saved as a delta or as a base."""
        manager = self._ready(source, step)
        self.save(manager, step)
        manager.close()
        return self.kind(source, step)

    def _fail_one(self, root: Path, name: str, step: int, at: int) -> tuple[bool, bool, bool, int]:
        """Fails one operation, and looks at what the same process and a new one make of it.

        Returns:
            Whether there were as many operations; whether the save raised; whether the step is
            there all the same; the number of operations.
        """
        mode, error = FAILURES[name]
        what = f"{name} {at}"
        manager = self._ready(root, step)
        self.disk.arm(root, self.directory / "logs" / what, mode, at, error)
        raised = ""
        try:
            self.save(manager, step)
        except Exception as refused:
            raised = type(refused).__name__
        has_fired, has_raised = self.disk.has_fired, bool(raised)
        operations = self.disk.disarm()
        what = f"{what} ({raised})"
        is_there = (root / str(step)).exists()
        for look in (self._goes_on, self._restarts):
            try:
                look(manager, root, step, what, has_raised)
            except Exception as problem:
                self.note("other", f"{what}: {problem!r}: {_last_lines()}")
        return has_fired, has_raised, is_there, operations

    def _goes_on(self, manager: Any, root: Path, step: int, what: str, has_raised: bool) -> None:
        """The same process saves the next step, which must work, and be exact."""
        with contextlib.suppress(Exception):  # one error to save, another to wait
            manager.wait_until_finished()
        with contextlib.suppress(Exception):
            manager.reload()
        self._save_after(manager, step + 1, has_raised)
        listed = {each: each > step for each in range(step - 2, step + 2) if each > 0}
        listed[step] = not has_raised
        self.check(manager, f"{what}, goes on", listed)
        manager.close()

    def _restarts(self, _: Any, root: Path, step: int, what: str, has_raised: bool) -> None:
        with self.run.open_manager(root) as manager:
            allowed = {
                each: each > step or (each == step and not has_raised)
                for each in range(max(step - 2, 1), step + 2)
            }
            self.check(manager, f"{what}, restarted", allowed)

    def _save_after(self, manager: Any, step: int, has_raised: bool) -> None:
        """The save that follows one that may have failed."""
        try:
            self.save(manager, step)
        except OSError as late:  # Orbax's store of metadata tells its own error here
            if not has_raised or manifest_file.FILE in str(late):
                raise
            self.save(manager, step)

    def log(self, step: int) -> dict[str, Any]:
        """Counts the operations of a save; what they are stands in ``log/log``."""
        root, out = self.directory / "root", self.directory / "log"
        self.prepare(root, step)
        manager = self._ready(root, step)
        self.disk.arm(root, out, COUNT)
        self.save(manager, step)
        manager.close()
        return {"kind": self.kind(root, step), "operations": self.disk.disarm()}


def _number(path: Path) -> int:
    return int(path.name)


def _last_lines() -> str:
    return traceback.format_exc(limit=-3)


def progress(name: str, count: int, of: int | None = None) -> None:
    """Tells people how far it got, now and then."""
    if count % 10 == 0 or count == of:
        print(f"{name}: {count}" + (f" of {of}" if of else ""), file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser, modes: list[str]) -> None:
    """Options of a campaign that stops or fails operations."""
    parser.add_argument("modes", nargs="+", choices=modes)
    parser.add_argument("--directory", type=Path, required=True, help="empty directory to work in")
    parser.add_argument("--stride", type=int, default=1, help="try every so many operations")


def by_mode(
    modes: list[str], exam: Exam, result_of: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Results of each mode, with its problems."""
    results = {}
    for mode in modes:
        before = len(exam.problems)
        result = result_of(mode)
        results[mode] = {**result, "problems": exam.problems[before:]}
    return {"modes": results}


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, minutes=math.inf)
    add_options(parser, ["stopped", *FAILURES, "log"])
    parser.add_argument("--save", choices=list(SAVES), default="delta", help="what is saved")
    parser.add_argument("--delta", default="auto", help="as AdaCheckHandler takes it")
    args = parser.parse_args()
    stop_s = time.monotonic() + args.minutes * 60
    disk = Disk() if shim.VARIABLE in os.environ else Interpreter()
    exam = Exam(args.directory, args.delta, disk, stop_s)
    step = SAVES[args.save]

    def result_of(mode: str) -> dict[str, Any]:
        if mode == "stopped":
            return exam.stopped(step, args.stride)
        return exam.log(step) if mode == "log" else exam.failed(mode, step, args.stride)

    found = by_mode(args.modes, exam, result_of)
    return command.finish({**found, "half_deleted": exam.half_deleted}, exam.problems)


if __name__ == "__main__":
    sys.exit(main())
