"""Verification of one saved step, its structure or every stored byte; the newest that verifies.

A step needs the files of every step of its lineage. Hard links to files that were checked already
are not read again; see :class:`Verifier`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.stock.descriptions import check_described, damaged_descriptions
from adacheck_jax.device import trees
from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    StepDeletedError,
    StorageError,
    first_line,
    unreadable,
)
from adacheck_jax.format import fingerprint
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Update
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store import volume_reader, zarr
from adacheck_jax.store.steps import identity, lookup, manifest_file, roots
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.interface import NotPlainError
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.steps import undeleted
from adacheck_jax.update import program as update_program

_log = logging.getLogger(__name__)

PLACEMENT = "placement"
NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference between a stored step and the step that was written.

    Attributes:
        file: path of the damaged file, of the database's directory, or the path that the names of
            a pack's files begin with.
        leaf: leaf path, None if no single leaf is damaged.
        message: the expected and the found.
        hinders: the only use that it hinders: a platform's name for replay on that platform,
            :data:`PLACEMENT` for a restore without an abstract state, :data:`NUMBER` for finding
            the step by its number; None if it hinders every restore.
    """

    file: str
    leaf: str | None
    message: str
    hinders: str | None = None

    @property
    def error(self) -> IntegrityError:
        """The damage as an error to raise."""
        leaf = "" if self.leaf is None else f"{self.leaf}: "
        return IntegrityError(f"{self.file}: {leaf}{self.message}. Restore another step.")


def check(item_directory: AnyPath, *, read_data: bool, verifier: Verifier | None = None) -> None:
    """Check that a step has everything that a restore on this machine needs.

    These are the manifests and their references to each other, the update program, the databases,
    and the presence of every chunk of an array.

    Args:
        item_directory: the step's item directory.
        read_data: True to read every byte of the step and of the steps that it builds on, too.
        verifier: checks of other steps, to be remembered; None to remember none.

    Raises:
        AdaCheckError: names the file and, if a leaf is damaged, the leaf.
        StorageError: a file of the step cannot be read now, and may be whole.
    """
    try:
        lineage, verifier = lookup.resolve(item_directory), verifier or Verifier()
        found = next(_hindering(lineage, read_data, verifier), None)
        if found is None:
            return
        if lookup.resolve(item_directory).checksums == lineage.checksums:
            raise found.error
    except AdaCheckError as error:
        problem = unreadable_file(item_directory)
        if problem is not None and (refused := unreadable(item_directory, problem)):
            raise refused from error
        raise
    check(item_directory, read_data=read_data, verifier=verifier)  # it was compacted meanwhile


def _hindering(lineage: Lineage, read_data: bool, verifier: Verifier) -> Iterator[Damage]:
    """The damage that hinders a restore on this machine."""
    platform = update_program.platform() if lineage.replayed_count else None
    for look in (verifier.structure, verifier.data) if read_data else (verifier.structure,):
        yield from (each for each in look(lineage) if each.hinders in (None, platform))


def latest_restorable(
    root: str | os.PathLike[str], item: str | None = None, *, read_data: bool = True
) -> int | None:
    """The newest step that verifies, for a script that would rather go on than stop.

    Newer steps that do not verify are skipped, and the log says why; so are steps that stock Orbax
    saved, which nothing can verify. Every process may call this, and finds the same step under a
    shared root. ``RestoreArgs(skip_damaged=True)`` does the same during a restore, so reads each
    file once, and restores the earlier steps that only a bad step's directory holds, too.

    No update is replayed.

    Args:
        root: the directory or URL given to the checkpoint manager.
        item: name of the item that has to verify; None for every item of a step.
        read_data: True to read every stored byte; False to check only the structure, in a fraction
            of a second: then a flipped bit is found by the restore.

    Returns:
        The number of the step, as the manager lists it; None if no step was ever saved.

    Raises:
        AdaCheckError: there are steps and none of them verifies; the error of the newest. Training
            should not begin anew unasked.
        StorageError: a step cannot be read now, and may be whole.
    """
    path = located(os.fspath(root))
    steps, verifier, first = roots.stock_steps(path, item), Verifier(), None
    for each in roots.items_of(path):
        if (number := roots.place_of(each).step) is not None and item in (None, each.name):
            steps.setdefault(number, []).append(each)
    for number, paths in sorted(steps.items(), reverse=True):
        try:
            for each in sorted(paths, key=str):
                if roots.is_stock(each):
                    raise IntegrityError(
                        f"{each}: expected a step with fingerprints, found one that stock Orbax "
                        "saved, which nothing can verify. To go on from it, restore it by its "
                        "number."
                    )
                with undeleted(each):
                    check(each, read_data=read_data, verifier=verifier)
        except StorageError:
            raise
        except StepDeletedError as error:
            _log.info("Skipping step %d: %s", number, error)
        except AdaCheckError as error:
            _log.warning("Skipping step %d, which does not verify: %s", number, error)
            first = first or error
        else:
            return number
    if first is not None:
        raise first
    return None


