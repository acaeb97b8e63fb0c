"""The optax wrapper that keeps what each update consumed.

``Recorder(tx)`` behaves as ``tx`` and adds to its state the *record*: the gradient that ``tx``
received in the last update, and a counter of updates. The handler saves the record as a delta and
replays ``tx`` over it at restore.

Put it last in the chain, after clipping: it records what ``tx`` receives, and an element-wise
``tx`` replays bit-exactly on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adacheck_jax.errors import RecorderError
from adacheck_jax.trees import PyTree

TAKE_ARGUMENT = "adacheck_take"
"""Extra argument of ``update``: a list that takes what is recorded, in place of an update."""
COUNT_FIELD = "adacheck_count"
RECORD_FIELD = "adacheck_record"
EXTRA_FIELD = "adacheck_extra"
INNER_FIELD = "adacheck_inner"


class RecorderState(NamedTuple):
    """State of a :class:`Recorder`.

    The fields are found again by name in the saved state: containers such as ``nnx.State`` keep
    field names and lose types.

    Attributes:
        adacheck_count: int32 scalar, number of updates so far.
        adacheck_record: what the wrapped transformation received in the last update; shaped and
            sharded like the params.
        adacheck_extra: the recorded extra arguments of the last update, by name.
        adacheck_inner: the wrapped transformation's own state.
    """

    adacheck_count: Any
    adacheck_record: PyTree
    adacheck_extra: dict[str, Any]
    adacheck_inner: PyTree


class Probe:
    """Given to ``init`` in place of params, learns which recorders there are; has no leaves."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


jax.tree_util.register_pytree_node(Probe, lambda probe: ((), probe), lambda probe, _: probe)


class InnerElsewhere(NamedTuple):
    """Stands for the wrapped transformation's state while only the record is taken."""


@dataclass(frozen=True)
class UpdateSignature:
    """The trees that one update takes, as ``jax.ShapeDtypeStruct`` without shardings.

    Attributes:
        params, inner, extra: as the wrapped transformation's ``update`` takes them.
    """

    params: PyTree
    inner: PyTree
    extra: dict[str, Any]


