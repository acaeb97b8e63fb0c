"""The update program of a training run: exported, and classified."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from adacheck_jax.device.background import in_background
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.errors import listed
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import exactness, exported_program
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import Pieces, UnevenError
from adacheck_jax.update.elements.sample_sites import WHOLE_ELEMENTS
from adacheck_jax.update.exactness import Level
from adacheck_jax.update.recorder import Recorder

Check = Literal["auto", "sample", "full"]
"""Elements of a delta's replay that are compared with the state before the delta is saved."""
Engine = Literal["sample", "full", "identity"]
"""Ways to compare a replay with its state: see :mod:`~adacheck_jax.proof`."""

_COPIED_BYTES = 64 * 2**20
"""Largest state that is copied a second time, unasked, where a sample could not tell."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedUpdate:
    """The exported updates of a structure, and their exactness.

    Attributes:
        program: serialized program of this platform; empty where there is a problem.
        others: gives those of other platforms, which are exported in the background.
        problem: reason why no update can be replayed; empty if one can.
        reducing: indices of the leaves that depend on the order of a sum.
        passed: indices of the leaves that the update returns as it took them.
        unreplayed: indices of the computed leaves that a delta stores, since another program may
            compute other bits of them, or nothing can check it.
        pinned: True if all that is replayed computes the same bits in any program.
        elementwise: True if each computed element follows from those of its own place.
        engine: way in which replay is checked.
        pieces: the updates on samples, for the engine of that name.
        function: the updates over flat leaves; one object, so that it is compiled once.
        warnings: reasons why some leaves are stored as bit patterns, to be told once.
        arithmetic: settings that the updates were traced with.
    """

    program: bytes = b""
    others: Future[dict[str, bytes]] | None = None
    problem: str = ""
    reducing: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    unreplayed: frozenset[int] = frozenset()
    pinned: bool = False
    elementwise: bool = False
    engine: Engine = "sample"
    pieces: Pieces | None = None
    function: update_program.UpdateFunction | None = None
    warnings: tuple[str, ...] = ()
    arithmetic: Arithmetic = dataclasses.field(default_factory=Arithmetic.current)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of this platform's program; empty where there is none."""
        return exported_program.digest_of(self.program) if self.program else ""

    def described(self, structure: Structure, files: Mapping[str, bytes]) -> Update:
        """The update of a structure as a base tells of it, with the programs of some platforms."""
        params, inner, record, extra = structure.arguments
        return Update(
            params=params,
            inner=inner,
            record=record,
            extra=extra,
            counts=structure.counts,
            parts=structure.parts,
            reducing=self.reducing,
            passed=self.passed,
            placement=structure.placement if self.reducing else "",
            problem=self.problem,
            programs={name: exported_program.digest_of(data) for name, data in files.items()},
            jax_version=jax.__version__,
            pinned=self.pinned,
        )

    def files(self) -> dict[str, bytes]:
        """The serialized program of each platform; waits for those of others."""
        if not self.program:
            return {}
        others = self.others.result() if self.others is not None else {}
        return {update_program.platform(): self.program, **others}

    def compared(self, structure: Structure) -> list[int]:
        """The leaves whose replay is relied on."""
        explained = (*structure.arguments[0], *structure.arguments[1])
        return [i for i in explained if i not in self.stored]

    def is_sampled_whole(self, structure: Structure) -> bool:
        """True if a sample takes every leaf whole whose replay is relied on."""
        sizes = (math.prod(structure.leaves[i].shape) for i in self.compared(structure))
        return max(sizes, default=0) <= WHOLE_ELEMENTS

    @functools.cached_property
    def stored(self) -> frozenset[int]:
        """The computed leaves that a delta stores wherever they changed."""
        return self.unreplayed.union(self.passed)


NOT_YET = ExportedUpdate()
"""Stands for the update of a base that nothing precedes, until it is exported after the save."""


