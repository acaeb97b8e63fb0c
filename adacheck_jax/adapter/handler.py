"""The Orbax adapter: arguments, save, restore, metadata, finalize. Orchestration only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from adacheck_jax.adapter import base_checkpoint, inputs
from adacheck_jax.adapter.base_checkpoint import Entry, StockCheckpoints, stored_dtype
from adacheck_jax.adapter.targets import Target, Wishes
from adacheck_jax.device import jax_settings, replicas, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StorageError,
    storage_named,
)
from adacheck_jax.format import durable, roots
from adacheck_jax.format import lineage as lineages
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.lineage import IN_PLACE, STEP_METADATA, Lineage
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.format.roots import Place
from adacheck_jax.restore import check, replay
from adacheck_jax.restore.compiled_update import CompiledUpdates
from adacheck_jax.save.commit import Save
from adacheck_jax.save.exported_update import Check
from adacheck_jax.save.policy import Delta
from adacheck_jax.save.saver import Destination, Saver
from adacheck_jax.store.base_writer import Name, chunk_shape
from adacheck_jax.store.compression import Compression
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.update.binding import RecorderArgument, recorders_of

_log = logging.getLogger(__name__)


_DIRECTORIES_S = 5.0
"""How long a refused save waits for Orbax's directories."""
_STEP_METADATA_S = 1.0
"""How long a save waits for a file that Orbax is about to write into the step's directory."""


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
        recorder: the :class:`Recorder` in the optimizer chain, or the chain. Several optimizers in
            one state (a GAN, an actor and a critic) have one each: give a list of them, or, where
            they cannot be told apart by the shapes of their params, a dictionary by leaf-path
            prefix of the optimizer state. Without one every save is a base, and every restore still
            works.
        max_deltas: longest lineage. A restore replays at most this many updates.
        delta: ``"auto"`` replays updates, and where that is not exact stores the bit-pattern
            difference of every leaf to the step before. ``"replay"`` saves bases there.
            ``"bits"`` always stores differences; it needs no recorder, saves any pytree, and pays
            where few bits change, as in bfloat16 weights at small learning rates. Differences keep
            a host copy of the last saved state.
        params_path: leaf path of the trained params in the state, such as ``"params"``; needed
            only where several subtrees have the recorded shapes (an EMA copy). With several
            recorders a dictionary by leaf-path prefix of the optimizer state.
        keep_lineage: the preservation policy given to the manager, where the file system has no
            hard links.
        check: what of a delta's replay is compared with the state before the delta is saved.
            ``"sample"``: small leaves whole, and of each large leaf a block at a position that
            changes from save to save; what touches few elements of a large leaf may be missed.
            ``"full"``: everything, by a second copy of the state that follows training on the same
            devices. Leaves that replay does not reproduce are stored. Where a save had returned
            before its step was computed, the state is gone when that is found: the save fails,
            and the run becomes cautious: from then on saves are checked before they return.
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
        ValueError: ``max_deltas`` or ``run_bytes`` is negative, or ``delta``, ``check``,
            ``compression`` or ``check_replicas`` is none of these.
        RecorderError: there is no recorder in what was given as one.
    """

    @classmethod
    def typestr(cls) -> str:
        """Name that Orbax writes beside every step, and finds the handler by: it never changes."""
        return "adacheck_jax.handler.AdaCheckHandler"

    def __init__(
        self,
        recorder: RecorderArgument = None,
        *,
        max_deltas: int = 20,
        params_path: str | Mapping[str, str] | None = None,
        keep_lineage: KeepLineage | None = None,
        delta: Delta = "auto",
        check: Check = "sample",
        compression: Compression = "auto",
        check_replicas: replicas.Mode = "warn",
        returns_early: bool = False,
        run_bytes: int = 256 * 2**20,
    ) -> None:
        for name, value in (
            ("max_deltas", max_deltas),
            ("run_bytes", run_bytes),
        ):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"expected {name} to be an int >= 0, found {value!r}")
        for name, choice, known in (
            ("delta", delta, Delta),
            ("check", check, Check),
            ("compression", compression, Compression),
            ("check_replicas", check_replicas, replicas.Mode),
        ):
            if choice not in get_args(known):
                raise ValueError(
                    f"expected {name} to be one of {get_args(known)}, found {choice!r}"
                )
        self._recorders = recorders_of(recorder)
        self._params_path = params_path
        self._keep_lineage = keep_lineage
        self._new_saver = lambda: Saver(
            self._recorders,
            params_path,
            max_deltas=max_deltas,
            keep_lineage=keep_lineage,
            delta=delta,
            check=check,
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
            MismatchError, FormatError: the state holds what cannot be stored.
            ValueError: the step is no step number.
        """
        with _directories_made():
            begun, stored = self._begin(directory, args)
            return await self._write(directory, begun, stored)

    @jax_settings.own()
    def _begin(self, directory: epath.Path, args: SaveArgs) -> tuple[_Begun, SaveArgs]:
        """The part of a save that needs the caller's thread, where the caller's jax settings hold.

        Returns:
            What is left to do, and what is to be stored.
        """
        if "://" in str(directory):
            raise StorageError(
                f"{directory}: expected a path on a mounted file system, found a remote one, which "
                "this release cannot write. Nothing was saved; mount it, or save to a local root."
            )
        path = _absolute(directory)
        final = roots.committed_path(path)
        _check_writable(final)
        state = inputs.checked_state(args.state, args.save_args)
        step = inputs.step_number(args.step)
        state, save_args, cast = _cast(state, args.save_args)
        place = _place_while_saved(path)
        custom_metadata = _json_copy(args.custom_metadata)
        with storage_named(final):
            save = self._saver_of(place).begin(
                Destination(final, place.step),
                state,
                step,
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
        return begun, SaveArgs(state, save_args=save_args, custom_metadata=custom_metadata)

    async def _write(
        self, directory: epath.Path, begun: _Begun, stored: SaveArgs
    ) -> list[ocp.Future]:
        futures: list[ocp.Future] = []
        save, path = begun.save, _absolute(directory)
        if save.is_base:
            futures, begun.entries = await self._stock.write(
                epath.Path(path), stored.state, stored.save_args, stored.custom_metadata
            )
            assert save.base is not None
            save.base.names = {
                leaf.path: Name(entry.name, stored_dtype(leaf.dtype), entry.chunk_bytes)
                for leaf in save.structure.leaves
                if (entry := begun.entries.get(leaf.path))
            }
        written = _written(save, path)
        futures.append(CommitFutureAwaitingContractedSignals(written, name="adacheck_write"))
        return futures

    @jax_settings.own()
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
            build on (no base; another tree or other shardings), it has to be stored in full, a
            check found it wrong, or the recorded steps take up ``run_bytes`` or, with it,
            ``max_deltas``. With several processes all get the same answer.

        Raises:
            ValueError: the step is no step number, or comes before the last one, or the handler
                saves several lines of steps.
        """
        with self._lock:
            savers = [saver for saver in self._savers.values() if saver.has_steps]
        state = inputs.checked_state(state)
        step = inputs.step_number(step)
        if len(savers) > 1:
            raise ValueError(
                f"expected a handler that saves one line of steps, found {len(savers)}: it is not "
                "known which of them this step belongs to. Use one handler for each."
            )
        return bool(savers) and savers[0].record(state, step)

    @jax_settings.own()
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
        """Saves synchronously, also where an event loop is running; see :meth:`async_save`."""
        with _directories_made(), ThreadPoolExecutor(1) as thread:
            writing = self._write(directory, *self._begin(directory, args))
            futures = thread.submit(asyncio.run, writing).result()
        for future in futures:
            future.result()

    @jax_settings.own()
    def finalize(self, directory: epath.Path) -> None:
        """Commits: Orbax calls this on one process, after every process's futures."""
        path = _absolute(directory)
        with self._lock:
            begun = self._begun.pop(roots.committed_path(path), None)
        if begun is None:
            raise AdaCheckError(
                f"{directory}: expected to commit a save that this handler began, found none. "
                "Call finalize once, on the handler that saved; nothing was committed."
            )
        with storage_named(begun.save.final_directory), begun.save.committing(path):
            self._commit(path, begun)

    def _commit(self, path: Path, begun: _Begun) -> None:
        if begun.save.is_base:
            leaves = {leaf.path: leaf for leaf in begun.save.structure.leaves}
            entries = begun.entries.items()
            chunks = {each: chunk_shape(leaves[each], entry.chunk_bytes) for each, entry in entries}
            begun.save.described = self._stock.finalize(epath.Path(path), begun.entries, chunks)
        begun.save.commit(path)

    @jax_settings.own()
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
        args, path = args or RestoreArgs(), _absolute(directory)
        try:
            return self._restore(path, args)
        except (FormatError, IntegrityError, LineageError) as error:
            if not args.fallback:
                raise
            return self._restore_older(path, args, error)

    def _restore_older(self, path: Path, args: RestoreArgs, error: AdaCheckError) -> PyTree:
        """Restores the newest step before a bad one that can be: of its lineage, or an older one.

        The bad step's own lineage first: a step of it need not have a directory of its own.
        """
        wanted, end = roots.place_of(path).step, args.step
        older: list[roots.Step] = []
        if wanted is not None:
            wanted, stop = (wanted, wanted) if end is None else (end, end + 1)
            older = [s for s in roots.siblings(path) if s.directory != path and s.step < stop]
        bad: set[tuple[str, ...]] = set()  # the files of steps that cannot be restored
        inner, last = self._newest_within(path, args, bad), error
        plain = dataclasses.replace(args, step=None)
        while inner is not None or older:
            _log.warning("Skipping a step that cannot be restored: %s", last)
            if inner is not None and not (older and older[-1].step >= inner[1].end.step):
                (place, lineage), inner = inner, None
            else:
                place, lineage = older.pop().directory, None
            try:
                if lineage is None and self._resolve(place).files in bad:
                    raise IntegrityError(f"{place}: it has the files of a bad step.")
                state = self._restore_to(place, lineage or self._resolve(place), args)
            except (FormatError, IntegrityError, LineageError) as another:
                last = another
                if lineage is None:
                    found = filter(None, (inner, self._newest_within(place, plain, bad)))
                    inner = max(found, key=lambda each: each[1].end.step, default=None)
                continue
            assert self.restored is not None
            _log.warning("Restored step %d instead of step %s.", self.restored.step, wanted)
            return state
        raise error

    def _newest_within(
        self, path: Path, args: RestoreArgs, bad: set[tuple[str, ...]]
    ) -> tuple[Path, Lineage] | None:
        """The newest step that is exact, of those that a bad step's directory holds.

        Args:
            path: the bad step's item directory.
            args: what to restore.
            bad: the files of steps that cannot be restored; those found here are added.
        """
        try:
            lineage = lineages.held(path)
            lineage = lineage if args.step is None else lineage.until(args.step)
        except (FormatError, IntegrityError, LineageError):  # no manifest in it is whole
            return None
        if lineage.files in bad:
            return None
        try:
            read = self._read(path, lineage, args)
            rounded = frozenset() if args.exact else read.rounded
            found = replay.newest_exact(read.leaves, lineage, read.programs, rounded=rounded)
        except (FormatError, IntegrityError):  # of the base, on which all of them build
            found = None
        files, good = lineage.files, [] if found is None else found.steps
        for part in map(lineage.to, lineage.steps[len(good) :]):
            bad.add((*files[: len(part.entries)], str(part.left_out)))
        return None if found is None else (path, found)

    def _restore(self, path: Path, args: RestoreArgs) -> PyTree:
        if args.step is None:
            return self._restore_to(path, self._resolve(path), args)
        return self._restore_to(path, self._earlier(path, args.step), args)

    def _restore_to(self, path: Path, lineage: Lineage, args: RestoreArgs) -> PyTree:
        """Restores the end of a lineage that a step's directory holds."""
        end = lineage.entries[-1]
        is_own = end.holder == path and not end.is_link
        if is_own and (misplaced := roots.misplaced(path, lineage.manifest)):
            _log.warning("%s: %s; it was moved there.", path, misplaced)
        read = self._read(path, lineage, args)
        leaves = replay.replay_onto(read.leaves, lineage, read.programs)
        rounded = check.check_bits(leaves, lineage, path, rounded=read.rounded)
        self.restored = self._tell(lineage, rounded, path, args.exact)
        named = {spec.path: leaf for spec, leaf in zip(lineage.base.leaves, leaves, strict=True)}
        if read.moved:
            read.target.move(read.moved, named)
        state = read.target.finish(named)
        if not rounded:
            place = roots.place_of(path)
            saver = self._saver_of(place)
            if is_own and not lineage.left_out:
                saver.follow(lineage, place.step, leaves, state)
            else:
                saver.forget()
        return state

    def _read(self, path: Path, lineage: Lineage, args: RestoreArgs) -> _Read:
        """Reads the base of a lineage to where its updates are to be replayed."""
        programs = CompiledUpdates(self._recorders, self._params_path)
        programs.begin_loading(lineage)
        damage = base_checkpoint.damaged_descriptions(lineage.base_directory, lineage.base)
        shardings_damage = damage.pop(manifests.SHARDINGS, None)
        for error in damage.values():
            raise error
        saved_tree = self._stock.described(lineage.base_directory)
        wishes = Wishes(
            args.abstract_state, args.strict, args.support_layout, args.fallback_sharding
        )
        target = Target(wishes, lineage.base, saved_tree, path, shardings_damage)
        placements = target.placements(lineage)
        bound = check.bound_to_mesh(lineage)
        there = target.saved_placements(lineage) if bound else {}
        wanted = placements | (there or {})
        programs.begin_compiling(lineage, wanted)
        empty = {
            leaf.path: target.empty(leaf, wanted.pop(leaf.path))
            for leaf in lineage.base.leaves
            if not leaf.nbytes
        }
        specs = {leaf.path: leaf for leaf in lineage.base.leaves}
        read = self._stock.read(lineage.base_directory, wanted, specs, saved_tree) | empty
        leaves = [read[leaf.path] for leaf in lineage.base.leaves]
        check.check_types(leaves, lineage.base, lineage.base_directory)
        moved = {each: placements[each] for each in there or ()}
        return _Read(target, programs, leaves, bound if there is None else frozenset(), moved)

    def _tell(
        self, lineage: Lineage, rounded: Sequence[int], path: Path, wants_exact: bool
    ) -> RestoreInfo:
        count = lineage.replayed_count
        paths = tuple(lineage.base.leaves[i].path for i in rounded)
        tolerance = check.tolerance(lineage, rounded) if rounded else 0.0
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
        lineage = self._resolve(_absolute(directory))
        for error in base_checkpoint.damaged_descriptions(
            lineage.base_directory, lineage.base
        ).values():
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

    def _earlier(self, path: Path, step: int) -> Lineage:
        """What an earlier step is restored from, of those that a directory holds."""
        try:
            return lineages.held(path).to(step)
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


@dataclass(frozen=True, slots=True)
class _Read:
    """A base that was read, and what is needed to replay updates onto it.

    Attributes:
        target: the caller's wishes.
        programs: the update, being compiled.
        leaves: the base's, where its updates are replayed.
        rounded: indices of the leaves that are replayed to rounding only, on the devices here.
        moved: the shardings that are wanted of leaves that are replayed elsewhere, by leaf path.
    """

    target: Target
    programs: CompiledUpdates
    leaves: list[Any]
    rounded: frozenset[int]
    moved: dict[str, Any]


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
            that is wanted. ``ocp.PLACEHOLDER`` leaves a leaf out, and so does None or an empty node
            in its place (a ``MaskedNode`` of optax). A leaf of another data type of
            the same kind (float32 for bfloat16) is cast, after it was verified. None restores
            everything onto the shardings that it was saved with.
        strict: as for ``StandardRestore``: False truncates or pads leaves whose shape differs.
        support_layout: as for ``StandardRestore``: restore with the layouts in the abstract state.
        fallback_sharding: as for ``StandardRestore``: used where no sharding is given and the one
            that a leaf was saved with does not exist here.
        fallback: where the step cannot be restored, restore the newest one before it that can, and
            log what was skipped and why; ``handler.restored.step`` tells which it was. It may be
            one that the bad step's directory holds, of those that it builds on, and have no
            directory any more. Otherwise a bad step is an error: training should not restart from
            an older step unasked.
        step: an earlier step, of those that the restored directory holds: one that was recorded
            (:meth:`AdaCheckHandler.record_step`) and saved with it, or one that it builds on, also
            where the directory's own step is damaged. The next save is a base then.
        exact: refuse a step of which some bits can only be had to rounding here: the update adds up
            elements, and the devices that it was saved from do not exist.
        item: ``abstract_state`` by the name that ``StandardRestore`` has for it.

    Raises:
        ValueError: both ``abstract_state`` and ``item`` are given.
    """

    abstract_state: PyTree | None = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    fallback: bool = False
    step: int | None = None
    exact: bool = False
    item: PyTree | None = None

    def __post_init__(self) -> None:
        if self.item is None:
            return
        if self.abstract_state is not None:
            raise ValueError("expected abstract_state or item, which are the same, found both.")
        self.abstract_state, self.item = self.item, None


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


def _absolute(directory: epath.Path) -> Path:
    """The path as Orbax wants it, for numbers and keys at least."""
    return Path(directory).absolute()


async def _nothing() -> None:
    """Completes when what Orbax has promised for this save (its directories) is there."""


def _wait_for_directories() -> None:
    with contextlib.suppress(TimeoutError):
        CommitFutureAwaitingContractedSignals(_nothing()).result(_DIRECTORIES_S)


@contextlib.contextmanager
def _directories_made() -> Iterator[None]:
    """Lets Orbax's threads finish where a save is refused.

    They are making directories, and wait for each other for ten minutes if it is refused meanwhile;
    then the process cannot end. Where the disk is why it is refused they never will, and nobody
    tells.
    """
    try:
        yield
    except Exception:
        _wait_for_directories()
        raise


def _place_while_saved(directory: Path) -> Place:
    """Where a step is being saved, also where no temporary name tells an item from a step."""
    if not roots.is_written_in_place(directory):
        return roots.place_of(directory)
    _wait_for_directories()
    marks = directory / STEP_METADATA, directory.parent / STEP_METADATA
    until_s = time.monotonic() + _STEP_METADATA_S
    # Orbax writes it from a thread of its own, just after it has made the directories.
    while directory.exists() and not any(each.exists() for each in marks):
        if time.monotonic() > until_s:
            break
        time.sleep(0.001)
    return roots.place_of(directory)


async def _written(save: Save, directory: Path) -> None:
    if roots.is_written_in_place(directory):
        durable.write(directory / IN_PLACE, b"")  # before anything else: see is_committed
    with jax_settings.own():  # nothing is awaited meanwhile
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
