"""Recomputation of saved steps on one device, compared with their fingerprints.

The bits of some leaves depend on the order of a sum, and so on the devices that they were saved on
(:func:`adacheck_jax.restore.check.bound_to_mesh`). A fingerprint cannot tell another order from
damage, so such leaves are reported apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.device import jax_settings
from adacheck_jax.errors import AdaCheckError, FormatError, StorageError, first_line
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.restore import check, replay
from adacheck_jax.restore.compiled_update import CompiledUpdates
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store.steps import identity, manifest_file
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.location import at
from adacheck_jax.tools.verification import Damage, damage_of, damaged_programs
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program

RECOMPUTED = "recomputed, it does not have the bits that were saved"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of recomputing a step.

    Attributes:
        damage: damage found; empty if every leaf has the bits that were saved.
        rounded: leaf paths that differ, and come out of sums on devices that are not here.
        problem: the reason why this machine cannot recompute the step, damaged or not; else None.
    """

    damage: tuple[Damage, ...] = ()
    rounded: tuple[str, ...] = ()
    problem: str | None = None


class Reached:
    """A state on one device, brought from step to step: what lies between is replayed once.

    Args:
        key_of: identity of a saved step, by which the way to another one is told.
    """

    def __init__(self, key_of: Callable[[LineageStep], Hashable]) -> None:
        self._key_of = key_of
        self._stock, self._programs = StockCheckpoints(), CompiledUpdates()
        self._keys: list[Hashable] = []
        self._leaves: list[Any] = []

    def keys(self, lineage: Lineage) -> list[Hashable]:
        """Keys of the base and of each delta of a lineage."""
        found: list[Hashable] = []
        for entry in lineage.entries:
            key = self._key_of(entry)
            found += [(key, step) for step in entry.manifest.steps]
        return found[: len(found) - lineage.left_out]

    def at(self, lineage: Lineage) -> tuple[list[Any], set[int], set[int]]:
        """The leaves at the end of a lineage, from where the state is, or from the base.

        Returns:
            The leaves, which are donated to the next call; and of those that do not have the bits
            that were saved the indices: of wrong ones, and of ones that are right to rounding.

        Raises:
            AdaCheckError: the stored data is damaged or cannot be read.
        """
        specs = lineage.base.leaves
        with wide_integers(specs[i].dtype for i in touched(lineage.base)):
            leaves = self._leaves_at(lineage)
            differing = check.differing(leaves, lineage.end.fingerprints)
        bound = check.bound_to_mesh(lineage) if differing else frozenset()
        return leaves, differing - bound, differing & bound

    def _leaves_at(self, lineage: Lineage) -> list[Any]:
        wanted = self.keys(lineage)
        keys, leaves = self._keys, self._leaves
        self.release()  # what fails leaves nothing half done
        if not keys or keys != wanted[: len(keys)]:
            keys, leaves = wanted[:1], base_leaves(self._stock, lineage)
        readers = delta_reader.readers_of(lineage)[len(keys) - 1 :]
        if readers:
            leaves = replay.replay_onto(leaves, lineage, self._programs, readers=readers)
        self._keys, self._leaves = wanted, leaves
        return leaves

    def release(self) -> None:
        """Let go of the state."""
        self._keys, self._leaves = [], []

    def close(self) -> None:
        """Release the state, and Orbax's reader."""
        self.release()
        self._stock.close()


class Recomputation:
    """Recomputes steps on one device, and compares every leaf with its fingerprint.

    Each update is replayed once if the steps of an item come in ascending order.
    """

    def __init__(self) -> None:
        self._reached = Reached(identity.of_step)
        self._failed: dict[tuple[Hashable, ...], Damage] = {}

    def replay(self, lineage: Lineage) -> Replayed:
        """Recompute the steps of the last save of a lineage."""
        problem = cannot_replay_here(lineage)
        if problem is not None:
            return Replayed(problem=problem)
        keys, specs = self._reached.keys(lineage), lineage.base.leaves
        prefixes = (tuple(keys[:n]) for n in range(1, len(keys) + 1))
        if failed := next((self._failed[x] for x in prefixes if x in self._failed), None):
            return Replayed((failed,))
        wrong, rounded = set[int](), set[int]()
        try:
            for part in map(lineage.to, lineage.manifest.steps):
                _, more_wrong, more_rounded = self._reached.at(part)
                wrong, rounded = wrong | more_wrong, rounded | more_rounded
        except StorageError as error:  # the step may be whole, so this is no damage
            return Replayed(problem=" ".join(str(error).split()))
        except AdaCheckError as error:
            found = damage_of(error, lineage.entries[-1].place)
            # What is deleted while it is read says nothing about other links to the files.
            if self._reached.keys(lineage) == keys:
                self._failed[tuple(keys)] = found
            return Replayed((found,))
        where = str(lineage.entries[-1].holder)
        return Replayed(
            tuple(Damage(where, specs[i].path, RECOMPUTED) for i in sorted(wrong)),
            tuple(specs[i].path for i in sorted(rounded - wrong)),
        )


