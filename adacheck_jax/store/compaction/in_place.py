"""Puts a base into the place of a saved delta, in the delta's directory.

The order makes it safe. All files of the base are made elsewhere under the root, in a directory
with a temporary name, and made durable. Then they are moved beside the delta's, where
neither this library nor Orbax looks for them: Orbax's own metadata last of all, when the rest is in
place. Then the base's manifest is renamed over the delta's: *this* is the moment. Then the delta's
files are deleted. What a crash leaves is the delta or the base, whole, and files that
:func:`clear` removes.

Nothing in the step's directory is made, all is moved there, so that a step which is being deleted
does not come back.

The lock of a compaction is a file's, one a step. The thread that compacts holds it until the base
is in its place, writes and waits for other processes meanwhile, and takes no other lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError, LineageError, StorageError, first_line, system_error
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.store.compaction import new_base
from adacheck_jax.store.compaction.new_base import BEGIN, Team
from adacheck_jax.store.links import OWN_TREE_METADATA
from adacheck_jax.store.steps import lookup, manifest_file, marks, roots
from adacheck_jax.store.steps.folders import BASE, DELTA, KEPT, LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.marks import TREE_METADATA
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at

_OURS = manifest_file.DIRECTORY
_KEPT_METADATA = f"{_OURS}/{OWN_TREE_METADATA}"
_DATABASE = "manifest.ocdbt"
_WORK, _LOCK = "compaction", "compacting"
"""Parts of the names of a directory for a base's files, and of the lock that is held meanwhile."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A base, durable, beside the delta whose place it is to take.

    Attributes:
        manifest: its manifest.
    """

    manifest: BaseManifest
    _work: Location
    _directory: Location
    _stamp: Stamp

    def put(self) -> None:
        """Puts it into the delta's place; once.

        Nobody may delete the step meanwhile: who removes a directory with all that is in it fails
        where files come and go.

        Raises:
            LineageError: the step was deleted or replaced.
            StorageError: the disk refused something.
        """
        directory = self._directory
        with _named(directory):
            _check_there(directory, self._stamp)
            _clear(directory)
            try:
                _move(self._work, directory, self._stamp)
            except BaseException:
                # What a disk keeps that refuses this too does no harm.
                with contextlib.suppress(OSError, AdaCheckError):
                    _clear(directory)
                raise
        with _named(directory, "It is a base now, and what is left of the delta does no harm"):
            if (directory / manifest_file.FILE).exists:  # else it was deleted since
                _clear(directory)


@contextlib.contextmanager
def prepared(
    lineage: Lineage,
    blocks: Mapping[int, Blocks],
    team: Team,
    earlier_sums: Mapping[int, int] | None,
) -> Iterator[Prepared]:
    """Writes a base beside the delta at the end of a lineage; removes it if it is not put there.

    The step can be restored at every moment, and has the same bits before and after. Other steps,
    also those that build on it, are as they were. Deferred steps that were saved with it, and
    earlier steps that its directory alone held, are gone afterwards. Another compaction of the step
    waits until this one is left.

    Args:
        lineage: the lineage of a saved delta on a file system, as it was resolved or restored.
        blocks: elements of every leaf that has any, by leaf index and box, as the step was saved:
            boxes of whole chunks, such as the leaf's own boxes, or the whole leaf; of a typed PRNG
            key its words. Of several processes those that this one has.
        team: the processes that write it; this is process 0, and the others call
            :func:`contribute`.
        earlier_sums: this process's contributions to the fingerprints of the old base; None if
            they are not known.

    Raises:
        MismatchError: a leaf is missing.
        IntegrityError: the values are not those that were saved, or files of the old base are
            damaged.
        LineageError: the step is a base already, was deleted, or was saved again.
        StorageError: the disk refused something.
    """
    end = lineage.entries[-1]
    directory, delta = at(end.holder), end.manifest
    assert directory.on_file_system
    assert isinstance(delta, DeltaManifest)
    assert lineage.left_out == 0
    assert not end.is_link  # a saved step has a directory of its own
    with _named(directory):
        _remove_abandoned(directory)
    work, process = roots.beside(directory, _WORK), OneProcess("a base")
    process.enter()
    with _turn(directory):
        try:
            with _named(directory):
                stamp = _stamp(directory, delta)
                work.delete()
                team.agree(BEGIN, {}, lambda _: {"delta": delta.checksum})
                manifest = new_base.write(work, lineage, blocks, team, earlier_sums)
            assert manifest is not None  # this is process 0
            yield Prepared(manifest, work, directory, stamp)
        finally:
            if not process.is_elsewhere:  # a forked child that ends has a copy of this
                with contextlib.suppress(OSError):  # the next compaction, or a repair, removes it
                    work.delete()


def contribute(
    item_directory: AnyPath,
    blocks: Mapping[int, Blocks],
    team: Team,
    earlier_sums: Mapping[int, int],
) -> None:
    """Writes this process's part of a base that process 0 makes with :func:`prepared`.

    Arguments and errors are those of :func:`prepared`.

    Raises:
        AdaCheckError: another process failed.
    """
    directory = at(item_directory)
    with _named(directory):
        wanted = team.agree(BEGIN, {}, lambda _: {})["delta"]
        found = lookup.resolve(item_directory)
        if found.manifest.checksum != wanted:
            raise LineageError(
                f"{directory}: expected the step with manifest {wanted[:12]}, found "
                f"{found.manifest.checksum[:12]}. Nothing was changed."
            )
        work = roots.beside(directory, _WORK)
        new_base.write(work, found, blocks, team, earlier_sums)


def _stamp(directory: Location, delta: DeltaManifest) -> Stamp:
    """Identity of the delta's manifest, if it is still there."""
    marks.refuse_uncommitted(directory)
    found = manifest_file.read(directory)
    if found.checksum == delta.checksum:
        return (directory / manifest_file.FILE).stamp
    if isinstance(found, BaseManifest) and found.saved_checksum == delta.checksum:
        raise LineageError(
            f"{directory}: expected a delta, found that step {found.step} is a base already. "
            "Nothing was changed; nothing is left to be done."
        )
    raise LineageError(
        f"{directory}: expected step {delta.step} with manifest {delta.checksum[:12]}, found "
        f"{found.checksum[:12]}. The step was saved again; nothing was changed."
    )


