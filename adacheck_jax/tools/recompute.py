"""Recomputation of saved steps on one device, compared with their fingerprints.

The bits of some leaves depend on the order of a sum, and so on the devices that they were saved on
(:func:`adacheck_jax.restore.check.bound_to_mesh`). A fingerprint cannot tell another order from
damage, so such leaves are reported apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.errors import AdaCheckError, FormatError, StorageError, first_line
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.restore import check, replay
from adacheck_jax.restore.compiled_update import CompiledUpdates
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store.steps import identity, manifest_file
from adacheck_jax.store.steps.lineage import Lineage
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


@dataclass(frozen=True, slots=True)
class _Compared:
    """The comparison of one step with its fingerprints.

    Attributes:
        differing: indices of the leaves that do not have the bits that were saved.
        error: the damage that kept the step from being computed, else None.
    """

    differing: tuple[int, ...] = ()
    error: Damage | None = None


class Recomputation:
    """Recomputes steps on one device, and compares every leaf with its fingerprint.

    Each update is replayed once if the steps of an item come in ascending order.
    """

    def __init__(self) -> None:
        self._stock = StockCheckpoints()
        self._chain: tuple[str, ...] = ()
        self._leaves: list[Any] = []
        self._programs = CompiledUpdates()
        self._compared: dict[tuple[str, ...], _Compared] = {}

    def replay(self, lineage: Lineage) -> Replayed:
        """Recompute one step.

        Args:
            lineage: the step's lineage.
        """
        problem = cannot_replay_here(lineage)
        if problem is not None:
            return Replayed(problem=problem)
        chain = _chain_of(lineage)
        try:
            on_device = touched(lineage.base)
            with wide_integers(lineage.base.leaves[i].dtype for i in on_device):
                result = self._advanced(lineage, chain)
        except StorageError as error:  # the step may be whole, so this is no damage
            self._chain, self._leaves = (), []
            return Replayed(problem=" ".join(str(error).split()))
        if result.error is not None:
            return Replayed((result.error,))
        where, specs = str(lineage.entries[-1].holder), lineage.base.leaves
        bound = check.bound_to_mesh(lineage)
        wrong = [i for i in result.differing if i not in bound]
        rounded = tuple(specs[i].path for i in result.differing if i in bound)
        damage = tuple(Damage(where, specs[i].path, RECOMPUTED) for i in wrong)
        return Replayed(damage, rounded)

    def _advanced(self, lineage: Lineage, chain: tuple[str, ...]) -> _Compared:
        if self._chain != chain[: len(self._chain)]:  # another lineage, or files of other content
            self._chain, self._leaves = (), []
        for depth in range(1, len(chain) + 1):
            known = self._compared.get(chain[:depth])
            if (known is None or known.error is None) and depth > len(self._chain):
                known = self._step(lineage, chain[:depth])
                # What is deleted while it is read says nothing about other links to the files.
                if known.error is None or _chain_of(lineage) == chain:
                    self._compared[chain[:depth]] = known
            if known is not None and known.error is not None:
                return known  # no later step can be built
        return self._compared[chain]

    def _step(self, lineage: Lineage, chain: tuple[str, ...]) -> _Compared:
        """Compute the next save of a lineage, and compare all its steps."""
        first, entry = lineage.entries[0], lineage.entries[len(chain) - 1]
        differing: set[int] = set()
        try:
            if len(chain) == 1:
                self._leaves = base_leaves(self._stock, lineage)
                differing |= check.differing(self._leaves, lineage.base.fingerprints)
            else:
                one = Lineage((first, entry))
                for reader, delta in zip(delta_reader.readers_of(one), one.deltas, strict=True):
                    leaves, self._leaves = self._leaves, []  # they are donated
                    self._leaves = replay.apply_deltas(leaves, one, [reader], self._programs)
                    differing |= check.differing(self._leaves, delta.fingerprints)
        except StorageError:
            raise
        except AdaCheckError as error:
            self._chain, self._leaves = (), []
            return _Compared(error=damage_of(error, entry.place))
        self._chain = chain
        return _Compared(tuple(sorted(differing)))


def _chain_of(lineage: Lineage) -> tuple[str, ...]:
    """Digests of the files of each saved step."""
    return tuple(map(identity.of_step, lineage.entries))


def base_leaves(stock: StockCheckpoints, lineage: Lineage) -> list[Any]:
    """Read a base: on one device the leaves that updates touch, all others on the host.

    Args:
        stock: reader of bases.
        lineage: a lineage that begins with it.
    """
    base, directory = lineage.base, lineage.base_directory
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    on_device = touched(base)
    wanted = {
        leaf.path: device if leaf.key_type or i in on_device else np.ndarray
        for i, leaf in enumerate(base.leaves)
        if leaf.nbytes
    }
    specs = {leaf.path: leaf for leaf in base.leaves}
    read = stock.read(directory, wanted, specs, stock.described(directory))
    for i, leaf in enumerate(base.leaves):
        if not leaf.nbytes:
            empty = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
            read[leaf.path] = jax.device_put(empty, device) if i in on_device else empty
    return [read[leaf.path] for leaf in base.leaves]


def touched(base: BaseManifest) -> frozenset[int]:
    """Indices of the leaves that updates compute or consume."""
    return frozenset() if base.update is None else base.update.explained | {*base.update.consumed}


@contextlib.contextmanager
def wide_integers(dtypes: Iterable[str]) -> Iterator[None]:
    """This library's own settings; and 64-bit elements, if there are any, on all threads.

    Orbax reads on threads of its own.

    Args:
        dtypes: data types of the leaves that are made device arrays.
    """
    wide = frozenset({"int64", "uint64", "float64", "complex128"})
    before = jax.enable_x64.get_global()  # jax.config has what this thread has set
    x64 = transfer.x64_enabled() or not wide.isdisjoint(dtypes)
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
        exported_program.load(at(path).read(), update, str(path))
    except FormatError as error:
        return " ".join(str(error).split())
    except (AdaCheckError, OSError):
        return None  # damaged: replaying it raises the error
    return None


def try_to_restore(lineage: Lineage) -> tuple[bool | None, str]:
    """Recompute a damaged step, which may be restorable all the same.

    Returns:
        True if it can be restored, False if not, None if this machine cannot know; and the reason.
    """
    problem = cannot_replay_here(lineage)
    if problem is not None:
        return None, problem
    here = update_program.platform()
    update = lineage.base.update
    if update is not None and lineage.replayed_count:
        bad = {each.hinders for each in damaged_programs(lineage.entries[0], update)}
        if here in bad and bad != update.programs.keys():
            whole = ", ".join(sorted(update.programs.keys() - bad))
            return None, f"the update for {here} is damaged, the one for {whole} is not"
    try:
        replayed = Recomputation().replay(lineage)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return None, f"it could not be tried: {first_line(error)}"
    if replayed.problem is not None:
        return None, replayed.problem
    damage = replayed.damage
    if not damage:
        return True, "it can be restored all the same"
    return False, f"{damage[0].leaf or damage[0].file}: {damage[0].message}"
