"""The backlog of storage: steps in memory that it does not have yet, written when it answers.

A save that storage refused is written again as it was, into the same directory: its copies are kept
until the step has its name. Steps after it are recorded in memory, as after any save that is not
committed yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format import manifest_json
from adacheck_jax.memory.free_memory import free_bytes
from adacheck_jax.plan import situation
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.processes.messages import Report
from adacheck_jax.save.line.notices import tell_given_up
from adacheck_jax.save.line.parents import Line
from adacheck_jax.save.one_save import Attempt, Committed, Save
from adacheck_jax.store.steps import marks
from adacheck_jax.store.storage.location import at


@dataclass(frozen=True, slots=True)
class Lag:
    """Lag of storage: the steps in memory that are not on the disk.

    Attributes:
        refused: the manager's number of the save that storage refused last, to be written again;
            None if there is none.
        steps: numbers of all steps, those of that save first.
        deferred: numbers of the steps recorded after it.
        portion: number of steps that the next save of deferred ones writes at most: twice as many
            as the last save. So a disk that was full takes what has room there, and a bucket all in
            a few saves.
        plan: plan of the last step; None without any.
        is_computing: True while the last save waits for more than storage.
        saved: plans of the steps of the last save.
    """

    refused: int | None
    steps: Sequence[int]
    deferred: Sequence[int]
    portion: int
    plan: SavePlan | None
    is_computing: bool
    saved: Sequence[SavePlan]

    def next_number(self, *, in_portions: bool) -> int | None:
        """The manager's number of the save that is written next; None if there is nothing."""
        first = self.deferred[: self.portion if in_portions else None]
        return self.refused if self.refused is not None else max(first, default=None)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the last save writes, in the process that writes most."""
        return sum(situation.bytes_of(each.structure, each.stored) for each in self.saved)

    @property
    def taken_bytes(self) -> int:
        """Host memory that the deferred steps take, which all store about as much."""
        count, plan = len(self.deferred), self.plan
        return count * situation.bytes_of(plan.structure, plan.stored) if plan and count else 0

    @property
    def most_bytes(self) -> int:
        """Host memory that they may take in this process while storage is away.

        As much as a base takes, or a quarter of what would be free without them: the save that
        writes them packs them, joins the packs and, in a store, makes files of them in memory. At
        most half of what would be free, since a process that takes all is killed, and they with it.
        """
        if self.plan is None:
            return 0
        base_bytes = situation.most_bytes(self.plan.structure)
        room_bytes = free_bytes() + self.taken_bytes
        return min(max(base_bytes, room_bytes // 4), room_bytes // 2)


class Backlog:
    """The steps in memory after the step saved last, which its manager has written.

    The ``lock`` is held through each save and each record of a step.
    """

    def __init__(self, line: Line, lock: threading.Lock) -> None:
        self._line, self._lock = line, lock

    def lag(self) -> Lag:
        """Steps that storage does not have, and that are not being written."""
        with self._lock:
            return self._lag()

    def _lag(self) -> Lag:
        steps, refused, save = self._line.deferred, None, self._line.save
        every = behind = [each.step for each in steps]
        if save is not None and save.is_kept:
            refused, every = save.number, [*(each.step for each in save.steps), *behind]
        last = [*([] if save is None else save.steps), *steps][-1:]
        portion = 1 if save is None else 2 * len(save.steps)
        plan, is_computing = last[0].plan if last else None, save is not None and save.is_computing
        saved = () if save is None else [each.plan for each in save.steps]
        return Lag(refused, every, behind, portion, plan, is_computing, saved)

    def _save_of(self, number: int | None) -> Save | None:
        """The save that was begun last, if its manager gave it this number."""
        save = self._line.save
        return save if save is not None and save.number == number else None

    def stop(self, number: int, error: BaseException) -> None:
        """Notes that a save has failed, and waits until nothing of it is written any more.

        Orbax gives up on a save at the first error of a part of it. It empties the directory of one
        that is made again, into which the other parts would write.
        """
        if (save := self._save_of(number)) is not None and isinstance(error, Exception):
            save.error = save.error or error
            save.attempt.stop()

    def fail(self, number: int, error: Exception) -> bool:
        """Notes that a save has failed, as its manager was told; True if all of it is kept.

        An error of its share, or of its commit, is noted already.

        Raises:
            AdaCheckError: the step is not what it was planned as, so it is not kept.
        """
        with self._lock:
            if (save := self._save_of(number)) is None:
                return False
            save.error = save.error or error
            if save.is_kept:
                try:
                    save.detach()
                except AdaCheckError as wrong:
                    save.error = wrong
                    save.release()
                    raise wrong from error
            return save.is_kept

    def end(self, number: int) -> None:
        """Notes that a save has its name on the disk: nothing of it is kept any more."""
        with self._lock:
            save = self._save_of(number)
            if save and (save.committed or jax.process_index()):  # process 0 alone commits
                save.error = None
                save.release()

    def tell_others(self, number: int, error: BaseException) -> None:
        """Tells the others that a save has failed before its share was written, if it has."""
        save = self._save_of(number)
        if save and not (save.agreed or save.error):
            save.attempt.exchange.fail(error)

    def committed(self) -> Report:
        """The manifest of the step that process 0 has committed, for the others; in a store.

        They would read it there when the next save begins, in the way of the training loop.
        """
        save = self._line.save
        if save is None or save.committed is None or at(save.directory).on_file_system:
            return {}
        data = manifest_json.encode(save.committed.manifest)
        return {"number": save.number, "manifest": data.decode()}

    def learn(self, report: Report) -> None:
        """Learns what process 0 has committed."""
        save = self._save_of(report.get("number"))
        if save is None or save.committed is not None:
            return
        manifest = manifest_json.decode(report["manifest"].encode(), where=f"{save.directory}")
        save.committed = Committed(manifest, (), frozenset())

    def take_back(self, count: int = 1, why: str = "") -> None:
        """Lets go of the steps recorded last, which another process lacks; tells why, if given."""
        with self._lock:
            self._line.give_up(max(len(self._line.deferred) - count, 0), why)

    def is_there(self) -> bool:
        """True if the save that storage seemed to refuse is on the disk; OSError if not known."""
        with self._lock:
            save = self._line.save
        if save is None or not save.is_kept or (committed := save.committed) is None:
            return False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return marks.is_there(save.directory, committed.stamp)
        return False

    def give_up(self, number: int, why: str) -> Sequence[int]:
        """Lets go of all steps in memory that are not on the disk, and says so.

        Gives the recorded ones: those after a save that failed, and those that it was to write if
        it failed after its shares. Else its error names these.
        """
        failed = self._save_of(number)
        carried = failed.steps[:-1] if failed and failed.agreed else ()
        with self._lock:
            lag, save = self._lag(), self._line.save
            if save is not None and save.is_kept:
                save.release()
            self._line.cut(0)
        tell_given_up(lag.steps, why)
        return [*(each.step for each in carried), *lag.deferred]

    def replace(self, number: int) -> None:
        """Lets go of what was refused of one step alone, since its caller saves it again."""
        with self._lock:
            lag, save = self._lag(), self._line.save
            if save is not None and lag.refused == number and len(lag.steps) == 1:
                save.release()

    def let_go(self) -> None:
        """Lets go of the last save, since another one begins; under the lock."""
        if (save := self._line.save) is not None:
            if save.is_kept:
                tell_given_up([each.step for each in save.steps], "another step is saved")
            save.release()


def empty() -> Backlog:
    """The backlog of a line without steps."""
    return Backlog(Line(None), threading.Lock())


def repeated(save: Save, attempt: Attempt) -> Save:
    """The same save once more."""
    again = dataclasses.replace(
        save,
        attempt=attempt,
        measured=() if save.agreed is not None else save.measured,
        background=BackgroundFacts(),
        durable_s=None,
        error=None,
        agreed=None,
        committed=None,
    )
    save.is_repeated, save.base = True, None  # what it took is the new one's
    return again
