"""What a full disk does to saves: at many points of a save, and to the steps before and after it.

    python -m tests.campaigns.disk --points 50          # needs the right to mount a tmpfs

The root lies on a small tmpfs. For each point, and for bases and deltas alike, all space is taken
but for that part of what a save needs; a step is saved; and the space is given back. Then every
step that is listed is restored by a new handler and compared bit by bit, and the next step is saved
and restored. ``--take inodes`` takes inodes in place of bytes; ``--take read-only`` remounts the
file system read-only instead.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.multihost import multihost

import adacheck_jax as adacheck
from tests.campaigns import command

multihost._DEFAULT_BARRIER_TIMEOUT = 5
"""Seconds for which Orbax waits for directories that cannot be made; 300 otherwise."""

WIDTH = 256
SIZE_BYTES = 256 * 2**20  # what was to be deleted at a failed save stays until a manager is opened
INODES = 4000
_LOST = "no further step was saved"
_GONE, _OTHER_BITS = "committed, and gone", "other bits"


class Run:
    """A run of four matrices, of which every state that was saved is remembered."""

    def __init__(self) -> None:
        self.recorder = adacheck.Recorder(optax.adamw(1e-2))
        keys = jax.random.split(jax.random.key(0), 4)
        params = {str(i): jax.random.normal(k, (WIDTH, WIDTH)) for i, k in enumerate(keys)}
        self.state = {"params": params, "opt_state": self.recorder.init(params)}
        self.step = 0
        self.saved: dict[int, list[np.ndarray]] = {}

        @jax.jit
        def train_step(state: Any) -> Any:
            grads = jax.tree.map(lambda p: jnp.sin(p * 10), state["params"])
            updates, opt_state = self.recorder.update(grads, state["opt_state"], state["params"])
            return {
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
            }

        self._train_step = train_step

    def advance(self) -> Any:
        """Makes one update, and remembers what it gave."""
        self.state = self._train_step(self.state)
        self.step += 1
        self.saved[self.step] = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]
        return self.state


class Disk:
    """A tmpfs of which all but some of the space can be taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        options = f"size={SIZE_BYTES},nr_inodes={INODES}"
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        self._ballast = path / "ballast"
        self._files = path / "files"

    def free(self) -> tuple[int, int]:
        """Bytes and inodes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_bsize, found.f_favail

    def leave_bytes(self, count: int) -> None:
        """Takes all space but that many bytes."""
        size = self.free()[0] - count
        with open(self._ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def leave_inodes(self, count: int) -> None:
        """Takes all inodes but that many."""
        self._files.mkdir()
        for i in range(self.free()[1] - count):
            (self._files / str(i)).touch()

    def remount(self, mode: str) -> None:
        """Makes it read-only (ro) or not (rw)."""
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=True)

    def give_back(self) -> None:
        """Gives back what was taken."""
        self._ballast.unlink(missing_ok=True)
        for path in self._files.glob("*"):
            path.unlink()
        if self._files.is_dir():
            self._files.rmdir()

    def close(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", str(self.path)], check=True)


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    with tempfile.TemporaryDirectory() as place:
        try:
            Disk(Path(place)).close()
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def manager_of(root: Path, recorder: Any, max_deltas: int) -> ocp.CheckpointManager:
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=max_deltas)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    return ocp.CheckpointManager(root, item_handlers=handler, options=options)


def harmed(root: Path, run: Run, newest: int) -> list[str]:
    """What is wrong with the steps that a new manager lists.

    Args:
        root: of the steps.
        run: what was saved.
        newest: the last step that was committed, which has to be there.
    """
    wrong = []
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state
    )
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler()) as manager:
        steps = manager.all_steps()
        if newest not in steps:
            wrong.append(f"step {newest}: {_GONE}")
        for step in steps:
            try:
                found = manager.restore(step, args=adacheck.RestoreArgs(target))
            except Exception as error:
                wrong.append(f"step {step}: {type(error).__name__}: {error}"[:400])
                continue
            pairs = zip(jax.tree.leaves(found), run.saved[step], strict=True)
            if any(np.asarray(a).tobytes() != b.tobytes() for a, b in pairs):
                wrong.append(f"step {step}: {_OTHER_BITS}")
    return wrong


def save(manager: ocp.CheckpointManager, run: Run) -> list[str]:
    """Saves the next step; tells each time that it raised something."""
    run.advance()
    raised = []
    for call in (
        lambda: manager.save(run.step, args=adacheck.SaveArgs(run.state)),
        manager.wait_until_finished,
        manager.wait_until_finished,  # it is raised once
    ):
        try:
            call()
        except Exception as error:
            first_line = str(error).split("\n", 1)[0]
            raised.append(f"{type(error).__name__}: {first_line}"[:300])
    return raised


def campaign(kind: str, what: str, points: int) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as place:
        disk = Disk(Path(place))
        root, run = disk.path / "root", Run()
        manager = manager_of(root, run.recorder, 0 if kind == "base" else 20)
        try:
            save(manager, run)
            save(manager, run)
            before = disk.free()
            save(manager, run)
            newest = run.step
            needs = [a - b for a, b in zip(before, disk.free(), strict=True)]
            for point in range(points):
                if what == "bytes":
                    disk.leave_bytes(needs[0] * point // points)
                elif what == "inodes":
                    disk.leave_inodes(needs[1] * point // points)
                else:
                    disk.remount("ro")
                raised = save(manager, run)
                listed = run.step in manager.all_steps()
                if what == "read-only":
                    disk.remount("rw")
                disk.give_back()
                committed = (root / str(run.step)).exists()
                newest = run.step if committed else newest
                wrong = harmed(root, run, newest)
                after = save(manager, run)
                # Orbax's manager, with any handler, may tell of a failed save once more when the
                # next one begins, which is not saved then. The one after it has to be.
                is_late = bool(after) and not (root / str(run.step)).exists()
                if is_late:
                    after += save(manager, run)
                if (root / str(run.step)).exists():
                    newest = run.step
                else:
                    wrong.append(_LOST)
                wrong += harmed(root, run, newest)
                # What Orbax leaves of a failure. Not before: one of its threads may still write it.
                for left in root.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(left)
                results.append(
                    {
                        "kind": kind,
                        "taken": what,
                        "point": point,
                        "raised": raised,
                        "committed": committed,
                        "listed": listed,
                        "raised_after": after,
                        "late": is_late,
                        "wrong": wrong,
                    }
                )
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            manager.close()
        finally:
            disk.close()
    return results


def kinds_of(result: dict[str, Any]) -> set[str]:
    """What is wrong at one point: a step is ``lost`` or ``wrong``, or something ``other``."""
    found = set()
    for what in result["wrong"]:
        is_next = what == _LOST
        found.add("other" if is_next else "wrong" if what.endswith(_OTHER_BITS) else "lost")
    if not result["committed"] and len(result["raised"]) != 1:
        found.add("other")  # it is to be told, and once
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    head = [
        *("taken", "save of a", "points", "saved all the same", "raised once", "raised otherwise"),
        *("steps harmed", "next save lost", "and the one after it"),
    ]
    rows = []
    groups = collections.defaultdict(list)
    for each in results:
        groups[each["taken"], each["kind"]].append(each)
    for (taken, kind), group in groups.items():
        failed = [r for r in group if not r["committed"]]
        once = sum(len(r["raised"]) == 1 for r in failed)
        cells = [
            taken,
            kind,
            len(group),
            len(group) - len(failed),
            once,
            len(failed) - once,
            sum(any(w != _LOST for w in r["wrong"]) for r in group),
            sum(r["late"] for r in group),
            sum(_LOST in r["wrong"] for r in group),
        ]
        rows.append(cells)
    return command.table(head, rows)


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, json=False)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--take", nargs="+", default=["bytes", "inodes", "read-only"])
    arguments = parser.parse_args()
    if not can_mount():
        return command.finish({"not_tried": "a tmpfs cannot be mounted here"})
    results = []
    for what in arguments.take:
        points = arguments.points if what != "read-only" else 3
        for kind in ("base", "delta"):
            results += campaign(kind, what, points)
    messages = collections.Counter(m for r in results for m in r["raised"] + r["raised_after"])
    told = "\n".join(f"{count} x {m}" for m, count in messages.most_common())
    text = "" if arguments.json else f"{table(results)}\n\n{told}"
    problems = [r for r in results if any(w != _LOST for w in r["wrong"])]
    return command.finish({"points": results}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