def damage_of(error: Exception, where: AnyPath) -> Damage:
    """An error as damage; most errors of ours begin with the path of their file."""
    message = _ADVICE.sub("", " ".join(str(error).split())).rstrip(".")
    file, colon, rest = message.partition(": ")
    if colon and (file.startswith("/") or "://" in file):
        return Damage(file, None, rest)
    return Damage(str(where), None, message)


_ADVICE = re.compile(r"( The step is damaged)?(;)? [Rr]estore another (step|one)\.$")
"""Last sentence of a restore's error, which a row of a table does not need."""


def unreadable_file(directory: AnyPath) -> OSError | None:
    """The error of a file that exists and cannot be read now: it may be whole."""
    problems: list[OSError] = []
    try:
        for each in at(directory).list():
            try:
                each.read(0, 1)
            except OSError as error:
                problems.append(error)
    except OSError as error:
        problems.append(error)
    known = FileNotFoundError | NotPlainError
    return next((each for each in problems if not isinstance(each, known)), None)


_Check = Callable[[LineageStep, BaseManifest], Iterator[Damage]]


class Verifier:
    """Checks steps, and remembers its findings about files that several of them share."""

    def __init__(self) -> None:
        self._stock = StockCheckpoints()
        self._known: dict[tuple[_Check, str], tuple[str, list[Damage]]] = {}

    def structure(self, lineage: Lineage) -> list[Damage]:
        """Damage that is visible without reading arrays."""
        found = self._each(lineage, self._base_structure, _delta_structure)
        if lineage.replayed_count:
            found += _without_program(lineage)
        return found

    def data(self, lineage: Lineage) -> list[Damage]:
        """Damage of the stored bytes of a step and of the steps that it builds on."""
        return self._each(lineage, self._base_data, _delta_data)

    def _each(self, lineage: Lineage, of_base: _Check, of_delta: _Check) -> list[Damage]:
        found = []
        for entry in lineage.entries:
            look = of_delta if isinstance(entry.manifest, DeltaManifest) else of_base
            digest = identity.of_step(entry)
            known = self._known.get((look, digest))  # by another link to the same files, perhaps
            if known is None:
                known = str(entry.place), _until_error(look(entry, lineage.base), entry)
                # What is deleted while it is read says nothing about other links to the files.
                if not known[1] or identity.of_step(entry) == digest:
                    self._known[look, digest] = known
            found += [_moved(each, known[0], str(entry.place)) for each in known[1]]
        return found

    def _base_structure(self, entry: LineageStep, base: BaseManifest) -> Iterator[Damage]:
        yield from damaged_programs(entry, base.update)
        for name, error in damaged_descriptions(entry.directory, base).items():
            hinders = PLACEMENT if name == manifests.SHARDINGS else None
            yield dataclasses.replace(damage_of(error, entry.directory), hinders=hinders)
        known, _ = trees.flatten(self._stock.described(entry.directory))
        specs = {leaf.path: leaf for leaf in base.leaves if leaf.nbytes}
        for path in sorted(known.keys() ^ specs.keys()):
            is_there = "Orbax's metadata has" if path in known else "the manifest has"
            message = (
                f"expected the same leaves in the manifest and in _METADATA, only {is_there} it"
            )
            yield Damage(str(entry.directory / "_METADATA"), path, message)
        for path in specs.keys() & known.keys():
            try:
                check_described(entry.directory, specs[path], known[path])
            except IntegrityError as error:
                yield dataclasses.replace(damage_of(error, entry.directory), leaf=path)
        names = {leaf.name: path for path, leaf in known.items() if path in specs}
        lost = volume_reader.lost_chunks(zarr.database_in(entry.directory), list(names))
        for name, why in lost.items():
            yield Damage(str(entry.directory), names[name], why)

    def _base_data(self, entry: LineageStep, base: BaseManifest) -> Iterator[Damage]:
        known, _ = trees.flatten(self._stock.described(entry.directory))
        for index, leaf in enumerate(base.leaves):
            if not leaf.nbytes or leaf.path not in known:
                continue
            try:
                value = volume_reader.fingerprint_of_array(
                    entry.directory, known[leaf.path].name, leaf.dtype
                )
            except (ValueError, OSError) as error:
                message = f"the stored bytes are damaged ({first_line(error)})"
                yield Damage(str(entry.directory), leaf.path, message)
                continue
            if value != base.fingerprints[index]:
                yield Damage(str(entry.directory), leaf.path, OTHER_BITS)


