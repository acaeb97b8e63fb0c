"""Replicas that are declared equal and differ.

A sharding that does not cut an array along a mesh axis declares that the devices along that axis
hold the same bits. Nothing in a running program checks it: a missing ``psum``, an input that
differs between hosts, or a faulty device leaves replicas that drift apart in silence. Here the
partial fingerprints of all replicas of a box are compared: eight bytes a shard, and no array data,
leave the devices.

Within a process every replica is compared. Across processes each sends one sum for every box that
others hold too, and the sums of single devices only where its own disagree.
"""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from adacheck_jax.device import fingerprint, jax_settings, transfer, trees
from adacheck_jax.device.fingerprint import ReplicaSums
from adacheck_jax.device.primary import DeviceGrid, Primary, nearest
from adacheck_jax.device.sharding import Holder, holders_of
from adacheck_jax.errors import ReplicaError, listed
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Leaf

_log = logging.getLogger(__name__)

Mode = Literal["warn", "raise", "off"]

_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class Site:
    """A box that several devices hold.

    Attributes:
        leaf: leaf index.
        path: leaf path.
        box: the box in global coordinates.
        holders: devices of all processes that hold the box, ascending.
    """

    leaf: int
    path: str
    box: Box
    holders: tuple[Holder, ...]

    @property
    def is_shared(self) -> bool:
        """True if devices of several processes hold the box."""
        return self.holders[0].process != self.holders[-1].process


@dataclass(frozen=True, slots=True)
class Divergence:
    """One box whose replicas differ.

    Attributes:
        path: leaf path.
        box: the box in the leaf's global coordinates.
        devices: devices in the minority, such as ``"gpu:3"``; in a tie all devices that hold the
            box.
        processes: process (host) of each of ``devices``, in the same order.
        agreeing_count: number of replicas in the largest group of equal ones.
        replica_count: number of replicas of the box.
        is_tie: True if no group is larger than every other, so that none can be called wrong.
    """

    path: str
    box: Box
    devices: tuple[str, ...]
    processes: tuple[int, ...]
    agreeing_count: int
    replica_count: int
    is_tie: bool

    def __str__(self) -> str:
        spans = zip(self.box.start, self.box.stop, strict=True)
        where = f"{self.path}[{', '.join(f'{a}:{b}' for a, b in spans)}]"
        pairs = zip(self.devices, self.processes, strict=True)
        names = listed((f"{device} (process {process})" for device, process in pairs), 8)
        if self.is_tie:
            return f"{where}: the {self.replica_count} replicas on {names} differ, with no majority"
        verb = "differs" if len(self.devices) == 1 else "differ"
        return f"{where}: {names} {verb} from {self.agreeing_count} replicas that agree"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Result of :func:`replica_report`.

    Attributes:
        leaf_count: number of leaves of the state.
        replicated_box_count: number of boxes that several devices hold.
        replica_count: number of shards that hold one of these boxes.
        divergences: boxes whose replicas differ, by leaf in tree order.
    """

    leaf_count: int
    replicated_box_count: int
    replica_count: int
    divergences: tuple[Divergence, ...]

    def __str__(self) -> str:
        compared = (
            f"{self.replica_count} replicas of {self.replicated_box_count} boxes of "
            f"{self.leaf_count} leaves compared"
        )
        if not self.divergences:
            return f"{compared}: all equal."
        return "\n  ".join(
            [f"{compared}; {summary(self.divergences)}.", *map(str, self.divergences)]
        )


def compare(sums: Mapping[Site, Mapping[Holder, int]]) -> tuple[Divergence, ...]:
    """The boxes whose replicas differ, in the order of the sums, which are given by holder."""
    found = []
    for site, by_holder in sums.items():
        counts = collections.Counter(by_holder.values()).most_common(2)
        if len(counts) < 2:
            continue
        (majority, agreeing_count), (_, next_count) = counts
        is_tie = agreeing_count == next_count
        named = sorted(h for h, value in by_holder.items() if is_tie or value != majority)
        found.append(
            Divergence(
                path=site.path,
                box=site.box,
                devices=tuple(map(str, named)),
                processes=tuple(each.process for each in named),
                agreeing_count=agreeing_count,
                replica_count=len(by_holder),
                is_tie=is_tie,
            )
        )
    return tuple(found)


def _message(what: str, found: Sequence[Divergence]) -> str:
    more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return (
        f"{what}: {summary(found)}: {'; '.join(map(str, found[:_MAX_LISTED]))}{more}. "
        "If it is always the same device, suspect it and take it out; if it is many, look for "
        "a missing psum, or an input that differs between hosts"
    )


def summary(divergences: Sequence[Divergence]) -> str:
    """Numbers of differing boxes and leaves, in half a sentence."""
    leaf_count = len({each.path for each in divergences})
    boxes = f"{len(divergences)} {'box' if len(divergences) == 1 else 'boxes'}"
    leaves = f"{leaf_count} {'leaf' if leaf_count == 1 else 'leaves'}"
    return f"{boxes} of {leaves} whose replicas are declared equal and are not"


def replicated_sites(paths: Sequence[str], arrays: Sequence[Any]) -> tuple[Site, ...]:
    """Boxes with elements that several devices hold, by leaf and box; only jax arrays have any.

    Boxes that several processes hold come in the same order in every process.
    """
    return tuple(
        Site(i, path, box, holders)
        for i, (path, array) in enumerate(zip(paths, arrays, strict=True))
        if isinstance(array, jax.Array)
        for box, holders in holders_of(array.sharding, tuple(array.shape)).items()
        if box.size and len(holders) > 1
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison of a step's replicas.

    Attributes:
        replica: device whose replica is saved, such as ``"gpu:3"``; empty if all are equal.
        primary: the primary of the saves that follow.
        leaves: indices of the leaves whose replicas differ.
    """

    replica: str
    primary: Primary
    leaves: frozenset[int] = frozenset()


