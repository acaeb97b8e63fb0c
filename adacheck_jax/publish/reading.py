"""Versions read into host memory: the way to one, and its weights.

Nothing read here is trusted until the fingerprints of the weights were compared with those of the
version; who asks for the weights compares, where they are used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from adacheck_jax.errors import FormatError, IntegrityError, LineageError
from adacheck_jax.publish import plan, weights
from adacheck_jax.publish.plan import Route
from adacheck_jax.publish.records import Base, Claim, Leaves, Record, Version
from adacheck_jax.publish.root import BASES, LEAVES, VERSIONS, GoneError, Root
from adacheck_jax.publish.weights import WeightChange, Weights

_log = logging.getLogger(__name__)
_R = TypeVar("_R", bound=Record)
_THREADS = 8
_AGAIN_S = 2.0
"""Time after which a root is read again in which no way was found, and nothing came since."""
_MOST_DELTA, _SPARE_BYTES = 3, 1 << 20
"""A delta has no more bytes than so many times the leaves, and some more."""


class VersionReader:
    """Knowledge of one process about a root.

    Attributes:
        problem: the last thing that was found damaged; empty if nothing was.
        refused: checksums of versions, and names of bases, that are damaged.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.problem = ""
        self._claims: tuple[Claim, ...] = ()
        self._leaves: dict[str, Leaves] = {}
        self.refused: set[str] = set()
        self._gone: set[str] = set()
        self._stuck: tuple[list[int], list[int]] | None = None
        self._again_s = 0.0

    def sequences(self) -> list[int]:
        """Sequence numbers of versions, of which some may not count.

        Raises:
            MismatchError: there are none, because the root is no place of published weights.
        """
        found = self.root.numbers(VERSIONS)
        if not found:
            self.root.check_own()
        return found

    def versions(self, sequences: Sequence[int]) -> dict[int, Version]:
        """The versions among some that can be read and count."""
        self._claims = self.root.claims(self._claims)  # read after the listing
        found = self._readable(VERSIONS, Version, sequences)
        return {x.sequence: x for x in found if plan.counts(x, self._claims)}

    def _readable(self, folder: str, kind: type[_R], numbers: Sequence[int]) -> list[_R]:
        """Records that can be read; damage of others is noted."""

        def read(number: int) -> _R | None:
            try:
                return self.root.read(folder, number, kind)
            except GoneError:
                return None
            except (FormatError, IntegrityError) as error:  # or it is being written
                self._note(error)
                return None

        with ThreadPoolExecutor(_THREADS) as threads:
            return [x for x in threads.map(read, numbers) if x is not None]

    def _note(self, error: Exception) -> None:
        if str(error) != self.problem:
            self.problem = str(error)
            _log.warning("Published weights are damaged: %s", error)

    def bases(self) -> list[Base]:
        """Bases that can be read and were not refused."""
        found = self._readable(BASES, Base, self.root.numbers(BASES))
        return [each for each in found if _base_key(each) not in self.refused]

    def route(self, have: Version | None, last: int | None = None) -> Route | None:
        """The way to the newest version that can be reached, and is newer than the one in hand.

        Where all records end before the one in hand the root was lost, or begun anew: the way is
        that to its newest version then, whose number may be lower.
        """
        sequences = [each for each in self.sequences() if last is None or each <= last]
        newest = max(sequences, default=-1)
        if have is not None and newest < have.sequence:
            have = None
        first = -1 if have is None else have.sequence
        if newest == first:
            return None
        if have is not None:
            after = self.versions([each for each in sequences if each > first])
            deltas = plan.onwards(have, after.values(), self.refused)
            if deltas and deltas[-1].sequence == max(after):
                return Route(None, have, deltas)
        listing = (sequences, self.root.numbers(BASES))
        if listing == self._stuck and time.monotonic() < self._again_s:
            return None  # nothing came since no way was found
        every = self.versions(sequences)
        bases = [each for each in self.bases() if each.sequence <= newest]
        ways = [plan.from_base(bases, every, self.refused)]
        if have is not None:  # of two ways that end alike the first is taken
            ways.insert(0, Route(None, have, plan.onwards(have, every.values(), self.refused)))
        ahead = [each for each in ways if each and each.end.sequence > first]
        found = max(ahead, key=lambda each: each.end.sequence, default=None)
        self._stuck = listing if found is None else None
        self._again_s = time.monotonic() + _AGAIN_S
        return found

    def leaves(self, version: Version) -> Leaves:
        """Leaves of a version.

        Raises:
            GoneError: their record is not there.
            AdaCheckError: it is damaged, or another than the version's.
        """
        if version.leaves not in self._leaves:
            self._leaves[version.leaves] = self.root.read(LEAVES, version.leaves, Leaves)
        found = self._leaves[version.leaves]
        if len(version.fingerprints) != len(found.leaves):
            raise IntegrityError(
                f"{self.root.record_at(VERSIONS, version.sequence)}: expected a fingerprint for "
                f"each of {len(found.leaves)} leaves, found {len(version.fingerprints)}."
            )
        if version.parent is not None and len(version.deltas) != found.shares:
            raise IntegrityError(
                f"{self.root.record_at(VERSIONS, version.sequence)}: expected a delta of each of "
                f"{found.shares} shares, found {len(version.deltas)}."
            )
        return found

    def leaves_at(self, route: Route) -> Leaves:
        """Leaves of the version that a route leads to; raises as :meth:`load`."""
        with self._judged(_last_step(route)):
            return self.leaves(route.end)

    def load(
        self, route: Route, have: Weights | None, shares: Iterable[int] | None = None
    ) -> tuple[Weights, list[WeightChange]]:
        """Weights at the end of a route, not compared with fingerprints yet.

        Args:
            route: the way.
            have: weights that it goes on from; None if it begins with a base.
            shares: the shares to read, which those in hand have; None for all.

        Returns:
            The weights, and all changes that were applied.

        Raises:
            GoneError: something was pruned meanwhile.
            IntegrityError: something is damaged; it is refused from now on.
        """
        leaves = self.leaves_at(route)
        wanted = tuple(range(leaves.shares) if shares is None else shares)
        with ThreadPoolExecutor(_THREADS) as threads:
            reading = [
                threads.submit(self._delta, each, leaves, share)
                for each in route.deltas
                for share in wanted
            ]
            if route.base is not None:
                have = self._base(route.base, Weights(self.leaves(route.start), wanted), threads)
            changes = [each.result() for each in reading]
        assert have is not None
        for each in changes:
            have.apply(each)
        return have, [change for each in changes for change in each]

    def _delta(self, record: Version, leaves: Leaves, share: int) -> list[WeightChange]:
        with self._judged(record.checksum):
            if self.leaves(record) is not leaves:
                raise IntegrityError(f"{self.root}: version {record.version} has other leaves.")
            if record.delta_bytes > _MOST_DELTA * leaves.nbytes + _SPARE_BYTES:
                raise IntegrityError(
                    f"{self.root.record_at(VERSIONS, record.sequence)}: expected a delta of "
                    f"{leaves.nbytes} bytes of leaves, found one of {record.delta_bytes} bytes."
                )
            stored = record.deltas[share] if record.deltas else None
            if stored is None:
                return []
            place = self.root.delta_at(record.sequence, record.epoch, share)
            return weights.decode(leaves, share, self.root.load(place, stored), self.root)

    def _base(self, base: Base, found: Weights, threads: ThreadPoolExecutor) -> Weights:
        with self._judged(_base_key(base)):
            leaves, place = found.leaves, self.root.record_at(BASES, base.sequence)
            expected = [weights.part_count(leaves, share) for share in range(leaves.shares)]
            if (counts := [*map(len, base.parts)]) != expected:
                raise IntegrityError(
                    f"{place}: expected {expected} parts of the shares, found {counts}. A later "
                    "base heals followers."
                )
            every = [(share, n) for share in found.shares for n in range(expected[share])]

            def load(part: tuple[int, int]) -> bytes:
                share, number = part
                part_at = self.root.part_at(base.sequence, base.epoch, share, number)
                return self.root.load(part_at, base.parts[share][number])

            for part, data in zip(every, threads.map(load, every), strict=True):
                found.set_part(*part, data)
        return found

    @contextlib.contextmanager
    def _judged(self, key: str) -> Iterator[None]:
        """Refuses a delta or a base that is damaged, or is gone though its record stays."""
        try:
            yield
        except (FormatError, IntegrityError) as error:
            self._refuse(key, error)
            raise
        except GoneError as error:
            if key not in self._gone:  # as a rule it was pruned, and its record before it
                self._gone.add(key)
                raise
            lost = IntegrityError(
                f"{error}: expected a value that a record names, found none. A later base heals "
                "followers."
            )
            self._refuse(key, lost)
            raise lost from error

    def refuse(self, route: Route, error: Exception) -> None:
        """Takes the last step of a route, which did not prove right, for damaged from now on."""
        self._refuse(_last_step(route), error)

    def _refuse(self, key: str, error: Exception) -> None:
        self.refused.add(key)
        self._note(error)