def base_leaves(stock: StockCheckpoints, lineage: Lineage) -> list[Any]:
    """Read a base: on one device the leaves that updates touch, all others on the host."""
    base, directory = lineage.base, lineage.base_directory
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    on_device = touched(base)
    wanted = {
        leaf.path: device if leaf.key_type or i in on_device else np.ndarray
        for i, leaf in enumerate(base.leaves)
    }
    return [*stock.read(directory, base.leaves, wanted, stock.described(directory)).values()]


def touched(base: BaseManifest) -> frozenset[int]:
    """Indices of the leaves that updates compute or consume."""
    return frozenset() if base.update is None else base.update.explained | {*base.update.consumed}


@contextlib.contextmanager
def wide_integers(dtypes: Iterable[str]) -> Iterator[None]:
    """This library's own settings; and 64-bit elements, if there are any, on all threads.

    Orbax reads on threads of its own.
    """
    wide = frozenset({"int64", "uint64", "float64", "complex128"})
    before = jax.enable_x64.get_global()  # jax.config has what this thread has set
    x64 = jax_settings.x64_enabled() or not wide.isdisjoint(dtypes)
    jax.config.update("jax_enable_x64", x64)
    try:
        with jax_settings.own(x64):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def cannot_replay_here(lineage: Lineage) -> str | None:
    """The reason why this machine cannot replay even an undamaged lineage; None if it can."""
    update = lineage.base.update
    if update is None or not update.programs or not lineage.replayed_count:
        return None
    here = update_program.platform()
    if here not in update.programs:
        known = ", ".join(update.programs)
        return f"the update was exported for {known}, and this machine's platform is {here}"
    path = lineage.base_directory / manifest_file.update_file(here)
    try:
        exported_program.vetted(at(path).read(), update, str(path))
    except FormatError as error:
        return " ".join(str(error).split())
    except (AdaCheckError, OSError):
        return None  # damaged: replaying it raises the error
    return None


def reason_to_keep(lineage: Lineage) -> str:
    """The reason why a damaged step may be restorable all the same; empty if trying it failed."""
    here, update = update_program.platform(), lineage.base.update
    if update is not None and lineage.replayed_count:
        bad = {each.hinders for each in damaged_programs(lineage.entries[0], update)}
        if here in bad and bad != update.programs.keys():
            whole = ", ".join(sorted(update.programs.keys() - bad))
            return f"the update for {here} is damaged, the one for {whole} is not"
    try:
        replayed = Recomputation().replay(lineage)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return f"it could not be tried: {first_line(error)}"
    if replayed.problem is not None:
        return replayed.problem
    return "" if replayed.damage else "it can be restored all the same"


def restorable_part(lineage: Lineage) -> Lineage | None:
    """The part of a lineage up to the newest step that can be restored, tried step by step.

    Returns:
        The lineage of that step; None if none can be restored. All of it where this machine cannot
        try.
    """
    dtypes = (lineage.base.leaves[i].dtype for i in touched(lineage.base))
    with contextlib.closing(StockCheckpoints()) as stock, wide_integers(dtypes):
        try:
            if cannot_replay_here(lineage):
                return lineage
            args = base_leaves(stock, lineage), lineage, CompiledUpdates()
            return replay.newest_exact(*args, rounded=check.bound_to_mesh(lineage))
        except (StorageError, MemoryError, jax.errors.JaxRuntimeError):
            return lineage
        except AdaCheckError:
            return None
