"""Steps that storage does not have yet and that stay in memory, to be written when it answers.

A save that storage refused is written again as it was, into the same directory: its copies are kept
until the step has its name. Steps after it are recorded behind it, as behind any save that is not
committed yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.plan import situation
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.proof.free_memory import free_bytes
from adacheck_jax.save.attempt import Attempt
from adacheck_jax.save.line.deferred import DeferredSteps
from adacheck_jax.save.line.notices import tell_given_up
from adacheck_jax.save.line.parents import Parents
from adacheck_jax.save.one_save import Save
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps import marks


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """Steps in memory that are not on the disk.

    Attributes:
        refused: the manager's number of the save that storage refused last, to be written again;
            None if there is none.
        steps: numbers of all steps, those of that save first.
        deferred: numbers of the steps recorded behind it.
        portion: number of steps that the next save of deferred ones writes at most: twice as many
            as the last save. So a disk that was full takes what has room there, and a bucket all in
            a few saves.
        plan: plan of the last step; None without any.
    """

    refused: int | None
    steps: Sequence[int]
    deferred: Sequence[int]
    portion: int
    plan: SavePlan | None

    def next_number(self, *, in_portions: bool) -> int | None:
        """The manager's number of the save that is written next; None if there is nothing."""
        first = self.deferred[: self.portion if in_portions else None]
        return self.refused if self.refused is not None else max(first, default=None)

    @property
    def taken_bytes(self) -> int:
        """Host memory that the deferred steps take, which all store about as much."""
        count, plan = len(self.deferred), self.plan
        return count * situation.bytes_of(plan.structure, plan.stored) if plan and count else 0

    @property
    def most_bytes(self) -> int:
        """Host memory that they may take while storage is away."""
        return most_bytes(self.plan.structure, self.taken_bytes) if self.plan else 0


def most_bytes(structure: Structure, taken_bytes: int) -> int:
    """Host memory that deferred steps may take while storage does not answer.

    As much as a base takes, or a quarter of what would be free without them: the save that writes
    them packs them, joins the packs and, in a store, makes files of them in memory.
    """
    return max(situation.most_bytes(structure), (free_bytes() + taken_bytes) // 4)


class Keeper:
    """The steps in memory behind the step saved last; its manager asks for them, and writes them.

    The ``lock`` is held through each save and each record of a step.
    """

    def __init__(self, parents: Parents, deferred: DeferredSteps, lock: threading.Lock) -> None:
        self._parents, self._deferred, self._lock = parents, deferred, lock

    def steps(self) -> KeptSteps:
        """Steps that storage does not have, and that are not being written."""
        with self._lock:
            return self._steps()

    def _steps(self) -> KeptSteps:
        steps, refused, save = self._deferred.steps, None, self._save
        every = behind = [each.step for each in steps]
        if save is not None and save.is_kept:
            refused, every = save.number, [*(each.step for each in save.steps), *behind]
        last = [*([] if save is None else save.steps), *steps][-1:]
        portion = 1 if save is None else 2 * len(save.steps)
        return KeptSteps(refused, every, behind, portion, last[0].plan if last else None)

    @property
    def _save(self) -> Save | None:
        saved = self._parents.saved
        return saved.save if saved is not None else None

    def fail(self, number: int, error: Exception) -> bool:
        """Notes that a save has failed, as its manager was told; True if all of it is kept.

        An error of its share, or of its commit, is noted already.

        Raises:
            AdaCheckError: the step is not what it was planned as, so it is not kept.
        """
        with self._lock:
            if (save := self._save) is None or save.number != number:
                return False
            save.error = save.error or error
            if save.is_kept:
                try:
                    for each in save.steps:
                        each.verify()
                except AdaCheckError as wrong:
                    save.error = wrong
                    save.release()
                    raise wrong from error
            return save.is_kept

    def end(self) -> None:
        """Notes that the last save has its name on the disk: nothing of it is kept any more."""
        with self._lock:
            if (save := self._save) is not None and save.committed is not None:
                save.error = None
                save.release()

    def is_there(self) -> bool:
        """True if the save that storage seemed to refuse is on the disk.

        Raises:
            OSError: storage does not tell.
        """
        with self._lock:
            save = self._save
        if save is None or not save.is_kept or (committed := save.committed) is None:
            return False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return marks.is_there(save.directory, committed.stamp)
        return False

    def give_up(self, why: str) -> None:
        """Lets go of all steps in memory that are not on the disk, and says so."""
        with self._lock:
            steps = self._steps()
            if steps.refused is not None and (save := self._save) is not None:
                save.release()
            self._deferred.cut(0)
        tell_given_up(steps.steps, why)

    def replace(self, number: int) -> None:
        """Lets go of what was refused of one step alone, since its caller saves it again."""
        with self._lock:
            steps, save = self._steps(), self._save
            if save is not None and steps.refused == number and len(steps.steps) == 1:
                save.release()

    def let_go(self) -> None:
        """Lets go of the last save, since another one begins; under the lock."""
        if (save := self._save) is not None:
            if save.is_kept:
                tell_given_up([each.step for each in save.steps], "another step is saved")
            save.release()


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
