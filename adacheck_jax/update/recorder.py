"""The Recorder: an optax wrapper that keeps the gradient that each update consumed.

``Recorder(tx)`` behaves as ``tx`` and adds to its state the *record*, which is the gradient that
``tx`` received in the last update, and a counter of updates. The handler saves the record as a
delta, and a restore replays ``tx`` over it.

A replay is bit-exact on every mesh: roundings are pinned, and what sums over elements gave, such as
the norm of a clipping, is kept too (:mod:`~adacheck_jax.update.pinning.pinned_function`).

The thread that trains traces updates and notes what it saw; a save reads that on the caller's
thread, and a restore, which may trace a replay, on one in the background. There is no lock: what a
Recorder keeps is replaced or appended whole, and two threads at worst make one value twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from adacheck_jax.device import jax_settings, trees
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError
from adacheck_jax.format import byte_loops
from adacheck_jax.update.derived import Derived, DerivedFunction
from adacheck_jax.update.pinning.fence import fence, zero_of
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from adacheck_jax.update.pinning.reductions import Slots
from adacheck_jax.update.recorder_state import (
    InnerElsewhere,
    RecorderState,
    find_nodes,
    next_counter,
    no_results,
    passed_key,
    picked,
)
from adacheck_jax.update.recording.record import (
    ExtraArguments,
    check_types,
    empty_record,
    in_place_of,
    record_of,
    widened,
)
from adacheck_jax.update.recording.signatures import (
    SeparateCall,
    UpdateSignature,
    abstract,
    passed_and_reduced,
    whole_params,
)

_Value = TypeVar("_Value")

TAKE_ARGUMENT = "adacheck_take"
"""Extra argument of ``update``: a list that receives the record; then no update is computed."""
_KEPT_COUNT = 8
"""Values that a recorder keeps for its handlers; a state's tree may change all the time."""