def _move(work: Location, directory: Location, stamp: Stamp) -> None:
    """Moves a base beside a delta, and then into its place."""
    ours, own = work / _OURS, directory / TREE_METADATA
    (ours / OWN_TREE_METADATA).write(own.read() if own.exists else b"")
    (ours / OWN_TREE_METADATA).sync()
    files = {each.below(work) for folder in (work, ours) for each in folder.list(deep=False)}
    folders = {name for name in work.folders() if name != _OURS}
    folders |= {f"{_OURS}/{name}" for name in ours.folders()}
    early = files - {_KEPT_METADATA, _DATABASE, TREE_METADATA, manifest_file.FILE}
    for name in (_KEPT_METADATA, *sorted(folders | early), _DATABASE, TREE_METADATA):
        _check_there(directory, stamp)
        (work / name).move(directory / name)
    directory.sync(directory / _OURS)
    _check_there(directory, stamp)
    # The moment: before, the step is the delta, and from here on the base. Both are whole.
    (work / manifest_file.FILE).move(directory / manifest_file.FILE)
    (directory / _OURS).sync()
    # At once, so that no save links a part of the lineage. Readers of the delta look again.
    if (directory / LINEAGE).is_folder:
        (directory / LINEAGE).move(work / LINEAGE)


def _check_there(directory: Location, stamp: Stamp) -> None:
    """Raises if a step is being deleted, or was replaced."""
    with contextlib.suppress(FileNotFoundError):
        if marks.is_there(directory, stamp):
            return
    raise _is_gone(directory)


def _is_gone(directory: Location) -> LineageError:
    return LineageError(
        f"{directory}: expected the step that is compacted, found that it is being deleted or was "
        "replaced. What was written for the new base is removed."
    )


def clear(item_directory: AnyPath) -> None:
    """Removes what an interrupted compaction left in the directory of a step, and beside it.

    Raises:
        FormatError, IntegrityError: the manifest cannot be read.
        StorageError: something cannot be removed.
    """
    directory = at(item_directory)
    if not directory.on_file_system:
        return
    with _turn(directory), _named(directory):
        _clear(directory)
        roots.beside(directory, _WORK).delete()


def leftovers(item_directory: AnyPath) -> list[Location]:
    """Files and folders that an interrupted compaction left in the directory of a step.

    Raises:
        FormatError, IntegrityError: the manifest cannot be read.
    """
    directory = at(item_directory)
    if not directory.on_file_system:
        return []
    manifest, ours = manifest_file.read(directory), directory / _OURS
    files = [*ours.list(deep=False)]
    if isinstance(manifest, BaseManifest):
        if manifest.replaces is None:
            return []
        found = [directory / LINEAGE]
        begins = (f"{DELTA}.", OWN_TREE_METADATA)
    else:
        described = (_DATABASE, "d", "array_metadatas", "_sharding")
        found = [directory / name for name in (*described, BASE, KEPT)]
        begins = ("update.", OWN_TREE_METADATA)
    found += [each for each in files if each.name.startswith(begins)]
    return [each for each in found if each.exists]


def _clear(directory: Location) -> None:
    found = leftovers(directory)
    kept = directory / _KEPT_METADATA
    if kept in found and isinstance(manifest_file.read(directory), DeltaManifest):
        # First of all, so that Orbax does not find a base whose arrays are gone.
        if kept.stat().size_bytes:
            kept.move(directory / TREE_METADATA)
        else:
            (directory / TREE_METADATA).delete()
        directory.sync()
    for each in found:
        each.delete()


@contextlib.contextmanager
def _turn(directory: Location) -> Iterator[None]:
    """Waits for another compaction of the same step."""
    with _named(directory, "It is whole"), roots.beside(directory, _LOCK).lock():
        yield


def _remove_abandoned(directory: Location) -> None:
    """Removes what processes that are gone have left of bases of other steps under the root.

    A base is as large as a state, and each kill may leave one.
    """
    root = at(roots.place_of(directory).line[0])
    begin, end = roots.PROBE_PREFIX, f".{_WORK}{roots.TMP_SUFFIX}"
    for name in root.folders():
        if name.startswith(begin) and name.endswith(end):
            lock = f"{name.removesuffix(end)}.{_LOCK}{roots.TMP_SUFFIX}"
            with (root / lock).lock(waits=False) as is_held:
                if is_held:  # else somebody works on it
                    (root / name).delete()


@contextlib.contextmanager
def _named(directory: Location, state: str = "The step is as it was") -> Iterator[None]:
    """Tells what the operating system refused as a ``StorageError``, or that the step is gone."""
    try:
        yield
    except AdaCheckError:  # some are errors of a system, too
        raise
    except (OSError, ValueError) as error:
        system = system_error(error)
        if system is None:
            raise
        if not (directory / manifest_file.FILE).exists:
            raise _is_gone(directory) from error
        raise StorageError(
            f"{directory}: expected to write a base in the place of a delta, found: "
            f"{system.strerror or error} ({first_line(error)}). {state}; make room or mend the "
            "disk; the next base is written by the loop, and adacheck repair removes what is left."
        ) from error