class ReplicaCheck:
    """Compares the replicas of one state that is being saved.

    Created while the state is alive. Later every process publishes its :meth:`part`, and the
    process that commits calls :meth:`settle`; both need sums alone.

    Args:
        mode: reaction to replicas that differ.
        sites: boxes that have replicas.
        leaves: all leaves, with the processes that write their boxes.
        devices: devices of the state.
        primary: the one of them whose replica is saved.
    """

    def __init__(
        self,
        mode: Mode,
        sites: Sequence[Site],
        leaves: Sequence[Leaf],
        devices: DeviceGrid,
        primary: Primary,
    ) -> None:
        self.mode: Mode = mode
        self._sites = sites if mode != "off" else ()
        self._leaves, self._devices, self._primary = leaves, devices, primary

    def part(self, sums: ReplicaSums) -> dict[str, Any]:
        """This process's report for the process that commits, as JSON.

        Args:
            sums: sums of the replicas on this process's devices.

        Returns:
            ``shared``: one sum for every box that other processes hold too, by leaf and box.
            ``divergent``: boxes whose replicas differ within this process, device by device.
        """
        shared: list[int] = []
        divergent: list[Any] = []
        for site in self._sites:
            here = sums.get(site.leaf, {}).get(site.box, {})
            if not here:
                continue
            if site.is_shared:
                shared.append(next(iter(here.values())))
            if len(set(here.values())) > 1:
                each = [[h.process, h.device, h.platform, value] for h, value in here.items()]
                divergent.append([site.leaf, site.path, site.box.start, site.box.stop, each])
        return {"shared": shared, "divergent": divergent}

    def differing(self, parts: Sequence[Mapping[str, Any]]) -> dict[Site, dict[Holder, int]]:
        """The boxes whose replicas differ, with their sums, by the reports of all processes."""
        table: dict[tuple[int, Box], tuple[str, dict[Holder, int]]] = {}
        shared = [iter(part["shared"]) for part in parts]
        for site in self._sites:
            if site.is_shared:
                processes = sorted({holder.process for holder in site.holders})
                value = {process: next(shared[process]) for process in processes}
                sums = {holder: value[holder.process] for holder in site.holders}
                table[site.leaf, site.box] = (site.path, sums)
        for part in parts:
            for leaf, path, start, stop, each in part["divergent"]:
                key = (leaf, Box(tuple(start), tuple(stop)))
                sums = {Holder(*where): value for *where, value in each}
                table.setdefault(key, (path, {}))[1].update(sums)
        return {
            Site(leaf, path, box, tuple(sorted(sums))): sums
            for (leaf, box), (path, sums) in sorted(table.items())
            if len(set(sums.values())) > 1
        }

    def settle(self, step: int, parts: Sequence[Mapping[str, Any]]) -> Verdict:
        """Warns of replicas that differ, or refuses the step.

        Raises:
            ReplicaError: replicas differ, and the mode is ``"raise"``; or the processes have
                written parts of several of them.
        """
        sums = self.differing(parts)
        if not sums:
            return Verdict("", self._primary)
        message = _message(f"step {step}", compare(sums))
        if self.mode == "raise":
            raise ReplicaError(
                f"{message}. The step is not saved: go on from the last one that is, which has the "
                "same bits on every replica; adacheck.tools.replica_report(state) looks again."
            )
        verdict = self._verdict(sums)
        if verdict is None:
            raise ReplicaError(
                f"{message}. The step is not saved: its processes had shared the work, and each "
                "has written what its own devices hold, parts of several replicas. From the next "
                "save on, a base, all of a step is written from one replica."
            )
        turn = ""
        if verdict.primary.position != self._primary.position:
            turn = (
                " From the next save on, a base, it is that of "
                f"{self._devices.devices[verdict.primary.position]}, with which most agree."
            )
        _log.warning(
            "%s. All leaves of the step are saved as the replica of %s has them.%s The last step "
            'that was saved without this warning is sound. check_replicas="raise" refuses such '
            "steps.",
            *(message, verdict.replica, turn),
        )
        return verdict

    def expect_equal(self, what: str, parts: Sequence[Mapping[str, Any]]) -> None:
        """Refuses what has replicas that differ.

        Raises:
            ReplicaError: there are some.
        """
        if sums := self.differing(parts):
            raise ReplicaError(
                f"{_message(what, compare(sums))}. It is not published; "
                "adacheck.tools.replica_report(params) looks again."
            )

    def _verdict(self, sums: Mapping[Site, Mapping[Holder, int]]) -> Verdict | None:
        """The replica that was staged, and the primary to follow; None for several replicas.

        The majority is followed; without one, or if it has the bits of the primary, that stays.
        """
        written = {site: self._written(site, values) for site, values in sums.items()}
        most = {site: collections.Counter(values.values()) for site, values in sums.items()}
        every = [self._primary.position, *range(len(self._devices.devices))]
        bits = {position: self._bits(position, sums) for position in every}
        staged = [p for p in every if all(written[site] == {x} for site, x in bits[p].items())]
        if not staged:
            return None
        outvoted = {  # in how many boxes more replicas have other bits
            p: sum(most[site][x] < max(most[site].values()) for site, x in bits[p].items())
            for p in every
        }
        primary = Primary(min(every, key=outvoted.__getitem__), is_apart=True)
        leaves = frozenset(site.leaf for site in sums)
        return Verdict(str(self._devices.devices[staged[0]]), primary, leaves)

    def _bits(self, position: int, sums: Mapping[Site, Mapping[Holder, int]]) -> dict[Site, int]:
        """Sums of one replica of the state, by box."""
        ranks = self._devices.ranks(position)
        found = {holders: nearest(holders, ranks) for holders in {site.holders for site in sums}}
        return {site: values[found[site.holders]] for site, values in sums.items()}

    def _written(self, site: Site, values: Mapping[Holder, int]) -> set[int]:
        """The sums of the replicas that the owners of a box, or of its pieces, have written."""
        leaf, ranks = self._leaves[site.leaf], self._devices.ranks(self._primary.position)
        pairs = zip(leaf.boxes, leaf.owners, strict=True)
        owners = {owner for box, owner in pairs if site.box.contains(box)}
        held = [[h for h in values if h.process == owner] for owner in owners]
        return {values[nearest(each, ranks)] for each in held if each}


