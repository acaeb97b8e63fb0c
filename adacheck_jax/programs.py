"""The update program of a training run: exported, classified, and proved."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax import exactness, proof, replay
from adacheck_jax.exactness import Level
from adacheck_jax.manifest import Leaf
from adacheck_jax.recorder import Recorder
from adacheck_jax.snapshot import Structure
from adacheck_jax.staging import Blocks

_KNOWN_COUNT = 8
_SMALL_COUNT = 64
"""Elements of the largest leaf that is forecast."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """The exported update, and how exactly it can be replayed.

    Attributes:
        files: the serialized program of each platform; none where there is a problem.
        digests: digest of each of them.
        problem: why the update cannot be replayed; empty if it can.
        reducing: indices of the leaves that depend on the order of a sum.
        passed: indices of the leaves that the update returns as it took them.
        piecewise: whether the update can be computed a piece of each leaf at a time.
        function: what proves it; one object, so that it is compiled once and not for every proof.
    """

    files: Mapping[str, bytes]
    digests: Mapping[str, str]
    problem: str = ""
    reducing: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    piecewise: bool = False
    function: replay.UpdateFunction | None = None

    @property
    def digest(self) -> str:
        """Digest of this platform's program; empty where there is none."""
        return self.digests.get(replay.platform(), "")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The small part of the optimizer's state that an update computes from itself alone.

    Counters and hyper-parameters: what they must be after an update can be told at once, so that a
    value set by hand between two steps is noticed before a delta is written.

    Attributes:
        inner: positions in the list of inner leaves.
        run: the next values of those leaves, from their values and those of the extra arguments.
    """

    inner: tuple[int, ...]
    run: Callable[[list[Any], list[Any]], list[Any]]


class Programs:
    """The exported updates of the structures that a recorder is used with.

    Args:
        recorder: the recorder in the optimizer chain, or None.
        prove_bytes: device memory that a proof may take.
    """

    def __init__(self, recorder: Recorder | None, prove_bytes: int) -> None:
        self._recorder = recorder
        self._prove_bytes = prove_bytes
        self._known: dict[Any, Program] = {}
        self._last: tuple[Structure, Any, Program] | None = None
        self._forecasts: dict[int, Forecast] = {}
        self._disproved: dict[str, str] = {}
        self._said: set[str] = set()

    def of(self, structure: Structure) -> Program:
        """The update of a structure; exported once, since a lineage keeps its update."""
        recorder, binding = self._recorder, structure.binding
        if recorder is None or binding is None:
            return Program({}, {}, "no recorder")
        how = (recorder.unreplayable, recorder.separate)
        last = self._last
        if last is None or last[0] is not structure or last[1] != how:
            last = self._last = (structure, how, self._exported(recorder, structure, how))
        program = last[2]
        if disproved := self._disproved.get(program.digest):
            return dataclasses.replace(program, files={}, digests={}, problem=disproved)
        return program

    def _exported(self, recorder: Recorder, structure: Structure, how: Any) -> Program:
        arguments, binding = structure.arguments, structure.binding
        specs = [[_abstract(structure.leaves[i]) for i in indices] for indices in arguments]
        assert binding is not None
        # The recorder holds its signatures, so the id of one is not used again.
        key = (id(binding.signature), arguments, tuple(map(tuple, specs)), how)
        if key not in self._known:
            if len(self._known) >= _KNOWN_COUNT:  # a state whose tree changes all the time
                self._known.clear()
            self._known[key] = _export(recorder, structure, specs)
        return self._known[key]

    def forecast(self, structure: Structure) -> Forecast:
        """What can be told of the next state; computed once a signature."""
        recorder, binding = self._recorder, structure.binding
        assert recorder is not None
        assert binding is not None
        key = id(binding.signature)
        if key not in self._forecasts:
            specs = [
                [_abstract(structure.leaves[i]) for i in indices] for indices in structure.arguments
            ]
            function = replay.update_function(recorder, binding.signature)
            self._forecasts[key] = _forecast(function, specs)
        return self._forecasts[key]

    def prove(
        self,
        structure: Structure,
        before: Mapping[int, Blocks],
        after: Mapping[int, Blocks],
        shardings: Mapping[int, Any],
        x64: bool,
    ) -> list[int]:
        """Replays one update on host copies.

        Args:
            structure: of the saved state.
            before: for everything that the update takes the blocks of its proof sites.
            after: likewise for what it computes, as it was trained.
            shardings: of every leaf.
            x64: whether the train step ran with 64-bit types enabled.

        Returns:
            Indices of the leaves that came out differently.
        """
        leaves, arguments = structure.leaves, structure.arguments
        try:
            with jax.enable_x64(x64):
                program = self.of(structure)
                assert program.function is not None
                if program.piecewise:
                    return proof.in_pieces(
                        program.function, leaves, arguments, before, after, self._prove_bytes
                    )
                if jax.process_count() > 1:
                    return self._unproved("it would take a program over several processes")
                needed_bytes = proof.whole_bytes(leaves, arguments, shardings)
                if needed_bytes > self._prove_bytes:
                    return self._unproved(
                        f"the update can only be computed whole, which takes {needed_bytes} bytes "
                        f"of device memory, and prove_bytes is {self._prove_bytes}"
                    )
                return proof.whole(program.function, arguments, before, after, shardings)
        except Exception as error:  # a proof is no part of a save: it may not fail it
            return self._unproved(f"{type(error).__name__}: {error}")

    def _unproved(self, why: str) -> list[int]:
        if why not in self._said:
            self._said.add(why)
            _log.warning("Deltas are saved that are not proved as they are saved: %s.", why)
        return []

    def disprove(self, digest: str, problem: str) -> None:
        """Remembers that a program does not reproduce what is trained."""
        self._disproved.setdefault(digest, problem)


def _export(recorder: Recorder, structure: Structure, specs: list[list[Any]]) -> Program:
    binding = structure.binding
    assert binding is not None
    if recorder.unreplayable:
        return Program({}, {}, recorder.unreplayable)
    try:
        function = replay.update_function(recorder, binding.signature)
        found = exactness.of(function, specs)
        explained = [*structure.arguments[0], *structure.arguments[1]]
        pairs = list(zip(explained, found.levels, strict=True))
        reducing = tuple(i for i, level in pairs if level is Level.ORDER)
        problem = ""
        if reducing and not recorder.separate:
            problem = _not_exact([structure.leaves[i].path for i in reducing], found.primitives)
        files = {} if problem else replay.export(function, specs)
        piecewise = all(level is Level.ELEMENT for _, level in pairs) and _same_in_pieces(
            function, specs
        )
        if files and not piecewise:  # what a restore will run, and not what it was exported from
            function = replay.from_bytes(files[replay.platform()])
        return Program(
            files,
            {platform: hashlib.sha256(data).hexdigest() for platform, data in files.items()},
            problem,
            reducing,
            tuple(i for n, i in enumerate(explained) if found.origins[n] == n),
            piecewise,
            function,
        )
    except Exception as error:
        return Program({}, {}, f"the update cannot be exported: {error}")


def _same_in_pieces(function: replay.UpdateFunction, specs: list[list[Any]]) -> bool:
    """Whether the update does the same to pieces: it may look at the shapes of what it takes."""
    pieces = [
        [
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            for shape, leaf in zip(proof.piece_shapes([x.shape for x in each]), each, strict=True)
        ]
        for each in specs[:3]
    ]
    try:
        operations = exactness.operations_of(function, [*pieces, specs[3]])
    except (TypeError, ValueError):
        return False
    return operations == exactness.operations_of(function, specs)


def _forecast(function: replay.UpdateFunction, arguments: list[list[Any]]) -> Forecast:
    params, inner, record, _ = arguments
    large = [leaf.size > _SMALL_COUNT for leaf in inner]
    touched = [True] * len(params) + large + [True] * len(record) + [False] * len(arguments[3])
    results = exactness.independent_of(function, arguments, touched)
    chosen = tuple(i - len(params) for i in results if i >= len(params))
    chosen = tuple(i for i in chosen if not large[i])

    def run(values: list[Any], extra: list[Any]) -> list[Any]:
        # Nothing that is returned depends on the zeros, so the compiler drops them.
        zeros = [[jnp.zeros(leaf.shape, leaf.dtype) for leaf in each] for each in arguments[:3]]
        for i, value in zip(chosen, values, strict=True):
            zeros[1][i] = value
        _, after = function(zeros[0], zeros[1], zeros[2], extra)
        return [after[i] for i in chosen]

    jitted: Any = jax.jit(run)
    return Forecast(chosen, jitted)


def _not_exact(paths: list[str], primitives: Sequence[str]) -> str:
    """Why an update that was part of the train step's program would not replay exactly."""
    return (
        f"{len(paths)} leaves ({', '.join(paths[:3])}, ...) come out of {', '.join(primitives)}, "
        "whose bits depend on the mesh and on how the train step was compiled, so a replayed "
        "update might differ from what was trained. Put what reduces over elements "
        "(clip_by_global_norm) before the Recorder, or run the update as its own program "
        "(adacheck.separate_update)"
    )


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
