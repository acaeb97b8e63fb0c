"""Failures that a layout survives without storage, told before there is a machine.

The owners of boxes and of their copies, and the memory that these take, are computed by the very
functions by which a run chooses them (:mod:`~adacheck_jax.memory.holdings`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.memory import holdings
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.holdings import HeldBox
from adacheck_jax.memory.shadow_state import fold_of, size_of
from adacheck_jax.state.exported_update import ExportedUpdate, ExportedUpdates
from adacheck_jax.state.planned import structure_of
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.binding import Binding
from adacheck_jax.update.elements.host_fold import UnfitError


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Leaves of which devices of other failure domains hold the same part.

    Attributes:
        leaf_count: number of the leaves.
        leaf_bytes: bytes of the leaves, every element once.
        copied_bytes: those of them that memory of two failure domains or more has, with copies.
    """

    leaf_count: int
    leaf_bytes: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Survival:
    """Failures after which memory serves, of a run with ``Shadow(directory=...)``.

    Failure domains are lost with all that is in their memory; a process is lost without it.

    Attributes:
        domain_count: number of failure domains.
        copies: number of copies of each box that is wanted.
        problem: reason why memory keeps no state; empty if it does, else all below is zero.
        full: leaves that other failure domains hold all of.
        partial: leaves that they hold a part of.
        none: leaves that they hold nothing of.
        process_bytes: host memory that one process's file takes at most: its part of the state,
            copies, and two records.
        copies_bytes: those of them that the copies take.
        wire_bytes: bytes that all processes together send at a step for copies of what devices of
            too few domains hold.
        survived_domains: number of domains of which any one may be lost.
        survived_pairs: number of pairs of domains of which any one may be lost.
    """

    domain_count: int
    copies: int
    problem: str = ""
    full: Redundancy = Redundancy(0, 0, 0)
    partial: Redundancy = Redundancy(0, 0, 0)
    none: Redundancy = Redundancy(0, 0, 0)
    process_bytes: int = 0
    copies_bytes: int = 0
    wire_bytes: int = 0
    survived_domains: int = 0
    survived_pairs: int = 0


def survival_of(
    named: Mapping[str, Any],
    bindings: tuple[Binding, ...],
    process_count: int,
    devices_per_process: int,
    domain_count: int,
    copies: int,
) -> Survival:
    """The failures that a state survives.

    Args:
        named: leaves by leaf path, abstract ones with shardings.
        bindings: update of each recorder.
        process_count: number of processes.
        devices_per_process: consecutive devices of an abstract mesh that belong to one.
        domain_count: number of failure domains, over which the processes are spread in turn.
        copies: number of copies of each box.
    """
    structure = structure_of(named, bindings, process_count, devices_per_process)
    update = ExportedUpdates("auto", exports=False).of(structure)
    domains = [f"{n * domain_count // process_count}" for n in range(process_count)]
    if update.pieces is None or not update.pinned:
        problem = update.problem or next(iter(update.warnings), "the update is not element-wise")
        return Survival(domain_count, copies, problem)
    try:
        parts = holdings.parts_of(structure, update.pieces, domains, copies)
        numbers = holdings.number_holders(structure, update.pieces, process_count)
        sizes = _file_bytes(structure, update, parts, numbers, process_count)
    except UnfitError as error:
        return Survival(domain_count, copies, str(error))
    for i, holders in numbers.items():
        parts += [HeldBox((i,), box, tuple(holders)) for box in structure.leaves[i].boxes]
    kinds = _redundancies(structure, parts)
    lost = [frozenset(domains[each] for each in part.owners) for part in parts]
    alone = {each for each in lost if len(each) == 1}
    pairs = {each for each in lost if len(each) == 2 and not any(one <= each for one in alone)}
    survived = domain_count - len(alone)
    return Survival(
        domain_count,
        copies,
        "",
        *kinds,
        process_bytes=sizes[0],
        copies_bytes=sizes[0] - sizes[1],
        wire_bytes=_sent_bytes(structure, parts),
        survived_domains=survived,
        survived_pairs=math.comb(survived, 2) - len(pairs),
    )


def _fullest(structure: Structure, parts: Sequence[HeldBox], process_count: int) -> int:
    """The process that holds most bytes."""
    held_bytes = [0] * process_count
    for part in parts:
        size_bytes = part.box.size * sum(structure.leaves[i].itemsize_bytes for i in part.leaves)
        for owner in part.owners:
            held_bytes[owner] += size_bytes
    return held_bytes.index(max(held_bytes))


def _file_bytes(
    structure: Structure,
    update: ExportedUpdate,
    parts: Sequence[HeldBox],
    numbers: Mapping[int, Collection[int]],
    count: int,
) -> list[int]:
    """Bytes of the file of the process that holds most, with copies and without them.

    Raises:
        UnfitError: there is none.
    """
    if missing := [structure.leaves[i].path for i, holders in numbers.items() if not holders]:
        raise UnfitError(f"no process computes all of {missing[0]}")
    process, sizes = _fullest(structure, parts, count), list[int]()
    without = [dataclasses.replace(part, owners=part.owners[:1]) for part in parts]
    for each in (parts, without):
        held = holdings.held_by(process, structure, each, numbers)
        if isinstance(found := fold_of(structure, update, held, is_kept=True, count=count), str):
            raise UnfitError(found)
        place = FilePlace("", "", "", "planned" if count > 1 else "", process, count)
        sizes.append(size_of(found[0], Journal(place, structure, update, *found)))
    return sizes


def _sent_bytes(structure: Structure, parts: Sequence[HeldBox]) -> int:
    """Bytes of a delta that are sent, once for each copy."""
    return sum(
        part.sent * part.box.size * structure.leaves[i].itemsize_bytes
        for part in parts
        for i in part.leaves
        if i not in structure.computed
    )


def _redundancies(structure: Structure, parts: Sequence[HeldBox]) -> list[Redundancy]:
    """The leaves by redundancy of devices: full, partial and none."""
    copied, given = ([0] * len(structure.leaves) for _ in range(2))
    for part in parts:
        size = part.box.size if len(part.owners) > 1 else 0
        given_size = size if len(part.owners) - part.sent > 1 else 0
        for i in part.leaves if size else ():
            copied[i] += size * structure.leaves[i].itemsize_bytes
            given[i] += given_size * structure.leaves[i].itemsize_bytes
    kinds: list[list[tuple[int, int]]] = [[], [], []]
    for leaf, copied_bytes, given_bytes in zip(structure.leaves, copied, given, strict=True):
        if leaf.nbytes:
            kind = 0 if given_bytes == leaf.nbytes else 1 if given_bytes else 2
            kinds[kind].append((leaf.nbytes, copied_bytes))
    return [
        Redundancy(len(kind), sum(a for a, _ in kind), sum(b for _, b in kind)) for kind in kinds
    ]
