"""Restore of a step that stock Orbax saved, without verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.wanted.targets import Target
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, MismatchError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.restore import check
from adacheck_jax.store.storage.location import AnyPath


def restore(
    directory: AnyPath, args: RestoreArgs, stock: StockCheckpoints
) -> tuple[PyTree, Mapping[str, tuple[str, str]]]:
    """Restore a step that stock Orbax saved; nothing can verify it.

    Returns:
        The state, and data types of the leaves that were converted (:class:`RestoreInfo`).

    Raises:
        IntegrityError: exact bits are wanted, or the step cannot be read.
        MismatchError: the abstract state does not fit.
    """
    if args.require_exact:
        raise IntegrityError(
            f"{directory}: expected exact bits, found a step that stock Orbax saved, without "
            "fingerprints to compare them with. Nothing was returned; do not ask for "
            "require_exact=True."
        )
    tree = stock.metadata(directory).tree
    wanted, _ = trees.flatten(args.abstract_state)
    leaves = [_leaf(x, each, wanted.get(x)) for x, each in trees.flatten(tree)[0].items()]
    target = Target(args, leaves, tree, directory)
    read = stock.read_by_orbax(directory, target.placements(), tree)
    for leaf in leaves:
        found: Any = read.get(leaf.path)
        if transfer.is_key(found):
            if leaf.key_type not in (None, str(found.dtype)):
                raise MismatchError(
                    f"{directory}: leaf {leaf.path}: expected keys of the type that was saved, "
                    f"{found.dtype}, found that {leaf.key_type} is asked for. Ask for the former."
                )
        else:
            check.check_types([found], [leaf], directory)
    converted = target.converted(read)
    return target.finish(read), converted


def _leaf(path: str, described: Any, wanted: Any) -> Leaf:
    """Description of a leaf by Orbax's, which tells nothing of the types of PRNG keys."""
    shape = tuple(getattr(described, "shape", None) or ())
    dtype = np.dtype(getattr(described, "dtype", str))  # a text has none
    is_key = transfer.is_key(wanted) and shape[:-1] == np.shape(wanted) and dtype == np.uint32
    cuts = cuts_of([Box.full(shape)], shape)
    key_type = str(wanted.dtype) if is_key else None
    return Leaf(path, shape, str(dtype), dtype.itemsize, key_type, cuts, (0,))
