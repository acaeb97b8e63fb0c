"""The line of a run: steps that the next delta may follow, as the disk has them; deferred ones.

:mod:`~adacheck_jax.plan.which_parent` chooses among them.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.plan.situation import Counts
from adacheck_jax.plan.which_parent import which_parent
from adacheck_jax.save.line.notices import tell_given_up
from adacheck_jax.save.one_save import Save
from adacheck_jax.save.pending import KnownStep, Pending
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store import links
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps import lookup, marks, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at

_log = logging.getLogger(__name__)
_DRAINING_COUNT = 2
_UNCHECKED_COUNT = 4


@dataclass(slots=True, eq=False)
class Parent:
    """A step on the disk that the next delta may refer to: the one saved or restored last.

    Its item directory is not there before its save is committed. One that is being deleted does not
    tell the number in the name of the step's directory any more.

    Attributes:
        lineage: its lineage as it was found on the disk last; None if no delta can follow it.
    """

    directory: AnyPath
    number: int | None
    known: KnownStep
    save: Save | None
    lineage: Lineage | None = None
    _files: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.lineage is not None:  # it was restored just now
            self._files = links.files_of(self.lineage.entries[-1])

    @property
    def identity(self) -> tuple[frozenset[str], Stamp | None]:
        """Names of its files, while it was whole, and identity of its manifest; if known here."""
        committed = self.save.committed if self.save else None
        return (committed.files, committed.stamp) if committed else (self._files, None)

    @property
    def _known(self) -> list[Lineage]:
        """Its own lineage and that of the step before it, as far as they are known."""
        followed = self.save.parent if self.save else None
        return [each for each in (self.lineage, followed) if each is not None]

    @property
    def base_depth(self) -> int:
        """Number that its base, as far as it is known, has in its line of deltas."""
        return self._known[0].base.depth if self._known else 0

    def look(self, others: list[Lineage]) -> None:
        """Looks for its lineage on the disk."""
        known, self.lineage, save = [*others, *self._known], None, self.save
        if save is not None and save.error is not None:
            return  # it was told that it is not saved, or is to be written again first
        try:
            found = (save and save.lineage()) or lookup.follow(known, self.directory)
            if not found.exists():  # deleted; or compacted, and linked otherwise than was known
                found = lookup.resolve(self.directory)
        except AdaCheckError as error:
            root, _ = roots.place_of_lost(self.directory).line
            if at(self.directory).is_folder:
                _log.warning("The last step cannot be built on: %s", error)
            elif not roots.items_of(root):
                _log.warning(
                    "%s: expected the steps of this run, found none; step %d was the last. If you "
                    "have not deleted them, look whether the disk is mounted. What is saved now "
                    "begins anew.",
                    *(root, self.known.step),
                )
            else:
                _log.info(
                    "Step %d was deleted; the next step does not build on it.", self.known.step
                )
            return
        self.lineage = found


class Line:
    """The steps that the next one may follow, and those that the next save writes with its own.

    Each deferred step is replayed and compared with its state in the background. A step that replay
    gets wrong takes those after it along, so at most :data:`_UNCHECKED_COUNT` steps wait for that:
    then the next one waits for the oldest. On accelerators a record is copied on its device first
    and drained from there in the background, so that no step waits for a transfer;
    :data:`_DRAINING_COUNT` of them at most take device memory.

    Attributes:
        saved: the step saved last.
        deferred: the steps deferred since, in memory, oldest first.
        deferred_behind: the step that they follow.
    """

    def __init__(self, keep_lineage: KeepLineage | None) -> None:
        self._keep_lineage = keep_lineage
        self._candidates: tuple[Parent, ...] = ()
        self._links: dict[AnyPath, bool] = {}
        self.saved: Parent | None = None
        self.deferred: list[Pending] = []
        self.deferred_behind: Parent | None = None
        self._unproved: list[Pending] = []

    @property
    def is_empty(self) -> bool:
        """True if nothing was saved or restored that the next save may build on."""
        return not self._candidates

    @property
    def save(self) -> Save | None:
        """The save that was begun last."""
        return self.saved.save if self.saved is not None else None

    @property
    def only(self) -> Parent | None:
        """The step saved or restored last, if it is the only one to build on."""
        return self._candidates[0] if len(self._candidates) == 1 else None

    def advance(self, save: Save) -> None:
        """Notes a step that is being saved, perhaps with deferred ones: others follow it now."""
        # Until the save is committed its directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        saved = Parent(save.directory, save.number, save.own, save)
        for each in (*(parent.known for parent in self._candidates), *save.steps[:-1]):
            each.forget()
        self.saved, self._candidates = saved, (saved,)
        self.deferred_behind, self.deferred = saved, self.deferred[len(save.steps) :]

    def follow(self, restored: Parent) -> None:
        """Notes a step that was restored: a candidate, before the step saved last.

        That one stays a candidate, since an older step may be restored for a look alone.
        """
        saved = self.saved
        others = (saved,) if saved is not None and saved.directory != restored.directory else ()
        for each in self._candidates:
            if each not in others and each.known.preparing is not None:
                each.known.preparing.cancel()  # no baseline is needed; one in work is made
        self._candidates = (restored, *others)

    def stay(self, restored: Lineage, structure: Structure) -> bool:
        """Stays with the step saved last, if a restored one is that; True if so.

        All that the next save needs of its state is in memory, and so may be a shadow at it.
        """
        saved = self.saved
        if saved is None or saved.save is None or saved.save.error is not None:
            return False
        place = saved.directory, saved.known.step, saved.save.structure
        if place != (restored.entries[-1].holder, restored.manifest.step, structure):
            return False
        self._candidates = (saved,)
        return True

    def forget(self) -> None:
        """Notes that a step was restored that nothing can build on."""
        self._candidates = ()

    def look(self, parent: Parent, final_directory: AnyPath) -> bool:
        """True if a delta can follow a step by what is on the disk now."""
        others = [each.lineage for each in self._candidates if each.lineage is not None]
        parent.look(others)
        keep = self._keep_lineage  # what the policy wants deleted, a manager may delete later
        lets_go = keep is not None and parent.number is not None and keep.lets_go(parent.number)
        if lets_go or lookup.reference(final_directory, parent.directory) is None:
            parent.lineage = None
        return parent.lineage is not None

    def choose(self, final_directory: AnyPath, counts: Counts) -> Parent | None:
        """The step to follow, of those that are on the disk; None if there is none."""
        found = [each for each in self._candidates if self.look(each, final_directory)]
        position = which_parent([x.lineage.manifest.counts for x in found if x.lineage], counts)
        return None if position is None else found[position]

    def note_parent(self, number: int | None, parent: Parent | None) -> None:
        """Tells the policy which step a new one refers to; a base refers to none."""
        keep = self._keep_lineage
        if keep is not None and parent and parent.number is not None and number is not None:
            keep.note(number, parent.number)

    def has_links(self, final_directory: AnyPath) -> bool:
        """True if steps beside this one can be hard-linked; probed once a root."""
        if not at(final_directory).on_file_system:
            return False
        root = final_directory.parent
        # The root exists, and is not a step's directory.
        while (
            root not in self._links
            and root != root.parent
            and (not at(root).is_folder or at(root / marks.STEP_METADATA).exists)
        ):
            root = root.parent
        if root not in self._links:
            self._links[root] = links.can_link(root)
        return self._links[root]

    def keeps_ancestors(self, final_directory: AnyPath) -> bool:
        """True if the steps that a delta builds on live as long as it does."""
        keep = self._keep_lineage
        # A manager asks with each save. If it has not asked yet, it has another policy, or none.
        is_kept = keep is not None and (keep.is_asked or self.saved is None)
        return is_kept or self.has_links(final_directory)

    def last_after(self, parent: Parent) -> KnownStep:
        """The last step in memory: of the deferred ones, else the parent's own."""
        return self.deferred[-1] if self.deferred else parent.known

    def add(self, staged: Pending, *, drains: bool) -> None:
        """Adds a step; it ``drains`` if it takes device memory until it was copied to the host."""
        self.deferred.append(staged)
        staged.begin()
        while len(self._unproved) >= (_DRAINING_COUNT if drains else _UNCHECKED_COUNT):
            with contextlib.suppress(AdaCheckError):  # raised for whoever saves or defers next
                self._unproved.pop(0).verify()
        self._unproved.append(staged)

    def cut(self, count: int) -> list[Pending]:
        """Gives up all but the first steps, and returns them."""
        given_up, self.deferred = self.deferred[count:], self.deferred[:count]
        return given_up

    def give_up(self, count: int, why: str) -> None:
        """Gives up all but the first steps, and says so."""
        tell_given_up([each.step for each in self.cut(count)], why)

    def supersede(self, step: int | None) -> Pending | None:
        """Gives up the steps that a save replaces; the one that it saves again, if it was last."""
        steps = self.deferred
        if step is None or not steps:
            return None
        kept = sum(each.step < step for each in steps)
        if kept == len(steps) - 1 and steps[-1].step == step:
            return self.cut(kept)[0]
        self.give_up(kept, f"step {step} is saved after them")
        return None

    def settle(self, *, verify: bool) -> None:
        """Settles the steps in order; raises where some are not one update apart, or wrong."""
        for each in self.deferred:
            each.settled()
        if verify and self.deferred:
            self.deferred[-1].verify()

    @property
    def settled_count(self) -> int:
        """Number of steps, from the first on, that are known to be one update apart."""
        flags = [each.plan.is_speculative for each in self.deferred]
        return flags.index(True) if True in flags else len(flags)

    @property
    def wrong(self) -> tuple[int, AdaCheckError] | None:
        """The first step that is known not to be what it was planned as, and the reason."""
        pairs = enumerate(each.refused for each in self.deferred)
        return next(((i, error) for i, error in pairs if error is not None), None)
