"""The optax wrapper that keeps what each update consumed.

``Recorder(tx)`` behaves as ``tx`` and adds to its state the *record*: the gradient that ``tx``
received in the last update, and a counter of updates. The handler saves the record as a delta and
replays ``tx`` over it at restore.

Put it last in the chain, after clipping: it records what ``tx`` receives, and an element-wise
``tx`` replays bit-exactly on every mesh, since its roundings are pinned
(:mod:`adacheck_jax.update.pinning`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError
from adacheck_jax.update.fence import fence, zero_of
from adacheck_jax.update.pinning import PinnedFunction

_log = logging.getLogger(__name__)

TAKE_ARGUMENT = "adacheck_take"
"""Extra argument of ``update``: a list that takes what is recorded, in place of an update."""
COUNT_FIELD = "adacheck_count"
RECORD_FIELD = "adacheck_record"
EXTRA_FIELD = "adacheck_extra"
PASSED_FIELD = "adacheck_passed"
INNER_FIELD = "adacheck_inner"
SMALL_COUNT = 64
"""Elements of the largest leaf that is recorded as it was consumed."""
_OWNER = "adacheck_recorder"  # attribute of a recorder's functions


_FUNCTIONS = (
    "An update that evaluates the model cannot be replayed: leave the Recorder out, and save "
    "differences with AdaCheckHandler(delta='bits')"
)


class RecorderState(NamedTuple):
    """State of a :class:`Recorder`.

    The fields are found again by name in the saved state: containers such as ``nnx.State`` keep
    field names and lose types.

    Attributes:
        adacheck_count: int32 scalar, number of updates so far.
        adacheck_record: what the wrapped transformation received in the last update; shaped and
            sharded like the params.
        adacheck_extra: the recorded extra arguments of the last update, by name.
        adacheck_passed: what the last update consumed of those small leaves of the wrapped state
            that updates return unchanged (a learning rate), by :func:`passed_key`.
        adacheck_inner: the wrapped transformation's own state.
    """

    adacheck_count: Any
    adacheck_record: PyTree
    adacheck_extra: dict[str, Any]
    adacheck_passed: dict[str, Any]
    adacheck_inner: PyTree


def passed_key(path: str) -> str:
    """The key in ``adacheck_passed`` of a leaf path of the wrapped state.

    One key and no tree of keys: ``optax.tree_utils.tree_get(state, "learning_rate")`` finds what
    has that key, and must find the learning rate that the next update takes alone.
    """
    return path.replace("/", ".")


def consumed_leaf(path: str) -> str:
    """The leaf path of which a leaf of ``adacheck_passed`` is a copy, as the update consumed it."""
    above, field, key = path.partition(f"/{PASSED_FIELD}/")
    return f"{above}/{INNER_FIELD}/{key.replace('.', '/')}" if field else path


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
        params, inner, record, extra: as the wrapped transformation's ``update`` takes them. The
            record has the params' tree, or ``None`` in places where no gradient arrives.
        passed: leaf paths, in ``inner``, of what is recorded as it was consumed.
    """

    params: PyTree
    inner: PyTree
    record: PyTree
    extra: dict[str, Any]
    passed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeparateCall:
    """One update that ran as a program of its own, by references to its arrays.

    Attributes:
        taken: the params and the inner state that it was given, in the order of their leaves.
        returned: those that it returned.
    """

    taken: tuple[Any, ...]
    returned: tuple[Any, ...]


