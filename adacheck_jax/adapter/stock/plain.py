"""A plain checkpoint of stock Orbax, written and read on the host, for those who lack this library.

Both Orbax APIs read it: ``ocp.StandardCheckpointer().restore(path)``, and v1's ``load(path)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import StorageError, first_line
from adacheck_jax.format.manifest import Leaf


def write(path: Path, tree: PyTree) -> None:
    """Write a tree of host arrays, numbers and PRNG keys as a checkpoint of stock Orbax.

    Raises:
        StorageError: Orbax cannot write it.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()
    except OSError:
        raise
    except Exception as error:
        raise StorageError(
            f"{path.name}: stock Orbax cannot write it ({type(error).__name__}: "
            f"{first_line(error)}). Make room, or choose another format."
        ) from error


def read(path: Path) -> dict[str, np.ndarray]:
    """Elements of a checkpoint by leaf path, as stock Orbax restores them; keys as key data."""
    with ocp.StandardCheckpointer() as checkpointer:
        found, _ = trees.flatten(checkpointer.restore(path))
    return {path: np.asarray(transfer.raw(leaf)) for path, leaf in found.items()}


def tree_of(described: PyTree, wanted: Collection[str], value: Callable[[str], Any]) -> PyTree:
    """The tree of a base with values in the place of metadata, and of the wanted leaves alone.

    Positions in a list stay: None is in the place of what is left out before a wanted leaf.
    """
    above = {""} | {p[:i] for p in wanted for i, c in enumerate(p) if c == "/"} | {*wanted}

    def build(node: Any, path: str) -> Any:
        below = f"{path}/" if path else ""
        if isinstance(node, dict):
            return {k: build(x, f"{below}{k}") for k, x in node.items() if f"{below}{k}" in above}
        if isinstance(node, list | tuple):
            places = [i for i in range(len(node)) if f"{below}{i}" in above]
            kept = range(max(places, default=-1) + 1)
            return [build(node[i], f"{below}{i}") if i in places else None for i in kept]
        return value(path) if path in wanted else None

    return build(described, "")


def stored(elements: np.ndarray, leaf: Leaf, described: Any) -> Any:
    """A leaf as Orbax takes it: an array, a typed PRNG key, or a Python number."""
    if leaf.key_type is not None:
        return transfer.keys_of(jax.numpy.asarray(elements), leaf.key_type)
    if isinstance(described, ocp.metadata.ScalarMetadata):
        return elements.item()
    return elements
