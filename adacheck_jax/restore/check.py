"""Comparison of restored leaves with what was saved of them: types, shapes and fingerprints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.errors import IntegrityError, MismatchError, listed
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.restore.working_set import is_abstract
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update import program as update_program

ROUNDING = 1e-6
"""Change that another order of sums makes in one update, relative to a leaf's largest value."""


def check_types(leaves: Sequence[Any], specs: Sequence[Leaf], where: AnyPath) -> None:
    """Compare shapes and data types of the leaves of a base with those of its manifest.

    Orbax takes shapes, data types and key types from files that no checksum protects.

    Raises:
        MismatchError: leaves have 64-bit elements, and jax makes none in this thread.
        IntegrityError: names every leaf of another shape or data type.
    """
    wrong, narrowed = list[str](), list[str]()
    for spec, leaf in zip(specs, leaves, strict=True):
        if hasattr(leaf, "dtype"):
            found = f"{leaf.dtype}{list(leaf.shape)}"
            if found != spec.description:
                made = jax.dtypes.canonicalize_dtype(spec.dtype)  # of 32 bits in place of 64
                messages = narrowed if spec.dtype != str(made) == str(leaf.dtype) else wrong
                messages.append(f"{spec.path}: expected {spec.description}, found {found}")
    if narrowed:
        raise MismatchError(
            f"{where}: jax makes no 64-bit elements here, which {len(narrowed)} of {len(leaves)} "
            f"leaves were saved with: {listed(narrowed)}. Restore the step inside `with "
            "jax.enable_x64(True)`, or set jax_enable_x64."
        )
    if wrong:
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(leaves)} leaves of the base do not have the shape and "
            f"data type that were saved: {listed(wrong)}. Its metadata is damaged; restore another "
            "step."
        )


def differing(leaves: Sequence[Any], fingerprints: Sequence[int]) -> set[int]:
    """Indices of the leaves whose fingerprints are not the given ones; absent ones are left out."""
    found = fingerprint.of_leaves({i: transfer.raw(leaf) for i, leaf in _present(leaves).items()})
    return {i for i, value in found.items() if value != fingerprints[i]}


def check_bits(
    leaves: Sequence[Any],
    lineage: Lineage,
    where: AnyPath,
    *,
    rounded: Collection[int] = (),
) -> list[int]:
    """Compare every leaf with the fingerprint taken when the step was saved.

    Returns:
        Indices of those leaves of ``rounded`` whose bits differ.

    Raises:
        IntegrityError: names every other leaf whose bits differ.
    """
    end, specs = lineage.end, lineage.base.leaves
    different = sorted(differing(leaves, end.fingerprints))
    wrong = [specs[i].path for i in different if i not in rounded]
    if wrong:
        count = len(_present(leaves))
        raise IntegrityError(
            f"{where}: {len(wrong)} of {count} leaves of step {end.step} do not have "
            f"the bits that were saved: {listed(wrong)}. The stored data is damaged"
            f"{_other_cause(lineage)}. Nothing was returned; restore another step, or a base step."
        )
    return different


def _present(leaves: Sequence[Any]) -> dict[int, Any]:
    """The leaves that were read, by their index."""
    return {i: x for i, x in enumerate(leaves) if x is not None and not is_abstract(x)}


def _other_cause(lineage: Lineage) -> str:
    """The cause that is no damage, with the settings of arithmetic that differ from the save's."""
    here, saved = update_program.environment(), lineage.base.environment
    if not lineage.replayed_count:
        return ""
    other = [
        f"{name} was {value or 'not set'} when the base was saved, and is {here[name] or 'not set'}"
        for name, value in saved.items()
        if name in here and here[name] != value
    ]
    return (
        ", or replay of the update is not exact here, as on another processor, or under other XLA "
        f"flags{'. Not the same here: ' if other else ''}{'; '.join(other)}"
    )


def bound_to_mesh(lineage: Lineage) -> frozenset[int]:
    """Indices of the leaves whose bits depend on the devices that their updates are replayed on.

    These are all leaves that an update with sums in it computes. Leaves without sums have exact
    arithmetic, but belong to a program that is compiled in another way on other devices.
    """
    update = lineage.base.update
    if update is None or not update.reducing or not lineage.replayed_count:
        return frozenset()
    return update.explained.difference(update.passed)


def tolerance(lineage: Lineage, rounded: Sequence[int]) -> float:
    """Approximate bound of the error of leaves that were replayed on other devices.

    Returns:
        A bound relative to each leaf's largest value, for updates that are continuous: the effect
        of the order of sums in float32 for each update, and one rounding to the leaf's own type.
    """
    dtypes = [jnp.dtype(lineage.base.leaves[i].dtype) for i in rounded]
    roundings = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    return lineage.replayed_count * ROUNDING + max(roundings, default=0.0)
