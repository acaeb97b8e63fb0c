"""A follower: the newest weights, verified, on a mesh and in data types of its own."""

# Threads: any thread of the program may ask; ``_lock`` is held through a whole update, reads of the
# storage included, so that one thread advances the weights. It is re-entrant: ``params`` heals what
# was donated. The reader's own threads take no lock.

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adacheck_jax.device import fingerprint, jax_settings
from adacheck_jax.errors import (
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StorageError,
)
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.processes import run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.meetings import ALONE, Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.processes.service import Patience
from adacheck_jax.publish import reading
from adacheck_jax.publish.followed_params import FollowedParams
from adacheck_jax.publish.plan import Route
from adacheck_jax.publish.reading import VersionReader
from adacheck_jax.publish.records import Version
from adacheck_jax.publish.root import GoneError, Root
from adacheck_jax.publish.weights import WeightChange, Weights
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)
_VANISHED = 20
"""Times that an update begins anew because values were pruned while it read them."""


class Follower:
    """The newest published weights that prove right, on a mesh and in data types of its own.

    Iterating gives pairs of a version and its params, each newer than the one before, without end.

    Args:
        root: the root that a :class:`~adacheck_jax.publish.publisher.Publisher` publishes to; it
            need not exist yet.
        abstract_params: pytree of abstract arrays (``jax.ShapeDtypeStruct``), or of arrays, with
            the wanted shardings and data types; leaf paths and shapes are those of the published
            params. Weights are verified as they were published, and cast then.
        poll_s: time between two looks at the root while a version is waited for. In an object store
            each look is a request.

    Of several processes all make one, and call its methods alike: process 0 looks at the root, and
    all take the version that it finds, or none does. Each has all weights in host memory.

    Attributes:
        version: number of the version that is held; None before the first.
        bases_read: number of times that it began with a base: once, and again whenever it fell
            behind what is kept, or a delta was damaged.
        problem: the last thing that it found damaged or could not read; empty if nothing was.

    Raises:
        MismatchError: a leaf is no abstract array.
        DifferingCallsError: processes do not call alike.
        StorageError: the root is a URL of an unknown kind.
    """

    def __init__(self, root: str | AnyPath, abstract_params: Any, *, poll_s: float = 0.1) -> None:
        self._root = Root(root)
        self._reader = VersionReader(self._root)
        self._wanted = FollowedParams(abstract_params)
        self._poll_s = poll_s
        self._have: Version | None = None
        self._weights: Weights | None = None
        self._arrays: dict[str, jax.Array] = {}
        self._changes: list[WeightChange] | None = None
        self._trouble = ""
        self._lock = threading.RLock()
        self._process = OneProcess("a Follower")
        self._past, self._calls = ALONE, Calls(self._root)  # exchange of the update before
        run.watch(self._calls)
        self.version: int | None = None
        self.bases_read = 0

    @property
    def problem(self) -> str:
        """The last thing that was found damaged, or could not be read."""
        return self._trouble or self._reader.problem

    @property
    def params(self) -> Any:
        """The params of the version that is held.

        Raises:
            LineageError: there is none yet.
        """
        if self._have is None:
            raise LineageError(
                f"{self._root}: expected a published version, found none that can be read."
                f"{self.problem and ' ' + self.problem} Wait for one: wait_for(version)."
            )
        self._process.enter()
        with self._lock:
            self._heal()
            return self._wanted.tree(self._arrays)

    def latest(self) -> Any:
        """The params of the newest version that proves right, after one look at the root.

        Raises:
            LineageError: there is none.
            StorageError: the root cannot be read now.
            MismatchError: other params were published, or the root is that of something else.
        """
        self.update()
        return self.params

    def wait_for(self, version: int, *, timeout_s: float | None = None) -> Any:
        """Waits for a version, or a newer one, and gives the newest; ``version`` tells which it is.

        Storage that cannot be read for a while is waited for, too.

        Args:
            version: number of the version.
            timeout_s: longest time to wait; None for any.

        Raises:
            LineageError: the time is over.
            MismatchError: other params were published, or the root is that of something else.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_alone, look, longest_s = jax.process_count() == 1, self._look, None
        if not is_alone:  # process 0 looks and pauses, and the others wait for it
            look = functools.partial(self._look_until, version, end_s)
            longest_s = math.inf if timeout_s is None else timeout_s + Patience().report_s
        while True:
            found: bool | None = False
            try:
                found = self._advance(f"wait_for({version})", look, longest_s)
            except StorageError as error:
                self._trouble = str(error)
            if self.version is not None and self.version >= version:
                return self.params
            rest_s = self._rest_s(end_s)
            if rest_s <= 0 if is_alone else found is None:
                raise LineageError(
                    f"{self._root}: expected version {version} within {timeout_s} seconds, found "
                    f"{'none' if self.version is None else self.version}. Look after the publisher."
                    f"{self.problem and ' ' + self.problem}"
                )
            if not found:
                time.sleep(max(rest_s, 0.0))

    def _rest_s(self, end_s: float | None) -> float:
        """Seconds until the next look."""
        return self._poll_s if end_s is None else min(self._poll_s, end_s - time.monotonic())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while True:
            after = -1 if self.version is None else self.version
            params = self.wait_for(after + 1)
            assert self.version is not None
            yield self.version, params

    def update(self) -> bool:
        """Looks once for newer versions, and takes the newest that proves right.

        What is held stays as it is until a newer version was verified in every leaf.

        Returns:
            True if there is a newer one now.

        Raises:
            StorageError: the root cannot be read now.
            MismatchError: other params were published, or the root is that of something else.
        """
        return bool(self._advance("update()", self._look))

    def _advance(
        self, call: str, look: Callable[[], Route | None], longest_s: float | None = None
    ) -> bool | None:
        """Takes the version that process 0 finds by a look of so many seconds, in all processes.

        None if it finds none; False if none of those that it finds can be taken.
        """
        self._process.enter()
        route: Route | None = None

        def judged(reports: Sequence[Report]) -> Report:
            nonlocal route
            self._reader.refused.update(key for each in reports for key in each["refused"])
            route = look()
            return {"end": None if route is None else route.end.sequence}

        with self._lock, jax_settings.own(x64=True):
            self._calls.note(call)
            self._trouble, past = "", self._past
            where = f"{self._root}: follower {self._calls.key}"  # there may be several of one root
            self._past = together = run.exchange(where, is_save=False)
            together = together.within(longest_s).watching(self._calls)
            for _ in range(_VANISHED):
                end = together.turn({"refused": [*self._reader.refused]}, judged)["end"]
                past.forget()  # all have ended it
                if end is None:
                    return None
                try:
                    self._take(end, route, together)
                    return True
                except GoneError as error:
                    _log.info("Published weights were pruned while they were read: %s", error)
                except (FormatError, IntegrityError):
                    continue  # refused by the reader from now on, which finds another way
        return False

    @property
    def _start(self) -> Version | None:
        """The version in hand, if there are whole weights to go on from."""
        return self._have if self._weights is not None else None

    def _look(self) -> Route | None:
        """The way to a newer version, after one look at the root."""
        route = self._reader.route(self._start)
        return route if route is not None and self._is_newer(route) else None

    def _look_until(self, version: int, end_s: float | None) -> Route | None:
        """The way to a newer version, after as many looks as one that is waited for has time."""
        while True:
            try:
                if (route := self._look()) is not None:
                    return route
            except StorageError as error:
                self._trouble = str(error)
            is_there = self.version is not None and self.version >= version
            if is_there or (rest_s := self._rest_s(end_s)) <= 0:
                return None
            time.sleep(rest_s)

    def _is_newer(self, route: Route) -> bool:
        if self._have is None:
            return True
        have, end = self._have, route.end
        if end.sequence != have.sequence and end.version <= have.version:
            # Records were lost, and the publisher that began then did not know of this version.
            self._trouble = (
                f"{self._root}: expected versions above {have.version}, found that {end.version} "
                "was published after it: records between were lost. It is held until a version "
                "with a higher number is there."
            )
            return False
        return end.sequence != have.sequence

    def _take(self, end: int, route: Route | None, together: Exchange) -> None:
        """Reads, places and verifies a version, and holds it if it is right.

        Raises:
            GoneError: something was pruned meanwhile, for one of the processes.
            FormatError, IntegrityError: something is damaged, and refused from now on.
        """
        found: _Found | None = None
        wrong: Exception = GoneError(f"{self._root}: another process could not read its part")
        with together.telling("follow published weights", (MismatchError,)):
            try:
                if together.index:
                    route = self._reader.route(self._start, end)
                if route is not None and route.end.sequence == end:
                    found = self._found(route)
            except (GoneError, FormatError, IntegrityError) as error:
                wrong = error
        checksum = "" if found is None else found.version.checksum
        if not together.turn({"checksum": checksum}, _are_alike)["are_alike"]:
            if found is not None:
                self._weights = None  # its words are those of the version
            raise wrong
        assert found is not None
        if found.changes is None and self._have is not None:
            _log.warning(
                "%s: version %d is read from a base: deltas do not lead there from version %d.",
                *(self._root, found.version.version, self._have.version),
            )
        # Nothing fails from here on: what is held is of one version.
        self._arrays = {**self._arrays, **found.arrays}
        self._have, self._weights = found.version, found.weights
        self._changes = found.changes
        self.version = found.version.version
        self.bases_read += found.changes is None

    def _found(self, route: Route) -> _Found:
        """The version that a route leads to, read, placed and verified.

        Raises:
            GoneError: something was pruned meanwhile.
            FormatError, IntegrityError: something is damaged, and refused from now on.
        """
        leaves = self._reader.leaves_at(route)
        self._wanted.check(leaves, self._root)
        weights, changes = self._reader.load(route, None if route.base else self._weights)
        former = None if route.base else self._have
        self._weights = None  # its words have changed, and are not known to be right
        indices = weights.changed(changes) if former else range(len(leaves.leaves))
        try:
            made = self._verified(route.end, weights, indices, former)
        except IntegrityError as error:
            self._reader.refuse(route, error)
            raise
        return _Found(route.end, weights, changes if former else None, made)

    def _verified(
        self, version: Version, weights: Weights, indices: Collection[int], former: Version | None
    ) -> dict[str, jax.Array]:
        """Some leaves on their devices, verified there with all others, and cast.

        Of several processes each verifies on its host what all shares together are: on the devices
        it would need the others, which may have failed.

        Raises:
            IntegrityError: a leaf is not as it was published.
        """
        leaves = weights.leaves.leaves
        arrays = self._wanted.placed(weights, indices)
        if jax.process_count() == 1:
            found = [0] * len(leaves) if former is None else [*former.fingerprints]
            for index, total in fingerprint.of_leaves(arrays).items():
                found[index] = total
        else:
            found = weights.fingerprints()
        reading.check(version, weights.leaves, found, self._root)
        return {leaves[i].path: self._wanted.cast(leaves[i].path, x) for i, x in arrays.items()}

    @jax_settings.own(x64=True)
    def _heal(self) -> None:
        """Places leaves anew that were donated by whoever they were given to."""
        gone = {path for path, array in self._arrays.items() if array.is_deleted()}
        if not gone:
            return
        if self._weights is None or self._have is None:
            raise LineageError(
                f"{self._root}: expected params that were not donated, found {len(gone)} arrays "
                "that were, and no whole copy. Wait for the next version."
            )
        indices = [i for i, leaf in enumerate(self._weights.leaves.leaves) if leaf.path in gone]
        self._arrays |= self._verified(self._have, self._weights, indices, self._have)

    def changes(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Elements that the last update changed, for those who hold a copy of their own.

        Returns:
            Of each leaf that changed the flat indices (C order), ascending, and the new elements'
            bits as unsigned words; a complex element is two words.

        Raises:
            LineageError: the last update began with a base, so that all elements may have changed.
        """
        self._process.enter()
        with self._lock:
            if self._changes is None or self._weights is None:
                raise LineageError(
                    f"{self._root}: expected an update by deltas, found that the last one began "
                    "with a base. Take all params."
                )
            found = {}
            for index, places in sorted(self._weights.changed(self._changes).items()):
                positions = np.unique(np.concatenate(places))
                leaf = self._weights.leaves.leaves[index]
                words = self._weights.block(index, Box.full(leaf.shape)).reshape(-1)
                found[leaf.path] = positions, words.view(f"u{leaf.word_bytes}")[positions]
            return found


class _Found(NamedTuple):
    """A version as this process has read it.

    Attributes:
        version: its record.
        weights: all of them, on the host.
        changes: what changed since the version in hand; None if it began with a base.
        arrays: the leaves that changed, by path.
    """

    version: Version
    weights: Weights
    changes: list[WeightChange] | None
    arrays: dict[str, jax.Array]


def _are_alike(reports: Sequence[Report]) -> Report:
    """True, in the answer, if all processes have the same version."""
    checksums = {each["checksum"] for each in reports}
    return {"are_alike": len(checksums) == 1 and "" not in checksums}
