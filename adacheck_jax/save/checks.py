"""Comparison of a delta's replay with the state that it stands for, before the delta is saved.

No delta is trusted unchecked: the compiler may compute an update otherwise in another program, and
something else than the update may change the state. Three engines tell. What one of them keeps of a
state, to check the next step with, is a *witness*.

``sample``: small leaves whole and a block of each large one, at positions that change, are taken at
each save, replayed at the next, and compared (:mod:`~adacheck_jax.update.sampling`).

``full``: a second copy of the state follows training by replay, on the same devices. Its
fingerprints must be those of the state.

``identity``: an update that runs as a program of its own (``separate_update``) is exact if the
arrays that are saved are the very arrays that it returned, and it was given those that were saved
before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, jax_settings, transfer
from adacheck_jax.device.shard_sums import Summing
from adacheck_jax.format.fingerprint import words_of
from adacheck_jax.save.exported_update import Engine, ExportedUpdate
from adacheck_jax.save.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.pieces import Pieces
from adacheck_jax.update.recorder import SeparateCall, reference
from adacheck_jax.update.sample_sites import WHOLE_ELEMENTS
from adacheck_jax.update.sampling import Sample, Taker, from_host

Findings = dict[int, float]
"""Share of the compared elements that differ, for each leaf that replay gets wrong."""

Witness = Any
"""Part of a state that an engine keeps to check the next one; opaque to everybody else."""

DENSE = 1 / 16
"""From this share on a sample cannot miss an error: ``(1 - 1/16) ** 1024`` is 2e-29."""


@dataclass(frozen=True, slots=True)
class State:
    """A state that is being saved, while its arrays are alive.

    Attributes:
        arrays: plain arrays, one a leaf.
        step: step number.
        sums: function that gives this process's contribution to each leaf's fingerprint; may be
            called later, and waits for the devices.
    """

    arrays: Sequence[Any]
    step: int
    sums: Callable[[], Mapping[int, int]]


class Check(Protocol):
    """The check of one delta, with all that it needs of the state."""

    @property
    def witness(self) -> Witness:
        """Witness of the state that the delta gives."""
        ...

    def findings(self, updates: Sequence[int]) -> Findings:
        """Replays, and compares; waits for the devices.

        Args:
            updates: positions of the recorders that made an update.
        """
        ...

    def renew(self, state: State, wrong: Collection[int]) -> None:
        """Takes leaves that replay gets wrong from the state itself, for the next check.

        Args:
            state: its arrays are still alive.
            wrong: indices of the leaves.
        """
        ...


class Checker(Protocol):
    """Checks the deltas of states of one structure."""

    engine: Engine

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        ...

    def witness(self, state: State) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        ...

    def begin(self, before: Witness, state: State) -> Check:
        """Takes what the check of a delta needs; the state may be donated afterwards.

        Args:
            before: witness of the parent.
            state: the state that the delta is to give.
        """
        ...


def checker_of(structure: Structure, program: ExportedUpdate) -> Checker:
    """The checker of a structure; compiles in the background."""
    if program.pieces is not None:
        return _Sampling(structure, program, program.pieces)
    if program.engine == "full":
        return _Following(structure, program)
    return _Identity(structure, program)


def is_sparse(structure: Structure, index: int, share: float) -> bool:
    """True if a later sample may miss an error that this one found."""
    return share < DENSE and _size(structure, index) > WHOLE_ELEMENTS


def _size(structure: Structure, index: int) -> int:
    return int(np.prod(structure.leaves[index].shape))


def _compared(structure: Structure, program: ExportedUpdate) -> list[int]:
    """The leaves whose replay is relied on."""
    explained = (*structure.arguments[0], *structure.arguments[1])
    return [i for i in explained if i not in program.stored]


class _Sampling:
    """Replays blocks of the leaves."""

    engine: Engine = "sample"

    def __init__(self, structure: Structure, program: ExportedUpdate, pieces: Pieces) -> None:
        assert structure.sites is not None
        self._structure, self._sites, self._pieces = structure, structure.sites, pieces
        self._compared = frozenset(_compared(structure, program))
        self._taker: Taker | None = None
        self._compiled: Future[Any] = Future()
        self._x64 = transfer.x64_enabled()
        update_program.in_background(self._compile, self._compiled)

    @property
    def is_ready(self) -> bool:
        return self._taker is not None and self._taker.is_ready and self._compiled.done()

    def _compile(self) -> Any:
        rows = len(self._sites.devices)
        specs = [
            {
                dtype: jax.ShapeDtypeStruct((rows, length), jnp.dtype(dtype))
                for dtype, length in order.lengths.items()
            }
            for order in (self._pieces.before, self._pieces.after)
        ]
        with jax_settings.own(self._x64):
            switches = update_program.switches(len(self._structure.bindings))
            return jax.jit(self._pieces.__call__).lower(*specs, switches).compile()

    def _prepare(self, arrays: Sequence[Any]) -> Taker:
        """The program that takes samples; begins to compile it at the first call."""
        if self._taker is None:
            self._taker = Taker(self._sites, self._pieces.after, arrays)
            update_program.in_background(self._taker.compile, Future())
        return self._taker

    def witness(self, state: State) -> Witness:
        starts, taker = self._sites.starts_at(state.step), self._prepare(state.arrays)
        if taker.is_ready:
            return taker.take(state.arrays, starts, starts)[0]
        return from_host(state.arrays, self._sites, starts, self._pieces.before)

    def begin(self, before: Witness, state: State) -> Check:
        starts, taker = self._sites.starts_at(state.step), self._prepare(state.arrays)
        if taker.is_ready:
            after, following = taker.take(state.arrays, before.starts, starts)
        else:
            after = from_host(state.arrays, self._sites, before.starts, self._pieces.after)
            following = from_host(state.arrays, self._sites, starts, self._pieces.before)
        return _SampleCheck(self, before, after, following)

    def compare(self, before: Sample, after: Sample, updates: Sequence[int]) -> Findings:
        taken = after.vectors(self._pieces.after)
        given = jax.device_put([before.vectors(self._pieces.before), taken])
        with jax_settings.own(self._x64):
            switches = update_program.switches(len(self._structure.bindings), updates)
            results = self._compiled.result()(*given, switches)
        found = self._pieces.wrong(results, taken)
        return {i: share for i, share in found.items() if i in self._compared}


@dataclass(frozen=True, slots=True)
class _SampleCheck:
    """Samples of two successive states, and one to check the next with."""

    checker: _Sampling
    before: Sample
    after: Sample
    witness: Sample

    def findings(self, updates: Sequence[int]) -> Findings:
        return self.checker.compare(self.before, self.after, updates) if updates else {}

    def renew(self, state: State, wrong: Collection[int]) -> None:
        """Nothing to do: a witness is a sample of the state itself."""


class _Following:
    """Replays every update onto a second copy of the state."""

    engine: Engine = "full"

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self._structure, self._program = structure, program
        self._compared = frozenset(_compared(structure, program))
        self._fold: Any = None
        self._summing: Summing | None = None
        self._x64 = transfer.x64_enabled()

    @property
    def is_ready(self) -> bool:
        return self._fold is not None

    def witness(self, state: State) -> Witness:
        own = (*self._structure.arguments[0], *self._structure.arguments[1])
        return _Followed(_Copy(self._together(state, own)), 0)

    def begin(self, before: Witness, state: State) -> Check:
        consumed = (*self._structure.arguments[2], *self._structure.arguments[3])
        given = self._together(state, consumed)
        # What was put on other devices is compared by its bits, all else by fingerprints.
        alone = {
            i: array
            for i, array in before.copy.arrays.items()
            if getattr(state.arrays[i], "sharding", None) != array.sharding
        }
        after = transfer.copies({i: state.arrays[i] for i in alone})
        # Leaves whose replay is not relied on are the state's own again.
        renewed = self._together(state, [*self._program.stored])
        return _FollowingCheck(self, before, given, after, renewed, state.sums)

    def _together(self, state: State, indices: Sequence[int]) -> dict[int, jax.Array]:
        """Copies on the devices that the largest leaves have in common; waits only for others."""
        touched = [i for each in self._structure.arguments for i in each]
        shardings = dict(
            zip(
                touched,
                update_program.common_shardings([state.arrays[i] for i in touched]),
                strict=True,
            )
        )
        main = next((where for where in shardings.values() if where), None)
        result = transfer.copies({i: state.arrays[i] for i in indices if shardings[i]})
        for i in indices:
            if not shardings[i]:
                placed = None if main is None else update_program.replicated(main)
                result[i] = jax.device_put(np.asarray(state.arrays[i]), placed)
        return result

    def renew(self, copy: _Copy, state: State, wrong: Collection[int]) -> None:
        with copy.lock:
            copy.arrays.update(self._together(state, [i for i in wrong if i in copy.arrays]))

    def compare(self, check: _FollowingCheck, updates: Sequence[int]) -> Findings:
        with check.before.copy.lock:
            return self._followed(check, updates)

    def _followed(self, check: _FollowingCheck, updates: Sequence[int]) -> Findings:
        copy, number = check.before.copy, check.before.number
        if copy.number == number:
            # A restore puts what is passed through in place before the update that takes it.
            passed = self._program.passed
            given = {i: jnp.copy(each) for i, each in check.renewed.items() if i in passed}
            copy.arrays.update(given)  # copies, since the update donates what it takes
            if updates:
                self._advance(copy, check.given, updates)
            copy.number += 1
        elif copy.number != number + 1:  # another step was replayed onto it meanwhile
            return dict.fromkeys(self._compared, 1.0)
        found = self._differing(copy.arrays, check) if updates else {}
        copy.arrays.update((i, jnp.copy(each)) for i, each in check.renewed.items())
        return found

    def _advance(self, copy: _Copy, given: Mapping[int, jax.Array], updates: Sequence[int]) -> None:
        structure, held = self._structure, copy.arrays
        params, inner, record, extra = structure.arguments
        with jax_settings.own(self._x64):
            shardings = [x.sharding for x in (*held.values(), *given.values())]
            switches = update_program.switches(len(structure.bindings), updates, shardings)
            lists = [[held[i] for i in params], [held[i] for i in inner]]
            consumed = [[given[i] for i in each] for each in (record, extra)]
            if self._fold is None:
                assert self._program.function is not None
                self._fold = update_program.jit_update_like(self._program.function, *lists)
            outputs = jax.tree.leaves(self._fold(*lists, *consumed, switches))
        held.update(zip((*params, *inner), outputs, strict=True))

    def _differing(self, held: Mapping[int, Any], check: _FollowingCheck) -> Findings:
        structure = self._structure
        wrong = {
            i: share
            for i, after in check.after.items()
            if i in self._compared and (share := _differing(np.asarray(held[i]), np.asarray(after)))
        }
        whole = {i: x for i, x in held.items() if i in self._compared and i not in check.after}
        if self._summing is None:
            self._summing = structure.summing_of(whole)
        found = fingerprint.Contributions(
            whole, structure.picks, structure.whole_picks, summing=self._summing
        ).sums()
        expected = check.sums()
        return wrong | {i: 1.0 for i, value in found.items() if value != expected[i]}


@dataclass(slots=True)
class _Copy:
    """The second copy of the leaves that updates compute, which each check moves on by one step.

    Attributes:
        arrays: by leaf index.
        number: of steps since it was made.
        lock: held by who moves it on: a step may be checked as recorded and as saved at once.
    """

    arrays: dict[int, jax.Array]
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Followed:
    """The copy as it is to be after a number of steps."""

    copy: _Copy
    number: int


@dataclass(frozen=True, slots=True)
class _FollowingCheck:
    """A step that the second copy follows, and the state that it is compared with.

    Attributes:
        before: the copy at the step before.
        given: what the update consumed.
        after: leaves of the state that the copy has elsewhere; compared by their bits.
        renewed: leaves of the state whose replay is not relied on.
        sums: as of :class:`State`.
    """

    checker: _Following
    before: _Followed
    given: Mapping[int, jax.Array]
    after: Mapping[int, Any]
    renewed: Mapping[int, Any]
    sums: Callable[[], Mapping[int, int]]

    @property
    def witness(self) -> Witness:
        return _Followed(self.before.copy, self.before.number + 1)

    def findings(self, updates: Sequence[int]) -> Findings:
        return self.checker.compare(self, updates)

    def renew(self, state: State, wrong: Collection[int]) -> None:
        self.checker.renew(self.before.copy, state, wrong)


class _Identity:
    """Asks whether the arrays are those that the replayed program took and returned."""

    engine: Engine = "identity"

    def __init__(self, structure: Structure, program: ExportedUpdate) -> None:
        self.structure, self.program = structure, program

    @property
    def is_ready(self) -> bool:
        return True

    def witness(self, state: State) -> Witness:
        own = (*self.structure.arguments[0], *self.structure.arguments[1])
        return {i: reference(state.arrays[i]) for i in own}

    def begin(self, before: Witness, state: State) -> Check:
        (binding,) = self.structure.bindings
        call: SeparateCall | None = binding.recorder.last_call
        witness = self.witness(state)
        every = dict.fromkeys(_compared(self.structure, self.program), 1.0)
        if call is None:
            return _Identified(witness, every)
        own = (*self.structure.arguments[0], *self.structure.arguments[1])
        pairs = zip(own, call.taken, strict=True)
        if not all(_is_same(before.get(i), taken) for i, taken in pairs):
            return _Identified(witness, every)
        returned = dict(zip(own, call.returned, strict=True))
        wrong = {i: each for i, each in every.items() if not _is_same(witness[i], returned[i])}
        return _Identified(witness, wrong)


@dataclass(frozen=True, slots=True)
class _Identified:
    witness: Witness
    wrong: Findings

    def findings(self, updates: Sequence[int]) -> Findings:
        return self.wrong if updates else {}

    def renew(self, state: State, wrong: Collection[int]) -> None:
        """Nothing to do: a witness names the arrays of the state itself."""


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and a is b


def _differing(a: np.ndarray, b: np.ndarray) -> float:
    """The share of elements whose bits differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return 1.0
    if not a.size:
        return 0.0
    words = (words_of(np.ascontiguousarray(x).reshape(-1)) for x in (a, b))
    x, y = (each.reshape(a.size, -1) for each in words)
    return float(np.mean(np.any(x != y, axis=1)))