def _last_step(route: Route) -> str:
    return route.end.checksum if route.base is None or route.deltas else _base_key(route.base)


def _base_key(base: Base) -> str:
    return f"base {base.sequence} {base.of}"


def check(version: Version, leaves: Leaves, found: Sequence[int], where: object) -> None:
    """Compares fingerprints of weights with those of their version.

    Raises:
        IntegrityError: names leaves that differ.
    """
    triples = zip(leaves.leaves, version.fingerprints, found, strict=True)
    wrong = [leaf.path for leaf, expected, got in triples if expected != got]
    if wrong:
        raise IntegrityError(
            f"{where}: version {version.version}: expected the bits that were published, found "
            f"others in {len(wrong)} of {len(leaves.leaves)} leaves ({', '.join(wrong[:5])}). They "
            "are not given to anyone; a later base heals followers."
        )


def read_version(root: Root, choose: Callable[[list[int]], int]) -> tuple[Version, Weights]:
    """A version that is kept, and its weights, compared with its fingerprints on the host.

    Args:
        root: the root.
        choose: gives the number of the version, of those that are kept, ascending.

    Raises:
        LineageError: there is no such version.
        AdaCheckError: it is damaged.
    """
    reader = VersionReader(root)
    every = reader.versions(reader.sequences())
    kept = sorted(each.version for each in every.values())
    number = choose(kept)
    found = [each for each in every.values() if each.version == number]
    if not found:
        shown = f"versions {kept[0]} to {kept[-1]}" if kept else "none"
        raise LineageError(
            f"{root}: expected version {number}, found {shown}. Give a version that is kept."
            f"{reader.problem and ' ' + reader.problem}"
        )
    wanted = max(found, key=lambda each: each.sequence)
    try:
        route = reader.route(None, wanted.sequence)
        if route is None or route.end != wanted:
            raise LineageError(
                f"{root}: expected a base for version {number}, found none that leads to it: what "
                "it builds on is damaged or was pruned. Give another version."
                f"{reader.problem and ' ' + reader.problem}"
            )
        made, _ = reader.load(route, None)
        check(wanted, made.leaves, made.fingerprints(), root)
        return wanted, made
    except GoneError as error:
        raise LineageError(
            f"{root}: version {number} was pruned while it was read ({error}). Give a newer one."
        ) from error
