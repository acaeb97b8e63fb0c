"""The Orbax adapter: arguments, save, restore, metadata, finalize. Orchestration only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from adacheck_jax import lineage as lineages
from adacheck_jax import manifest as manifests
from adacheck_jax import replicas, restorer, roots, stock, trees
from adacheck_jax.base_share import Name, chunk_shape
from adacheck_jax.commit import Save
from adacheck_jax.compression import Compression
from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StorageError,
    storage_named,
)
from adacheck_jax.lineage import Lineage
from adacheck_jax.manifest import BaseManifest, DeltaManifest
from adacheck_jax.policy import Delta
from adacheck_jax.recorder import Recorder
from adacheck_jax.retention import KeepLineage
from adacheck_jax.roots import Place
from adacheck_jax.saver import Destination, Prove, Saver
from adacheck_jax.stock import Entry, StockCheckpoints, stored_dtype
from adacheck_jax.targets import Target, Wishes
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)


_DIRECTORIES_S = 5.0
"""How long a refused save waits for Orbax's directories."""


class AdaCheckHandler(ocp.AsyncCheckpointHandler):
    """Saves every step: periodic bases, and deltas between them.

    Works wherever Orbax takes a handler::

        handler = adacheck.AdaCheckHandler(recorder)
        manager = ocp.CheckpointManager(root, item_handlers=handler)
        manager.save(step, args=adacheck.SaveArgs(state))
        state = manager.restore(step, args=adacheck.RestoreArgs(abstract_state))

    One handler follows one training run: it remembers the step that it saved or restored last,
    which the next delta builds on.

    Args:
        recorder: the :class:`Recorder` in the optimizer chain. Without one every save is a base,
            and every restore still works.
        max_deltas: longest lineage. A restore replays at most this many updates.
        delta: ``"auto"`` replays updates, and where that is not exact stores the bit-pattern
            difference of every leaf to the step before. ``"replay"`` saves bases there.
            ``"bits"`` always stores differences; it needs no recorder, saves any pytree, and pays
            where few bits change, as in bfloat16 weights at small learning rates. Differences keep
            a host copy of the last saved state.
        params_path: leaf path of the trained params in the state, such as ``"params"``; needed
            only where several subtrees have the recorded shapes (an EMA copy).
        keep_lineage: the preservation policy given to the manager, where the file system has no
            hard links.
        prove: which deltas are replayed in the background as they are saved, and compared with the
            state: the ``"first"`` one after a base or a restore, ``"every"`` one, or ``"never"``:
            then steps are lost where the train step does anything else than is replayed.
            Leaves that replay does not reproduce are stored whole, the handler says why, and
            replays no updates from then on. Costs a host copy of params and optimizer state for
            one step.
        prove_bytes: device memory that a proof may take, about. Updates that leave every element in
            its place are proved in pieces of that size. Any other takes its params, optimizer state
            and record at once, and is proved only if they fit, and in a single process.
        compression: lossless. Of a delta's leaves a sample tells what compresses: of gradients the
            exponents. ``"small"`` compresses with zstd, ``"fast"`` with LZ4, in less than a third
            of the time and a little larger; ``"none"`` stores all as it is, and ``"auto"`` does
            what has it stored soonest, by what a sample and the last base took.
        check_replicas: what to do when devices that are declared to hold the same bits do not,
            which every save looks for by their fingerprints: ``"warn"`` logs which and saves the
            step as one of them has it; ``"raise"`` refuses
            it with a :class:`ReplicaError`, at the next save or wait where saves are asynchronous;
            ``"off"`` does not look. Each device reads what it holds once, as for any fingerprint.
        returns_early: a base's save returns while the state is still on its way to the host, so
            that this overlaps the next step's forward and backward pass. The training loop then has
            to call :meth:`wait_until_staged` before the update that donates the state, or changes
            it in place. Otherwise ``save`` returns when that is safe.
        run_bytes: host memory that each process may take, about, for steps that were recorded
            (:meth:`record_step`). While they are written it takes as much again, and what is
            recorded meanwhile.

    Attributes:
        restored: what the last restore gave; None before it.

    Raises:
        ValueError: ``max_deltas``, ``prove_bytes`` or ``run_bytes`` is negative, or ``delta``,
            ``prove``, ``compression`` or ``check_replicas`` is none of these.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        *,
        max_deltas: int = 20,
        params_path: str | None = None,
        keep_lineage: KeepLineage | None = None,
        delta: Delta = "auto",
        prove: Prove = "first",
        prove_bytes: int = 64 * 2**20,
        compression: Compression = "auto",
        check_replicas: replicas.Mode = "warn",
        returns_early: bool = False,
        run_bytes: int = 256 * 2**20,
    ) -> None:
        for name, value in (
            ("max_deltas", max_deltas),
            ("prove_bytes", prove_bytes),
            ("run_bytes", run_bytes),
        ):
            if value < 0:
                raise ValueError(f"expected {name} >= 0, found {value}")
        for name, choice, known in (
            ("delta", delta, Delta),
            ("prove", prove, Prove),
            ("compression", compression, Compression),
            ("check_replicas", check_replicas, replicas.Mode),
        ):
            if choice not in get_args(known):
                raise ValueError(
                    f"expected {name} to be one of {get_args(known)}, found {choice!r}"
                )
        self._recorder = recorder
        self._params_path = params_path
        self._keep_lineage = keep_lineage
        self._new_saver = lambda: Saver(
            recorder,
            params_path,
            max_deltas=max_deltas,
            keep_lineage=keep_lineage,
            delta=delta,
            prove=prove,
            prove_bytes=prove_bytes,
            compression=compression,
            check_replicas=check_replicas,
            returns_early=returns_early,
            run_bytes=run_bytes,
        )
        self.restored: RestoreInfo | None = None
        # Managers, or one manager's saves and restores, may call from several threads.
        self._lock = threading.Lock()
        self._savers: dict[tuple[Path, str | None], Saver] = {}
        self._stock = StockCheckpoints()
        self._begun: dict[Path, _Begun] = {}

    async def async_save(self, directory: epath.Path, args: SaveArgs) -> list[ocp.Future]:
        """Decides between base and delta, stages, and starts writing.

        When this returns, every buffer of the state may be donated.

        Args:
            directory: the item's (temporary) directory; it need not exist yet.
            args: what to save.

        Returns:
            Futures that complete when this process's share is durable.

        Raises:
            StorageError: the root cannot be written.
            RecorderError: the recorder cannot be tied to the state.
            ValueError: as from ``StandardSave``, for a state that Orbax does not take.
        """
        try:
            return await self._start(directory, args)
        except Exception:
            # Orbax is making directories on threads that wait for each other for ten minutes if
            # the save is refused meanwhile; let them finish, so that the process can end. Where
            # the disk is why it is refused they never will, and nobody tells.
            with contextlib.suppress(TimeoutError):
                CommitFutureAwaitingContractedSignals(_nothing()).result(_DIRECTORIES_S)
            raise

    async def _start(self, directory: epath.Path, args: SaveArgs) -> list[ocp.Future]:
        if "://" in str(directory):
            raise StorageError(
                f"{directory}: expected a path on a mounted file system, found a remote one, which "
                "this release cannot write. Nothing was saved; mount it, or save to a local root."
            )
        final = roots.committed_path(Path(directory))
        _check_writable(final)
        state, save_args, cast = _cast(args.state, args.save_args)
        place = roots.place_of(Path(directory))
        custom_metadata = _json_copy(args.custom_metadata)
        with storage_named(final):
            save = self._saver_of(place).begin(
                Destination(final, place.step),
                state,
                args.step,
                cast=cast,
                custom_metadata=custom_metadata,
            )
        begun = _Begun(place.line, save)
        with self._lock:
            # Several at once: items of one step, or of several managers. One that was never
            # committed here (it failed, or another process commits) is dropped when its line goes
            # on.
            self._begun = {p: each for p, each in self._begun.items() if each.line != place.line}
            self._begun[final] = begun
        futures: list[ocp.Future] = []
        if save.is_base:
            futures, begun.entries = await self._stock.write(
                directory, state, save_args, custom_metadata
            )
            assert save.base is not None
            save.base.names = {
                leaf.path: Name(entry.name, stored_dtype(leaf.dtype), entry.chunk_bytes)
                for leaf in save.structure.leaves
                if (entry := begun.entries.get(leaf.path))
            }
        written = _written(save, Path(directory))
        futures.append(CommitFutureAwaitingContractedSignals(written, name="adacheck_write"))
        return futures

    def record_step(self, state: PyTree, step: int | None = None) -> bool:
        """Takes hold of a step that the next save writes together with its own.

        For training steps that are shorter than a save through the manager takes::

            for step, batch in enumerate(batches):
                state = train_step(state, batch)
                if not handler.record_step(state, step):
                    manager.save(step, args=adacheck.SaveArgs(state))

        The state may be donated when this returns; nothing is written, and no running step waited
        for. Recorded steps are restored by their numbers, from the step that was saved next:
        ``manager.restore(saved, args=RestoreArgs(abstract_state, step=recorded))``. They are lost
        where the process ends before that save, or it fails.

        Args:
            state: the whole train state, as it would be saved.
            step: its number; None is the one after the last step, recorded or saved. A step that
                was recorded may be recorded or saved again.

        Returns:
            Whether it was recorded. If not, save this step: there is nothing yet that it could
            build on (no base; an update that is yet to be proved; a step that was just restored;
            another tree or other shardings), it has to be stored in full, or the recorded
            steps take up ``run_bytes`` or, with it, ``max_deltas``. With several processes all
            get the same answer.

        Raises:
            ValueError: the step comes before the last one, or the handler saves several lines of
                steps.
        """
        with self._lock:
            savers = [saver for saver in self._savers.values() if saver.has_saved]
        if len(savers) > 1:
            raise ValueError(
                f"expected a handler that saves one line of steps, found {len(savers)}: it is not "
                "known which of them this step belongs to. Use one handler for each."
            )
        return bool(savers) and savers[0].record(state, step)

    def wait_until_staged(self) -> None:
        """Waits until every state that was saved may be donated, or changed in place.

        Needed with ``returns_early`` alone, and then before each update that donates::

            gradients = gradients_of(state, batch)  # while the last save is still reading the state
            handler.wait_until_staged()
            state = update(state, gradients)  # donates it
        """
        with self._lock:
            savers = [*self._savers.values()]
        for saver in savers:
            saver.wait_until_staged()

    def save(self, directory: epath.Path, args: SaveArgs) -> None:
        """Saves synchronously; see :meth:`async_save`."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def finalize(self, directory: epath.Path) -> None:
        """Commits: Orbax calls this on one process, after every process's futures."""
        path = Path(directory)
        with self._lock:
            begun = self._begun.pop(roots.committed_path(path), None)
        if begun is None:
            raise AdaCheckError(
                f"{directory}: expected to commit a save that this handler began, found none. "
                "Call finalize once, on the handler that saved; nothing was committed."
            )
        if begun.save.is_base:
            leaves = {leaf.path: leaf for leaf in begun.save.structure.leaves}
            entries = begun.entries.items()
            chunks = {each: chunk_shape(leaves[each], entry.chunk_bytes) for each, entry in entries}
            with storage_named(begun.save.final_directory):
                begun.save.described = self._stock.finalize(directory, begun.entries, chunks)
        begun.save.commit(path)

    def restore(self, directory: epath.Path, args: RestoreArgs | None = None) -> PyTree:
        """Restores a step, bit-exact and verified.

        Args:
            directory: the item's directory.
            args: what to restore; without an abstract state everything is restored as it was
                saved, containers as dictionaries and lists.

        Returns:
            The state.

        Raises:
            MismatchError: the abstract state does not fit what was saved.
            LineageError: a step that this one builds on is missing.
            IntegrityError: stored bits are damaged, or the restored ones differ from the saved.
            FormatError: a file is missing or cannot be read.

        What was restored, and whether every bit is the saved one, is then in ``self.restored``:
        with ``fallback`` it may be an older step.
        """
        args, path = args or RestoreArgs(), Path(directory)
        try:
            return self._restore(path, args)
        except (FormatError, IntegrityError, LineageError) as error:
            if not args.fallback:
                raise
            return self._restore_older(path, args, error)

    def _restore_older(self, path: Path, args: RestoreArgs, error: AdaCheckError) -> PyTree:
        """Restores the newest step before a bad one that can be."""
        number = roots.place_of(path).step
        older = [s for s in roots.siblings(path) if number is not None and s.step < number]
        places: list[tuple[Path, int | None]] = [(s.directory, None) for s in reversed(older)]
        if (recorded := _recorded_before_damage(path, args.step)) is not None:
            places.insert(0, (path, recorded))
        bad: AdaCheckError = error
        for directory, step in places:
            _log.warning("Skipping a step that cannot be restored: %s", bad)
            try:
                state = self._restore(directory, dataclasses.replace(args, step=step))
            except (FormatError, IntegrityError, LineageError) as another:
                bad = another
                continue
            assert self.restored is not None
            wanted = number if args.step is None else args.step
            _log.warning("Restored step %d instead of step %s.", self.restored.step, wanted)
            return state
        raise error

    def _restore(self, path: Path, args: RestoreArgs) -> PyTree:
        lineage = self._resolve(path)
        if misplaced := roots.misplaced(path, lineage.manifest):
            _log.warning("%s: %s; it was moved there.", path, misplaced)
        if args.step is not None:
            lineage = self._earlier(lineage, args.step, path)
        folds = restorer.Folds(self._recorder, self._params_path)
        folds.begin(lineage)
        damage = stock.damaged_descriptions(lineage.base_directory, lineage.base)
        shardings_damage = damage.pop(manifests.SHARDINGS, None)
        for error in damage.values():
            raise error
        saved_tree = self._stock.described(lineage.base_directory)
        wishes = Wishes(
            args.abstract_state, args.strict, args.support_layout, args.fallback_sharding
        )
        target = Target(wishes, lineage.base, saved_tree, path, shardings_damage)
        placements = target.placements(lineage)
        bound = restorer.bound_to_mesh(lineage)
        there = target.saved_placements(lineage) if bound else {}
        wanted = placements | (there or {})
        folds.compile(lineage, wanted)
        empty = {
            leaf.path: target.empty(leaf, wanted.pop(leaf.path))
            for leaf in lineage.base.leaves
            if not leaf.nbytes
        }
        specs = {leaf.path: leaf for leaf in lineage.base.leaves}
        read = self._stock.read(lineage.base_directory, wanted, specs, saved_tree) | empty
        leaves = [read[leaf.path] for leaf in lineage.base.leaves]
        restorer.check_kinds(leaves, lineage.base, lineage.base_directory)
        leaves = restorer.replay_onto(leaves, lineage, folds)
        rounded = restorer.verify(leaves, lineage, path, rounded=bound if there is None else ())
        self.restored = self._tell(lineage, rounded, path, args.exact)
        if not rounded:
            place = roots.place_of(path)
            saver = self._saver_of(place)
            end = lineage.entries[-1]
            if end.holder == path and not (end.is_link or lineage.left_out):
                saver.follow(lineage, place.step, leaves)
            else:
                saver.forget()
        named = {spec.path: leaf for spec, leaf in zip(lineage.base.leaves, leaves, strict=True)}
        if there:
            target.move({each: placements[each] for each in there}, named)
        return target.finish(named)

    def _tell(
        self, lineage: Lineage, rounded: Sequence[int], path: Path, wants_exact: bool
    ) -> RestoreInfo:
        count = restorer.replayed_count(lineage)
        paths = tuple(lineage.base.leaves[i].path for i in rounded)
        tolerance = restorer.tolerance(lineage, rounded) if rounded else 0.0
        info = RestoreInfo(lineage.end.step, count, paths, tolerance)
        if not paths:
            return info
        shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
        message = (
            f"{path}: {len(paths)} leaves of step {info.step} are within rounding of what was "
            f"saved, not the exact bits ({shown}; each within about {info.tolerance:.0e} of its "
            "leaf's largest value): they come out of sums, and the devices that they were "
            "saved from do not exist here"
        )
        if wants_exact:
            raise IntegrityError(
                f"{message}. Nothing was returned; restore where as many devices exist as when it "
                "was saved, restore a base step, or do not ask for exact=True."
            )
        _log.warning("%s.", message)
        return info

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's tree metadata of a base or delta step."""
        lineage = self._resolve(Path(directory))
        for error in stock.damaged_descriptions(lineage.base_directory, lineage.base).values():
            raise error
        metadata = self._stock.metadata(lineage.base_directory)
        if isinstance(lineage.manifest, BaseManifest):
            return metadata
        return type(metadata).build(metadata.tree, custom_metadata=lineage.manifest.custom_metadata)

    def close(self) -> None:
        """Releases what Orbax's handlers hold; called by the manager."""
        with self._lock:
            savers = [*self._savers.values()]
        for saver in savers:
            saver.close()
        self._stock.close()

    def _saver_of(self, place: Place) -> Saver:
        """The saver of one line of steps; a handler may serve several items and managers."""
        with self._lock:
            if place.line not in self._savers:
                self._savers[place.line] = self._new_saver()
                self._learn_parents(*place.line)
            return self._savers[place.line]

    def _resolve(self, path: Path) -> Lineage:
        try:
            return lineages.resolve(path)
        except LineageError as error:
            steps = [s.step for s in roots.siblings(path) if s.error is None]
            hint = ", ".join(map(str, steps[-10:])) or "none"
            raise LineageError(f"{error} Steps that can be restored: {hint}.") from error

    def _earlier(self, lineage: Lineage, step: int, path: Path) -> Lineage:
        """The part of a lineage that an earlier step is restored from."""
        try:
            return lineage.to(step)
        except LineageError as error:
            for saved in roots.siblings(path):
                recorded = getattr(saved.manifest, "recorded", ())
                if saved.error is None and step in (saved.step, *(each.step for each in recorded)):
                    raise LineageError(f"{error} Restore it from step {saved.step}.") from error
            raise

    def _learn_parents(self, root: Path, item: str | None) -> None:
        """Tells the preservation policy about the steps that are on disk already."""
        if self._keep_lineage is None:
            return
        for step in roots.steps_of(root, item):
            if isinstance(step.manifest, DeltaManifest):
                parent = roots.place_of(step.directory / step.manifest.parent.reference).step
                number = roots.place_of(step.directory).step
                if number is not None and parent is not None:
                    self._keep_lineage.note(number, parent)


