"""Programs over arrays on their devices, of which several are dispatched as one.

To hand an array to a program takes its caller a microsecond or two, however small the array is, and
the programs that read one state take the same hundreds of arrays. And once CPU devices have work,
the caller gets less of its processor. So calls are gathered (:class:`Gathering`) and dispatched
last; what is compiled in no time, as one program. That is compiled in the background; until then
each is dispatched by itself.

Any thread may ask for a result. The lock of a gathering is held while its programs are dispatched;
nothing waits for them under it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from adacheck_jax.device.background import in_background

Place = tuple[int, int | None]
"""A leaf of a state: its index, and the position of the shard that is taken, None for all of it."""

Result = Callable[[], Any]
"""Gives what a program returns, perhaps still being computed."""


class Later:
    """One of the arrays in a list that a program returns, which may not be dispatched yet."""

    def __init__(self, result: Result, number: int) -> None:
        self._result, self._number = result, number
        self._array: jax.Array | None = None

    def get(self) -> jax.Array:
        """The array, perhaps still being computed; the list lets go of it."""
        if self._array is None:
            arrays = self._result()
            if (array := arrays[self._number]) is not None:  # else another thread has just taken it
                self._array, arrays[self._number] = array, None
        assert self._array is not None
        return self._array


def now(given: Any) -> Any:
    """An array that may have been given for later."""
    return given.get() if isinstance(given, Later) else given


class Program:
    """A program over arrays on one mesh, which nothing waits for.

    The arrays may be donated once it was called; where calls are gathered, once they were
    dispatched.

    Args:
        function: jitted function of a list of arrays, and of operands.
        mesh: mesh of the arrays; None if there is none.
        types: shape, data type and sharding of each array.
        operands: those of the operands.
        places: place of each array in a state, if one program of this and others is compiled in no
            time, as those that call compiled loops; else None.
        shardings: those of the results, a list; None where the function tells.
    """

    def __init__(
        self,
        function: Any,
        mesh: Mesh | None,
        types: Sequence[jax.ShapeDtypeStruct],
        operands: Sequence[Any],
        places: Sequence[Place] | None = None,
        shardings: Sequence[jax.sharding.Sharding] | None = None,
    ) -> None:
        self.function, self.mesh, self.types, self.operands = function, mesh, types, (*operands,)
        self.places, self.shardings = places or (), shardings and tuple(shardings)
        platforms = (device.platform for each in types for device in each.sharding.device_set)
        self._is_on_cpu = next(platforms, "") == "cpu"
        self._jitted = _shared(function, self.shardings) if self._is_on_cpu else function
        self._compiled = self._jitted

    def compile(self) -> None:
        """Compiles it; else the first call does."""
        effort = (_EFFORT,) if self._is_on_cpu else ()
        self._compiled = _compiled(self.mesh, self._jitted, self.types, *self.operands, *effort)

    def __call__(self, arrays: Sequence[jax.Array], *operands: Any) -> Result:
        """Starts it, now or with others."""
        if (gathering := _gathering.get()) is not None:
            return gathering.add(_Waiting(self, arrays, operands))
        result = self.run(arrays, operands)
        return lambda: result

    def run(self, arrays: Sequence[jax.Array], operands: Sequence[Any]) -> Any:
        """Dispatches the program by itself."""
        effort = (_EFFORT,) if self._is_on_cpu else ()
        result = _called(self.mesh, self._compiled, self._jitted, arrays, *operands, *effort)
        return result[0] if self._is_on_cpu else result


_EFFORT = np.ones((16, 16), np.float32)
"""Matrix that programs on CPU devices multiply by itself."""


def _with_effort(function: Any, shardings: Any) -> Any:
    """The jitted function, whose results have these shardings, with a product of matrices besides.

    XLA:CPU runs a program with few floating-point operations in the calling thread, and takes a
    call of compiled loops for none.
    """

    def with_effort(arrays: Any, *operands: Any) -> tuple[Any, jax.Array]:
        *own, effort = operands
        return function(arrays, *own), effort @ effort

    return jax.jit(with_effort, out_shardings=(shardings and [*shardings], None))


_shared = functools.lru_cache(maxsize=16)(_with_effort)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that is not dispatched yet."""

    program: Program
    arrays: Sequence[jax.Array]
    operands: Sequence[Any]
    result: Future[Any] = field(default_factory=Future)