class ExportedUpdates:
    """The exported updates of the structures that are saved.

    Args:
        check: elements of a replay that are to be compared.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._last: tuple[Structure, Any, ExportedUpdate] | None = None
        self._identity_fails = False
        self._said: set[str] = set()

    def of(self, structure: Structure) -> ExportedUpdate:
        """The updates of a structure; exported once, however many handlers a recorder has."""
        if not structure.bindings:
            return ExportedUpdate(problem="no recorder")
        recorders, now = [each.recorder for each in structure.bindings], Arithmetic.current()
        state = (
            self._identity_fails,  # a recorder whose update was not traced yet will be, as now
            *((r.unreplayable, r.arithmetic or now, self._runs_apart(r)) for r in recorders),
        )
        last = self._last
        if last is None or last[0] is not structure or last[1] != state:
            last = self._last = (structure, state, self._exported(structure, state))
        return last[2]

    def can_wait(self, structure: Structure) -> bool:
        """True if the updates are not exported yet, and may be in the background.

        What ``separate_update`` returned is known by the arrays themselves, and needs them.
        """
        is_known = self._last is not None and self._last[0] is structure
        recorders = [each.recorder for each in structure.bindings]
        return bool(recorders) and not is_known and not any(map(self._runs_apart, recorders))

    def _runs_apart(self, recorder: Recorder) -> bool:
        """True if the update is run by a ``separate_update``, and does not just have one."""
        return recorder.separate and not (self._identity_fails and recorder.last_call is None)

    def compare_in_full(self) -> None:
        """Checks no more by identity: the loop hands on other arrays than it got."""
        self._identity_fails = True

    def _exported(self, structure: Structure, state: Any) -> ExportedUpdate:
        """The updates as they were trained, whatever the caller of a save has set."""
        signatures = [(each.signature, each.derived) for each in structure.bindings]
        sites, recorder = structure.sites, structure.bindings[0].recorder
        sharing = (sites.uncovered, tuple(sites.sizes.items())) if sites else None
        with (recorder.arithmetic or Arithmetic.current()).applied():
            arguments = structure.arguments
            specs = [[_abstract(structure.leaves[i]) for i in indices] for indices in arguments]
            shapes = (arguments, tuple(map(tuple, specs)), sharing, Arithmetic.current())
            key = (self._check, state, *signatures, *shapes)
            return recorder.once(key, lambda: self._export(structure, specs))

    def tell(self, update: ExportedUpdate) -> None:
        """Warns of leaves that are not replayed, once; for saves, since a restore prepares more."""
        for each in update.warnings:
            if each not in self._said:
                self._said.add(each)
                _log.warning("Saving these leaves as bit patterns: %s.", each)

    def _export(self, structure: Structure, specs: list[list[Any]]) -> ExportedUpdate:
        recorders = [each.recorder for each in structure.bindings]
        if reasons := [each.unreplayable for each in recorders if each.unreplayable]:
            return ExportedUpdate(problem=reasons[0])
        try:
            function = update_program.joint_function(structure.bindings)
            jitted: Any = jax.jit(function)  # traced once, whoever looks at its operations
            with exported_program.tracing():
                program = self._classify(structure, jitted, specs)
            if program.problem:
                return program
            here, switches = update_program.platform(), update_program.switches(len(recorders))
            own = exported_program.export(jitted, specs, switches, [here])[here]
        except Exception as error:
            return ExportedUpdate(problem=f"the update cannot be exported: {error}")
        if program.engine != "sample":  # what a restore will run, and not what it was exported from
            function = exported_program.load_own(own)
        arithmetic = Arithmetic.current()

        def others() -> dict[str, bytes]:
            elsewhere = [each for each in exported_program.PLATFORMS if each != here]
            with arithmetic.applied():
                return exported_program.export(jitted, specs, switches, elsewhere)

        exporting = in_background(others)  # needed when a base is written
        return dataclasses.replace(program, program=own, others=exporting, function=function)

    def _classify(
        self, structure: Structure, function: update_program.UpdateFunction, specs: list[list[Any]]
    ) -> ExportedUpdate:
        """The exactness of each leaf's replay, and the engine that checks it."""
        recorders = [each.recorder for each in structure.bindings]
        leaves = structure.leaves
        is_separate = len(recorders) == 1 and self._runs_apart(recorders[0])
        arguments = [*specs, update_program.switches(len(recorders))]
        pinned = all(each.pin for each in recorders)
        found = exactness.of(function, arguments, pinned=pinned)
        computed = [*structure.arguments[0], *structure.arguments[1]]
        levels = dict(zip(computed, found.levels, strict=True))
        passed = tuple(i for n, i in enumerate(computed) if found.origins[n] == n)
        reducing = tuple(i for i, level in levels.items() if level is Level.ORDER)
        arrays = {i for i in computed if leaves[i].shape and i not in passed}
        unreplayed: set[int] = set()
        warnings: list[str] = []
        if reducing and not is_separate:
            unreplayed.update(reducing)
            problem = _not_exact([leaves[i].path for i in reducing], found.primitives)
            if unreplayed.issuperset(arrays):  # replay would leave nothing but counters
                return ExportedUpdate(problem=problem, reducing=reducing)
            warnings.append(problem)
        engine: Engine = "full"
        pieces: Pieces | None = None
        if is_separate and not self._identity_fails:
            engine = "identity"
        elif self._check != "full":
            stored = {*unreplayed, *passed}
            replayed = {i: x for i, x in levels.items() if i not in stored and leaves[i].nbytes}
            pieces = _pieces(structure, function, specs, passed)
            missed = {*replayed} if pieces is None else _missed(structure, replayed)
            copied_bytes = sum(leaves[i].nbytes for i in computed)
            if (pieces is None or missed) and copied_bytes <= _COPIED_BYTES:
                pieces = None  # a second copy tells of all
            elif missed:
                unreplayed |= missed
                problem = _not_sampled([leaves[i].path for i in sorted(missed)])
                if unreplayed.issuperset(arrays):
                    return ExportedUpdate(problem=problem, reducing=reducing)
                warnings.append(problem)
            engine = "full" if pieces is None else "sample"
        own = tuple(i for i in reducing if i not in unreplayed)
        return ExportedUpdate(
            reducing=own,
            passed=passed,
            unreplayed=frozenset(unreplayed),
            pinned=pinned and not own,
            elementwise=all(level is Level.ELEMENT for level in found.levels),
            engine=engine,
            pieces=pieces,
            function=function,
            warnings=tuple(warnings),
        )


