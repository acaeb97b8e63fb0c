"""The demonstration: train, kill, resume, restore on other meshes, and compare every bit.

Everything that computes runs in child processes, each with a JAX of its own, so that what is shown
is what a new process finds on disk. This process only starts them, kills one, and compares.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, TaskID
from rich.table import Table

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools import inspection
from adacheck_jax.tools.inspection import StepSummary
from adacheck_jax.tools.steps import InputError

_MESH = ("--mesh", "4x2", "--devices", "8")
_POLL_S = 0.02
_FIRST_KILL_STEP = 4

Advance = Callable[[int], None]


class DemoError(AdaCheckError):
    """A part of the demonstration could not run to its end."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one kind of save costs.

    Attributes:
        kind: ``base``, ``delta`` or ``stock Orbax`` (``StandardSave`` of the same state).
        new_bytes: bytes that one step adds on disk.
        blocking_ms: median milliseconds for which ``save`` blocks the training loop.
    """

    kind: str
    new_bytes: int
    blocking_ms: float


@dataclass(frozen=True, slots=True)
class MeshRestore:
    """One restore of one step.

    Attributes:
        mesh: the target mesh, data x model.
        restore_s: seconds of one restore in a fresh process, compiling included.
        leaf_count: leaves compared with the restore on the mesh that saved them.
        different: paths of those whose bits differ; empty if all is well.
    """

    mesh: str
    restore_s: float
    leaf_count: int
    different: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demonstration showed.

    Attributes:
        steps: training steps of each run.
        seed: chose the moment of the kill.
        last_loss_step: the last step whose loss the killed run had reported.
        resumed_step: the newest committed step, which the new process resumed from.
        was_saving: whether the kill interrupted a save.
        compared_loss_count: losses, before the kill and after it, that were compared with those of
            the uninterrupted run.
        restored_step: the step that was copied aside and restored on every mesh.
        restored_kind: ``base`` or ``delta``.
        restored_depth: number of deltas that each restore folded onto the base.
        restores: one a mesh, the one that saved first.
        saves: one a kind.
        total_s: seconds of the whole demonstration.
        failures: what differed, one sentence each; empty if every bit was equal.
    """

    steps: int
    seed: int
    last_loss_step: int
    resumed_step: int
    was_saving: bool
    compared_loss_count: int
    restored_step: int
    restored_kind: str
    restored_depth: int
    restores: tuple[MeshRestore, ...]
    saves: tuple[SaveCost, ...]
    total_s: float
    failures: tuple[str, ...]


def run_demo(
    *, steps: int = 40, seed: int | None = None, keep: Path | None = None, console: Console
) -> DemoReport:
    """Runs the whole demonstration.

    Args:
        steps: training steps of each run.
        seed: chooses the moment of the kill; None takes a random one.
        keep: a new or empty directory to work in, which is kept; None works in a temporary one.
        console: where progress is told.

    Returns:
        What was found. Bits that differ are not an exception but ``failures``.

    Raises:
        InputError: ``keep`` exists and is not an empty directory.
        DemoError: a child process failed.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    with _workplace(keep) as work:
        console.print(f"working in {work}; the kill's seed is {seed}", style="dim", highlight=False)
        return _play(_Stage(work, steps, console), seed)


@contextlib.contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="adacheck-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(
            f"{keep}: expected a new or empty directory to work in, found "
            f"{'files in it' if keep.is_dir() else 'a file'}. Give another one."
        )
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


def _play(stage: _Stage, seed: int) -> DemoReport:
    start_s = time.monotonic()
    expected = stage.train("uninterrupted", "train without saving", "--no-save")
    before = stage.train_and_kill(random.Random(seed))
    resumed, restored = stage.set_aside()
    was_saving = any("tmp" in path.name for path in stage.root.iterdir())
    after = stage.train("resumed", "resume in a new process", "--root", str(stage.root))
    restores = stage.restore(restored)
    saves = tuple(SaveCost(**each) for each in stage.measure("save", "compare with stock Orbax"))
    failures = [
        *_different_losses(expected, before, "before the kill"),
        *_different_losses(expected, after, "after resuming"),
        *(
            f"On {each.mesh} {len(each.different)} of {each.leaf_count} leaves of step "
            f"{restored.step} differ: {', '.join(each.different[:3])}."
            for each in restores
            if each.different
        ),
    ]
    due = range((resumed.step or 0) + 1, stage.steps + 1)
    if sorted(after) != list(due):
        failures.append(
            f"Expected the new process to train steps {due.start} to {stage.steps}, found "
            f"{min(after, default=0)} to {max(after, default=0)}."
        )
    return DemoReport(
        steps=stage.steps,
        seed=seed,
        last_loss_step=max(before, default=0),
        resumed_step=resumed.step or 0,
        was_saving=was_saving,
        compared_loss_count=len(before) + len(after),
        restored_step=restored.step or 0,
        restored_kind=restored.kind or "",
        restored_depth=restored.depth or 0,
        restores=restores,
        saves=saves,
        total_s=time.monotonic() - start_s,
        failures=tuple(failures),
    )


def _different_losses(expected: dict[int, str], found: dict[int, str], when: str) -> list[str]:
    wrong = [step for step, loss in found.items() if expected.get(step) != loss]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"{len(wrong)} of {len(found)} losses {when} differ, first at step {first}: expected "
        f"{expected.get(first)}, found {found[first]}."
    ]


class _Stage:
    """Runs the parts of the demonstration, one child process at a time.

    Args:
        work: directory to work in.
        steps: training steps of each run.
        console: where progress is told.
    """

    def __init__(self, work: Path, steps: int, console: Console) -> None:
        self.root = work / "checkpoints"
        self.steps = steps
        self._work = work
        self._aside = work / "aside"
        self._console = console
        self._part = 0

    def train(self, name: str, title: str, *options: str) -> dict[int, str]:
        """Trains to the end; returns each step's loss as ``float.hex``."""
        losses = self._losses_file(name)
        with self._told(title, self.steps) as advance, self._trainer(name, *options) as child:
            while child.poll() is None:
                advance(max(_read_losses(losses), default=0))
                time.sleep(_POLL_S)
            self._check(child, name)
        return _read_losses(losses)

    def train_and_kill(self, rng: random.Random) -> dict[int, str]:
        """Trains, saving every step, and kills the process at a random moment.

        The moment is a random step's commit and up to one step's time more, so that it falls
        anywhere: into computing, staging, writing or committing.
        """
        name, committed, step_s, since_s = "killed", 0, 0.0, time.monotonic()
        fatal = rng.randint(_FIRST_KILL_STEP, max(_FIRST_KILL_STEP, 3 * self.steps // 4))
        title = "train, save every step, kill -9"
        with (
            self._told(title, self.steps) as advance,
            self._trainer(name, "--root", str(self.root)) as child,
        ):
            while committed < fatal:
                self._check_alive(child, name)
                time.sleep(_POLL_S)
                newest = _newest_committed(self.root)
                if newest > committed:
                    # The first commit waits for the compiler: what it took says nothing.
                    step_s = (time.monotonic() - since_s) / (newest - committed) if committed else 0
                    committed, since_s = newest, time.monotonic()
                    advance(committed)
            time.sleep(rng.random() * step_s)
            self._check_alive(child, name)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        return _read_losses(self._losses_file(name))

    def set_aside(self) -> tuple[StepSummary, StepSummary]:
        """Copies one step, and nothing that it was built on, out of the killed run's root.

        Returns:
            The newest committed step; and the copied one, the newest delta.
        """
        whole = [step for step in inspection.summarize_root(self.root).steps if not step.error]
        if not whole:
            raise DemoError(f"{self.root}: expected a step that can be restored, found none.")
        chosen = max(whole, key=lambda step: (step.kind == "delta", step.step))
        directory = str(chosen.step)
        shutil.copytree(self.root / directory, self._aside / directory)
        return whole[-1], chosen

    def restore(self, step: StepSummary) -> tuple[MeshRestore, ...]:
        """Restores the step that was set aside on every mesh."""
        results = self.measure("restore", f"restore step {step.step} on four meshes", step.step)
        return tuple(
            MeshRestore(**{**each, "different": tuple(each["different"])}) for each in results
        )

    def measure(self, task: str, title: str, *arguments: object) -> list[dict[str, Any]]:
        """Runs one measurement and returns what it printed."""
        root = self._aside if task == "restore" else self._work / "measured"
        module = "adacheck_jax.cli.demo.measure"
        with (
            self._told(title, None),
            self._child(task, module, task, str(root), *map(str, arguments)) as child,
        ):
            child.wait()
            self._check(child, task)
        return json.loads(self._log(task, "out").read_text().splitlines()[-1])

    @contextlib.contextmanager
    def _told(self, title: str, total: int | None) -> Iterator[Advance]:
        """Shows a bar while a part runs and leaves a line when it is done."""
        self._part += 1
        title = f"{self._part}/5 {title}"
        start_s = time.monotonic()
        with Progress(console=self._console, transient=True, disable=not self._bars) as progress:
            task = progress.add_task(title, total=total)
            yield lambda completed: _set(progress, task, completed)
        taken_s = time.monotonic() - start_s
        self._console.print(f"{title} [dim]({taken_s:.1f} s)[/dim]", highlight=False)

    @property
    def _bars(self) -> bool:
        return self._console.is_terminal and not self._console.quiet

    def _trainer(self, name: str, *options: str) -> contextlib.AbstractContextManager[_Child]:
        losses = str(self._losses_file(name))
        every = ("--steps", str(self.steps), *_MESH, "--losses", losses, *options)
        return self._child(name, "adacheck_jax.cli.demo.train_lm", *every)

    @contextlib.contextmanager
    def _child(self, name: str, module: str, *arguments: str) -> Iterator[_Child]:
        """A child process on virtual CPU devices, which does not outlive this block."""
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with self._log(name, "out").open("wb") as out, self._log(name, "err").open("wb") as err:
            command = [sys.executable, "-m", module, *arguments]
            child = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            try:
                yield child
            finally:
                if child.poll() is None:
                    child.kill()
                child.wait()

    def _log(self, name: str, stream: str) -> Path:
        return self._work / f"{name}.{stream}"

    def _losses_file(self, name: str) -> Path:
        return self._work / f"{name}.losses"

    def _check(self, child: _Child, name: str) -> None:
        if child.returncode:
            said = _reason(*(self._log(name, stream).read_text() for stream in ("out", "err")))
            raise DemoError(
                f"FAILED: the child process {name!r} ended with code {child.returncode} (with "
                f"--keep DIR its whole output is in DIR/{name}.err). It said: {said}"
            )

    def _check_alive(self, child: _Child, name: str) -> None:
        if child.poll() is not None:
            self._check(child, name)
            raise DemoError(
                f"The run that was to be killed had ended after {self.steps} steps. Give more "
                "--steps."
            )


_Child = subprocess.Popen[bytes]


def _set(progress: Progress, task: TaskID, completed: int) -> None:
    progress.update(task, completed=completed)


def _reason(stdout: str, stderr: str) -> str:
    """Why a process failed: what it printed as its error, else how its traceback ends."""
    with contextlib.suppress(LookupError, TypeError, ValueError):
        return json.loads(stdout.splitlines()[-1])["error"]
    return stderr.strip().rsplit("\n", maxsplit=1)[-1] or "nothing"


def _read_losses(file: Path) -> dict[int, str]:
    """Step to loss from the whole lines of a file that may still be written."""
    if not file.exists():
        return {}
    lines = file.read_text().split("\n")[:-1]
    return {int(step): loss for step, loss in map(str.split, lines)}


def _newest_committed(root: Path) -> int:
    """The newest step directory without a temporary name: Orbax renames it in the end."""
    names = os.listdir(root) if root.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def show(report: DemoReport, console: Console) -> None:
    """Prints a report for people: tables, and last what was shown or what failed."""
    console.print()
    console.print(_save_table(report.saves))
    console.print()
    console.print(_restore_table(report.restores))
    console.print()
    if report.failures:
        console.print("FAILED: not every bit is equal.", style="bold red")
        for failure in report.failures:
            console.print(failure, markup=False, highlight=False)
        console.print(f"Repeat with --seed {report.seed} --keep DIR to look into it.")
        return
    console.print(_conclusion(report), highlight=False, markup=False)
    console.print(f"{report.total_s:.0f} s", style="dim", highlight=False)


def _save_table(saves: tuple[SaveCost, ...]) -> Table:
    stock = next(save for save in saves if save.kind == "stock Orbax")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("one save")
    for name in ("bytes", "of stock", "blocking", "of stock"):
        table.add_column(name, justify="right")
    for save in saves:
        table.add_row(
            save.kind,
            decimal(save.new_bytes),
            f"{save.new_bytes / stock.new_bytes:.2f}",
            f"{save.blocking_ms:.1f} ms",
            f"{save.blocking_ms / stock.blocking_ms:.2f}",
        )
    return table


def _restore_table(restores: tuple[MeshRestore, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("restore on")
    table.add_column("time", justify="right")
    table.add_column("leaves verified", justify="right")
    for each in restores:
        verified = each.leaf_count - len(each.different)
        table.add_row(each.mesh, f"{each.restore_s:.2f} s", f"{verified} of {each.leaf_count}")
    return table


def _conclusion(report: DemoReport) -> str:
    moment = "in the middle of a save" if report.was_saving else "between two saves"
    replayed = f", a base and {report.restored_depth} deltas," if report.restored_depth else ""
    meshes = [each.mesh for each in report.restores]
    return (
        f"A run was killed {moment} after step {report.last_loss_step}. A new process resumed "
        f"from step {report.resumed_step} and went on to step {report.steps}: all "
        f"{report.compared_loss_count} losses before and after the kill equal those of a run that "
        f"was never interrupted, bit for bit. Step {report.restored_step}{replayed} copied out of "
        f"its root, was restored on {len(meshes)} meshes ({', '.join(meshes)}): each of its "
        f"{report.restores[0].leaf_count} leaves has the same bits on all of them."
    )