@dataclass(slots=True)
class _Begun:
    """A save that is being written: the line that it belongs to, and what Orbax leaves to us."""

    line: tuple[Path, str | None]
    save: Save
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)


@ocp.args.register_with_handler(AdaCheckHandler, for_save=True)
@dataclass
class SaveArgs(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
        state: the whole train state, optimizer state included.
        step: step number; None takes it from the step directory's name.
        save_args: as for ``StandardSave``: a tree of ``ocp.SaveArgs`` (or None) like the state.
            A cast of a leaf that the update consumes or computes makes the save a base.
        custom_metadata: as for ``StandardSave``: JSON that ``metadata()`` returns.
    """

    state: PyTree
    step: int | None = None
    save_args: PyTree | None = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(AdaCheckHandler, for_restore=True)
@dataclass
class RestoreArgs(ocp.args.CheckpointArgs):
    """What to restore.

    Attributes:
        abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings (or of arrays) in the form
            that is wanted. ``ocp.PLACEHOLDER`` leaves a leaf out. A leaf of another data type of
            the same kind (float32 for bfloat16) is cast, after it was verified. None restores
            everything onto the shardings that it was saved with.
        strict: as for ``StandardRestore``: False truncates or pads leaves whose shape differs.
        support_layout: as for ``StandardRestore``: restore with the layouts in the abstract state.
        fallback_sharding: as for ``StandardRestore``: used where no sharding is given and the one
            that a leaf was saved with does not exist here.
        fallback: where the step is damaged, restore the newest older one that is not, and log what
            was skipped and why; ``handler.restored.step`` tells which it was. Otherwise a bad step
            is an error: training should not restart from an older step unasked.
        step: an earlier step, of those that the restored directory holds: one that was recorded
            (:meth:`AdaCheckHandler.record_step`) and saved with it, or one that it builds on. The
            next save is a base then.
        exact: refuse a step of which some bits can only be had to rounding here: the update adds up
            elements, and the devices that it was saved from do not exist.
    """

    abstract_state: PyTree | None = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    fallback: bool = False
    step: int | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """What a restore gave.

    Attributes:
        step: step number.
        replayed_count: updates that were replayed.
        rounded: leaf paths of what is within rounding of the saved bits; empty if all is exact.
        tolerance: how far those leaves may be off, relative to each leaf's largest value: 1e-6 for
            every replayed update and one rounding to the leaf's data type. An estimate for updates
            that are continuous; 0 if all is exact.
    """

    step: int
    replayed_count: int
    rounded: tuple[str, ...]
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether every bit is the one that was saved."""
        return not self.rounded


def _recorded_before_damage(path: Path, step: int | None) -> int | None:
    """The last recorded step of a damaged save up to which its bytes can be read."""
    try:
        lineage = lineages.resolve(path)
        rest = restorer.readable(lineage if step is None else lineage.to(step))
    except AdaCheckError:
        return None
    return None if rest is None else rest.end.step


async def _nothing() -> None:
    """Completes when what Orbax has promised for this save (its directories) is there."""


async def _written(save: Save, directory: Path) -> None:
    save.write(directory)


def _json_copy(metadata: Any) -> Any:
    """A copy that the caller cannot change, in the form in which it will be read again."""
    try:
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"custom_metadata: expected JSON, found {error}. Nothing was saved; pass numbers, "
            "texts, lists and dictionaries."
        ) from error


