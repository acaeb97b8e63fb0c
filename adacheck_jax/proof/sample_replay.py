"""The update on samples: one compiled program, also for samples of more elements than its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import jax_settings
from adacheck_jax.device.background import in_background
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import Pieces, Vectors


class SampleReplay:
    """Computes samples of the state after an update.

    What a thin sample and a dense one compute differs in the number of elements alone, and to
    compile it takes longer than all other programs of a check: so one program serves both.

    Args:
        program: the exported update.
        pieces: the update on samples of the sizes that are compiled, in the background.
        rows: number of devices that sample.
        recorder_count: number of recorders.
    """

    def __init__(
        self, program: ExportedUpdate, pieces: Pieces, rows: int, recorder_count: int
    ) -> None:
        self._arithmetic, self._recorder_count = program.arithmetic, recorder_count
        self._specs = pieces.abstract_samples(rows)
        self._compiled = in_background(functools.partial(self._compile, pieces))

    @property
    def is_compiled(self) -> bool:
        """True if a call would not wait for a compiler."""
        return self._compiled.done()

    def _compile(self, pieces: Pieces) -> Any:
        with self._arithmetic.applied():
            switches = update_program.switches(self._recorder_count)
            return jax.jit(pieces.__call__).lower(*self._specs, switches).compile()

    def __call__(self, before: Vectors, after: Vectors, updates: Sequence[int]) -> Vectors:
        """Samples of what the update computes, of as many elements as it is given."""
        with jax_settings.own(), self._arithmetic.applied():
            switches = update_program.switch_values(self._recorder_count, updates)
            run = functools.partial(self._run, (before, after), switches)
            parts = [run(number) for number in range(self._part_count(before, after))]
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for role in parts[0]:
            whole = np.concatenate([np.asarray(each[role]) for each in parts], axis=1)
            joined[role] = whole[:, : after[role].shape[1]]
        return joined

    def _part_count(self, *given: Vectors) -> int:
        """Number of calls of the program for all elements."""
        return max(
            -(-vectors[role].shape[1] // max(spec.shape[1], 1))
            for vectors, specs in zip(given, self._specs, strict=True)
            for role, spec in specs.items()
        )

    def _run(self, given: Sequence[Vectors], switches: Any, number: int) -> Vectors:
        parts = (
            {role: _part(vectors[role], spec.shape[1], number) for role, spec in specs.items()}
            for vectors, specs in zip(given, self._specs, strict=True)
        )
        return self._compiled.result()(*parts, switches)


def _part(vector: np.ndarray, size: int, number: int) -> np.ndarray:
    """Elements of the part with a number, filled up with zeros; all of what has no more."""
    if vector.shape[1] == size:
        return vector
    part = vector[:, number * size : (number + 1) * size]
    return np.pad(part, ((0, 0), (0, size - part.shape[1])))
