"""The publisher: params of a training, published version by version."""

# Threads: the caller's threads publish, wait and close, one at a time: ``_lock`` is held through
# each of these calls, waits included. One thread writes, and owns the writer; it takes no lock.
# Callers look at the writer once no job runs.

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import jax_settings, transfer, trees
from adacheck_jax.device.fingerprint import Contributions
from adacheck_jax.device.primary import grid_of
from adacheck_jax.device.sharding import distinct_boxes
from adacheck_jax.errors import Closing, MismatchError, StorageError, first_line, listed
from adacheck_jax.format.manifest import ITEMSIZES_BYTES
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.publish import root as roots
from adacheck_jax.publish.records import Leaves, PublishedLeaf
from adacheck_jax.publish.root import GoneError, Root, TakenOverError
from adacheck_jax.publish.weights import Weights
from adacheck_jax.publish.writing import Published, Writer
from adacheck_jax.store.storage.location import AnyPath

_HASTE_S = 5.0
"""Seconds for which versions are waited for while an error is under way."""
_WAITING = 1
"""Versions that wait in host memory while the one before them is written."""


class Publisher(Closing):
    """The one who publishes weights to a root, in the background.

    It takes the root over from a publisher that had it, and goes on after the newest version. Close
    it at the end, or use it in a ``with`` statement.

    Args:
        root: directory or URL (``gs://``, ``s3://``) of its own, not that of a checkpoint manager.
        params_path: leaf path of the params in the states that are published; None if the params
            themselves are.
        base_every: largest number of versions between bases; there is one sooner if the deltas
            since the last one have as many bytes.
        keep_versions: number of the newest versions that stay readable, with all that they build
            on; older ones are deleted whenever a base was written. None keeps all.

    Raises:
        MismatchError: an argument is no positive number, or something else than published weights
            is in the root.
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
        if jax.process_count() > 1:
            raise MismatchError(
                f"expected a program of one process, found {jax.process_count()}: each has a part "
                "of the params alone. Publish from a program of one process."
            )
        self._root, self._params_path = Root(root), params_path
        with _named(self._root, "a publisher's claim"):
            mine = roots.claim(self._root)
            self._writer = Writer(self._root, mine, base_every, keep_versions)
        last = self._writer.last
        self._latest = -1 if last is None else last.version
        self._process = OneProcess("a Publisher")
        self._process.enter()
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_publish")
        self._jobs: list[Future[Published]] = []  # versions on their way
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
            self._await(_WAITING + 1)
            if self._taken_over is not None:
                raise self._taken_over
            if type(version) is not int or version <= self._latest:
                raise MismatchError(
                    f"{self._root}: expected a version above {self._latest}, found {version!r}: "
                    "versions only go up. Give the number of the step."
                )
            named = _params_of(state, self._params_path)
            leaves = Leaves(tuple(_leaf(path, array) for path, array in named.items()))
            self._await(_WAITING)
            arrays = dict(enumerate(named.values()))
            ranks = grid_of(arrays.values()).ranks(0)  # of all leaves the same replica
            picks = {i: transfer.picks_of(x, distinct_boxes(x), ranks) for i, x in arrays.items()}
            staged = transfer.Staged(arrays, picks).begin()
            contributions = Contributions(arrays, picks, staged=staged)
            staged.wait()
            job = self._thread.submit(self._write, version, leaves, staged, contributions)
            self._jobs.append(job)
            self._latest = version
            if wait:
                self.wait()
            return version

    def _write(
        self, version: int, leaves: Leaves, staged: transfer.Staged, contributions: Contributions
    ) -> Published:
        """Writes a version; on the thread that writes."""
        with _named(self._root, f"version {version}"), jax_settings.own():
            sums, made = contributions.sums(), Weights(leaves)
            while staged:  # whose memory goes as it is copied
                index, blocks = staged.popitem()
                for box, block in blocks.items():
                    made.arrays[index][box.slices] = block
            found = made.fingerprints()
            changed = [x.path for i, x in enumerate(leaves.leaves) if found[i] != sums[i]]
            if changed:
                raise MismatchError(
                    f"{self._root}: expected params that stay as they are until version {version} "
                    f"is written, found that {listed(changed, 5)} changed: not published. "
                    "Call wait() before you change memory of numpy's that they lie in."
                )
            return self._writer.write(version, made, found)

    def wait(self) -> Published | None:
        """Waits until all versions are durable.

        Returns:
            Sizes of the version that was published last; None if none was.

        Raises:
            StorageError: one could not be written.
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
                self._is_closed = True
                self._thread.shutdown(wait=not late)

    def _await(self, most: int) -> None:
        """Waits until at most so many versions are on their way; raises an error of one, once."""
        if self._is_closed:
            raise StorageError(f"{self._root}: expected an open publisher, found a closed one.")
        while self._jobs and (len(self._jobs) > most or self._jobs[0].done()):
            try:
                self._published = self._jobs.pop(0).result()
            except Exception as error:
                concurrent.futures.wait(each for each in self._jobs if not each.cancel())
                self._jobs.clear()
                last = self._writer.last
                self._latest = -1 if last is None else last.version
                if isinstance(error, TakenOverError):
                    self._taken_over = error
                raise


def _params_of(state: Any, params_path: str | None) -> dict[str, Any]:
    """The params of a state by leaf path, in the order of the paths."""
    named = trees.flatten(state)[0]
    if params_path is not None:
        start = f"{params_path}/"
        inside = {x.removeprefix(start): y for x, y in named.items() if x.startswith(start)}
        if not inside:
            raise MismatchError(
                f"params_path: expected leaves below {start}, found none among {len(named)}: "
                f"{', '.join([*named][:5])}. Give the leaf path of the params."
            )
        named = inside
    if not named:
        raise MismatchError("expected params, found a tree without leaves.")
    return {path: named[path] for path in sorted(named)}


def _leaf(path: str, array: Any) -> PublishedLeaf:
    dtype = str(getattr(array, "dtype", ""))
    if not isinstance(array, jax.Array | np.ndarray) or dtype not in ITEMSIZES_BYTES:
        raise MismatchError(
            f"{path}: expected an array of numbers, found {type(array).__name__} {dtype}. Publish "
            "params alone: no keys, no Python numbers."
        )
    return PublishedLeaf(path, tuple(array.shape), dtype)


@contextlib.contextmanager
def _named(root: Root, what: str) -> Iterator[None]:
    """Tells errors of the operating system as a StorageError."""
    try:
        yield
    except (OSError, GoneError) as error:
        raise StorageError(
            f"{root}: expected to write {what}, found: {first_line(error)}. Versions that "
            "followers can see are whole. Make room or mend the storage, and publish the next one."
        ) from error