def reference(array: Any) -> Any:
    """A weak reference to an array: the same object for the same array, as long as either lives."""
    return weakref.ref(array)


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
        pin: whether every operation of ``tx`` is rounded as it is written. Without it the compiler
            may compute an update otherwise in the train step than in a replay, and otherwise in two
            train steps: it contracts products and sums, divides by multiplying, keeps digits that a
            short data type has not, depending on all that surrounds the update. A step where it
            does that is then not a replayed delta but a larger one, or a base.
            Pinned, an update that runs outside ``jax.jit`` is traced once for each structure, as
            ``jax.jit`` would: what ``tx`` reads beside its arguments is read then.

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
    pin: bool
    _pinned: PinnedFunction

    def __new__(  # noqa: D102 - the class says it
        cls,
        tx: optax.GradientTransformation,
        *,
        dtype: Any = None,
        extra_args: Mapping[str, Any] | None = None,
        pin: bool = True,
    ) -> Recorder:
        _check_arguments(tx, dtype)
        declared = {
            name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
            for name, value in (extra_args or {}).items()
        }
        consumes_extra = isinstance(tx, optax.GradientTransformationExtraArgs)
        wrapped = optax.with_extra_args_support(tx)

        def init(params: PyTree) -> RecorderState:
            if isinstance(params, Probe):
                params.recorders.append(self)
                return RecorderState((), (), {}, {}, InnerElsewhere())
            inner = wrapped.init(params)
            extra = {name: jnp.zeros(s.shape, s.dtype) for name, s in declared.items()}
            record = jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=_record_dtype(p, dtype)), _arrays(params)
            )
            passed = self._learn(params, inner, record, extra)
            return RecorderState(
                jnp.zeros((), jnp.int32),
                record,
                extra,
                picked(map(passed_key, passed), inner),
                inner,
            )

        def update(
            updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
        ) -> tuple[PyTree, RecorderState]:
            taken = extra_args.pop(TAKE_ARGUMENT, None)
            extra = {}
            for name, value in extra_args.items():
                if name in declared:
                    extra[name] = _declared(name, value, declared[name])
                elif consumes_extra:
                    self._undeclared(name, value, any(map(callable, extra_args.values())))
            if missing := sorted(declared.keys() - extra.keys()):
                raise RecorderError(
                    f"expected update() to receive the declared extra arguments {missing}, found "
                    f"{sorted(extra_args)}. Pass them to every update, or do not declare them."
                )
            zero = zero_of(state.adacheck_count)
            record = jax.tree.map(lambda u: u.astype(_record_dtype(u, dtype)), _arrays(updates))
            whole = self._whole(record, state.adacheck_record, params)
            _check_dtypes(record, state.adacheck_record)
            record, extra = self.sealed(zero, (record, extra))
            count = state.adacheck_count + jnp.ones((), jnp.int32)
            if taken is not None:
                taken.append((self, record))
                rest = (state.adacheck_passed, state.adacheck_inner)
                return record, RecorderState(count, record, extra, *rest)
            inner = state.adacheck_inner
            if isinstance(inner, InnerElsewhere):
                raise RecorderError(
                    "separate_update expected an optimizer that ends in its Recorder, found a "
                    "transformation around it that keeps extra arguments from it (MultiSteps). "
                    "Put it around the gradients, or inside the Recorder."
                )
            passed = picked(state.adacheck_passed, inner)
            outputs, inner = self.apply(zero, record, inner, params, {**extra_args, **extra})
            if whole is not None:
                self._learn(whole, inner, record, extra)  # as the next update will take them
            return outputs, RecorderState(count, record, extra, passed, inner)

        self = super().__new__(cls, init, update)
        vars(init)[_OWNER] = vars(update)[_OWNER] = self
        self.tx = wrapped
        self.dtype = dtype
        self.signatures = []
        self.unreplayable = None
        self.separate = False  # until separate_update has run
        self.last_call = None
        self.pin = pin
        self._pinned = PinnedFunction(self._updated)
        return self

    def __copy__(self) -> Recorder:
        return self  # a state that a copy made is a state of this very recorder

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of any NamedTuple: the recorder whose functions they are, else no Recorder."""
        made = optax.GradientTransformationExtraArgs(*iterable)
        owners = [getattr(function, _OWNER, None) for function in made]
        return owners[0] if owners[0] is owners[1] is not None else made

    def _replace(self, /, **changes: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        unknown = changes.keys() - set(self._fields)
        if unknown:
            raise ValueError(f"expected the fields {self._fields}, found {sorted(unknown)}")
        return self._make({**self._asdict(), **changes}.values())

    def sealed(self, zero: Any, consumed: PyTree) -> PyTree:
        """Makes certain that what is recorded is what the update consumes, to the bit.

        Args:
            zero: uint32 scalar, zero at run time.
            consumed: the record, or extra arguments.
        """
        if not self.pin:
            return jax.tree.map(jax.lax.optimization_barrier, consumed)
        return jax.tree.map(lambda x: fence(x, zero, canonical=True), consumed)

    def apply(
        self, zero: Any, record: PyTree, inner: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Runs the wrapped transformation: the same bits in the train step and in the replay.

        Args:
            zero: uint32 scalar, zero at run time.
            record: sealed; see :meth:`sealed`.
            inner: the wrapped transformation's state.
            params: as ``tx.update`` takes them, or None.
            extra: all extra arguments; those that are recorded sealed.

        Returns:
            The updates, and the next inner state.
        """
        record = self._widened(record, params)
        has_functions = not all(map(core.valid_jaxtype, jax.tree.leaves(extra)))
        if not self.pin or has_functions:  # such an update cannot be replayed
            return self._updated(record, inner, params, extra)
        return self._pinned(zero, record, inner, params, extra)

    def _updated(
        self, record: PyTree, inner: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree]:
        own = jax.tree.map(lambda u: u, record)  # tx may change the containers in place
        return self.tx.update(own, inner, params, **extra)

    def _widened(self, record: PyTree, params: PyTree) -> PyTree:
        """The record in the params' data type, where that has more digits."""
        if self.dtype is None:
            return record
        paths, treedef = trees.flatten(record)
        for like in (params, *(signature.params for signature in self.signatures)):
            known = trees.flatten(like)[0]
            shapes = {path: jnp.shape(known[path]) for path in paths if path in known}
            if shapes == {path: leaf.shape for path, leaf in paths.items()}:
                return treedef.unflatten(_wide(x, known[path]) for path, x in paths.items())
        return record

    def _learn(
        self, params: PyTree, inner: PyTree, record: PyTree, extra: dict[str, Any]
    ) -> tuple[str, ...]:
        """Notes the trees of an update, so that the handler can trace it again.

        Returns:
            Leaf paths of the small leaves of ``inner`` that updates return unchanged.
        """
        shapes = [jax.tree.map(abstract, tree) for tree in (params, inner, record, extra)]
        for known in self.signatures:
            if [known.params, known.inner, known.record, known.extra] == shapes:
                return known.passed
        passed = self._passed(self._widened(record, params), inner, params, extra)
        params, inner, record, extra = shapes
        self.signatures.append(UpdateSignature(params, inner, record, extra, passed))
        return passed

    def _passed(
        self, record: PyTree, inner: PyTree, params: PyTree, extra: dict[str, Any]
    ) -> tuple[str, ...]:
        try:
            origins = self._pinned.origins(record, inner, params, extra)[1]
        except Exception as error:  # it takes what only update() is given: see ``unreplayable``
            _log.debug("The update is not traced at init: %s", error)
            return ()
        first = len(jax.tree.leaves(record))
        pairs, treedef = jax.tree_util.tree_flatten_with_path(inner)
        found = jax.tree.leaves(origins, is_leaf=lambda x: x is None)
        if treedef.num_leaves != len(found):
            return ()
        paths = [
            trees.leaf_path(path)
            for i, (path, leaf) in enumerate(pairs)
            if found[i] == first + i and jnp.size(leaf) <= SMALL_COUNT
        ]
        return tuple(path for path in paths if path)

    def _whole(self, record: PyTree, before: PyTree, params: PyTree) -> PyTree | None:
        """The params of gradients that leave out some (``None``) as none did before; or None.

        Stock optimizers take such gradients, and some leave them out of their state from then on.

        Raises:
            RecorderError: the gradients are of other params than the state.
        """
        structure = jax.tree.structure(record)
        is_as_before = structure == jax.tree.structure(before)
        if is_as_before and any(jax.tree.structure(s.record) == structure for s in self.signatures):
            return None
        known = [each.params for each in self.signatures]
        for whole in known if params is None else [params, *known]:
            if _covers(whole, record) and _covers(whole, before):
                return whole
        if is_as_before:  # of a state that this recorder did not make
            return None
        raise RecorderError(
            "expected gradients with the tree of the params that init() got, found "
            f"{jax.tree.structure(record)} for {jax.tree.structure(before)}. A transformation that "
            "takes gradients of a part of its params cannot be recorded as it is: put the Recorder "
            "inside, as optax.lookahead(Recorder(fast), ...) with AdaCheckHandler(recorder, "
            "params_path='params/fast'), by the leaf path of the fast params; steps at which it "
            "synchronizes store the params."
        )

    def _undeclared(self, name: str, value: Any, has_function: bool) -> None:
        if has_function:
            self.unreplayable = (
                f"update() received the extra argument {name!r} and a function, as line searches "
                f"take it (optax.lbfgs). {_FUNCTIONS}"
            )
        elif isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
            raise RecorderError(
                f"update() received the extra argument {name!r} "
                f"({jnp.result_type(value)}{list(jnp.shape(value))}), which the Recorder does not "
                f"know. Expected every array that the wrapped transformation may consume to be "
                f"declared: Recorder(tx, extra_args={{{name!r}: jnp.zeros({jnp.shape(value)})}})."
            )
        else:
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