class Recorder(optax.GradientTransformationExtraArgs):
    """Wraps an optax transformation and records the input of each update.

    Example::

        recorder = Recorder(optax.adamw(3e-4))
        tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)

    Args:
        tx: the transformation whose updates are recorded and replayed.
        dtype: data type of the record. None keeps the gradient's own, which must be the params'
            then: ``tx`` receives each gradient as it is (though the compiler may fuse a step that
            also returns the gradient in another way). ``jnp.bfloat16`` rounds the gradient before
            ``tx`` sees it, as mixed-precision training does, and halves a delta of a float32
            gradient: ``tx`` then consumes exactly what is recorded, in that data type.
        extra_args: examples (arrays or ``jax.ShapeDtypeStruct``) of the extra arguments that
            ``tx.update`` consumes, by name, such as ``{"value": jnp.zeros(())}`` for
            ``optax.contrib.reduce_on_plateau``. They are recorded too. They are declared here so
            that the state has the same structure before and after the first update.

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

    def __new__(  # noqa: D102 - the class says it
        cls,
        tx: optax.GradientTransformation,
        *,
        dtype: Any = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> Recorder:
        declared = {
            name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
            for name, value in (extra_args or {}).items()
        }
        consumes_extra = isinstance(tx, optax.GradientTransformationExtraArgs)
        wrapped = optax.with_extra_args_support(tx)

        def init(params: PyTree) -> RecorderState:
            if isinstance(params, Probe):
                params.recorders.append(self)
                return RecorderState((), (), {}, InnerElsewhere())
            inner = wrapped.init(params)
            extra = {name: jnp.zeros(s.shape, s.dtype) for name, s in declared.items()}
            self._learn(params, inner, extra)
            record = jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=_record_dtype(p, dtype)), params
            )
            return RecorderState(jnp.zeros((), jnp.int32), record, extra, inner)

        def update(
            updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
        ) -> tuple[PyTree, RecorderState]:
            taken = extra_args.pop(TAKE_ARGUMENT, None)
            extra = {}
            for name, value in extra_args.items():
                if name in declared:
                    extra[name] = _declared(name, value, declared[name])
                elif consumes_extra:
                    self._undeclared(name, value)
            if missing := sorted(declared.keys() - extra.keys()):
                raise RecorderError(
                    f"expected update() to receive the declared extra arguments {missing}, found "
                    f"{sorted(extra_args)}. Pass them to every update, or do not declare them."
                )
            record = jax.tree.map(lambda u: u.astype(_record_dtype(u, dtype)), updates)
            _check_dtypes(record, state.adacheck_record)
            count = state.adacheck_count + jnp.ones((), jnp.int32)
            if taken is not None:
                taken.append((self, record))
                return record, RecorderState(count, record, extra, state.adacheck_inner)
            if isinstance(state.adacheck_inner, InnerElsewhere):
                raise RecorderError(
                    "separate_update expected an optimizer that ends in its Recorder, found a "
                    "transformation around it that keeps extra arguments from it (MultiSteps). "
                    "Put it around the gradients, or inside the Recorder."
                )
            # The barrier keeps XLA from fusing the cast away: tx must consume the recorded bits.
            record, extra = jax.lax.optimization_barrier((record, extra))
            outputs, inner = wrapped.update(
                jax.tree.map(lambda u: u, record),  # tx may change the containers in place
                state.adacheck_inner,
                params,
                **{**extra_args, **extra},
            )
            return outputs, RecorderState(count, record, extra, inner)

        self = super().__new__(cls, init, update)
        self.tx = wrapped
        self.dtype = dtype
        self.signatures = []
        self.unreplayable = None
        self.separate = False  # until separate_update has run
        return self

    def _learn(self, params: PyTree, inner: PyTree, extra: dict[str, Any]) -> None:
        """Notes the trees of this update, so that the handler can trace it again."""
        signature = UpdateSignature(*(jax.tree.map(abstract, t) for t in (params, inner, extra)))
        if signature not in self.signatures:
            self.signatures.append(signature)

    def _undeclared(self, name: str, value: Any) -> None:
        if isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
            raise RecorderError(
                f"update() received the extra argument {name!r} "
                f"({jnp.result_type(value)}{list(jnp.shape(value))}), which the Recorder does not "
                f"know. Expected every array that the wrapped transformation may consume to be "
                f"declared: Recorder(tx, extra_args={{{name!r}: jnp.zeros({jnp.shape(value)})}})."
            )
        self.unreplayable = (
            f"update() received the extra argument {name!r} of type {type(value).__name__}, "
            "which cannot be recorded"
        )


def _declared(name: str, value: Any, declared: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.shape(value) != declared.shape:
        raise RecorderError(
            f"expected the extra argument {name!r} in the declared shape {declared.shape}, found "
            f"{jnp.shape(value)}. Declare the shape that update() receives."
        )
    return jnp.asarray(value, declared.dtype)


def _check_dtypes(record: PyTree, before: PyTree) -> None:
    """Before the first update the gradient's data type is unknown, and the params' is assumed."""
    if jax.tree.structure(record) != jax.tree.structure(before):
        raise RecorderError(
            "expected gradients with the tree of the params that init() got, found "
            f"{jax.tree.structure(record)} for {jax.tree.structure(before)}. A transformation that "
            "takes gradients of a part of its params (optax.lookahead) cannot be recorded as it "
            "is: put the Recorder inside it."
        )
    for new, old in zip(jax.tree.leaves(record), jax.tree.leaves(before), strict=True):
        if new.dtype != old.dtype:
            raise RecorderError(
                f"expected gradients of the params' data type {old.dtype}, found {new.dtype}. Say "
                f"so, and nothing is rounded: Recorder(tx, dtype=jnp.{new.dtype})."
            )


def _record_dtype(value: Any, dtype: Any) -> Any:
    """The record keeps integer gradients as they are; only floats are rounded."""
    if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value.dtype
    return dtype


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and data type of an array or scalar."""
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return jax.ShapeDtypeStruct(jnp.shape(value), dtype)


@dataclass(frozen=True, slots=True)
class RecorderNode:
    """Where the recorder's state lies in a saved state; every value is a leaf path.

    Attributes:
        prefix: leaf path of the node itself (empty when the state is the node).
        count: the update counter.
        record: paths of the record, by path relative to the recorded tree.
        extra: paths of the recorded extra arguments, by name.
        inner: paths of the wrapped state, by path relative to it.
    """

    prefix: str
    count: str
    record: dict[str, str]
    extra: dict[str, str]
    inner: dict[str, str]


def find_node(paths: list[str]) -> RecorderNode | None:
    """Finds the recorder's state among the leaf paths of a saved state.

    Args:
        paths: every leaf path of the state.

    Returns:
        The node, or None when there is no recorder in the state.

    Raises:
        RecorderError: there are several.
    """
    prefixes = {}
    for path in paths:
        parts = path.split("/")
        if COUNT_FIELD in parts:
            prefixes["/".join(parts[: parts.index(COUNT_FIELD)])] = path
    if not prefixes:
        return None
    if len(prefixes) > 1:
        raise RecorderError(
            f"expected one Recorder in the state, found {len(prefixes)}: at "
            f"{', '.join(repr(p) for p in sorted(prefixes))}. Wrap all recorded transformations "
            "in one Recorder."
        )
    ((prefix, count),) = prefixes.items()
    below = f"{prefix}/" if prefix else ""

    def under(field: str) -> dict[str, str]:
        whole = f"{below}{field}"  # a bare array has no path below the field
        return {
            path.removeprefix(whole).removeprefix("/"): path
            for path in paths
            if path == whole or path.startswith(f"{whole}/")
        }

    return RecorderNode(prefix, count, under(RECORD_FIELD), under(EXTRA_FIELD), under(INNER_FIELD))
