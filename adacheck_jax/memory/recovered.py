"""A state that another process has left in the shadow's file, taken and compared.

A process alone goes on in the file that it finds: as a run of one (``together``) it would have
the state in host memory twice, until its first base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import Found, Recorded
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.state.exported_update import ExportedUpdate, ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots, Structure
from adacheck_jax.update import program as update_program


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The newest step in storage.

    Attributes:
        step: its number.
        sums: fingerprint of each leaf; None if they are not known.
    """

    step: int
    sums: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A state that was taken from memory, all its fingerprints compared.

    Attributes:
        step: number of the step.
        state: the state that the caller gets.
        leaves: its leaves as they are trained: with arrays in place of Python numbers.
        has_records: True if it was in several processes' files for records.
        replayed_count: number of updates that were replayed.
    """

    step: int
    state: PyTree
    leaves: Sequence[Any]
    has_records: bool = False
    replayed_count: int = 0


class RecordReplay(Protocol):
    """Brings leaves to a later step, as a restore from storage would."""

    def __call__(
        self,
        leaves: Sequence[Any],
        specs: Sequence[Leaf],
        update: Update,
        program: bytes,
        records: Sequence[Recorded],
        read: Callable[[int, int, Box], np.ndarray],
        ready: Callable[[], None],
    ) -> Sequence[Any]:
        """Replays records on the devices that the leaves lie on; collective.

        Args:
            leaves: the leaves before them, which are donated.
            specs: description of each leaf.
            update: the update.
            program: its serialized program of this platform, which this process exported.
            records: what the steps bring, in their order.
            read: gives the elements of a box, by number of the record and index of the leaf.
            ready: called before each update, which is collective; raises where a process fails.

        Returns:
            The leaves after the records, as the given ones lie.
        """
        ...


def state_from(
    shadow: ShadowThread,
    snapshots: Snapshots,
    updates: ExportedUpdates,
    abstract_state: PyTree,
    stored: StoredStep | None,
    replay: RecordReplay,
) -> Recovered:
    """Takes the state in the shadow's file, which goes on from it, and compares all of it.

    Raises:
        ShadowFileError: there is none that can be taken; the message says why.
        RecorderError: the recorder cannot be tied to the state.
    """
    structure, found = _found_like(shadow, snapshots, updates, abstract_state)
    if stored is not None and stored.step > found.step:
        raise ShadowFileError(f"it is of step {found.step}, and storage has step {stored.step}")
    # Views of memory that goes on: no array may have them.
    values = {i: np.array(x) for i, each in found.blocks.items() for x in each.values()}

    def like(i: int, leaf: Any) -> Any:
        return leaf_like(leaf, values[i]) if i in values else example_of(leaf)

    def read(number: int, i: int, box: Box) -> np.ndarray:
        (value,) = found.records[number].blocks[i].values()
        return value[box.slices]

    def advance(leaves: Sequence[Any]) -> Sequence[Any]:
        return replayed(
            *(structure, updates.of(structure), replay, leaves, found.records, read),
            lambda: None,
        )

    made = compared(structure, abstract_state, like, found.step, found.sums, stored, advance)
    return replace(made, replayed_count=count_of(found.records))


def count_of(records: Sequence[Recorded]) -> int:
    """Number of the records that have an update."""
    return sum(bool(each.updates) for each in records)


def replayed(
    structure: Structure,
    update: ExportedUpdate,
    replay: RecordReplay,
    leaves: Sequence[Any],
    records: Sequence[Recorded],
    read: Callable[[int, int, Box], np.ndarray],
    ready: Callable[[], None],
) -> Sequence[Any]:
    """Leaves after the records that follow them.

    Raises:
        ShadowFileError: they cannot be replayed here.
    """
    if not records:
        return leaves
    described = update.described(structure, {update_program.platform(): update.program})
    try:
        return replay(leaves, structure.leaves, described, update.program, records, read, ready)
    except AdaCheckError as error:
        raise ShadowFileError(f"its records cannot be replayed here: {error}") from error


def compared(
    structure: Structure,
    abstract_state: PyTree,
    like: Callable[[int, Any], Any],
    step: int,
    sums: Sequence[int],
    stored: StoredStep | None,
    advance: Callable[[Sequence[Any]], Sequence[Any]],
) -> Recovered:
    """A state of leaves that are made like those of an abstract one, and brought to a step.

    Collective.

    Raises:
        ShadowFileError: a leaf has another fingerprint, or storage another state of the step.
    """
    abstract, treedef = jax.tree.flatten(abstract_state)
    made = [*advance([like(i, leaf) for i, leaf in enumerate(abstract)])]
    for i, leaf in enumerate(abstract):
        made[i] = transfer.like(made[i], leaf)
    state = jax.tree.unflatten(treedef, made)
    leaves = [
        np.asarray(leaf, structure.leaves[i].dtype) if _is_number(leaf) else leaf
        for i, leaf in enumerate(jax.tree.leaves(state))
    ]
    known = [i for i, leaf in enumerate(structure.leaves) if leaf.nbytes]
    found = fingerprint.of_leaves({i: transfer.raw(leaves[i]) for i in known})
    if wrong := sorted(i for i, each in found.items() if each != sums[i]):
        raise ShadowFileError(
            f"step {step} does not have the bits that were trained, in "
            f"{structure.leaves[wrong[0]].path} and {len(wrong) - 1} more"
        )
    known_sums = stored.sums if stored is not None and stored.step == step else None
    if known_sums is not None and [*known_sums] != [*sums]:
        raise ShadowFileError(f"storage has another state as step {step}")
    return Recovered(step, state, leaves)


def _found_like(
    shadow: ShadowThread,
    snapshots: Snapshots,
    updates: ExportedUpdates,
    abstract_state: PyTree,
) -> tuple[Structure, Found]:
    """State in the shadow's file that is like an abstract one, and its structure."""
    refused = ShadowFileError()
    for example in examples_of(abstract_state):
        structure = snapshots.take(example).structure
        try:
            return structure, shadow.recover(structure, updates.of(structure))
        except ShadowFileError as error:
            refused = error
    raise refused


def examples_of(abstract_state: PyTree) -> Iterator[PyTree]:
    """States like an abstract one, to be taken apart: with zeros for what is abstract.

    A Python number, such as the step of a train state that was just created, has become an array
    once a compiled step returned it; so that comes first, and then the number.
    """
    made = jax.tree.map(example_of, abstract_state)
    if any(map(_is_number, jax.tree.leaves(made))):
        yield jax.tree.map(_as_array, made)
    yield made


def example_of(leaf: Any) -> Any:
    """A leaf of zeros like an abstract one; any other as it is."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf) if transfer.is_key(leaf) else leaf
    if leaf.sharding is None or leaf.sharding.is_fully_addressable:
        return leaf_like(leaf, np.zeros(data.shape, data.dtype))
    wanted = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
    return transfer.keyed(transfer.place(wanted, lambda box: np.zeros(box.shape, data.dtype)), leaf)


def _as_array(leaf: Any) -> Any:
    return jnp.zeros((), jnp.result_type(type(leaf))) if _is_number(leaf) else leaf


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def leaf_like(leaf: Any, value: np.ndarray) -> Any:
    """A leaf of some elements, as another one is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return value.astype(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)(value)
    return jax.device_put(transfer.keyed(value, leaf), leaf.sharding)
