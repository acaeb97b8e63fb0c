"""``full``: a second copy of the state on the devices, which follows training by replay."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, jax_settings, sharding, transfer
from adacheck_jax.device.loops import copier
from adacheck_jax.device.shard_sums import Summing
from adacheck_jax.format.fingerprint import words_of
from adacheck_jax.proof.checker import Baseline, Check, Findings, Sums
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Snapshot, Structure
from adacheck_jax.update import program as update_program


class Following:
    """Replays every update onto a second copy of the state."""

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self._structure, self._program = structure, program
        self._compared = frozenset(program.compared(structure))
        # Each with the shardings that it was made for.
        self._fold: tuple[list[Any], Any] | None = None
        self._summing: tuple[dict[int, Any], Summing] | None = None

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        return self._fold is not None

    def baseline(self, arrays: Sequence[Any], step: int, *, is_restored: bool = False) -> Baseline:
        """Takes a baseline of a base, or of a restored state; waits for the state."""
        own = (*self._structure.arguments[0], *self._structure.arguments[1])
        copy = _Copy(self._together(arrays, own))
        return Baseline(self._structure, self._program, (copy, copy.number))

    def begin(self, before: Baseline, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the check of a delta needs."""
        copy, number = before.kept
        # What was put on other devices is compared by its bits, all else by fingerprints.
        alone = [
            i
            for i, array in copy.arrays.items()
            if getattr(arrays[i], "sharding", None) != array.sharding
        ]
        consumed = (*self._structure.arguments[2], *self._structure.arguments[3])
        given = self._together(arrays, consumed)
        after = copier.copies({i: arrays[i] for i in alone})
        # Leaves whose replay is not relied on are the state's own again.
        renewed = self._together(arrays, [*self._program.stored])

        def findings(updates: Sequence[int]) -> Findings:
            with copy.lock:
                if not self._moves_to(number + 1, copy, given, renewed, updates):
                    return dict.fromkeys(self._compared, 1.0)
                found = self._differing(copy.arrays, after, sums) if updates else {}
                copy.arrays.update((i, jnp.copy(each)) for i, each in renewed.items())
                return found

        def renew(arrays: Sequence[Any], wrong: Collection[int]) -> None:
            with copy.lock:
                copy.arrays.update(self._together(arrays, [i for i in wrong if i in copy.arrays]))

        baseline = Baseline(self._structure, self._program, (copy, number + 1))
        return Check(lambda: baseline, findings, renew)

    def _together(self, arrays: Sequence[Any], indices: Sequence[int]) -> dict[int, jax.Array]:
        """Copies on the devices that the largest leaves have in common; waits only for others.

        They lie in the memory that devices compute in, also those of what is offloaded from it.
        """
        touched = [i for each in self._structure.arguments for i in each]
        common = update_program.common_shardings([arrays[i] for i in touched])
        shardings = dict(zip(touched, common, strict=True))
        main = next((where for where in shardings.values() if where), None)
        result = copier.copies({i: arrays[i] for i in indices if shardings[i]})
        for i, array in result.items():
            if not sharding.in_device_memory(array):
                result[i] = jax.device_put(array, sharding.computable(array.sharding))
        placed = None if main is None else update_program.replicated(main)
        for i in indices:
            if not shardings[i]:
                result[i] = _placed(np.array(arrays[i]), placed)
        return result

    def _moves_to(
        self,
        number: int,
        copy: _Copy,
        given: Mapping[int, jax.Array],
        renewed: Mapping[int, jax.Array],
        updates: Sequence[int],
    ) -> bool:
        """Moves the copy on by one step; False if another one was replayed onto it meanwhile."""
        if copy.number + 1 == number:
            # A restore puts what is passed through in place before the update that takes it.
            passed = [i for i in renewed if i in self._program.passed]
            # Copies, since the update donates what it takes.
            copy.arrays.update((i, jnp.copy(renewed[i])) for i in passed)
            if updates:
                self._advance(copy, given, updates)
            copy.number += 1
        return copy.number == number

    def _advance(self, copy: _Copy, given: Mapping[int, jax.Array], updates: Sequence[int]) -> None:
        structure, held = self._structure, copy.arrays
        params, inner, record, extra = structure.arguments
        with jax_settings.own(), self._program.arithmetic.applied():
            shardings = [x.sharding for x in (*held.values(), *given.values())]
            switches = update_program.switches(len(structure.bindings), updates, shardings)
            lists = [[held[i] for i in params], [held[i] for i in inner]]
            consumed = [[given[i] for i in each] for each in (record, extra)]
            kept = [x.sharding for each in lists for x in each]
            if self._fold is None or self._fold[0] != kept:
                assert self._program.function is not None
                fold = update_program.jit_update_like(self._program.function, *lists)
                self._fold = kept, fold
            outputs = jax.tree.leaves(self._fold[1](*lists, *consumed, switches))
        held.update(zip((*params, *inner), outputs, strict=True))

    def _differing(self, held: Mapping[int, Any], after: Mapping[int, Any], sums: Sums) -> Findings:
        """The leaves that differ from the state: its fingerprints, or its bits ``after`` it."""
        structure = self._structure
        wrong = {
            i: share
            for i, own in after.items()
            if i in self._compared and (share := _differing(np.asarray(held[i]), np.asarray(own)))
        }
        whole = {i: x for i, x in held.items() if i in self._compared and i not in after}
        places = {i: x.sharding for i, x in whole.items()}
        if self._summing is None or self._summing[0] != places:
            self._summing = places, structure.summing_of(whole)
        found = fingerprint.Contributions(
            whole, structure.picks, structure.whole_picks, summing=self._summing[1]
        ).sums()
        expected = sums()
        return wrong | {i: 1.0 for i, value in found.items() if value != expected[i]}


@dataclass(slots=True)
class _Copy:
    """The second copy of the leaves that updates compute, which each check moves on by one step.

    The ``number`` is that of steps since it was made. The lock is held by who moves it on: a step
    may be checked as recorded and as saved at once.
    """

    arrays: dict[int, jax.Array]
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def is_collective(snapshot: Snapshot, program: ExportedUpdate) -> bool:
    """True if processes exchange elements when a replay of this engine runs on their devices.

    A collective has to have the same place among those of the training in all processes. So each
    begins it while its training loop waits for it, and never behind the loop's back.
    """
    if jax.process_count() == 1 or program.engine != "full":
        return False
    cuts: dict[tuple[int, ...], jax.sharding.Sharding] = {}
    for array in (snapshot.arrays[i] for each in snapshot.structure.arguments for i in each):
        if not np.ndim(array):
            continue
        if not isinstance(array, jax.Array):
            return True
        first = cuts.setdefault(array.shape, array.sharding)
        if not array.sharding.is_equivalent_to(first, array.ndim):
            return True
    return not program.elementwise  # else elements stay on their devices


def _placed(value: np.ndarray, where: jax.sharding.Sharding | None) -> jax.Array:
    """A host array on devices; ``device_put`` would have all processes compare what they have."""
    if where is None:
        return jax.device_put(value)
    return transfer.place(
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where),
        lambda box: value[box.slices],
    )


def _differing(a: np.ndarray, b: np.ndarray) -> float:
    """The share of elements whose bits differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return 1.0
    if not a.size:
        return 0.0
    words = (words_of(np.ascontiguousarray(x).reshape(-1)) for x in (a, b))
    x, y = (each.reshape(a.size, -1) for each in words)
    return float(np.mean(np.any(x != y, axis=1)))
