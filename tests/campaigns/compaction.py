"""Stops a compaction at every single operation that changes the disk, and fails each of them.

    python -m tests.campaigns.compaction stopped once full --directory DIRECTORY

needs the shim of :mod:`.shim`, as :mod:`.operations` does, whose modes it has: ``stopped`` goes on
from a copy of the root before every operation, ``once`` fails another operation each time, ``full``
fails one and all that follow. Every step has to be restored by a new handler, and the compacted one
by stock Orbax if that finds a base there; the compaction is tried again, ``adacheck repair`` finds
the root clean, and training goes on.
"""

from __future__ import annotations

import errno
import math
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from tests import support
from tests.campaigns import command, operations
from tests.campaigns.operations import COPY, FAIL_ONCE, FULL, Disk, Exam, progress

STEPS = (5, 6, 7)
"""A base, the delta that is compacted, and the delta that follows it."""
FAILURES = {"once": (FAIL_ONCE, errno.EIO), "full": (FULL, errno.ENOSPC)}


class CompactionExam:
    """Compactions of one step of a run.

    Args:
        directory: to work in.
        step: the step that is compacted.
        stop_s: when no more operations are tried, on the monotonic clock.
    """

    def __init__(self, directory: Path, step: int, stop_s: float) -> None:
        support.compile_once(directory / "compiled")
        self.exam = Exam(directory, "auto", Disk(), stop_s)
        self._directory, self._step = directory, step
        self.source = directory / "source"
        self.exam.prepare(self.source, STEPS[-1] + 1)
        self._expected = sorted(self._leaves(self.exam.states[step]))

    def _leaves(self, state: Any) -> list[bytes]:
        return [each.tobytes() for each in support.host_copy(state)]

    def _item(self, root: Path) -> Path:
        return root / str(self._step) / "default"

    def _is_base(self, root: Path) -> bool:
        return isinstance(manifest_file.read(self._item(root)), BaseManifest)

    def _values(self, root: Path) -> tuple[Lineage, dict[int, Blocks]]:
        return support.restored_boxes(self._item(root))

    def stopped(self, stride: int) -> dict[str, Any]:
        """Goes on from what the disk held before each operation."""
        root, out = self._directory / "stopped", self._directory / "copies"
        shutil.copytree(self.source, root)
        values = self._values(root)
        self.exam.disk.arm(root, out, COPY)
        support.put_base(*values)
        operations = self.exam.disk.disarm()
        copies = sorted(
            (path for path in out.iterdir() if path.is_dir()), key=lambda p: int(p.name)
        )
        chosen = [c for i, c in enumerate(copies) if i % stride == 0 or i >= len(copies) - 3]
        were_bases, were_stock = [], []
        for copy in chosen:
            if self.exam.is_late():
                break
            were_bases.append(self._is_base(copy))
            were_stock.append(self._judge(copy, f"copy {copy.name}"))
            shutil.rmtree(copy)
            progress("stopped", len(were_bases), len(chosen))
        for name, flags in (("base", were_bases), ("stock base", were_stock)):
            if flags != sorted(flags):
                self.exam.note("other", f"the {name} came and went")
        return {
            "operations": operations,
            "tried": len(were_bases),
            "had_base": sum(were_bases),
            "had_stock_base": sum(were_stock),
            "is_whole": len(were_bases) == len(chosen),
        }

    def failed(self, name: str, stride: int) -> dict[str, Any]:
        """Fails operations of a compaction."""
        mode, error = FAILURES[name]
        tried = raised = bases = 0
        at, has_fired, operations = 1, True, 0
        while has_fired and not self.exam.is_late():
            root = self._directory / name
            shutil.copytree(self.source, root)
            values, what = self._values(root), f"{name} {at}"
            self.exam.disk.arm(root, self._directory / "logs" / what, mode, at, error)
            has_raised = False
            try:
                support.put_base(*values)
            except Exception as refused:
                has_raised = True
                what = f"{what} ({type(refused).__name__}: {refused})"
            has_fired, operations = self.exam.disk.has_fired, self.exam.disk.disarm()
            if not has_raised and not self._is_base(root):
                self.exam.note("other", f"{what}: neither an error nor a base")
            bases += self._is_base(root)
            self._judge(root, what)
            tried, raised = tried + has_fired, raised + has_raised
            progress(name, tried)
            shutil.rmtree(root)
            at += stride
        counts = {"tried": tried, "raised": raised, "had_base": bases, "operations": operations}
        return {**counts, "is_whole": not has_fired}

    def _judge(self, root: Path, what: str) -> bool:
        """Looks at a root as a new process finds it, and goes on.

        Returns:
            True if stock Orbax finds a base.
        """
        try:
            return self._looked_at(root, what)
        except Exception as problem:
            self.exam.note("other", f"{what}: {problem!r}: {traceback.format_exc(limit=-3)}")
            return False

    def _looked_at(self, root: Path, what: str) -> bool:
        is_stock = self._is_stock(root, what)
        if self._is_base(root) and not is_stock:
            self.exam.note("lost", f"{what}: stock Orbax does not restore the base")
        self._check(root, what)
        if self._is_base(root):
            in_place.clear(self._item(root))
        else:
            support.put_base(*self._values(root))
        if not self._is_stock(root, what):
            self.exam.note("lost", f"{what}: stock Orbax does not restore the base that was made")
        if left := in_place.leftovers(self._item(root)):
            self.exam.note("other", f"{what}: left behind: {left}")
        self.exam.go_on(root, what, dict.fromkeys(STEPS, True))
        return is_stock

    def _is_stock(self, root: Path, what: str) -> bool:
        try:
            found = ocp.PyTreeCheckpointer().restore(self._item(root))
        except Exception:  # it finds no base: one of many errors
            return False
        if sorted(self._leaves(found)) != self._expected:
            self.exam.note("wrong", f"{what}: stock Orbax restores other bits")
        return True

    def _check(self, root: Path, what: str) -> None:
        """Restores every step, without a manager, which would remove what a crash left."""
        for step in STEPS:
            lineage, _ = support.restored_boxes(root / str(step) / "default")
            if lineage.end.step != step:
                self.exam.note("wrong", f"{what}: step {step} is step {lineage.end.step}")


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, minutes=math.inf)
    operations.add_options(parser, ["stopped", *FAILURES])
    parser.add_argument("--step", type=int, choices=STEPS[1:], default=6, help="that is compacted")
    args = parser.parse_args()
    exam = CompactionExam(args.directory, args.step, time.monotonic() + args.minutes * 60)

    def result_of(mode: str) -> dict[str, Any]:
        stopped = mode == "stopped"
        return exam.stopped(args.stride) if stopped else exam.failed(mode, args.stride)

    found = operations.by_mode(args.modes, exam.exam, result_of)
    return command.finish(found, exam.exam.problems)


if __name__ == "__main__":
    sys.exit(main())