def _wide(leaf: Any, like: Any) -> Any:
    dtype = like.dtype if hasattr(like, "dtype") else jnp.result_type(like)
    both_float = all(jnp.issubdtype(each, jnp.floating) for each in (leaf.dtype, dtype))
    return leaf.astype(dtype) if both_float and dtype.itemsize > leaf.dtype.itemsize else leaf


def picked(keys: Iterable[str], inner: PyTree) -> dict[str, Any]:
    """Copies of some leaves by their :func:`passed_key`: nobody donates one buffer twice."""
    leaves = {passed_key(path): leaf for path, leaf in trees.flatten(inner)[0].items()}
    return {key: jnp.copy(leaves[key]) for key in keys}


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


def _is_none(value: Any) -> bool:
    return value is None


def _arrays(tree: PyTree) -> PyTree:
    """A tree with Python numbers made arrays; other leaves without a data type are refused."""

    def as_array(path: Any, leaf: Any) -> Any:
        if hasattr(leaf, "dtype"):
            return leaf
        if isinstance(leaf, bool | int | float | complex):
            return jnp.asarray(leaf)
        raise RecorderError(
            f"leaf {trees.leaf_path(path)}: expected an array, found {type(leaf).__name__}. Give "
            "the optimizer the arrays alone, as equinox.filter(model, equinox.is_inexact_array)."
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)