class _Probe:
    """A stand-in for params, without leaves, that collects the recorders that it reaches."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


jax.tree_util.register_pytree_node(_Probe, lambda probe: ((), probe), lambda probe, _: probe)


class Recorder(optax.GradientTransformationExtraArgs):
    """Wraps an optax transformation and records the input of each update.

    Example::

        recorder = Recorder(optax.adamw(3e-4))
        tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)

    Args:
        tx: the transformation whose updates are recorded and replayed.
        dtype: data type of the record. None keeps the gradient's own, which must be the params'
            then: ``tx`` receives each gradient as it is. ``jnp.bfloat16`` rounds it before ``tx``
            sees it, as mixed-precision training does, and halves a delta of a float32
            gradient. ``tx`` consumes exactly what is recorded, cast to the params' data type where
            that is wider, so that it computes as it does without a Recorder.
        extra_args: examples (arrays or ``jax.ShapeDtypeStruct``) of the extra arguments that
            ``tx.update`` consumes, by name, such as ``{"value": jnp.zeros(())}`` for
            ``optax.contrib.reduce_on_plateau``. They are recorded too. They are declared here so
            that the state has the same structure before and after the first update.
        pin: True to round every operation of ``tx`` as it is written. Otherwise the compiler may
            compute an update in one way in the train step and in another in a replay, or in two
            train steps: it contracts products and sums, divides by multiplying, and keeps digits
            that a short data type lacks, depending on everything around the update. Such a step is
            then saved as a larger delta, or as a base.
            A pinned update outside ``jax.jit`` is traced once for each structure, as ``jax.jit``
            would trace it: values that ``tx`` reads besides its arguments are read then.
        derived: functions of trees that follow from the params after every update and lie
            elsewhere in the state, such as moving averages and target networks, by leaf path of
            the tree or the end of one. Each takes the new params, the last value of the tree and
            the number of updates so far, and returns the tree's next value. The train step calls
            :meth:`derive`; a delta then stores nothing of the tree.

    Raises:
        RecorderError: at ``update``, when an array arrives as an extra argument that was not
            declared and that ``tx`` could consume, when a declared one is missing or has another
            shape, or when gradients have another data type than expected.
    """

    tx: optax.GradientTransformation
    dtype: Any
    signatures: list[UpdateSignature]
    unreplayable: str | None
    separate: bool
    last_call: SeparateCall | None
    arithmetic: Arithmetic | None
    pin: bool
    derived: dict[str, Derived]
    _kept: dict[Hashable, Any]
    _extra: ExtraArguments
    _pinned: PinnedFunction

    def __new__(  # noqa: D102 - the class says it
        cls,
        tx: optax.GradientTransformation,
        *,
        dtype: Any = None,
        extra_args: Mapping[str, Any] | None = None,
        pin: bool = True,
        derived: Mapping[str, DerivedFunction] | None = None,
    ) -> Recorder:
        _check_arguments(tx, dtype)
        _expect_mappings({"extra_args": extra_args, "derived": derived})

        def init(params: PyTree) -> RecorderState:
            return self._init(params)

        def update(
            updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
        ) -> tuple[PyTree, RecorderState]:
            return self._update(updates, state, params, extra_args)

        self = super().__new__(cls, init, update)
        self.tx = optax.with_extra_args_support(tx)
        self.dtype = dtype
        self.signatures = []
        self.unreplayable = None
        self.separate = False  # until separate_update has run
        self.last_call = None
        self.arithmetic = None  # of the last update that was traced
        self.pin = pin
        self.derived = {
            name.strip("/"): Derived(name, function, pin=pin)
            for name, function in (derived or {}).items()
        }
        self._kept = {}
        self._extra = ExtraArguments(
            {
                name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
                for name, value in (extra_args or {}).items()
            },
            takes_others=isinstance(tx, optax.GradientTransformationExtraArgs),
        )
        self._pinned = PinnedFunction(self._updated, records=True)
        return self

    # It has a memory: whoever copies it, as a part of a config or of a tree, gets it itself.
    def __copy__(self) -> Recorder:
        return self

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A stock transformation: other functions make no Recorder."""
        return optax.GradientTransformationExtraArgs(*iterable)

    def once(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Make a value once for all handlers of this recorder, such as its exported update.

        It lives no longer than the recorder, which it may refer to. The key says all else that it
        depends on.
        """
        value = self._kept.get(key)
        if value is None:
            if len(self._kept) >= _KEPT_COUNT:
                self._kept.clear()
            value = self._kept[key] = make()
        return value

    def derive(self, name: str, opt_state: PyTree, params: PyTree, old: PyTree) -> PyTree:
        """Compute the next value of a derived tree, after each update of the params.

        Example::

            def average(params, ema, count):
                return optax.incremental_update(params, ema, 0.001)

            recorder = Recorder(optax.adamw(3e-4), derived={"ema_params": average})
            ...
            state = state.apply_gradients(grads=grads)
            ema = recorder.derive("ema_params", state.opt_state, state.params, state.ema_params)
            state = state.replace(ema_params=ema)

        Args:
            name: name of the tree, as in ``derived``.
            opt_state: the optimizer state after the update, with this Recorder's state in it.
            params: all params after the update.
            old: the last value.

        Returns:
            The next value, with the data types of the last one.

        Raises:
            RecorderError: the name is unknown, the optimizer state holds not one Recorder's state,
                or the function returns another tree than it takes.
        """
        known = self.derived.get(name.strip("/"))
        if known is None:
            raise RecorderError(
                f"expected the name of a derived tree, one of {sorted(self.derived)}, found "
                f"{name!r}. Declare it: Recorder(tx, derived={{{name!r}: function}})."
            )
        leaves, _ = trees.flatten(opt_state)
        nodes = find_nodes([*leaves])
        if len(nodes) != 1:
            raise RecorderError(
                f"expected an optimizer state with one Recorder's state in it, found {len(nodes)} "
                f"in {type(opt_state).__name__}. Give the optimizer state of this Recorder alone, "
                "as the update returned it."
            )
        count = jnp.asarray(leaves[nodes[0].count])
        known.learn(old)
        return known(zero_of(count), params, old, count)

    @property
    def version(self) -> Hashable:
        """A value that changes when the update has to be tied to a state anew."""
        return (self.separate, *(len(each.learned) for each in self.derived.values()))

    def _init(self, params: PyTree) -> RecorderState:
        """The state before the first update."""
        if isinstance(params, _Probe):
            params.recorders.append(self)
            return RecorderState((), (), {}, {}, InnerElsewhere())
        inner, extra = self.tx.init(params), self._extra.zeros()
        record = empty_record(params, self.dtype)
        # The first save fingerprints the state, and a compiler is done sooner than training begins.
        state = jax.tree.leaves((params, inner, record))
        byte_loops.expect(sum(x.size * x.dtype.itemsize for x in state if hasattr(x, "dtype")))
        known = self._learn(params, inner, record, extra)
        passed = picked(map(passed_key, known.passed), inner)
        slots = known.reduced
        if not jax.tree.leaves(params):  # a placeholder, as optax.tree_utils.tree_map_params gives
            slots = next((x.reduced for x in self.signatures if x.reduced), ())
        reduced = no_results(slots)
        return RecorderState(jnp.zeros((), jnp.int32), record, extra, passed, inner, reduced)

    def _update(
        self, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, RecorderState]:
        """One update, with its record and its extra arguments in the next state."""
        taken = extra_args.pop(TAKE_ARGUMENT, None)
        extra, problem = self._extra.recorded(extra_args)
        self.unreplayable = problem or self.unreplayable
        with jax_settings.compiled():
            zero = zero_of(state.adacheck_count)
            record = record_of(updates, self.dtype)
            whole = whole_params(self.signatures, record, state.adacheck_record, params)
            check_types(record, state.adacheck_record)
            record, extra = self.sealed(zero, (record, extra))
            count = next_counter(state.adacheck_count)
            kept = in_place_of(state.adacheck_record, record)
        if taken is not None:
            taken.append((self, record))
            return record, state._replace(
                adacheck_count=count, adacheck_record=kept, adacheck_extra=extra
            )
        inner = state.adacheck_inner
        if isinstance(inner, InnerElsewhere):
            raise RecorderError(
                "separate_update expected an optimizer that ends in its Recorder, found a "
                "transformation around it that keeps extra arguments from it (MultiSteps). "
                "Put it around the gradients, or inside the Recorder."
            )
        passed = picked(state.adacheck_passed, inner)
        self.arithmetic = Arithmetic.current()
        outputs, inner, words = self._apply(zero, record, inner, params, {**extra_args, **extra})
        if whole is not None:
            self._learn(whole, inner, record, extra)  # as the next update will take them
        reduced = {
            key: jnp.zeros_like(old) if words is None or words.shape != old.shape else words
            for key, old in state.adacheck_reduced.items()
        }
        return outputs, RecorderState(count, kept, extra, passed, inner, reduced)

    def sealed(self, zero: Any, consumed: PyTree) -> PyTree:
        """Fence a tree, so that the recorded bits are those that the update consumes."""
        if not self.pin:
            return jax.tree.map(jax.lax.optimization_barrier, consumed)
        return jax.tree.map(lambda x: fence(x, zero, canonical=True), consumed)

    def _apply(
        self, zero: Any, record: PyTree, inner: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree, Any]:
        """Run the wrapped transformation; updates, next state, and words of reduction results."""
        record = self._consumed(record, params)
        has_functions = not all(map(core.valid_jaxtype, jax.tree.leaves(extra)))
        if not self.pin or has_functions:  # an update that takes functions is never replayed
            return *self._updated(record, inner, params, extra), None
        (updates, inner), words = self._pinned.recording(zero, record, inner, params, extra)
        return updates, inner, words

    def replay(
        self,
        zero: Any,
        record: PyTree,
        inner: PyTree,
        params: PyTree,
        extra: Mapping[str, Any],
        reduced: tuple[Any, Slots],
    ) -> tuple[PyTree, PyTree]:
        """Run the wrapped transformation with the bits of the train step, by its trace if known.

        The gradients and recorded extra arguments come from :meth:`sealed`; ``zero`` is a uint32
        scalar, zero at run time; ``reduced`` are the words of the recorded reduction results, and
        their places.

        Returns:
            The updates, and the next inner state.
        """
        record = self._consumed(record, params)
        if not self.pin:
            return self._updated(record, inner, params, extra)
        return self._pinned.replaying(zero, *reduced, record, inner, params, extra)

    def _updated(
        self, record: PyTree, inner: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree]:
        own = jax.tree.map(lambda u: u, record)  # tx may change its containers in place
        return self.tx.update(own, inner, params, **extra)

    def _consumed(self, record: PyTree, params: PyTree) -> PyTree:
        """The record as the wrapped transformation takes it."""
        if self.dtype is None:
            return record
        return widened(record, (params, *(each.params for each in self.signatures)))

    def _learn(
        self, params: PyTree, inner: PyTree, record: PyTree, extra: dict[str, Any]
    ) -> UpdateSignature:
        """Note the trees of an update."""
        shapes = [jax.tree.map(abstract, tree) for tree in (params, inner, record, extra)]
        for known in self.signatures:
            if [known.params, known.inner, known.record, known.extra] == shapes:
                return known
        consumed = self._consumed(record, params)
        known = passed_and_reduced(self._pinned, consumed, inner, params, extra)
        params, inner, record, extra = shapes
        self.signatures.append(UpdateSignature(params, inner, record, extra, *known))
        return self.signatures[-1]


# A node without leaves, as an optax transformation has none.
jax.tree_util.register_pytree_node(Recorder, lambda one: ((), one), lambda one, _: one)


def reached_by(
    tx: optax.GradientTransformation | optax.MultiSteps,
) -> tuple[list[Recorder], Exception | None]:
    """The recorders in a transformation, each once, and the error of an ``init`` without params."""
    probe: Any = _Probe()
    problem = None
    try:
        tx.init(probe)
    except Exception as error:  # masks and labels need the params themselves
        problem = error
    return [*dict.fromkeys(probe.recorders)], problem


def _check_arguments(tx: Any, dtype: Any) -> None:
    if isinstance(tx, Recorder):
        raise RecorderError("expected an optax transformation, found a Recorder. One is enough.")
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise RecorderError(
            f"expected an optax transformation, found {type(tx).__name__}. Write "
            "Recorder(optax.adamw(3e-4))."
        )
    try:
        is_floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        raise RecorderError(
            f"expected dtype to be None or a floating-point type such as jnp.bfloat16, found "
            f"{dtype!r}."
        )


def _expect_mappings(arguments: Mapping[str, Any]) -> None:
    for argument, value in arguments.items():
        if not (value is None or isinstance(value, Mapping)):
            raise RecorderError(
                f"{argument}: expected a dictionary by names, found {type(value).__name__}. Write "
                f'Recorder(tx, {argument}={{"name": ...}}).'
            )
