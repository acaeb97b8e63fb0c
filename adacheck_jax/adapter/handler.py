"""The checkpoint handler: Orbax's calls to save, commit, restore and describe steps."""

# Threads: a manager calls save and restore on the caller's threads, and finalize on one of its own.
# ``_lock`` is held for a change of ``_begun`` alone; nothing is called while it is held. Finalize
# alone changes ``_marked``, and a manager runs one finalize at a time.

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.arguments import (
    HANDLER_NAME,
    RestoreArgs,
    RestoreInfo,
    SaveArgs,
)
from adacheck_jax.adapter.reports import OnSave, SaveReport
from adacheck_jax.adapter.restoring.finding import described_lineage
from adacheck_jax.adapter.saving.saves import Begun
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.device import replicas
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.plan.options import Delta, Options, Shadow
from adacheck_jax.schedule.line import MaxDeltas
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps import deletion, marks, roots
from adacheck_jax.store.steps.roots import Line
from adacheck_jax.store.storage.location import AnyPath, located
from adacheck_jax.store.zarr import Compression
from adacheck_jax.update.binding import RecorderArgument


class HandlerOptions(TypedDict, total=False):
    """Options of :class:`AdaCheckHandler`, for calls that make one."""

    max_deltas: MaxDeltas
    params_path: str | Mapping[str, str] | None
    delta: Delta
    compression: Compression
    check_replicas: replicas.Mode
    shadow: Shadow | None
    ephemeral: Sequence[str]
    on_save: OnSave | None


