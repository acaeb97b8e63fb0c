"""A process that forks, or ends, while threads of this library are at work.

Usage: forks_worker.py SITUATION ROOT MEMORY

SITUATION is what is at work: idle, saving, managing (saving by a manager of this library), folding,
writing (a base in the background), written (it waits for its place), publishing; or one of them
after ``end-``: then the process ends as it stands.
Each of ``DEEDS`` is done in a forked child meanwhile; then the process goes on. Prints JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.publish import Follower, Publisher
from adacheck_jax.publish.writing import Writer
from adacheck_jax.save import share
from adacheck_jax.save.background_bases import BackgroundBases
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.compaction import new_base
from adacheck_jax.store.steps import roots
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support

SITUATIONS = ("idle", "saving", "managing", "folding", "writing", "written", "publishing")
DEEDS = ("close", "leave", "collect", "use", "load")
PATIENCE_S = 15.0
HELD = {
    "saving": (share, "write"),
    "managing": (share, "write"),
    "folding": (HostFold, "advance"),
    "writing": (new_base, "write"),
    "publishing": (Writer, "write"),
}
LINEAGE = 3


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "nothing came"
        time.sleep(0.005)


class Held:
    """What a thread calls, and waits in until it is let go on, unless it may pass."""

    def __init__(self, owner: Any, name: str, *, passes: bool = False) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        if passes:
            self._go_on.set()
        call = getattr(owner, name)

        def held(*args: Any, **options: Any) -> Any:
            self._reached.set()
            self._go_on.wait()
            return call(*args, **options)

        setattr(owner, name, held)

    def wait(self) -> None:
        assert self._reached.wait(PATIENCE_S), "nobody came"

    def let_go(self) -> None:
        self._go_on.set()


class Training:
    """A run with a manager and a publisher, stopped in a situation."""

    def __init__(self, situation: str, root: Path, memory: Path, *, is_end: bool) -> None:
        self.situation, self.root, self.memory = situation, root, memory
        # A process that ends is not held: it would wait for its threads. It ends only once the
        # situation is there: before that Orbax makes a step's directory, and an end meanwhile
        # leaves a thread of Orbax's, with any handler, waiting for it for as long as it may.
        self.is_end = is_end
        self.run = support.dict_run(support.mesh_of((1, 1)))
        options: Any = {
            "max_deltas": adacheck.AdaptivePolicy(most_deltas=LINEAGE),
            "shadow": adacheck.Shadow(directory=memory),
        }
        recorder = self.run.recorder
        if situation == "managing":
            found = adacheck.checkpoint_manager(
                root / "steps", recorder, max_to_keep=None, **options
            )
            self.manager, self.handler = found, found.handler
        else:
            self.handler = adacheck.AdaCheckHandler(recorder, **options)
            self.manager = support.manager_of(root / "steps", self.handler)
        self.publisher = Publisher(root / "weights", params_path="params")
        self.saved: dict[int, list[Any]] = {}
        self.held: Held | None = None

    def save(self, *, wait: bool = True) -> None:
        state = self.run.advance()
        self.saved[self.run.count] = support.host_copy(state)
        self.manager.save(self.run.count, args=adacheck.SaveArgs(state))
        if wait:
            self.manager.wait_until_finished()

    def publish(self, *, wait: bool = True) -> None:
        self.publisher.publish(self.run.state, version=self.run.count, wait=wait)

    def bases(self) -> BackgroundBases:
        (saver,) = self.handler.run.lines._savers.values()
        return saver._bases

    def look_after_base(self) -> Any:
        """The base in the background, once a thread writes it."""
        self.handler.record_step(self.run.state, self.run.count)
        pending = self.bases()._pending
        return pending.written if pending is not None else None

    def begin(self) -> None:
        """Goes on until the situation is there."""
        self.save()
        self.save()
        self.publish()
        if held := HELD.get(self.situation):
            self.held = Held(*held, passes=self.is_end)
        if self.situation in ("saving", "managing", "folding"):
            self.save(wait=False)
        elif self.situation == "publishing":
            self.run.advance()
            self.publish(wait=False)
        elif self.situation in ("writing", "written"):
            until(lambda: self.save() or self.look_after_base() is not None)
            if self.situation == "written":
                assert self.look_after_base().result().base is not None
        if self.held is not None:
            self.held.wait()

    def end(self) -> dict[str, Any]:
        """Goes on, and tells if all is there."""
        if self.held is not None:
            self.held.let_go()
        is_locked = self.has_shadow()
        for _ in range(LINEAGE):
            self.save()
        self.publish()
        self.manager.close()
        self.publisher.close()
        found = [each.manifest for each in roots.steps_of(self.root / "steps")]
        bases = [each for each in found if isinstance(each, BaseManifest)]
        args = adacheck.RestoreArgs(support.abstract(self.run.state))
        with support.manager_of(self.root / "steps", adacheck.AdaCheckHandler()) as manager:
            for step, expected in self.saved.items():
                support.assert_same_bits(manager.restore(step, args=args), expected)
        params = support.abstract(self.run.state["params"])
        follower = Follower(self.root / "weights", params)
        support.assert_same_bits(follower.latest(), support.host_copy(self.run.state["params"]))
        again = adacheck.AdaCheckHandler(
            self.run.recorder, shadow=adacheck.Shadow(directory=self.memory)
        )
        recovered = again.recover(self.root / "steps", args.abstract_state)
        if recovered is not None:
            support.assert_same_bits(recovered[1], self.saved[recovered[0]])
        return {
            "steps": len(self.saved),
            "compacted": [each.step for each in bases if each.replaces is not None],
            "locked": is_locked,
            "recovered": recovered is not None and recovered[0] == self.run.count,
        }

    def has_shadow(self) -> bool:
        """True if nobody else gets the file of the shadow."""
        (path,) = self.memory.iterdir()
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def used(training: Training) -> int:
    """Uses everything in a child; returns an exit code."""
    state, version = training.run.state, training.run.count + 1
    args, steps = adacheck.RestoreArgs(support.abstract(state)), training.root / "steps"
    calls: list[Callable[[], object]] = [
        lambda: training.handler.record_step(state, version),
        lambda: training.handler.restore(epath.Path(steps / "1" / "default"), args),
        lambda: training.handler.recover(steps, args.abstract_state),
        lambda: training.publisher.publish(state, version=version),
        training.publisher.wait,
    ]
    if training.situation == "managing":
        calls.append(lambda: training.manager.save(version, args=adacheck.SaveArgs(state)))
        calls.append(lambda: training.manager.restore(1, args=args))
    for number, call in enumerate(calls, 10):
        try:
            call()
        except AdaCheckError as error:
            if "was forked from it" not in str(error):
                return number
        else:
            return number
    return 0


def loaded(number: int) -> int:
    """What a data loader does."""
    return number + 1


def outcome_of(pid: int) -> str:
    """The end of a child; one that hangs is killed."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def load() -> str:
    """Has a process that multiprocessing forks do something."""
    process = multiprocessing.get_context("fork").Process(target=loaded, args=(1,))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        return "hung"
    return f"ended with {process.exitcode}"


