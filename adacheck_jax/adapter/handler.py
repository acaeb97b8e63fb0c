"""The checkpoint handler: Orbax's calls to save, commit, restore and describe steps."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from adacheck_jax.adapter import descriptions, directories, inputs
from adacheck_jax.adapter.arguments import RestoreArgs, RestoreInfo, SaveArgs
from adacheck_jax.adapter.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.descriptions import Entry, stored_dtype
from adacheck_jax.adapter.restoring import StepRestorer, resolve
from adacheck_jax.device import jax_settings, replicas
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    StorageError,
    storage_named,
)
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.save.commit import Save
from adacheck_jax.save.exported_update import Check
from adacheck_jax.save.saver import Saver
from adacheck_jax.save.share import Destination
from adacheck_jax.save.situation import Delta, Options
from adacheck_jax.store.base_writer import Name, chunk_shape
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.lineage import IN_PLACE
from adacheck_jax.store.steps.roots import Place
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.store.zarr import Compression
from adacheck_jax.update.binding import RecorderArgument, recorders_of

_log = logging.getLogger(__name__)


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
            difference of every leaf to the step before. ``"bits"`` always stores differences; it
            needs no recorder, saves any pytree, and pays where few bits change, as in bfloat16
            weights at small learning rates. Differences need a host copy of the last saved state.
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
        compression: lossless. ``"none"`` stores records and whole leaves as they are, and
            compresses the differences of a delta alone, which exist to be compressed; ``"fast"``
            compresses all with LZ4, ``"small"`` with zstd, which takes about three times as long
            and gives a little less. A sample tells what of a leaf compresses: of gradients the
            exponents.
        check_replicas: what to do when devices that are declared to hold the same bits do not,
            which every save looks for by their fingerprints: ``"warn"`` logs which and saves the
            step as one of them has it; ``"raise"`` refuses
            it with a :class:`ReplicaError`, at the next save or wait where saves are asynchronous;
            ``"off"`` does not look. Each device reads what it holds once, as for any fingerprint.

    Attributes:
        restored: what the last restore gave; None before it.

    Raises:
        ValueError: ``max_deltas`` is negative, or ``delta``, ``check``,
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
        compression: Compression = "none",
        check_replicas: replicas.Mode = "warn",
    ) -> None:
        self._options = Options(
            max_deltas, params_path, keep_lineage, delta, check, compression, check_replicas
        )
        self._recorders = recorders_of(recorder)
        self.restored: RestoreInfo | None = None
        # Managers, or one manager's saves and restores, may call from several threads.
        self._lock = threading.Lock()
        self._savers: dict[tuple[AnyPath, str | None], Saver] = {}
        self._stock = StockCheckpoints()
        self._restorer = StepRestorer(self._stock, self._recorders, params_path)
        self._begun: dict[AnyPath, _Begun] = {}

    async def async_save(self, directory: epath.Path, args: SaveArgs) -> list[ocp.Future]:
        """Start a save: decide between base and delta, stage the state, and begin to write.

        When this returns, every buffer of the state may be donated.

        Args:
            directory: temporary directory of the item; it need not exist yet.
            args: arguments of the save.

        Returns:
            Futures that complete when this process's share is durable.

        Raises:
            StorageError: the root cannot be written.
            RecorderError: the recorder cannot be tied to the state.
            MismatchError, FormatError: a leaf of the state cannot be stored.
            ValueError: ``args.step`` is not a step number.
        """
        with directories.made_even_if_refused():
            begun, stored = self._begin(directory, args)
            return await self._write(directory, begun, stored)

    @jax_settings.own()
    def _begin(self, directory: epath.Path, args: SaveArgs) -> tuple[_Begun, SaveArgs]:
        """Begin a save on the caller's thread, under the caller's jax settings.

        Returns:
            The save, and the state as it is to be stored with the arguments for Orbax.
        """
        if "://" in str(directory):
            raise StorageError(
                f"{directory}: expected a path on a mounted file system, found a remote one, which "
                "this release cannot write. Nothing was saved; mount it, or save to a local root."
            )
        path = _absolute(directory)
        final = roots.committed_path(path)
        directories.check_writable(final)
        state = inputs.checked_state(args.state, args.save_args)
        step = inputs.step_number(args.step)
        state, save_args, cast = inputs.apply_casts(state, args.save_args)
        place = directories.place_while_saved(path)
        custom_metadata = inputs.json_copy(args.custom_metadata)
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
            # Several saves may be under way: items of one step, or several managers. A save that
            # this process never commits (it failed, or another process commits) is dropped when
            # its line goes on.
            self._begun = {p: each for p, each in self._begun.items() if each.line != place.line}
            self._begun[final] = begun
        return begun, SaveArgs(state, save_args=save_args, custom_metadata=custom_metadata)

    async def _write(
        self, directory: epath.Path, begun: _Begun, stored: SaveArgs
    ) -> list[ocp.Future]:
        futures: list[ocp.Future] = []
        names: dict[str, Name] = {}
        save, path = begun.save, _absolute(directory)
        if save.is_base:
            futures, begun.entries = await self._stock.write(
                epath.Path(path), stored.state, stored.save_args, stored.custom_metadata
            )
            names = {
                leaf.path: Name(entry.name, stored_dtype(leaf.dtype), entry.chunk_bytes)
                for leaf in save.staged.structure.leaves
                if (entry := begun.entries.get(leaf.path))
            }
        written = _written(save, path, names)
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
            check found it wrong, the recorded steps take as much host memory as a base (or 256
            MiB, if that is more), or the lineage would be longer than ``max_deltas``. With several
            processes all get the same answer.

        Raises:
            ValueError: the step is no step number, or comes before the last one, or was saved with
                other update counters, or the handler saves several lines of steps.
            AdaCheckError: steps recorded before are lost; told once, and recording goes on.
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
        return bool(savers) and savers[0].defer(state, step)

    def save(self, directory: epath.Path, args: SaveArgs) -> None:
        """Save synchronously, also inside a running event loop; see :meth:`async_save`."""
        with directories.made_even_if_refused(), ThreadPoolExecutor(1) as thread:
            writing = self._write(directory, *self._begin(directory, args))
            futures = thread.submit(asyncio.run, writing).result()
        for future in futures:
            future.result()

    @jax_settings.own()
    def finalize(self, directory: epath.Path) -> None:
        """Commit a save; Orbax calls this on one process, after every process's futures.

        Raises:
            AdaCheckError: this handler began no save into that directory.
        """
        path = _absolute(directory)
        with self._lock:
            begun = self._begun.pop(roots.committed_path(path), None)
        if begun is None:
            raise AdaCheckError(
                f"{directory}: expected to commit a save that this handler began, found none. "
                "Call finalize once, on the handler that saved; nothing was committed."
            )
        with storage_named(begun.save.staged.destination.directory), begun.save.committing(path):
            self._commit(path, begun)

    def _commit(self, path: Path, begun: _Begun) -> None:
        described: Mapping[str, str] = {}
        if begun.save.is_base:
            leaves = {leaf.path: leaf for leaf in begun.save.staged.structure.leaves}
            entries = begun.entries.items()
            chunks = {each: chunk_shape(leaves[each], entry.chunk_bytes) for each, entry in entries}
            described = self._stock.finalize(epath.Path(path), begun.entries, chunks)
        begun.save.commit(path, described)

    @jax_settings.own()
    def restore(self, directory: epath.Path, args: RestoreArgs | None = None) -> PyTree:
        """Restore a step, bit-exact and verified.

        Sets ``self.restored``: the step's number, which ``fallback`` may make an older one, and
        how exact it is.

        Args:
            directory: directory of the item.
            args: arguments of the restore. Without an abstract state every leaf is restored as it
                was saved, and containers become dictionaries and lists.

        Returns:
            The state.

        Raises:
            MismatchError: the abstract state does not fit the saved state.
            LineageError: a step that this one builds on is missing.
            IntegrityError: stored bits are damaged, or restored bits differ from the saved ones.
            FormatError: a file is missing or cannot be read.
        """
        restored = self._restorer.restore(_absolute(directory), args or RestoreArgs())
        self.restored = restored.info
        if restored.info.exact:
            place = roots.place_of(restored.directory)
            saver = self._saver_of(place)
            if restored.is_own:
                saver.follow(restored.lineage, place.step, restored.leaves, restored.state)
            else:
                saver.forget()
        return restored.state

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's tree metadata of a base or delta step.

        Raises:
            LineageError: a step that this one builds on is missing.
            IntegrityError: a file that describes the base is damaged.
            FormatError: a manifest is missing or cannot be read.
        """
        lineage = resolve(_absolute(directory))
        damage = descriptions.damaged_descriptions(lineage.base_directory, lineage.base)
        for error in damage.values():
            raise error
        metadata = self._stock.metadata(lineage.base_directory)
        if isinstance(lineage.manifest, BaseManifest):
            return metadata
        return type(metadata).build(metadata.tree, custom_metadata=lineage.manifest.custom_metadata)

    def close(self) -> None:
        """Release the resources of Orbax's handlers and of the savers; called by the manager."""
        with self._lock:
            savers = [*self._savers.values()]
        for saver in savers:
            saver.close()
        self._stock.close()

    def _saver_of(self, place: Place) -> Saver:
        """The saver of a line of steps; a handler may serve several items and managers."""
        with self._lock:
            if place.line not in self._savers:
                self._savers[place.line] = Saver(self._recorders, self._options)
                self._learn_parents(*place.line)
            return self._savers[place.line]

    def _learn_parents(self, root: AnyPath, item: str | None) -> None:
        """Tell the preservation policy which step each delta on disk builds on."""
        if self._options.keep_lineage is None:
            return
        for step in roots.steps_of(root, item):
            if isinstance(step.manifest, DeltaManifest):
                parent = roots.place_of(step.directory / step.manifest.parent.reference).step
                number = roots.place_of(step.directory).step
                if number is not None and parent is not None:
                    self._options.keep_lineage.note(number, parent)


@dataclass(slots=True)
class _Begun:
    """A save that is not committed yet.

    Attributes:
        line: root and item that the step belongs to.
        save: the save.
        entries: arrays of a base that Orbax left to this library, by leaf path.
    """

    line: tuple[AnyPath, str | None]
    save: Save
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)


def _absolute(directory: epath.Path) -> Path:
    """An absolute path, which Orbax demands for numbers and PRNG keys."""
    return Path(directory).absolute()


async def _written(save: Save, directory: Path, names: Mapping[str, Name]) -> None:
    """Write this process's share of a save."""
    if roots.is_written_in_place(directory):
        # Before any other file: it marks the directory as not committed (see is_committed).
        mark = at(directory / IN_PLACE)
        mark.write(b"")
        mark.sync()
    with jax_settings.own():  # set for this thread, so nothing may be awaited inside
        save.write(directory, names)


ocp.args.register_with_handler(AdaCheckHandler, for_save=True)(SaveArgs)
ocp.args.register_with_handler(AdaCheckHandler, for_restore=True)(RestoreArgs)