def _missed(structure: Structure, replayed: Mapping[int, Level]) -> set[int]:
    """Those of some leaves that samples cannot tell of: not computed element by element, or cut."""
    assert structure.sites is not None
    moved = {i for i, each in replayed.items() if each is not Level.ELEMENT}
    return moved | structure.sites.uncovered.intersection(replayed)


def _pieces(
    structure: Structure,
    function: update_program.UpdateFunction,
    specs: list[list[Any]],
    passed: tuple[int, ...],
) -> Pieces | None:
    """The update on samples; None if it does something else to them than to whole leaves."""
    assert structure.sites is not None
    switches = update_program.switches(len(structure.bindings))
    try:
        sizes = structure.sites.sizes
        return Pieces(function, specs, structure.arguments, switches, sizes, passed)
    except (UnevenError, TypeError, ValueError) as error:
        _log.info("The update cannot be computed on samples: %s", error)
        return None


def _not_exact(paths: list[str], primitives: Sequence[str]) -> str:
    """Reason why an update that was part of the train step's program does not replay exactly."""
    return (
        f"{_few(paths)} come out of {', '.join(primitives)}, "
        "whose bits depend on the mesh and on how the train step was compiled, and are too many to "
        "be recorded, so a replayed update might differ from what was trained. Run the update as "
        "its own program (adacheck.separate_update), or put such operations before the Recorder"
    )


def _not_sampled(paths: list[str]) -> str:
    """Reason why replay of some leaves cannot be checked by a sample."""
    return (
        f"{_few(paths)} depend on more than the elements of their own places (noise, a transposed "
        "leaf, other cuts over processes), so a sample cannot tell whether replay is exact. "
        "AdaCheckHandler(shadow=Shadow(on_devices=True)) compares all of them, for a copy of the "
        "state on the devices"
    )


def _few(paths: list[str]) -> str:
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'} ({listed(paths, 3)})"


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
