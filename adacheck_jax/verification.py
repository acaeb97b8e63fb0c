"""Whether a saved step is what it was: its structure, every stored byte, or all that it computes.

A step needs the files of every step of its lineage. Where these are hard links to files that were
seen already, they are not read again; see :class:`Verifier`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax import fingerprint, replay, restorer, staging, trees, volumes
from adacheck_jax import lineage as lineages
from adacheck_jax import manifest as manifests
from adacheck_jax.deltas import DeltaReader
from adacheck_jax.errors import AdaCheckError, FormatError, IntegrityError
from adacheck_jax.lineage import Entry, Lineage
from adacheck_jax.manifest import BaseManifest, Update
from adacheck_jax.stock import StockCheckpoints, stored_dtype

PLACEMENT = "placement"
NUMBER = "number"
_PARTS = {"_METADATA": None, "_sharding": PLACEMENT, "array_metadatas/process_0": None}
"""What Orbax keeps beside a base's arrays, and what its loss hinders, as in :class:`Damage`."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written.

    Attributes:
        file: the file, or the directory of the database, that is damaged.
        leaf: leaf path, None where no one leaf is.
        message: what was expected, and what was found.
        hinders: what alone it hinders: a platform's name for replaying there, :data:`PLACEMENT` for
            a restore without an abstract state, :data:`NUMBER` for finding the step by its number;
            None for every restore.
    """

    file: str
    leaf: str | None
    message: str
    hinders: str | None = None

    @property
    def error(self) -> IntegrityError:
        """As an error to be raised."""
        leaf = "" if self.leaf is None else f"{self.leaf}: "
        return IntegrityError(f"{self.file}: {leaf}{self.message}. Restore another step.")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What recomputing a step gave.

    Attributes:
        damage: empty if every leaf has the bits that were saved.
        rounded: leaf paths that differ, but come out of sums on devices that are not here.
        problem: why the step cannot be recomputed on this machine, whatever its files are; or None.
    """

    damage: tuple[Damage, ...] = ()
    rounded: tuple[str, ...] = ()
    problem: str | None = None


def check_structure(item_directory: Path) -> None:
    """Checks that a step has all that a restore on this machine needs, as far as that is cheap.

    Manifests and what they say of each other, the update program, the databases, and for every
    chunk of an array that it is there. No array is read.

    Args:
        item_directory: the step's item directory.

    Raises:
        AdaCheckError: names the file.
    """
    lineage = lineages.resolve(item_directory)
    _raise_first(Verifier().structure(lineage), lineage)


def check_data(item_directory: Path) -> None:
    """As :func:`check_structure`, and reads every byte of the step and of those it builds on.

    Args:
        item_directory: the step's item directory.

    Raises:
        AdaCheckError: names the file and, where one is damaged, the leaf.
    """
    lineage = lineages.resolve(item_directory)
    verifier = Verifier()
    _raise_first(verifier.structure(lineage), lineage)
    _raise_first(verifier.data(lineage), lineage)


def _raise_first(damage: Sequence[Damage], lineage: Lineage) -> None:
    platform = replay.platform() if restorer.replayed_count(lineage) else None
    for each in damage:
        if each.hinders in (None, platform):
            raise each.error


def damage_of(error: Exception, where: Path) -> Damage:
    """An error as damage: most of ours begin with the file that they are about."""
    message = " ".join(str(error).split())
    file, colon, rest = message.partition(": ")
    if colon and file.startswith("/"):
        return Damage(file, None, rest.rstrip("."))
    return Damage(str(where), None, message.rstrip("."))