class AdaCheckHandler(ocp.AsyncCheckpointHandler):
    """Saves every step: periodic bases, and deltas between them.

    :func:`checkpoint_manager` makes one with its manager. By itself it works wherever Orbax takes a
    handler, as in a framework that makes the manager::

        handler = adacheck.AdaCheckHandler(recorder)
        manager = ocp.CheckpointManager(root, item_handlers=handler)

    One handler follows one training run: it remembers the step that it saved or restored last,
    which the next delta builds on.

    Args:
        recorder: the :class:`Recorder` in the optimizer chain, or the chain. Several optimizers in
            one state (a GAN, an actor and a critic) have one each: give a list of them, or, where
            they cannot be told apart by the shapes of their params, a dictionary by leaf-path
            prefix of the optimizer state. Without one every save is a base, and every restore still
            works.
        max_deltas: longest lineage: a restore replays at most this many updates, and with a policy
            up to twice as many while a base is made in the background. ``"auto"`` is
            ``AdaptivePolicy()``; an :class:`AdaptivePolicy` chooses the number that loses least
            time to saves and failures, from what saves and restores are measured to take. Until
            two bases were saved it is 20.
        delta: ``"auto"`` replays updates, and where that is not exact stores the bit-pattern
            difference of every leaf to the step before. ``"bits"`` always stores differences; it
            needs no recorder, saves any pytree, and pays where few bits change, as in bfloat16
            weights at small learning rates. Differences need a host copy of the last saved state.
        params_path: leaf path of the trained params in the state, such as ``"params"``; needed
            only where several subtrees have the recorded shapes (an EMA copy). With several
            recorders a dictionary by leaf-path prefix of the optimizer state.
        keep_lineage: the preservation policy given to the manager, where the file system has no
            hard links.
        compression: lossless. ``"none"`` stores records and whole leaves as they are, and
            compresses the differences of a delta alone, which exist to be compressed; ``"fast"``
            compresses all with LZ4, ``"small"`` with zstd, which takes about three times as long
            and gives a little less. A sample tells what of a leaf compresses: of gradients the
            exponents.
        check_replicas: what to do when devices that are declared to hold the same bits do not,
            which every save looks for by their fingerprints: ``"warn"`` logs which, and saves the
            step as one of them has it, named by :attr:`RestoreInfo.replica`; ``"raise"`` refuses it
            with a :class:`ReplicaError`, at the next save or wait where saves are asynchronous;
            ``"off"`` does not look. Each device reads what it holds once, as for any fingerprint.
        shadow: the copy of the state that follows training, with which all of a delta's replay is
            compared before the delta is saved. None for no copy: then a sample is compared, small
            leaves whole, and of each large leaf a block at a position that changes from save to
            save; what touches few elements of a large leaf may be missed. Leaves that replay does
            not reproduce are stored. Where a save had returned before its step was computed, the
            state is gone when that is found: the save fails, and the run becomes cautious: from
            then on saves are checked before they return.
        ephemeral: patterns of the paths of leaves, or of nodes above them, that are saved with
            bases alone, such as ``("*/residual",)`` for what error feedback keeps: a step in
            between is restored with the bits that they had at the last base, and
            :attr:`RestoreInfo.stale` says so. ``*`` stands for any text. No Recorder's update may
            take or return them.
        on_save: called with the :class:`SaveReport` of each save once its manifest is on the disk,
            in the background and in the process that commits it. Orbax gives the step its name
            after that, and waits for the callback: let it be short. An error in it is logged.

    Attributes:
        run: steps that the run has saved and restored, shared with the handler for Orbax v1.
        restored: what the last restore gave; None before it.
        last_save: report of the last save that this process committed; None before it.

    Raises:
        ValueError: ``max_deltas`` is negative or none of these, ``delta``, ``compression``,
            ``check_replicas`` or ``shadow`` is none of these, or the shadow has a directory, and
            there are ephemeral leaves, or nothing that it follows.
        RecorderError: there is no recorder in what was given as one.
    """

    @classmethod
    def typestr(cls) -> str:
        """Name that Orbax writes beside every step, and finds the handler by: it never changes."""
        return HANDLER_NAME

    def __init__(
        self,
        recorder: RecorderArgument = None,
        *,
        max_deltas: MaxDeltas = "auto",
        params_path: str | Mapping[str, str] | None = None,
        keep_lineage: KeepLineage | None = None,
        delta: Delta = "auto",
        compression: Compression = "none",
        check_replicas: replicas.Mode = "warn",
        shadow: Shadow | None = Shadow(),
        ephemeral: Sequence[str] = (),
        on_save: OnSave | None = None,
    ) -> None:
        options = Options(
            *(max_deltas, params_path, keep_lineage, delta),
            *(compression, check_replicas, shadow, ephemeral),
        )
        self.run = TrainingRun(recorder, options, on_save=on_save)
        self._lock = threading.Lock()  # a manager's saves and restores may be on several threads
        self._begun: dict[AnyPath, Begun] = {}
        self._marked = set[Line]()  # lines whose steps Orbax marks; a look costs a request

    @property
    def restored(self) -> RestoreInfo | None:
        """Report of the last restore; None before it."""
        return self.run.restored

    @property
    def last_save(self) -> SaveReport | None:
        """Report of the last save that was committed; None before it, and in other processes."""
        return self.run.saves.last

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
            MismatchError: a leaf of the state cannot be stored.
            ValueError: ``args.step``, or the number in the directory's name, is not a step number.
        """
        with directories.made_even_if_refused(directory):
            return await self.run.saves.write(located(str(directory)), self._begin(directory, args))

    def _begin(self, directory: epath.Path, args: SaveArgs) -> Begun:
        path = located(str(directory))
        begun = self.run.saves.begin(path, lambda: directories.place_while_saved(path), args)
        with self._lock:
            # Several saves may be under way: items of one step, or several managers. A save that
            # this process never commits (it failed, or another process commits) is dropped when
            # its line goes on.
            self._begun = {p: each for p, each in self._begun.items() if each.line != begun.line}
            self._begun[begun.save.directory] = begun
        return begun

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
        return self.run.saves.record_step(state, step)

    def recover(
        self, root: AnyPath | str, abstract_state: PyTree, *, item: str | None = None
    ) -> tuple[int, PyTree] | None:
        """The state that processes which were killed have left in memory.

        Of several processes all call it, and get the newest step of which all parts lie in files of
        theirs, wherever a process is now; with copies also that of a machine that is gone.

        For the beginning of a run, before its newest step is read from storage::

            if (recovered := handler.recover(root, abstract_state)) is not None:
                newest, state = recovered
                first = newest + 1
            elif (newest := manager.latest_step()) is not None:
                state = manager.restore(newest, args=adacheck.RestoreArgs(abstract_state))
                first = newest + 1

        The step may be newer than the newest one in storage: it was recorded and not saved, or its
        save did not end. One that is older than that is not given. If it is the newest one in
        storage the next save is a delta of it, if it can be; else it is a base.

        Args:
            root: the directory or URL given to the checkpoint manager.
            abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays, of the
                whole state: the form in which it is returned. The mesh may be another one.
            item: name of the item, where the directory has the states of several.

        Returns:
            The number of the step and its state, each leaf compared with the fingerprint that was
            taken of it on the devices; None if there is none that is whole and as new as storage:
            the log says why. Then what storage has is as it was.

        Raises:
            ValueError: the handler's shadow has no directory, or it has states of several items
                and none is named.
            RecorderError: the recorder cannot be tied to the state.
        """
        return self.run.recover(root, abstract_state, item)

    def save(self, directory: epath.Path, args: SaveArgs) -> None:
        """Save synchronously, also inside a running event loop; see :meth:`async_save`."""
        with directories.made_even_if_refused(directory), ThreadPoolExecutor(1) as thread:
            writing = self.run.saves.write(located(str(directory)), self._begin(directory, args))
            futures = thread.submit(asyncio.run, writing).result()
        for future in futures:
            future.result()

    def finalize(self, directory: epath.Path) -> None:
        """Commit a save; Orbax calls this on one process, after every process's futures.

        Orbax then gives the directory its final name, or marks it. Without a checkpointer or a
        manager around the handler the step is committed when this returns.

        Raises:
            AdaCheckError: this handler began no save into that directory.
        """
        path = located(str(directory))
        with self._lock:
            begun = self._begun.pop(roots.committed_path(path), None)
        if begun is None:
            raise AdaCheckError(
                f"{directory}: expected to commit a save that this handler began, found none. "
                "Call finalize once, on the handler that saved; nothing was committed."
            )
        self.run.saves.commit(path, begun)
        if roots.is_written_in_place(path) and begun.line not in self._marked:
            with storage_named(begun.save.directory):
                if not marks.finalize(path):
                    self._marked.add(begun.line)

    def restore(self, directory: epath.Path, args: RestoreArgs | None = None) -> PyTree:
        """Restore a step, bit-exact and verified; one that stock Orbax saved, as Orbax reads it.

        Sets ``self.restored``: the step's number, which ``skip_damaged`` may make an older one, how
        exact it is, and if it was verified.

        Args:
            directory: directory of the item.
            args: arguments of the restore. Without an abstract state every leaf is restored as it
                was saved, and containers become dictionaries and lists.

        Returns:
            The state.

        Raises:
            MismatchError: the abstract state does not fit the saved state.
            StepDeletedError: the step was deleted before or while it was read.
            LineageError: a step that this one builds on is missing.
            IntegrityError: stored bits are damaged, or restored bits differ from the saved ones.
            FormatError: a file is missing or cannot be read.
        """
        return self.run.restore(located(str(directory)), args or RestoreArgs())

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's tree metadata of a base or delta step, or of one that stock Orbax saved.

        Raises:
            StepDeletedError: the step was deleted before or while it was read.
            LineageError: a step that this one builds on is missing.
            IntegrityError: a file that describes the base is damaged.
            FormatError: a manifest is missing or cannot be read.
        """
        path = located(str(directory))
        with deletion.detected(path):
            if roots.is_stock(path):
                return self.run.stock.metadata(path)
            lineage = described_lineage(path)
            metadata = self.run.stock.metadata(lineage.base_directory)
        if isinstance(lineage.manifest, BaseManifest):
            return metadata
        return type(metadata).build(metadata.tree, custom_metadata=lineage.manifest.custom_metadata)

    def close(self) -> None:
        """Release the resources of Orbax's handlers and of the savers; called by the manager.

        A shadow's file is let go of, and stays.
        """
        self.run.close()


ocp.args.register_with_handler(AdaCheckHandler, for_save=True)(SaveArgs)
ocp.args.register_with_handler(AdaCheckHandler, for_restore=True)(RestoreArgs)
