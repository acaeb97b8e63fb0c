"""The update program: ``tx.update``, then ``optax.apply_updates``, as one function of flat leaves.

Its arguments, the shardings of its results, and its compilation are here; its bytes are in
:mod:`~adacheck_jax.update.exported_program`.

:class:`Kept` has one lock, under which nothing is called.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adacheck_jax.device import jax_settings, transfer, trees
from adacheck_jax.device.sharding import computable, devices_of
from adacheck_jax.update.binding import Binding
from adacheck_jax.update.derived import COUNT, DerivedTree
from adacheck_jax.update.recorder import Recorder
from adacheck_jax.update.recording.signatures import UpdateSignature

_Result = TypeVar("_Result")
_TREES = ("params", "inner", "record", "extra")

Leaves = Sequence[Any]
UpdateFunction = Callable[[Leaves, Leaves, Leaves, Leaves, Any], tuple[list[Any], list[Any]]]
"""``(params, inner, record, extra, switches) -> (params, inner)``, over flat leaves.

``inner`` lacks the small leaves that the update passes through: their consumed values follow the
declared extra arguments, and the words of reduction results, in ``extra``. See :func:`switches`
for the last argument.
"""


def update_function(
    recorder: Recorder, signature: UpdateSignature, derived: Sequence[DerivedTree] = ()
) -> UpdateFunction:
    """The update over flat leaves, with the bits of the train step.

    Returns:
        The function. Typed PRNG keys are passed and returned as their data; ``switches`` is the
        number 0 that fences take. If a derived tree depends on the number of updates, that
        is the last extra argument.
    """
    treedefs = {name: jax.tree.structure(getattr(signature, name)) for name in _TREES}
    specs, _ = trees.flatten(signature.inner)
    is_passed = [path in signature.passed for path in specs]
    own_count = len(is_passed) - sum(is_passed)
    has_count = any(each.uses_count for each in derived)

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves, zero: Any
    ) -> tuple[list[Any], list[Any]]:
        count = extra[-1] if has_count else jnp.zeros(COUNT.shape, COUNT.dtype)
        extra = extra[:-1] if has_count else extra
        inner, old = inner[:own_count], iter(inner[own_count:])
        declared, extra = (
            extra[: treedefs["extra"].num_leaves],
            extra[treedefs["extra"].num_leaves :],
        )
        words, passed = (extra[0], extra[1:]) if signature.reduced else (None, extra)
        whole = joined(is_passed, inner, passed)
        params_tree = jax.tree.unflatten(treedefs["params"], params)
        record_tree, extra_tree = recorder.sealed(
            zero,
            (
                jax.tree.unflatten(treedefs["record"], record),
                jax.tree.unflatten(treedefs["extra"], declared),
            ),
        )
        updates, inner_tree = recorder.replay(
            zero,
            record_tree,
            jax.tree.unflatten(treedefs["inner"], map(transfer.keyed, whole, specs.values())),
            params_tree,
            extra_tree,
            (words, signature.reduced),
        )
        applied = apply_updates(params_tree, updates)
        results = zip(jax.tree.leaves(inner_tree), is_passed, strict=True)
        computed = [transfer.raw(leaf) for leaf, each in results if not each]
        for each in derived:
            value = each.treedef.unflatten(itertools.islice(old, len(each.types)))
            computed += jax.tree.leaves(recorder.derived[each.name](zero, applied, value, count))
        return jax.tree.leaves(applied), computed

    return run


def joined(is_passed: Sequence[bool], computed: Leaves, passed: Leaves) -> list[Any]:
    """All leaves of an optimizer state, of those that the update computes and passes through."""
    left, given = iter(computed), iter(passed)
    return [next(given if each else left) for each in is_passed]


def joint_function(bindings: Sequence[Binding]) -> UpdateFunction:
    """The updates of all recorders as one function over flat leaves, joined in their order.

    With several recorders, a switch of each says whether its update is made; see :func:`switches`.
    """
    functions = [update_function(each.recorder, each.signature, each.derived) for each in bindings]
    if len(functions) == 1:
        return functions[0]
    sizes = [[len(x) for x in (b.params, b.inner, b.record, b.extra)] for b in bindings]

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves, switches: Any
    ) -> tuple[list[Any], list[Any]]:
        lists: list[Leaves] = [params, inner, record, extra]
        results: tuple[list[Any], list[Any]] = ([], [])
        for k, (function, counts) in enumerate(zip(functions, sizes, strict=True)):
            own = [each[:n] for each, n in zip(lists, counts, strict=True)]
            lists = [each[n:] for each, n in zip(lists, counts, strict=True)]
            after = function(own[0], own[1], own[2], own[3], switches[0])
            is_on = switches[1 + k] != 0
            for old, new, result in zip(own, after, results, strict=False):
                result += [jnp.where(is_on, b, a) for a, b in zip(old, new, strict=True)]
        return results

    return run


def switches(
    recorder_count: int, updates: Sequence[int] = (), shardings: Iterable[Any] = ()
) -> jax.Array:
    """The last argument of an update program, made without an implicit transfer.

    Args:
        recorder_count: number of recorders whose updates the program makes.
        updates: positions of the recorders whose update is made this time.
        shardings: shardings of the program's other arguments, None for an argument without one;
            the result lies on all of their devices.

    Returns:
        For one recorder the number 0 that fences take. For several a vector of this 0 followed by
        a 1 for each recorder that makes an update and a 0 for each that does not.
    """
    value = switch_values(recorder_count, updates)
    known = [each for each in shardings if each is not None]
    largest = max(known, key=lambda each: len(each.device_set), default=None)
    if isinstance(largest, jax.sharding.NamedSharding):
        everywhere = jax.sharding.NamedSharding(largest.mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_callback(value.shape, everywhere, lambda at: value[at])
    return jax.device_put(value)


def switch_values(recorder_count: int, updates: Sequence[int] = ()) -> np.ndarray:
    """The values that :func:`switches` puts on devices."""
    if recorder_count > 1:
        return np.array([0, *(k in updates for k in range(recorder_count))], np.uint32)
    return np.zeros((), np.uint32)


class Kept(Generic[_Result]):
    """Programs that were used last, at most ``count``; any thread may ask.

    A key says everything that its value depends on.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._values: dict[Hashable, _Result] = {}

    def get(self, key: Hashable) -> _Result | None:
        """The value of a key, if it is kept."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value  # now the youngest
            return value

    def put(self, key: Hashable, value: _Result) -> None:
        """Keep a value, and let the oldest go if there are too many."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > self._count:
                self._values.pop(next(iter(self._values)))


