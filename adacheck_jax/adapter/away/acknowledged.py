"""Steps for which ``save`` has answered True, and that storage does not have yet."""

# Threads: the training loop's alone.

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import jax

from adacheck_jax.adapter.arguments import SaveArgs
from adacheck_jax.adapter.away.outage import Outage
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.errors import AdaCheckError, DifferingCallsError, StorageError
from adacheck_jax.processes.lockstep import Lockstep
from adacheck_jax.processes.messages import Report
from adacheck_jax.save.line.backlog import Lag
from adacheck_jax.store.steps.lineage import shown_steps


class AcknowledgedSteps:
    """Steps in memory of which a training loop was told that they are saved.

    Which ones they are all processes know alike: each step is kept by all of them or by none.

    Attributes:
        lines: lines of steps of the training run.
        saves: its saves.
        together: its processes.
        outage: the time in which storage is away, if it is.
        last: number of the last one; -1 without any.
        has_gap: True if a step after them was lost, so that nothing follows them by one update.
    """

    def __init__(self, run: TrainingRun, together: Lockstep) -> None:
        self.lines, self.saves = run.lines, run.saves
        self.together, self.outage = together, Outage()
        self.last, self.has_gap = -1, False
        self._room_bytes = sys.maxsize  # which all learn of with the first step

    @property
    def are_some(self) -> bool:
        """True if there is one."""
        return self.last >= 0

    @property
    def lag(self) -> Lag:
        """Steps in memory that are not on the disk."""
        return self.lines.backlog.lag()

    def add(self, step: int) -> None:
        """Notes that a step is in memory, and that ``save`` answers True."""
        self.last = max(self.last, step)
        self.outage.tell(self.lag)

    def end(self) -> None:
        """Notes that all are written."""
        self.last, self.has_gap = -1, False

    def replace(self, step: int) -> None:
        """Lets go of a step that its caller saves again."""
        if step <= self.last:
            self.lines.backlog.replace(step)

    def record(self, args: SaveArgs, step: int) -> bool:
        """Records a step in memory, in all processes or none, if nothing is lost by it."""
        plain = args.step, args.save_args, args.custom_metadata
        if self.has_gap or any(each is not None for each in plain):
            return False
        is_recorded, wrong = False, None
        try:
            is_recorded = self.saves.record_step(args.state, step, away_bytes=self._room_bytes)
        except Exception as error:
            wrong = error
        own = {"is_kept": is_recorded, "room_bytes": self.lag.most_bytes}
        answer: Report = {"is_kept": False}
        try:
            answer = self.together.agreed(own, by_all, wrong, f"call save({step})")
            self._room_bytes = answer["room_bytes"]
        except BaseException:  # another process may have recorded it
            self.has_gap = jax.process_count() > 1
            raise
        finally:
            if is_recorded and not answer["is_kept"]:
                self.lines.backlog.take_back()
        if answer["is_kept"]:
            self.add(step)
        return answer["is_kept"]

    def keep(self, step: int, error: Exception, *, is_ours: bool) -> None:
        """Keeps a save that failed; or raises its error, with the steps that are lost with it."""
        backlog = self.lines.backlog
        try:
            is_kept = backlog.fail(step, error) and is_ours
        except AdaCheckError as wrong:
            is_kept, error = False, wrong
        answer = self.together.agreed({"is_kept": is_kept, "room_bytes": 0}, by_all)
        if answer["is_kept"]:
            self.outage.refuse(error)
            self.add(step)
            return
        if is_kept:
            error = StorageError(f"{error} Another process cannot write it again.")
        lost = backlog.give_up(step, f"step {step}, which they follow, is not saved")
        if not lost:
            error.add_note(f"Step {step} is not saved.")
            raise error
        kind = type(error) if isinstance(error, AdaCheckError) else StorageError
        raise kind(
            f"{error} Step {step} is not saved, nor are the recorded steps {shown_steps(lost)}, "
            "which were to be written with it or follow it."
        ) from error

    def next_write(self) -> Report:
        """The next write, as process 0 sees it.

        Its number, and if it is there already; None if storage does not tell.
        """
        lag, is_there = self.lag, None
        try:
            is_there = self.lines.backlog.is_there()
        except OSError as error:
            self.outage.refuse(error)
            self.outage.return_to_loop()
        number = lag.next_number(in_portions=self.are_some)
        return {"number": number, "is_there": is_there}

    def meet_closing(self, until_s: float) -> float:
        """Waits until all processes close: one alone may do so by an error that only it has.

        Gives the seconds that all of them have for tries.

        Raises:
            AdaCheckError: one is gone; the message names the steps that are lost.
        """
        lag, left_s = self.lag, max(until_s - time.monotonic(), 0.0)
        try:
            own = {"left_s": left_s}
            answer = self.together.agreed(
                own, lambda all: {"left_s": min(x["left_s"] for x in all)}
            )
            return answer["left_s"]
        except DifferingCallsError:
            raise
        except AdaCheckError as error:
            raise AdaCheckError(
                f"{error} Steps that are not written: {shown_steps(lag.steps)}. They are lost."
            ) from error

    def cut_to_common(self) -> None:
        """Lets go of the steps that not all processes have: their calls differed."""
        self.together.begin_anew()
        lag = self.lag.steps
        answer = self.together.agreed({"steps": [*lag]}, _in_all)
        if count := len(lag) - answer["count"]:
            self.lines.backlog.take_back(count, "the processes did not call alike")


def by_all(reports: Sequence[Report]) -> Report:
    """True if all processes keep a step; and the room that all of them have for steps."""
    return {
        "is_kept": all(each["is_kept"] for each in reports),
        "room_bytes": min(each["room_bytes"] for each in reports),
    }


def _in_all(reports: Sequence[Report]) -> Report:
    """Number of steps, from the first one on, that all processes have in memory."""
    every = [[*each["steps"]] for each in reports]
    alike = [len({*numbers}) == 1 for numbers in zip(*every, strict=False)]
    return {"count": alike.index(False) if False in alike else len(alike)}
