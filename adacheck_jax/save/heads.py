"""The steps that the next save may build on, as they lie on disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format import lineage, manifest_file
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.save import decisions
from adacheck_jax.save.checks import Witness
from adacheck_jax.save.commit import Save
from adacheck_jax.save.expectation import Expectation
from adacheck_jax.save.policy import Counts, Tip, advanced
from adacheck_jax.store import links
from adacheck_jax.store.retention import KeepLineage

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Head:
    """A step that the next one may build on: the one saved last, or restored last.

    Attributes:
        directory: its item directory; it is not there before its save is committed.
        number: in the name of the step's directory, None if there is none. A directory that is
            being deleted does not tell it any more.
        copies: host copies of leaves that the next delta may store as differences.
        files: by its directory, its files while it was whole; empty if this process does not know.
        known: its lineage as it was found on disk last; before that its parent's, if it has one.
        save: that saved it, None if it was restored.
        witness: of its state, to check the next step with; None if there is none.
        expectation: of a save that returned before it was known what it saved.
    """

    directory: Path
    number: int | None
    copies: Mapping[int, Blocks]
    files: dict[Path, frozenset[str]]
    known: Lineage | None
    save: Save | None = None
    witness: Witness = None
    expectation: Expectation | None = None

    def tip(self) -> Tip:
        """The step itself; its counters are not known before its save is settled."""
        if self.save is None:
            assert self.known is not None
            return decisions.tip_of(self.known)
        return Tip(self.save.step, self.save.own.counts, self.save.depth)


class Heads:
    """The step saved last and the one restored last.

    Args:
        keep_lineage: the policy that keeps ancestors alive where there are no hard links.

    Attributes:
        saved: the step saved last.
    """

    def __init__(self, keep_lineage: KeepLineage | None) -> None:
        self._keep_lineage = keep_lineage
        self._heads: tuple[Head, ...] = ()
        self._links: dict[Path, bool] = {}
        self.saved: Head | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved or restored that the next save may build on."""
        return not self._heads

    @property
    def only(self) -> Head | None:
        """The step saved or restored last, if it is the only one to build on."""
        return self._heads[0] if len(self._heads) == 1 else None

    def advance(self, saved: Head) -> None:
        """Notes a step that is being saved."""
        self.saved = saved
        self._heads = (saved,)

    def follow(self, restored: Head) -> None:
        """Notes a step that was restored."""
        # The step saved last stays a candidate: an older one may be restored for a look.
        saved = self.saved
        others = (saved,) if saved is not None and saved.directory != restored.directory else ()
        self._heads = (restored, *others)

    def forget(self) -> None:
        """Notes that a step was restored that nothing can build on."""
        self._heads = ()

    def parent(self, final_directory: Path, counts: Counts) -> Head | None:
        """The head that a delta would follow, with its lineage as it is on disk now.

        Of the step restored last and the step saved last, the first that the counters follow.

        Args:
            final_directory: of the delta.
            counts: the update counters of its state.
        """
        found = [head for head in self._heads if self.is_there(head, final_directory)]
        for head in found:
            assert head.known is not None
            before = head.known.manifest.counts
            if counts and len(before) == len(counts) and advanced(before, counts) is not None:
                return head
        return found[0] if found else None

    def is_there(self, head: Head, final_directory: Path) -> bool:
        """Whether a delta can follow a step, by what is on disk now."""
        known = [each.known for each in (*self._heads, head) if each.known is not None]
        try:
            head.known = lineage.follow(known, head.directory)
        except AdaCheckError as error:
            _log.warning("The last step cannot be built on: %s", error)
            return False
        return head.known.exists() and self.may_follow(head, final_directory)

    def committed(self, head: Head) -> Lineage | None:
        """The lineage of a step that was saved here, if it is on disk as it was committed."""
        save = head.save
        assert save is not None
        if not lineage.is_committed(head.directory):  # Orbax's own part of the save failed
            return None
        try:
            if save.manifest is None:  # another process committed it
                head.known = lineage.follow([save.parent] if save.parent else [], head.directory)
            elif save.stamp != manifest_file.stamp(head.directory):
                return None
            elif isinstance(save.manifest, DeltaManifest) and save.parent is not None:
                head.known = save.parent.followed_by(
                    save.manifest, head.directory, linked=save.links
                )
        except (AdaCheckError, OSError):  # the disk is looked at again by whoever decides
            return None
        return head.known

    def may_follow(self, head: Head, final_directory: Path) -> bool:
        """Whether a step may refer to another, which stays where it is."""
        keep = self._keep_lineage  # what the policy wants deleted, a manager may delete later
        is_let_go = keep is not None and head.number is not None and keep.lets_go(head.number)
        return not is_let_go and lineage.reference(final_directory, head.directory) is not None

    def note_parent(self, number: int | None, parent: Head | None) -> None:
        """Tells the policy which step a new one builds on.

        Args:
            number: in the name of the new step's directory.
            parent: what it builds on; None for a base.
        """
        keep = self._keep_lineage
        if keep is not None and parent and parent.number is not None and number is not None:
            keep.note(number, parent.number)

    def has_links(self, final_directory: Path) -> bool:
        """Whether steps beside this one can be hard-linked; probed once a root."""
        root = final_directory.parent
        while not root.is_dir() or (root / lineage.STEP_METADATA).exists():  # a root, not a step
            root = root.parent
        if root not in self._links:
            self._links[root] = links.can_link(root)
        return self._links[root]

    def keeps_ancestors(self, final_directory: Path) -> bool:
        """Whether the steps that a delta builds on live as long as it does."""
        return self._keep_lineage is not None or self.has_links(final_directory)


def of_restored(
    restored: Lineage, number: int | None, copies: Mapping[int, Blocks], witness: Witness
) -> Head:
    """A restored step as a head.

    Args:
        restored: the step's lineage.
        number: in the name of the step's directory, None if there is none.
        copies: host copies of leaves that the next delta may store as differences.
        witness: of its state.
    """
    entry = restored.entries[-1]
    directory, files = entry.holder, {entry.holder: links.files_of(entry)}
    return Head(directory, number, copies, files, restored, witness=witness)