def environment() -> dict[str, str]:
    """Settings of this process that the bits of an update may depend on."""
    return {
        "XLA_FLAGS": " ".join(
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if "host_platform_device_count" not in flag
        ),
        "jax_enable_x64": str(jax_settings.x64_enabled()),
        "jax": jax.__version__,
    }


def apply_updates(params: trees.PyTree, updates: trees.PyTree) -> trees.PyTree:
    """``optax.apply_updates``, except that None for an update leaves a param as it is (equinox).

    And an update that is NaN is the new param: which of two NaNs a sum gives is its compiler's
    choice, and training has given the update's if both were NaN by training alone.
    """

    def applied(param: Any, update: Any) -> Any:
        if update is None:
            return param
        result: Any = optax.apply_updates(param, update)
        types = (jnp.result_type(update), result.dtype)
        if not all(jnp.issubdtype(each, jnp.floating) for each in types):
            return result
        own = jnp.broadcast_to(update, result.shape)
        return jax.lax.select(jax.lax.ne(own, own), own.astype(result.dtype), result)

    return jax.tree.map(applied, params, updates, is_leaf=lambda x: x is None)


def platform() -> str:
    """The platform of this process's default devices, as ``jax.export`` names it."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def jit_update_like(
    function: UpdateFunction, params: Iterable[jax.Array], inner: Iterable[jax.Array]
) -> UpdateFunction:
    """:func:`jit_update` for the shardings of these arrays, as far as one program can keep them."""
    params = list(params)
    kept = common_shardings([*params, *inner])
    return jit_update(function, kept[: len(params)], kept[len(params) :])


def jit_update(function: UpdateFunction, params: Sequence[Any], inner: Sequence[Any]) -> Any:
    """Wrap an update in ``jax.jit`` so that it replaces the state in place.

    Memory stays at one state plus one record: ``params`` and ``inner`` are donated, and the next
    ones take their place.

    Returns:
        The jitted function, whose results have these shardings.
    """
    return jax.jit(function, out_shardings=([*params], [*inner]), donate_argnums=(0, 1))


def common_shardings(arrays: Sequence[Any]) -> list[jax.sharding.Sharding | None]:
    """The shardings that the results of one program can keep if they replace some arrays.

    A program runs on one set of devices in one order, and the largest set among the arrays' is
    taken. An array on another one (a counter that was made on one device) gives None.
    """
    orders = [devices_of(array) for array in arrays]
    largest = max(orders, key=len, default=())
    return [
        array.sharding if order and order == largest else None
        for array, order in zip(arrays, orders, strict=True)
    ]


def replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """A sharding that gives every one of the same devices the whole array, to compute with."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    if len(sharding.device_set) == 1:
        return computable(sharding)
    devices = np.array(sorted(sharding.device_set, key=lambda d: d.id))
    mesh = jax.sharding.Mesh(devices, ("all",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
