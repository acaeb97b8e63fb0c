"""The update program of a training run: exported, classified, and proved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax import exactness, proof, replay, staging
from adacheck_jax.manifest import Leaf
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.snapshot import Structure
from adacheck_jax.staging import Blocks

_KNOWN_COUNT = 8
_SMALL_COUNT = 64
"""Elements of the largest leaf that is forecast."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """The exported update.

    Attributes:
        files: the serialized program of each platform; empty where there is none.
        problem: why there is none.
    """

    files: Mapping[str, bytes]
    problem: str = ""

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each platform's program."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}

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
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._known: dict[Any, Program] = {}
        self._forecasts: dict[int, Forecast] = {}
        self._disproved: dict[str, str] = {}

    def of(self, structure: Structure) -> Program:
        """The update of a structure; exported once, since a lineage keeps its update."""
        recorder, binding = self._recorder, structure.binding
        if recorder is None or binding is None:
            return Program({}, "no recorder")
        lists = (binding.params, binding.inner, binding.record, binding.extra)
        arguments = [
            [_abstract(structure.leaves[i]) for i in structure.positions(paths)] for paths in lists
        ]
        # The recorder holds its signatures, so the id of one is not used again.
        key = (id(binding.signature), lists, tuple(map(tuple, arguments)), recorder.unreplayable)
        if key not in self._known:
            if len(self._known) >= _KNOWN_COUNT:  # a state whose tree changes all the time
                self._known.clear()
            self._known[key] = _export(recorder, binding, arguments)
        return self._known[key]

    def forecast(self, structure: Structure) -> Forecast:
        """What can be told of the next state; computed once a signature."""
        recorder, binding = self._recorder, structure.binding
        assert recorder is not None
        assert binding is not None
        key = id(binding.signature)
        if key not in self._forecasts:
            lists = (binding.params, binding.inner, binding.record, binding.extra)
            arguments = [
                [_abstract(structure.leaves[i]) for i in structure.positions(paths)]
                for paths in lists
            ]
            function = replay.update_function(recorder, binding.signature)
            self._forecasts[key] = _forecast(function, arguments)
        return self._forecasts[key]

    def prove(
        self,
        structure: Structure,
        before: Mapping[int, Blocks],
        after: Mapping[int, Blocks],
        step: int,
        x64: bool,
    ) -> list[int]:
        """Replays one update on host copies and remembers it if the outcome is wrong.

        Args:
            structure: of the saved state.
            before: blocks of everything that the update takes.
            after: blocks of what it computes, as they were trained.
            step: for the message.
            x64: whether the train step ran with 64-bit types enabled.

        Returns:
            Indices of the leaves that came out differently.
        """
        recorder, binding = self._recorder, structure.binding
        assert recorder is not None
        assert binding is not None
        lists = (binding.params, binding.inner, binding.record, binding.extra)
        arguments = [structure.positions(paths) for paths in lists]
        shapes = {i: leaf.shape for i, leaf in enumerate(structure.leaves)}
        function = replay.update_function(recorder, binding.signature)
        try:
            with jax.enable_x64(x64):
                wrong = proof.mismatches(function, arguments, before, after, shapes)
        except jax.errors.JaxRuntimeError as error:  # no device memory to spare
            _log.warning("Step %d is saved, but could not be proved: %s", step, error)
            return []
        if wrong:
            paths = [structure.leaves[i].path for i in wrong]
            self._disproved[self.of(structure).digest] = (
                f"replaying the update did not reproduce {len(wrong)} leaves of step {step} "
                f"({', '.join(paths[:5])}, ...), which were stored whole. The train step does not "
                "apply the update as it is replayed: it is not compiled as one program (jax.jit), "
                "has a transformation after the Recorder, changes the params by something else, "
                "or the compiler fused the gradient's computation into the update"
            )
        return wrong

    def disproved(self, program: Program) -> str:
        """Why a program is not to be relied on; empty if nothing speaks against it."""
        return self._disproved.get(program.digest, "")

    @property
    def any_disproved(self) -> bool:
        """Whether a proof has failed in this process."""
        return bool(self._disproved)


def _export(recorder: Recorder, binding: Binding, arguments: Any) -> Program:
    if recorder.unreplayable:
        program = Program({}, recorder.unreplayable)
    else:
        try:
            function = replay.update_function(recorder, binding.signature)
            if any(map(staging.is_key, jax.tree.leaves(binding.signature.inner))):
                return _said(Program({}, "the optimizer's state holds typed PRNG keys"))
            problem = _not_elementwise(exactness.reductions_of(function, arguments), binding)
            program = Program({} if problem else replay.export(function, arguments), problem)
        except Exception as error:
            program = Program({}, f"the update cannot be exported: {error}")
    return _said(program)


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


def _said(program: Program) -> Program:
    if program.problem:
        _log.warning("Saving bases only: %s.", program.problem)
    return program


def _not_elementwise(reductions: exactness.Reductions, binding: Binding) -> str:
    """Why deltas of an update would not replay to the exact bits; empty if they do."""
    if not reductions.outputs:
        return ""
    paths = [(*binding.params, *binding.inner)[i] for i in reductions.outputs]
    return (
        f"{len(paths)} leaves ({', '.join(paths[:3])}, ...) come out of "
        f"{', '.join(reductions.primitives)}, whose bits depend on the mesh and on how the step "
        "was compiled, so a replayed delta might differ from what was trained. Put what reduces "
        "over elements (clip_by_global_norm) before the Recorder"
    )


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