class Gathering:
    """Calls that wait to be dispatched, as few.

    Whoever needs a result earlier has all of them dispatched. What they take from one place of a
    state has the same bits.
    """

    def __init__(self) -> None:
        self._calls: list[_Waiting] = []
        self._dispatched: list[Future[Any]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Adds the programs that this thread calls meanwhile."""
        token = _gathering.set(self)
        try:
            yield
        finally:
            _gathering.reset(token)

    def add(self, call: _Waiting) -> Result:
        """Adds a call."""
        with self._lock:
            self._calls.append(call)
        future = call.result  # whoever keeps a result keeps no array

        def result() -> Any:
            self.dispatch()
            return future.result()

        return result

    def drop(self) -> None:
        """Forgets the calls that wait; nobody may ask for their results."""
        with self._lock:
            for call in self._calls:
                call.result.cancel()
            self._calls = []

    def dispatch(self) -> None:
        """Dispatches the calls that wait."""
        with self._lock:
            calls, self._calls = self._calls, []
            self._dispatched += [call.result for call in calls]
            joint: dict[Any, list[_Waiting]] = {}
            for call in calls:
                program = call.program
                joint.setdefault(program.mesh if program.places else id(call), []).append(call)
            try:
                for each in joint.values():
                    _dispatch(each)
            except BaseException as error:
                for call in calls:
                    if not call.result.done():
                        call.result.set_exception(error)
                raise

    def wait(self) -> None:
        """Waits until what was dispatched has read its arrays."""
        with self._lock:
            dispatched, self._dispatched = self._dispatched, []
        for each in dispatched:
            jax.block_until_ready(each.result())


_gathering: ContextVar[Gathering | None] = ContextVar("adacheck_gathering", default=None)


def _dispatch(calls: Sequence[_Waiting]) -> None:
    """Dispatches calls of programs on one mesh, as one if that is compiled."""
    joint = _Joint.of(tuple(call.program for call in calls)) if calls[1:] else None
    if joint is not None and joint.is_compiled():
        results = joint.run(calls)
    else:
        results = [call.program.run(call.arrays, call.operands) for call in calls]
    for call, result in zip(calls, results, strict=True):
        call.result.set_result(result)


class _Joint:
    """One program of several, which takes each place of a state once."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs, self._asked = programs, False
        self._compiled: Future[Any] | None = None
        # For each place the number of a program that takes it, and its number there.
        self._taken: dict[Place, tuple[int, int]] = {}
        for k, program in enumerate(programs):
            for n, place in enumerate(program.places):
                self._taken.setdefault(place, (k, n))

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(programs: Sequence[Program]) -> _Joint:
        """The one of these programs."""
        return _Joint(programs)

    def is_compiled(self) -> bool:
        """True once it is compiled; begins to compile it, the second time they are called."""
        if self._compiled is None and self._asked:
            self._compiled = in_background(self._compile)
        self._asked = True
        compiled = self._compiled
        return compiled is not None and compiled.done() and not compiled.exception()

    def run(self, calls: Sequence[_Waiting]) -> Sequence[Any]:
        """Dispatches the programs together; the result of each."""
        assert self._compiled is not None
        arrays = [calls[k].arrays[n] for k, n in self._taken.values()]
        operands = [call.operands for call in calls]
        mesh = self._programs[0].mesh
        return _called(mesh, *self._compiled.result(), arrays, operands, _EFFORT)[0]

    def _compile(self) -> tuple[Any, Any]:
        programs = self._programs
        arrays = [programs[k].types[n] for k, n in self._taken.values()]
        operands = [program.operands for program in programs]
        shardings = [each.shardings and [*each.shardings] for each in programs]
        function = _with_effort(self._joined, shardings)
        return _compiled(programs[0].mesh, function, arrays, operands, _EFFORT), function

    def _joined(
        self, arrays: Sequence[jax.Array], operands: Sequence[Sequence[Any]]
    ) -> Sequence[Any]:
        given = dict(zip(self._taken, arrays, strict=True))
        return [
            program.function([given[place] for place in program.places], *own)
            for program, own in zip(self._programs, operands, strict=True)
        ]


def _compiled(mesh: Mesh | None, function: Any, *types: Any) -> Any:
    with _entered(mesh):
        return function.lower(*types).compile()


def _called(mesh: Mesh | None, compiled: Any, jitted: Any, *given: Any) -> Any:
    """Calls a function as it was compiled; for arrays in other layouts as jax compiles it anew.

    jax refuses to call what was compiled for the layouts that devices prefer with arrays in others
    (``jax.experimental.layout``). To ask each array for its layout beforehand takes too long.
    """
    with _entered(mesh):
        try:
            return compiled(*given)
        except ValueError as error:
            if "layout" not in str(error):
                raise
            return jitted(*given)


@contextlib.contextmanager
def _entered(mesh: Mesh | None) -> Iterator[None]:
    """A mesh, if there is one, and 64-bit types, whatever the caller has set."""
    with jax.enable_x64(True), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield
