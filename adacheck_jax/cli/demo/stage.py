"""Child processes of the demonstration, which train, are killed, restore and measure."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from adacheck_jax.cli.demo.report import MeshRestore
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools import listing
from adacheck_jax.tools.listing import StepSummary

_MESH = ("--mesh", "4x2", "--devices", "8")
_POLL_S = 0.02
_FIRST_KILL_STEP = 4
_COMPILES = "JAX starts, and compiles"
_DOING = {
    "restore": "JAX starts, and compiles the update for each mesh",
    "save": "JAX starts, and saves the same states as bases, as deltas and by stock Orbax",
}
"""What is done while a bar shows no steps."""

Advance = Callable[[int], None]


class DemoError(AdaCheckError):
    """A part of the demonstration could not run to its end."""


class Stage:
    """Parts of the demonstration, one child process at a time.

    Args:
        work: directory to work in.
        steps: training steps of each run.
        console: console for progress messages.
    """

    def __init__(self, work: Path, steps: int, console: Console) -> None:
        self.root = work / "checkpoints"
        self.steps = steps
        self._work = work
        self._aside = work / "aside"
        self._console = console
        self._part = 0

    def train(self, name: str, title: str, *options: str) -> dict[int, str]:
        """Train to the end and return each step's loss as ``float.hex``."""
        losses = self._losses_file(name)
        with (
            self._told(title, self.steps, _COMPILES) as advance,
            self._trainer(name, *options) as child,
        ):
            while child.poll() is None:
                advance(max(_read_losses(losses), default=0))
                time.sleep(_POLL_S)
            self._check(child, name)
        return _read_losses(losses)

    def train_and_kill(self, rng: random.Random) -> dict[int, str]:
        """Train, save every step, and kill the process at a random moment.

        The moment is a random step's commit and up to one step's time more, so that it falls
        anywhere: into computing, staging, writing or committing.
        """
        name, committed, step_s, since_s = "killed", 0, 0.0, time.monotonic()
        fatal = rng.randint(_FIRST_KILL_STEP, max(_FIRST_KILL_STEP, 3 * self.steps // 4))
        title = "train, save every step, kill -9"
        with (
            self._told(title, self.steps, _COMPILES) as advance,
            self._trainer(name, "--root", str(self.root)) as child,
        ):
            while committed < fatal:
                self._check_alive(child, name)
                time.sleep(_POLL_S)
                newest = _newest_committed(self.root)
                if newest > committed:
                    # The first commit waits for the compiler, so its time is not a step's.
                    step_s = (time.monotonic() - since_s) / (newest - committed) if committed else 0
                    committed, since_s = newest, time.monotonic()
                    advance(committed)
            time.sleep(rng.random() * step_s)
            self._check_alive(child, name)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        return _read_losses(self._losses_file(name))

    def set_aside(self) -> tuple[StepSummary, StepSummary]:
        """Copy one step, without the steps it was built on, out of the killed run's root.

        Returns:
            The newest committed step, and the copied step: the newest delta.
        """
        whole = [step for step in listing.summarize_root(self.root).steps if not step.error]
        if not whole:
            raise DemoError(f"{self.root}: expected a step that can be restored, found none.")
        chosen = max(whole, key=lambda step: (step.kind == "delta", step.step))
        directory = str(chosen.step)
        shutil.copytree(self.root / directory, self._aside / directory)
        return whole[-1], chosen

    def restore(self, step: StepSummary) -> tuple[MeshRestore, ...]:
        """Restore the step that was set aside on every mesh."""
        results = self.measure("restore", f"restore step {step.step} on four meshes", step.step)
        return tuple(
            MeshRestore(**{**each, "different": tuple(each["different"])}) for each in results
        )

    def measure(self, task: str, title: str, *arguments: object) -> list[dict[str, Any]]:
        """Runs one measurement and returns what it printed."""
        root = self._aside if task == "restore" else self._work / "measured"
        module = "adacheck_jax.cli.demo.measure"
        with (
            self._told(title, None, _DOING[task]),
            self._child(task, module, task, str(root), *map(str, arguments)) as child,
        ):
            child.wait()
            self._check(child, task)
        if task == "save":
            shutil.rmtree(root)  # it is large, and told by its sizes
        return json.loads(self._log(task, "out").read_text().splitlines()[-1])

    @contextlib.contextmanager
    def _told(self, title: str, total: int | None, doing: str) -> Iterator[Advance]:
        """Shows a bar while a part runs and leaves a line when it is done.

        Args:
            title: the part.
            total: number of its steps; None if they are not known.
            doing: what happens before the first of them.
        """
        self._part += 1
        title = f"{self._part}/5 {title}"
        start_s = time.monotonic()
        if not self._bars:
            line = f"{title}: {doing} ..."
            self._console.print(line, style="dim", highlight=False, soft_wrap=True)
        with Progress(console=self._console, transient=True, disable=not self._bars) as progress:
            task = progress.add_task(f"{title}: {doing}", total=total)
            yield lambda completed: _set(progress, task, completed, title if completed else None)
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
                f"FAILED: the child process {name!r} ended with code {child.returncode} "
                f"(its whole output: {self._log(name, 'err')}). It said: {said}"
            )

    def _check_alive(self, child: _Child, name: str) -> None:
        if child.poll() is not None:
            self._check(child, name)
            raise DemoError(
                f"The run that was to be killed had ended after {self.steps} steps. Give more "
                "--steps."
            )


_Child = subprocess.Popen[bytes]


def _set(progress: Progress, task: TaskID, completed: int, title: str | None) -> None:
    if title is None:
        progress.update(task, completed=completed)
    else:
        progress.update(task, completed=completed, description=title)


def _reason(stdout: str, stderr: str) -> str:
    """Reason of a process's failure: the error it printed, else the end of its traceback."""
    with contextlib.suppress(LookupError, TypeError, ValueError):
        return json.loads(stdout.splitlines()[-1])["error"]
    return stderr.strip().rsplit("\n", maxsplit=1)[-1] or "nothing"


def _read_losses(file: Path) -> dict[int, str]:
    """Loss by step, from the complete lines of a file that may still be written."""
    if not file.exists():
        return {}
    lines = file.read_text().split("\n")[:-1]
    return {int(step): loss for step, loss in map(str.split, lines)}


def _newest_committed(root: Path) -> int:
    """The newest step directory without a temporary name: Orbax renames it in the end."""
    names = os.listdir(root) if root.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