def child(deed: str, training: list[Training]) -> None:
    """Does a deed in a child, which does not come back."""
    code = 1
    try:
        if deed == "close":
            if training[0].situation == "managing":
                training[0].manager.wait_until_finished()
            training[0].manager.close()
            training[0].publisher.close()
        elif deed == "leave":
            with contextlib.suppress(SystemExit), training[0].manager, training[0].publisher:
                sys.exit()
        elif deed == "collect":
            training[0].bases()._pending = None
            training.clear()
            gc.collect()
        code = used(training[0]) if deed == "use" else 0
    finally:
        # Not by the end of the interpreter, at which JAX alone hangs or crashes in a child.
        os._exit(code)


def main() -> None:
    situation, root, memory = sys.argv[1], *map(Path, sys.argv[2:])
    line.BEGINNING = Schedule(LINEAGE, 1)
    is_end = situation.startswith("end-")
    training = [Training(situation.removeprefix("end-"), root, memory, is_end=is_end)]
    training[0].begin()
    if is_end:
        print(json.dumps({"steps": len(training[0].saved)}), flush=True)
        return
    outcomes: dict[str, str] = {}
    for deed in DEEDS:
        if deed == "load":
            outcomes[deed] = load()
            continue
        pid = os.fork()
        if not pid:
            child(deed, training)
        outcomes[deed] = outcome_of(pid)
    beside = sorted(each.name for each in (root / "steps").iterdir() if each.name[0] == ".")
    print(json.dumps({"outcomes": outcomes, "beside": beside, **training[0].end()}))


if __name__ == "__main__":
    main()
