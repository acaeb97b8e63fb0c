"""Leaves in another layout: a plan's operations, computed on shards, and proved by their inverse.

The operations run as compiled programs on the leaves' own devices, and leaves that are cut over
several stay cut. After them the inverse gives the leaves back as they were, and
these have to be, bit by bit, those that were verified.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.errors import MismatchError
from adacheck_jax.layout.operations import Kind, Operation
from adacheck_jax.layout.plan import Component, LayoutStep, Plan

Placement = Any
"""A sharding, ``np.ndarray`` for a host array, or None where anything will do."""


def placements_before(plan: Plan, wanted: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placements of a state's leaves that suit those wanted of the new state's.

    Returns:
        Placement of each leaf of the state that the plan takes, by leaf path. A leaf is cut over
        the devices over which the new one is cut: along the axis that becomes the other's, or else
        along its longest axis that can be cut.
    """
    known = {value: wanted.get(path) for path, value in plan.outputs.items()}
    for step in reversed(plan.steps):
        result = next((known[v] for v in step.given if known.get(v) is not None), None)
        for value in step.taken:
            if known.get(value) is None:
                known[value] = _before(step.operation, plan.kinds[value].shape, result)
    return {path: known.get(value) for path, value in plan.inputs.items()}


def _before(operation: Operation, shape: Sequence[int], result: Placement) -> Placement:
    if not isinstance(result, NamedSharding):
        is_simple = result is np.ndarray or isinstance(result, SingleDeviceSharding)
        return result if is_simple else None
    mesh, given = result.mesh, [*result.spec]
    axes = operation.source_axes(len(shape))
    entries = [None if k is None or k >= len(given) else given[k] for k in axes]
    cut: list[tuple[str, ...]] = [_names(entry) for entry in entries]
    used = [name for names in cut for name in names]
    free = [name for entry in given for name in _names(entry) if name not in used]
    for k in range(len(cut)):
        while shape[k] % math.prod(mesh.shape[name] for name in cut[k]):
            free.append(cut[k][-1])
            cut[k] = cut[k][:-1]
    for name in free:
        for k in sorted(range(len(shape)), key=lambda k: -shape[k]):
            if shape[k] % math.prod(mesh.shape[each] for each in (*cut[k], name)) == 0:
                cut[k] = (*cut[k], name)
                break
    spec = PartitionSpec(*(names or None for names in cut))
    return NamedSharding(mesh, spec, memory_kind=result.memory_kind)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def transformed(
    plan: Plan, leaves: Mapping[str, Any], wanted: Mapping[str, Placement]
) -> dict[str, Any]:
    """Compute the leaves of the new state.

    Returns:
        Leaves of the new state, by leaf path.

    Raises:
        MismatchError: an operation loses bits, and its rule does not say that it may.
    """
    values = {value: leaves[path] for path, value in plan.inputs.items()}
    places = {value: wanted.get(path) for path, value in plan.outputs.items()}
    paths = {value: path for path, value in plan.inputs.items()}
    for component in plan.components():
        taken = {value: _array(values.pop(value), plan.kinds[value]) for value in component.taken}
        given = _run(component.steps, taken, places)
        _prove(plan, component, taken, given, paths)
        values |= {value: given[value] for value in component.given}
    return {path: values[value] for path, value in plan.outputs.items()}


def _array(leaf: Any, kind: Kind) -> Any:
    """A leaf as an array: a Python number is a 0-d one of the host."""
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf, kind.dtype)


def _run(
    steps: Sequence[LayoutStep], taken: Mapping[int, Any], places: Mapping[int, Placement]
) -> dict[int, Any]:
    """All values that some steps give, by their numbers."""
    values = dict(taken)
    for step in steps:
        own = [places.get(value) for value in step.given]
        results = _computed(step.operation, [values[v] for v in step.taken], own)
        values |= zip(step.given, results, strict=True)
    return values


def _prove(
    plan: Plan,
    component: Component,
    taken: Mapping[int, Any],
    given: Mapping[int, Any],
    paths: Mapping[int, str],
) -> None:
    """Compare what the inverse gives with the leaves themselves, by fingerprint."""
    steps = plan.inverted(component)
    if steps is None:
        return
    places = {v: getattr(leaf, "sharding", np.ndarray) for v, leaf in taken.items()}
    back = _run(steps, {v: given[v] for step in component.steps for v in step.given}, places)
    before = fingerprint.of_leaves(taken)
    after = fingerprint.of_leaves({value: back[value] for value in taken})
    if wrong := [paths[value] for value in taken if before[value] != after[value]]:
        names = ", ".join(type(step.operation).__name__.lower() for step in component.steps)
        raise MismatchError(
            f"transform ({names}): expected a transformation that loses nothing, but its inverse "
            f"does not give back the bits of {', '.join(wrong[:10])}. Elements other than zeros "
            "were stripped, or a cast has rounded. Nothing was returned; say lossy=True in the "
            "rule if that is meant."
        )


def _computed(
    operation: Operation, arrays: Sequence[Any], wanted: Sequence[Placement]
) -> list[Any]:
    """The results of one operation, on the wanted places."""
    if not any(isinstance(array, jax.Array) for array in arrays):
        hosted = [np.asarray(array) for array in arrays]
        results = [np.asarray(each, order="C") for each in operation.apply(np, hosted)]
        pairs = zip(results, wanted, strict=True)
        return [x if w is None or w is np.ndarray else jax.device_put(x, w) for x, w in pairs]
    shapes = operation.kinds([Kind(x.shape, str(x.dtype)) for x in arrays])
    outs = tuple(_auto(w if w is not np.ndarray else None) for w in wanted)
    placed = [transfer.moved(x, s) if (s := _auto(x.sharding)) != x.sharding else x for x in arrays]
    results = _compiled(operation, outs)(placed)
    finished = []
    for x, kind, w in zip(results, shapes, wanted, strict=True):
        assert x.shape == kind.shape, (operation, x.shape, kind)
        if str(x.dtype) != kind.dtype:
            raise MismatchError(
                f"transform ({type(operation).__name__.lower()}): expected elements of "
                f"{kind.dtype}, found that jax makes {x.dtype} of them. Set jax_enable_x64."
            )
        if w is np.ndarray:
            finished.append(np.asarray(x))
        else:
            finished.append(x if w is None or x.sharding == w else transfer.moved(x, w))
    return finished


@functools.lru_cache(maxsize=256)
def _compiled(operation: Operation, shardings: tuple[Any, ...]) -> Any:
    return jax.jit(lambda arrays: operation.apply(jnp, arrays), out_shardings=[*shardings])


def _auto(sharding: Any) -> Any:
    """The sharding on a mesh whose axes are cut by the compiler: others refuse some operations."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or all(kind is AxisType.Auto for kind in mesh.axis_types):
        return sharding
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return NamedSharding(auto, sharding.spec, memory_kind=sharding.memory_kind)
