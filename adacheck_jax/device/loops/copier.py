"""Copies of arrays on their devices, which nothing waits for.

CPU devices call a compiled loop (:mod:`~adacheck_jax.device.loops.xla_call`): XLA would copy with
all its threads, and they would take the caller's processor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from adacheck_jax.device.background import in_background
from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.loops.programs import Later, Program, Result, now
from adacheck_jax.device.sharding import devices_of, mesh_of
from adacheck_jax.device.trees import is_narrow


class Copying:
    """Copies arrays on their devices, without waiting for them or for the copies.

    Made once for all arrays of these types and shardings.

    Args:
        arrays: jax or numpy arrays by leaf index; of one process, or on accelerators alone.
    """

    def __init__(self, arrays: Mapping[int, Any]) -> None:
        self._on_host = [i for i, x in arrays.items() if not isinstance(x, jax.Array)]
        groups: dict[Any, list[int]] = {}  # a program takes its devices in one order
        for index, array in arrays.items():
            if isinstance(array, jax.Array):
                groups.setdefault((mesh_of(array), devices_of(array)), []).append(index)
        self._groups = list[tuple[Sequence[int], _CopyProgram]]()
        for (mesh, _), group in groups.items():
            found: list[Any] = [arrays[index] for index in group]
            types, shardings = tuple(x.aval for x in found), tuple(x.sharding for x in found)
            calls_loops = xla_call.takes(mesh, [x.dtype for x in types])
            self._groups.append((group, _copier(mesh, types, shardings, (*group,), calls_loops)))

    def is_compiled(self) -> bool:
        """True if there are programs for it; else they are compiled in the background."""
        compiled = [copier.is_compiled() for _, copier in self._groups]
        return all(compiled)

    def copies(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """The copies; the arrays may be donated as each may be: their devices copy them first.

        Those of jax arrays are given later, since programs may be dispatched together.
        """
        result: dict[int, Any] = {i: np.array(arrays[i]) for i in self._on_host}
        for group, copier in self._groups:
            copied = copier([arrays[i] for i in group])
            result |= {i: Later(copied, n) for n, i in enumerate(group)}
        return result


def copies(arrays: Mapping[int, Any]) -> dict[int, Any]:
    """Copies of arrays on their devices, as of :class:`Copying`; dispatched when this returns."""
    return {i: now(x) for i, x in Copying(arrays).copies(arrays).items()}


class _CopyProgram:
    """A program that copies arrays of some types on their devices, and the future of it."""

    def __init__(
        self,
        mesh: Mesh | None,
        avals: Sequence[Any],
        shardings: Sequence[Sharding],
        leaves: Sequence[int],
        calls_loops: bool,
    ) -> None:
        def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            if not calls_loops:
                return [*map(jnp.copy, arrays)]
            copied = xla_call.copies
            if all(isinstance(each, NamedSharding) for each in shardings):
                specs = [cast(NamedSharding, each).spec for each in shardings]
                copied = jax.shard_map(
                    copied, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
                )
            return [*copied(arrays)]

        types = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(avals, shardings, strict=True)
        ]
        # jax has to lay out elements of less than a byte as it calls.
        self._is_narrow = any(is_narrow(x.dtype) for x in avals)
        places = [(i, None) for i in leaves] if calls_loops else None
        function = jax.jit(copy, out_shardings=[*shardings])
        self._program = Program(function, mesh, types, [], places, shardings)
        self._compiling: Future[None] | None = None

    def __call__(self, arrays: Sequence[jax.Array]) -> Result:
        """Starts the program; waits for it where it is being compiled."""
        if self._compiling is not None:
            self._compiling.result()
        return self._program(arrays)

    def is_compiled(self) -> bool:
        """True once the program is compiled; begins to compile it."""
        if self._is_narrow:
            return True
        if self._compiling is None:
            self._compiling = in_background(self._program.compile)
        return self._compiling.done()


_copier = functools.lru_cache(maxsize=64)(_CopyProgram)