def comparison_of(sites: Sequence[Site]) -> ReplicaCheck:
    """The comparison of replicas of what is not saved."""
    return ReplicaCheck("warn", sites, (), DeviceGrid((), ()), Primary())


@jax_settings.own()
def replica_report(state: trees.PyTree) -> ReplicaReport:
    """Compares all replicas of a state, on its devices, bit by bit.

    In a multi-process program every process calls this with the same state, and gets the same
    report; of arrays that lie on the devices of one process alone that process counts the replicas.

    Args:
        state: any pytree of arrays, typed PRNG keys included. Only jax arrays have replicas.

    Returns:
        Numbers of compared boxes and replicas, and every box whose replicas differ.

    Raises:
        MismatchError: two leaves have the same leaf path.

    Example:
        >>> import jax.numpy as jnp
        >>> replica_report({"w": jnp.zeros(3)}).divergences
        ()
    """
    named, _ = trees.flatten(state)
    arrays: list[Any] = [
        transfer.raw(leaf) if isinstance(leaf, jax.Array) else None for leaf in named.values()
    ]
    sites = replicated_sites(tuple(named), arrays)
    watched = {site.leaf: arrays[site.leaf] for site in sites}
    sums = fingerprint.Contributions(watched, dict.fromkeys(watched, ()), every_replica=True)
    sums.sums()
    check = comparison_of(sites)
    parts = _gathered(check.part(sums.replicas))
    replica_count = sum(len(site.holders) for site in sites)
    found = compare(check.differing(parts))
    return ReplicaReport(len(named), len(sites), replica_count, found)


def _gathered(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The reports of all processes, in order; collective."""
    if jax.process_count() == 1:
        return [part]
    data = np.frombuffer(json.dumps(part).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, max(sizes) - data.size)))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
