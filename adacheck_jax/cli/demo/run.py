"""The demonstration: train, kill, resume, restore on other meshes, and compare every bit.

Everything that computes runs in child processes, each with a JAX of its own, so that each finds
only what is on disk. This process starts them, kills one, and compares.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from rich.console import Console

from adacheck_jax.cli.demo.report import DemoReport, SaveCost
from adacheck_jax.cli.demo.stage import Stage
from adacheck_jax.tools.steps import InputError


def run_demo(
    *, steps: int = 40, seed: int | None = None, keep: Path | None = None, console: Console
) -> DemoReport:
    """Run the whole demonstration.

    Args:
        steps: training steps of each run.
        seed: seed that chooses the moment of the kill; None takes a random one.
        keep: new or empty directory to work in; None makes one among the temporary files. Either
            way it stays, so that its steps can be looked at.
        console: console for progress messages.

    Returns:
        The report; bits that differ raise nothing and are in ``failures``.

    Raises:
        InputError: ``keep`` exists and is not an empty directory.
        DemoError: a child process failed.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    work = _workplace(keep)
    shown = f"working in {work}; --seed {seed} kills at the same step again"
    console.print(shown, style="dim", highlight=False, soft_wrap=True)
    return _play(Stage(work, steps, console), seed)


def _workplace(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="adacheck-demo-"))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(
            f"{keep}: expected a new or empty directory to work in, found "
            f"{'files in it' if keep.is_dir() else 'a file'}. Give another one."
        )
    keep.mkdir(parents=True, exist_ok=True)
    return keep.absolute()


def _play(stage: Stage, seed: int) -> DemoReport:
    start_s = time.monotonic()
    expected = stage.train("uninterrupted", "train to the end, saving nothing", "--no-save")
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
        root=str(stage.root),
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