def _covers(whole: PyTree, part: PyTree) -> bool:
    """Whether a tree becomes another one if some of its subtrees become None."""
    try:
        left = jax.tree.map(lambda p, w: None if p is None else w, part, whole, is_leaf=_is_none)
    except ValueError:
        return False
    return jax.tree.structure(left) == jax.tree.structure(part)


def _check_dtypes(record: PyTree, before: PyTree) -> None:
    """Before the first update the gradient's data type is unknown, and the params' is assumed."""
    olds = dict(jax.tree_util.tree_leaves_with_path(before))
    for path, new in jax.tree_util.tree_leaves_with_path(record):
        old = olds.get(path, new)
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


# Without leaves, as what it wraps has none that a program could take; one object wherever it is
# put, so that whoever holds a copy holds the recorder that learns which trees it is used with.
jax.tree_util.register_pytree_node(
    Recorder, lambda recorder: ((), recorder), lambda recorder, _: recorder
)


@dataclass(frozen=True, slots=True)
class RecorderNode:
    """Where the recorder's state lies in a saved state; every value is a leaf path.

    Attributes:
        prefix: leaf path of the node itself (empty when the state is the node).
        count: the update counter.
        record: paths of the record, by path relative to the recorded tree.
        extra: paths of the recorded extra arguments, by name.
        passed: paths of what was consumed of the wrapped state, by path relative to it.
        inner: paths of the wrapped state, by path relative to it.
    """

    prefix: str
    count: str
    record: dict[str, str]
    extra: dict[str, str]
    passed: dict[str, str]
    inner: dict[str, str]


def find_nodes(paths: Sequence[str]) -> list[RecorderNode]:
    """Finds the state of every recorder among the leaf paths of a saved state.

    A recorder inside what another one wraps is part of the outer one's update, and no node.

    Args:
        paths: every leaf path of the state.

    Returns:
        The nodes, ordered by prefix; empty when there is no recorder in the state.
    """
    counts = {}
    for path in paths:
        parts = path.split("/")
        if COUNT_FIELD in parts:
            above = parts[: parts.index(COUNT_FIELD)]
            if INNER_FIELD not in above:
                counts["/".join(above)] = path
    return [_node_at(prefix, counts[prefix], paths) for prefix in sorted(counts)]


def _node_at(prefix: str, count: str, paths: Sequence[str]) -> RecorderNode:
    below = f"{prefix}/" if prefix else ""

    def under(field: str) -> dict[str, str]:
        whole = f"{below}{field}"  # a bare array has no path below the field
        return {
            path.removeprefix(whole).removeprefix("/"): path
            for path in paths
            if path == whole or path.startswith(f"{whole}/")
        }

    fields = (RECORD_FIELD, EXTRA_FIELD, PASSED_FIELD, INNER_FIELD)
    return RecorderNode(prefix, count, *map(under, fields))