OTHER_BITS = "the bits are not those that were saved, by their fingerprint"


def _moved(damage: Damage, source: str, target: str) -> Damage:
    if not damage.file.startswith(source):
        return damage
    return dataclasses.replace(damage, file=target + damage.file.removeprefix(source))


def _until_error(damage: Iterable[Damage], entry: LineageStep) -> list[Damage]:
    """All damage of a step; an error that ends the look at it is its last."""
    found = []
    try:
        for each in damage:
            found.append(each)
    except (AdaCheckError, ValueError, OSError) as error:
        found.append(damage_of(error, entry.place))
    return found


def damaged_programs(entry: LineageStep, update: Update | None) -> Iterator[Damage]:
    """Damage of the update programs: missing ones, and ones that do not match their digest."""
    for platform, digest in ({} if update is None else update.programs).items():
        path = entry.directory / manifest_file.update_file(platform)
        try:
            manifest_file.read_other(path, digest)
        except AdaCheckError as error:
            yield dataclasses.replace(damage_of(error, path), hinders=platform)


def _without_program(lineage: Lineage) -> list[Damage]:
    update = lineage.base.update
    if update is not None:
        damaged = [*damaged_programs(lineage.entries[0], update)]
        if len(damaged) < len(update.programs):
            return []
    message = "expected the update that a delta replays, found no program that is whole"
    return [Damage(str(lineage.base_directory / manifest_file.FILE), None, message)]


def _delta_structure(entry: LineageStep, base: BaseManifest) -> Iterator[Damage]:
    packs: dict[AnyPath, dict[str, None]] = {}
    for reader in delta_reader.readers_of(Lineage((LineageStep(base, entry.holder), entry))):
        for start, names in reader.open_packs().items():
            packs.setdefault(start, {}).update(dict.fromkeys(names))
    for start, names in packs.items():
        lost = volume_reader.lost_chunks(zarr.database_at(start), [*names])
        for name, why in lost.items():
            yield Damage(str(start), None, f"{name}: {why}")


def _delta_data(entry: LineageStep, base: BaseManifest) -> Iterator[Damage]:
    """Damage of all bytes of a save's deltas; leaves stored whole must have their fingerprints."""
    lineage = Lineage((LineageStep(base, entry.holder), entry))
    readers = delta_reader.readers_of(lineage)
    for reader, delta in zip(readers, lineage.deltas, strict=True):
        for index in reader.delta.stored:
            path = base.leaves[index].path
            try:
                parts = [fingerprint_of(b, box.start) for box, b in reader.blocks(index)]
            except AdaCheckError as error:
                yield dataclasses.replace(damage_of(error, entry.place), leaf=path)
                continue
            whole = reader.stores_whole(index)
            if whole and fingerprint.combine(parts) != delta.fingerprints[index]:
                yield Damage(str(entry.place), path, OTHER_BITS)