def identity(directory: Path, skipped: Path | None = None) -> str:
    """A digest of which files lie under a directory; empty if there are none.

    Hard links to the same files at the same places have the same one, wherever the directory is.

    Args:
        directory: to look at.
        skipped: a directory in it to leave out.
    """
    found = []
    for path, names, files in os.walk(directory):
        if skipped is not None:
            names[:] = [name for name in names if Path(path, name) != skipped]
        for name in files:
            with contextlib.suppress(OSError):
                stat = os.stat(Path(path, name))
                place = os.path.relpath(Path(path, name), directory)
                found.append((place, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def _identity(entry: Entry) -> str:
    return identity(entry.directory, entry.directory / lineages.LINEAGE)


class Verifier:
    """Checks steps, and remembers what it found of files that several of them share.

    Give it the steps of one item in ascending order: then each update is replayed once.
    """

    def __init__(self) -> None:
        self._stock = StockCheckpoints()
        self._known: dict[tuple[str, str], list[Damage]] = {}
        self._fold = _Fold(self._stock)

    def structure(self, lineage: Lineage) -> list[Damage]:
        """What a step lacks, as far as can be told without reading its arrays."""
        found = self._each(lineage, "structure", self._structure)
        if restorer.replayed_count(lineage):
            found += _without_program(lineage)
        return found

    def data(self, lineage: Lineage) -> list[Damage]:
        """What is damaged among the stored bytes of a step and of those that it builds on."""
        return self._each(lineage, "data", self._data)

    def replay(self, lineage: Lineage) -> Replayed:
        """Recomputes a step on one device, and compares every leaf with its fingerprint."""
        return self._fold.replay(lineage)

    def _each(
        self, lineage: Lineage, what: str, check: Callable[[Entry, BaseManifest], list[Damage]]
    ) -> list[Damage]:
        found = []
        for entry in lineage.entries:
            key = (what, _identity(entry))
            if key not in self._known:
                damage = check(entry, lineage.base)
                # Kept by the place within the step: its next link lies elsewhere.
                self._known[key] = [_moved(each, entry.directory, Path()) for each in damage]
            found += [_moved(each, Path(), entry.directory) for each in self._known[key]]
        return found

    def _structure(self, entry: Entry, base: BaseManifest) -> list[Damage]:
        if not isinstance(entry.manifest, BaseManifest):
            return _delta_structure(entry, base)
        return [*_programs(entry, base.update), *_lost_parts(entry), *self._base_arrays(entry)]

    def _base_arrays(self, entry: Entry) -> list[Damage]:
        try:
            known, _ = trees.flatten(self._stock.metadata(entry.directory).tree)
        except AdaCheckError as error:
            return [damage_of(error, entry.directory)]
        specs = {leaf.path: leaf for leaf in _stored_leaves(entry.manifest)}
        found = []
        for path in sorted(known.keys() ^ specs.keys()):
            is_there = "Orbax's metadata has" if path in known else "the manifest has"
            message = (
                f"expected the same leaves in the manifest and in _METADATA, only {is_there} it"
            )
            found.append(Damage(str(entry.directory / "_METADATA"), path, message))
        for path in specs.keys() & known.keys():
            spec, other = specs[path], known[path]
            expected = (spec.shape, stored_dtype(spec.dtype))
            if (tuple(other.shape or ()), str(other.dtype)) != expected:
                message = f"expected an array of {expected}, found {(other.shape, other.dtype)}"
                found.append(Damage(str(entry.directory), path, message))
        names = {leaf.name: path for path, leaf in known.items() if path in specs}
        found += _wrong_descriptions(entry, names)
        try:
            lost = volumes.lost_chunks(entry.directory, list(names))
        except (ValueError, OSError) as error:
            return [*found, damage_of(error, entry.directory)]
        return found + [Damage(str(entry.directory), names[n], why) for n, why in lost.items()]

    def _data(self, entry: Entry, base: BaseManifest) -> list[Damage]:
        if isinstance(entry.manifest, BaseManifest):
            return self._base_data(entry, entry.manifest)
        return _delta_data(entry, base)

    def _base_data(self, entry: Entry, base: BaseManifest) -> list[Damage]:
        try:
            known, _ = trees.flatten(self._stock.metadata(entry.directory).tree)
        except AdaCheckError as error:
            return [damage_of(error, entry.directory)]
        found = []
        for index, leaf in enumerate(base.leaves):
            if not leaf.nbytes or leaf.path not in known:
                continue
            try:
                reader = volumes.ArrayReader(entry.directory, known[leaf.path].name)
                dtype = jnp.dtype(leaf.dtype)
                parts = [
                    fingerprint.of_block(block.astype(dtype, copy=False), box.start)
                    for box, block in reader.pieces()
                ]
            except (ValueError, OSError) as error:
                message = f"the stored bytes are damaged ({_first_line(error)})"
                found.append(Damage(str(entry.directory), leaf.path, message))
                continue
            if fingerprint.combine(parts) != base.fingerprints[index]:
                found.append(Damage(str(entry.directory), leaf.path, _OTHER_BITS))
        return found


_OTHER_BITS = "the bits are not those that were saved, by their fingerprint"


def _first_line(error: Exception) -> str:
    return str(error).split("\n", maxsplit=1)[0][:300]


def _moved(damage: Damage, source: Path, target: Path) -> Damage:
    file = Path(damage.file)
    if not file.is_relative_to(source):
        return damage
    return dataclasses.replace(damage, file=str(target / file.relative_to(source)))


def _stored_leaves(manifest: Any) -> list[manifests.Leaf]:
    """Those that a base has elements of."""
    return [leaf for leaf in manifest.leaves if leaf.nbytes]


def _programs(entry: Entry, update: Update | None) -> list[Damage]:
    """The update programs that are missing, or not those that were written."""
    found = []
    for platform, digest in ({} if update is None else update.programs).items():
        path = entry.directory / manifests.update_file(platform)
        try:
            data = path.read_bytes()
        except OSError as error:
            message = f"expected the exported update, found none ({error.strerror})"
            found.append(Damage(str(path), None, message, platform))
            continue
        if hashlib.sha256(data).hexdigest() != digest:
            message = f"the exported update does not match its digest ({len(data)} bytes)"
            found.append(Damage(str(path), None, message, platform))
    return found


def _without_program(lineage: Lineage) -> list[Damage]:
    update = lineage.base.update
    if update is not None and len(_programs(lineage.entries[0], update)) < len(update.programs):
        return []
    message = "expected the update that a delta replays, found no program that is whole"
    return [Damage(str(lineage.base_directory / manifests.FILE), None, message)]


def _lost_parts(entry: Entry) -> list[Damage]:
    """What Orbax keeps beside the arrays: JSON that is there and can be read."""
    found = []
    for name, hinders in _PARTS.items():
        path = entry.directory / name
        try:
            json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            message = f"expected JSON that Orbax wrote, found none ({error})"
            found.append(Damage(str(path), None, message, hinders))
    return found


def _wrong_descriptions(entry: Entry, names: Mapping[str, str]) -> list[Damage]:
    """Orbax reads this file only when it restores, and then stumbles over it."""
    path = entry.directory / "array_metadatas/process_0"
    fields = {"param_name", "write_shape", "chunk_shape", "ext_metadata"}
    try:
        each = [one["array_metadata"] for one in json.loads(path.read_bytes())["array_metadatas"]]
        if all(one.keys() == fields and one["param_name"] in names for one in each):
            return []
    except (OSError, ValueError):
        return []  # told already
    except (LookupError, TypeError, AttributeError):
        pass
    message = "expected Orbax's descriptions of the base's arrays, found something else"
    return [Damage(str(path), None, message)]


def _delta_structure(entry: Entry, base: BaseManifest) -> list[Damage]:
    manifest = entry.manifest
    assert isinstance(manifest, manifests.DeltaManifest)
    if len(manifest.fingerprints) != len(base.leaves):
        message = f"expected {len(base.leaves)} fingerprints, found {len(manifest.fingerprints)}"
        return [Damage(str(entry.directory / manifests.FILE), None, message)]
    found = []
    try:
        packs = DeltaReader(base, manifest, entry.directory).open_packs()
        for directory, names in packs.items():
            lost = volumes.lost_chunks(directory, names)
            found += [Damage(str(directory), None, f"{n}: {why}") for n, why in lost.items()]
    except (AdaCheckError, ValueError, OSError) as error:
        found.append(damage_of(error, entry.directory))
    return found


def _delta_data(entry: Entry, base: BaseManifest) -> list[Damage]:
    """Reads all that a delta stores; what it stores whole is what the leaf is after the step."""
    manifest = entry.manifest
    assert isinstance(manifest, manifests.DeltaManifest)
    try:
        reader = DeltaReader(base, manifest, entry.directory)
    except AdaCheckError as error:
        return [damage_of(error, entry.directory)]
    found = []
    for index in reader.stored:
        path = base.leaves[index].path
        try:
            parts = [fingerprint.of_block(b, box.start) for box, b in reader.blocks(index)]
        except AdaCheckError as error:
            found.append(dataclasses.replace(damage_of(error, entry.directory), leaf=path))
            continue
        whole = reader.holds_all_of(index)
        if whole and fingerprint.combine(parts) != manifest.fingerprints[index]:
            found.append(Damage(str(entry.directory / lineages.DELTA), path, _OTHER_BITS))
    return found


@dataclass(frozen=True, slots=True)
class _Compared:
    """The leaves of one step that do not have the bits that were saved, by index; or an error."""

    differing: tuple[int, ...] = ()
    error: Damage | None = None


class _Fold:
    """One lineage, folded on one device a step at a time."""

    def __init__(self, stock: StockCheckpoints) -> None:
        self._stock = stock
        self._chain: tuple[str, ...] = ()
        self._leaves: list[Any] = []
        self._compiled: dict[str, replay.UpdateFunction] = {}
        self._compared: dict[tuple[str, ...], _Compared] = {}

    def replay(self, lineage: Lineage) -> Replayed:
        problem = cannot_replay_here(lineage)
        if problem is not None:
            return Replayed(problem=problem)
        chain = tuple(map(_identity, lineage.entries))
        with _wide_integers(lineage.base):
            result = self._advanced(lineage, chain)
        if result.error is not None:
            return Replayed((result.error,))
        where, specs = str(lineage.entries[-1].directory), lineage.base.leaves
        bound = restorer.bound_to_mesh(lineage)
        wrong = [i for i in result.differing if i not in bound]
        rounded = tuple(specs[i].path for i in result.differing if i in bound)
        message = "recomputed, it does not have the bits that were saved"
        return Replayed(tuple(Damage(where, specs[i].path, message) for i in wrong), rounded)

    def _advanced(self, lineage: Lineage, chain: tuple[str, ...]) -> _Compared:
        if self._chain != chain[: len(self._chain)]:  # another lineage, or files of other content
            self._chain, self._leaves = (), []
        for depth in range(1, len(chain) + 1):
            known = self._compared.get(chain[:depth])
            if known is not None and known.error is not None:
                return known
            if depth > len(self._chain):
                self._step(lineage, chain[:depth])
        return self._compared[chain]

    def _step(self, lineage: Lineage, chain: tuple[str, ...]) -> None:
        """Goes on to the next step of a lineage, and compares it."""
        first, entry = lineage.entries[0], lineage.entries[len(chain) - 1]
        try:
            if len(chain) == 1:
                self._leaves = self._base(lineage)
            else:
                leaves, self._leaves = self._leaves, []  # they are donated
                one = Lineage((first, entry))
                self._leaves = restorer.replay_onto(leaves, one, None, None, self._compiled)
        except AdaCheckError as error:
            self._chain, self._leaves = (), []
            self._compared[chain] = _Compared(error=damage_of(error, entry.directory))
            return
        self._chain = chain
        found = fingerprint.of_leaves({i: staging.raw(x) for i, x in enumerate(self._leaves)})
        saved = entry.manifest.fingerprints
        differing = tuple(i for i, value in found.items() if value != saved[i])
        self._compared[chain] = _Compared(differing)

    def _base(self, lineage: Lineage) -> list[Any]:
        base, directory = lineage.base, lineage.base_directory
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        on_device = _touched(base)
        wanted = {
            leaf.path: device if leaf.key_type or i in on_device else np.ndarray
            for i, leaf in enumerate(base.leaves)
            if leaf.nbytes
        }
        specs = {leaf.path: leaf for leaf in base.leaves}
        read = self._stock.read(directory, wanted, specs)
        for i, leaf in enumerate(base.leaves):
            if not leaf.nbytes:
                empty = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
                read[leaf.path] = jax.device_put(empty, device) if i in on_device else empty
        return [read[leaf.path] for leaf in base.leaves]


def _touched(base: BaseManifest) -> frozenset[int]:
    return frozenset() if base.update is None else base.update.explained | {*base.update.consumed}


@contextlib.contextmanager
def _wide_integers(base: BaseManifest) -> Iterator[None]:
    """Lets JAX have elements of 64 bits where the update has: Orbax reads on threads of its own."""
    wide = ("int64", "uint64", "float64", "complex128")
    before = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    is_wide = any(base.leaves[i].dtype in wide for i in _touched(base))
    jax.config.update("jax_enable_x64", before or is_wide)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def cannot_replay_here(lineage: Lineage) -> str | None:
    """Why no update of an undamaged lineage can be replayed on this machine; None if it can."""
    update = lineage.base.update
    if update is None or not update.programs or not restorer.replayed_count(lineage):
        return None
    here = replay.platform()
    if here not in update.programs:
        known = ", ".join(update.programs)
        return f"the update was exported for {known}, and this machine's platform is {here}"
    path = lineage.base_directory / manifests.update_file(here)
    try:
        replay.load(path.read_bytes(), update, str(path))
    except FormatError as error:
        return " ".join(str(error).split())
    except (AdaCheckError, OSError):
        return None  # damaged, as replaying it will tell
    return None


def try_to_restore(lineage: Lineage) -> tuple[bool | None, str]:
    """Whether a step that is damaged can be restored all the same, by doing it.

    Returns:
        True or False, or None where this machine cannot tell; and why.
    """
    problem = cannot_replay_here(lineage)
    if problem is not None:
        return None, problem
    here = replay.platform()
    update = lineage.base.update
    if update is not None and restorer.replayed_count(lineage):
        bad = {each.hinders for each in _programs(lineage.entries[0], update)}
        if here in bad and bad != update.programs.keys():
            whole = ", ".join(sorted(update.programs.keys() - bad))
            return None, f"the update for {here} is damaged, the one for {whole} is not"
    try:
        damage = Verifier().replay(lineage).damage
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return None, f"it could not be tried: {_first_line(error)}"
    if not damage:
        return True, "it can be restored all the same"
    return False, f"{damage[0].leaf or damage[0].file}: {damage[0].message}"