def _check_writable(final: Path) -> None:
    existing = final.parent
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(
            f"{final}: expected a directory that can be written, but {existing} "
            f"{'is not writable' if existing.is_dir() else 'is a file'}. Nothing was saved; give "
            "the manager another root, or mend the permissions."
        )


def _cast(state: PyTree, save_args: PyTree | None) -> tuple[PyTree, PyTree, frozenset[str]]:
    """Applies the casts of ``save_args``.

    Returns:
        The state as it is to be stored, the ``save_args`` that remain, and the leaf paths that
        were cast.
    """
    if save_args is None:
        return state, None, frozenset()
    leaves, treedef = trees.flatten(state)
    stored, rest, cast = [], [], set()
    for (path, leaf), arg in zip(leaves.items(), treedef.flatten_up_to(save_args), strict=True):
        dtype = None if arg is None else arg.dtype
        if dtype is not None and np.dtype(dtype) != trees.dtype_of(leaf):
            cast.add(path)
        stored.append(_astype(leaf, dtype) if path in cast else leaf)
        rest.append(None if arg is None else dataclasses.replace(arg, dtype=None))
    return trees.unflatten(treedef, stored), trees.unflatten(treedef, rest), frozenset(cast)


def _astype(leaf: Any, dtype: Any) -> Any:
    return leaf.astype(dtype) if hasattr(leaf, "astype") else np.asarray(leaf).astype(dtype)
