"""The publisher: params of a training, published version by version."""

# Threads: the caller's threads publish, wait and close, one at a time: ``_lock`` is held through
# each of these calls, waits included. One thread writes, and owns the writer; it takes no lock.
# Callers look at the writer once no job runs. Of several processes all do alike: each version has
# an exchange, whose first error is that of all.

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.device.fingerprint import Contributions
from adacheck_jax.errors import (
    Closing,
    DifferingCallsError,
    MismatchError,
    ReplicaError,
    StorageError,
    TakenOverError,
)
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.processes import run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.publish import published_params as published
from adacheck_jax.publish import records
from adacheck_jax.publish import root as roots
from adacheck_jax.publish.published_params import PublishedShare
from adacheck_jax.publish.records import Claim
from adacheck_jax.publish.root import GoneError, Root
from adacheck_jax.publish.weights import Weights
from adacheck_jax.publish.writing import NewVersion, Published, Writer, named
from adacheck_jax.store.storage.location import AnyPath

_HASTE_S = 5.0
"""Seconds for which versions are waited for while an error is under way."""
_WAITING = 1
"""Versions that wait in host memory while the one before them is written."""
_KINDS = MismatchError, ReplicaError, StorageError
"""Errors of one process that all raise alike."""


class Publisher(Closing):
    """The one who publishes weights to a root, in the background.

    It takes the root over from a publisher that had it, and goes on after the newest version. Close
    it at the end, or use it in a ``with`` statement.

    Args:
        root: directory or bucket's URL of its own, not that of a checkpoint manager.
        params_path: leaf path of the params in the states that are published; None if the params
            themselves are.
        base_every: largest number of versions between bases; there is one sooner if the deltas
            since the last one have as many bytes.
        keep_versions: number of the newest versions that stay readable, with all that they build
            on; older ones are deleted whenever a base was written. None keeps all.

    Of several processes all make one, and publish the same versions in the same order: each writes
    what it owns of the params.

    Raises:
        MismatchError: an argument is no positive number, or something else than published weights
            is in the root.
        DifferingCallsError: processes do not call alike; none publishes any more.
        StorageError: the root cannot be read or written.
    """

    def __init__(
        self,
        root: str | AnyPath,
        *,
        params_path: str | None = None,
        base_every: int = 50,
        keep_versions: int | None = 100,
    ) -> None:
        for name, value in (("base_every", base_every), ("keep_versions", keep_versions)):
            if value is not None and value < 1:
                raise MismatchError(f"{name}: expected a positive number, found {value}.")
        self._root, self._params_path = Root(root), params_path
        self._calls = Calls(self._root)
        self._calls.note(f"Publisher({base_every=}, {keep_versions=})")
        run.watch(self._calls)
        opening = self._past = self._exchange("publisher")
        opened = functools.partial(
            Writer, self._root, share=opening.index, base_every=base_every, keep=keep_versions
        )

        def claimed(_: Sequence[Report]) -> Report:
            with named(self._root, "a publisher's claim"):
                mine = roots.claim(self._root)
                self._writer = opened(mine)
                self._writer.clear()
                latest = -1 if self._writer.last is None else self._writer.last.version
                return {"claim": records.encode(mine).decode(), "latest": latest}

        told = opening.agree("claim", {}, claimed)
        with opening.telling("open the root", _KINDS), named(self._root, "a publisher's claim"):
            if opening.index:
                mine = records.decode(told["claim"].encode(), Claim, self._root)
                self._expect_shared(mine)
                self._writer = opened(mine)
        opening.agree("opened", {}, lambda _: {})
        self._latest: int = told["latest"]
        self._process = OneProcess("a Publisher")
        self._process.enter()
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_publish")
        self._jobs: list[Future[Published]] = []  # versions on their way
        self._published_share: PublishedShare | None = None  # of the version before
        self._taken_over: TakenOverError | None = None
        self._published: Published | None = None
        self._is_closed = False

    @property
    def version(self) -> int | None:
        """The newest version that was published or is on its way; None if there is none."""
        return None if self._latest < 0 else self._latest

    @jax_settings.own()
    def publish(self, state: Any, *, version: int, wait: bool = False) -> int:
        """Publishes the params of a state; they may be donated when this returns.

        Waits only while an earlier version waits to be written.

        Args:
            state: the state, or the params if no ``params_path`` was given.
            version: number of the version, above all before it; such as the step.
            wait: True to wait until the version is durable and followers can see it.

        Returns:
            The number of the version, for those who wait for it.

        Raises:
            MismatchError: there is a version of that number or a later one, or the params are not
                what can be published.
            StorageError: an earlier version could not be written, or another publisher has taken
                the root over. This version was not published; after an error of the storage the
                next one may be.
        """
        self._process.enter()
        with self._lock:
            together = self._exchange("version")
            self._calls.note(f"publish(version={version!r})")
            with together.telling(f"publish version {version}", _KINDS):
                taken = self._taken(state, version, together.index)
            together.turn({}, lambda _: {})  # else one raises here, and the others later
            self._jobs.append(self._thread.submit(self._write, version, *taken, together))
            self._latest = version
            if wait:
                self.wait()
            return version

    def _expect_shared(self, mine: Claim) -> None:
        """Raises MismatchError where the root of this process is another than process 0's."""
        with contextlib.suppress(GoneError):
            if self._root.read(roots.PUBLISHERS, mine.epoch, Claim) == mine:
                return
        raise MismatchError(
            f"{self._root}: expected the claim that process 0 has written, found none: it is "
            "another place here. Give all processes a root that they share."
        )

    def _exchange(self, name: str) -> Exchange:
        """An exchange about a call that all processes make alike."""
        where = f"{self._root}: {name} {self._calls.key}"  # there may be several of one root
        return run.exchange(where, is_save=False).watching(self._calls)

    def _taken(
        self, state: Any, version: int, process: int
    ) -> tuple[PublishedShare, transfer.Staged, Contributions]:
        """Takes a version out of a state."""
        self._await(_WAITING + 1)
        if self._taken_over is not None:
            raise self._taken_over
        if type(version) is not int or version <= self._latest:
            raise MismatchError(
                f"{self._root}: expected a version above {self._latest}, found {version!r}: "
                "versions only go up. Give the number of the step."
            )
        params = published.params_of(state, self._params_path)
        kinds, arrays = published.kinds_of(params), dict(enumerate(params.values()))
        if (share := self._published_share) is None or share.kinds != kinds:
            made = published.share_of(kinds, [*arrays.values()], process)
            share = self._published_share = made
        self._await(_WAITING)
        staged = transfer.Staged(arrays, share.picks).begin()
        picks = share.picks, share.whole_picks
        contributions = Contributions(arrays, *picks, every_replica=True, staged=staged)
        staged.wait()
        return share, staged, contributions

    def _write(
        self,
        version: int,
        share: PublishedShare,
        staged: transfer.Staged,
        contributions: Contributions,
        together: Exchange,
    ) -> Published:
        """Writes a version; on the thread that writes."""
        what = f"version {version}"
        with (
            jax_settings.own(),
            together.telling(f"write {what}", _KINDS),
            named(self._root, what),
        ):
            sums, made = contributions.sums(), Weights(share.leaves, [together.index])
            while staged:  # whose memory goes as it is copied
                index, blocks = staged.popitem()
                for box, block in blocks.items():
                    made.put(index, box, block)
            every = [sums.get(i, 0) for i in range(len(share.kinds))]
            replicas = share.replicas, share.replicas.part(contributions.replicas)
            found = self._writer.write(NewVersion(version, made, every, *replicas, together))
            self._past.forget()  # all have begun the version after it
            self._past = together
            return found

    def wait(self) -> Published | None:
        """Waits until all versions are durable.

        Returns:
            Sizes of the version that was published last; None if none was.

        Raises:
            StorageError: one could not be written.
            ReplicaError: replicas of one differ.
        """
        self._process.enter()
        with self._lock:
            self._await(0)
            return self._published

    def close(self) -> None:
        """Waits until all versions are durable, and ends; raises as :meth:`wait`.

        While an error is under way it waits for some seconds alone, and that error stays visible.
        In a child that was forked it does nothing: the versions are its parent's.
        """
        if self._process.is_elsewhere:
            return
        with self.closing() as in_haste, self._lock:
            late = concurrent.futures.wait(self._jobs, _HASTE_S if in_haste else None).not_done
            try:
                if late:
                    raise StorageError(
                        f"{self._root}: expected the versions on their way to be durable soon, "
                        "found that storage does not answer. The end of the process waits for them."
                    )
                if not self._is_closed:
                    self.wait()
            finally:
                with contextlib.suppress(
                    DifferingCallsError
                ):  # those who wait for a version hear it
                    self._calls.note("close()")
                self._is_closed = True
                self._thread.shutdown(wait=not late)

    def _await(self, most: int) -> None:
        """Waits until at most so many versions are on their way; raises an error of one, once.

        Of several processes all raise it at the same call.
        """
        if self._is_closed:
            raise StorageError(f"{self._root}: expected an open publisher, found a closed one.")
        is_alone = jax.process_count() == 1
        while self._jobs and (len(self._jobs) > most or (is_alone and self._jobs[0].done())):
            try:
                self._published = self._jobs.pop(0).result()
            except Exception as error:
                concurrent.futures.wait(self._jobs)
                self._jobs.clear()
                last = self._writer.last
                self._latest = -1 if last is None else last.version
                if isinstance(error, TakenOverError):
                    self._taken_over = error
                raise
