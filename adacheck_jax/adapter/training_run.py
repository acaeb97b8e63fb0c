"""One training run: what handlers of either Orbax API remember between the steps that they save."""

# Threads: begin, record_step and restore run on the caller's threads, write on Orbax's event loop
# and the threads of its futures, commit on a thread of the manager's. ``_lock`` guards ``_savers``;
# while it is held a saver may be made and a root be listed, but no method of a saver is called that
# takes the saver's own lock. ``_meeting`` is held while all processes hear of each other, once.
# ``restored`` and ``last_save`` are replaced whole.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter import directories, inputs, processes
from adacheck_jax.adapter.arguments import KEPT, RestoreArgs, RestoreInfo, SaveArgs
from adacheck_jax.adapter.coordination.agreeing import LONGEST_S, RestoreAgreement
from adacheck_jax.adapter.coordination.calls import Calls
from adacheck_jax.adapter.in_memory.gate import Neighbours
from adacheck_jax.adapter.in_memory.recovery import NoFilesError, RecoveringProcesses, found_files
from adacheck_jax.adapter.in_memory.replaying import replay
from adacheck_jax.adapter.processes import ServiceExchange
from adacheck_jax.adapter.reports import Announcer, OnSave, SaveReport, report_of
from adacheck_jax.adapter.restoring import Restored, StepRestorer, resolve, stock_info
from adacheck_jax.adapter.share_future import ShareFuture
from adacheck_jax.adapter.stock import descriptions
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints, described
from adacheck_jax.adapter.stock.descriptions import ArrayEntry, stored_dtype
from adacheck_jax.device import jax_settings
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.sending.consent import Consent
from adacheck_jax.plan.options import Options
from adacheck_jax.save import commit
from adacheck_jax.save.attempt import BEGUN, Exchange, Report
from adacheck_jax.save.line.kept import Keeper
from adacheck_jax.save.one_save import Save
from adacheck_jax.save.resuming import Newest
from adacheck_jax.save.saver import Saver
from adacheck_jax.schedule.stopwatch import Clock
from adacheck_jax.store.base_writer import ArrayLayout, Name
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.lookup import referred
from adacheck_jax.store.steps.roots import Line, Place
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.update.binding import RecorderArgument, recorders_of

_log = logging.getLogger(__name__)

_PREPARED = "prepared"
"""Topic of the exchange about the saves of which all processes have taken the state."""


@dataclass(slots=True)
class Begun:
    """A save that is not committed yet.

    Attributes:
        line: root and item that the step belongs to.
        save: the save.
        begin_s: reading of the clock when the caller called.
        together: exchange of the processes that begin it; None if there is none.
        is_again: True if it writes what storage refused before.
        returned_s: reading of the clock when the rest was left to the background; 0 before.
        entries: arrays of a base that Orbax left to this library, by leaf path.
        names: the same as they are stored.
    """

    line: Line
    save: Save
    begin_s: float
    together: ServiceExchange | None
    is_again: bool
    returned_s: float = 0.0
    entries: Mapping[str, ArrayEntry] = dataclasses.field(default_factory=dict)
    names: Mapping[str, Name] = dataclasses.field(default_factory=dict)

    @property
    def final(self) -> AnyPath:
        """Directory of the item once it is committed."""
        return self.save.directory

    @property
    def exchange(self) -> Exchange | None:
        """Exchange with the other processes; None if there is none."""
        return self.save.attempt.exchange


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """State of a save that was begun, but not in Orbax yet: another thread does that.

    Attributes:
        begun: the save.
        stored: the state as it is to be stored, with the arguments for Orbax.
    """

    begun: Begun
    stored: SaveArgs

    def into(self, directory: AnyPath) -> tuple[Begun, SaveArgs]:
        """The save, once Orbax makes its directory.

        Raises:
            AdaCheckError: it was begun for another one.
        """
        if (final := roots.committed_path(directory)) != self.begun.final:
            raise AdaCheckError(f"{final}: expected {self.begun.final}. The step is not saved.")
        directories.check_writable(directory)
        return self.begun, self.stored


class TrainingRun:
    """Saves and restores the steps of one training run.

    A save is three calls: :meth:`begin` on the caller's thread, :meth:`write` in every process, and
    :meth:`commit` in one process, after the writes of all processes. :class:`AdaCheckHandler` says
    what its arguments and methods are.

    Args:
        recorder: the :class:`Recorder`, or several.
        options: the caller's choices.
        clock: a monotonic clock, by which costs are measured.
        on_save: called with the report of each save that this process committed.

    Attributes:
        keeps_refused: True if its manager writes again what storage refused; set before any step is
            saved or restored.
        left: set while no caller is in a manager that says so.
        calls: calls of the training loop; those of its manager, if that compares them.
    """

    def __init__(
        self,
        recorder: RecorderArgument,
        options: Options,
        clock: Clock = time.monotonic,
        on_save: OnSave | None = None,
    ) -> None:
        self._options, self._clock = options, clock
        self._recorders = recorders_of(recorder)
        if options.shadow_directory is not None and not self._recorders:
            raise ValueError(
                "expected a recorder with Shadow(directory=...), found none: without one there is "
                "no shadow to lie in it. Give it: AdaCheckHandler(recorder, ...)."
            )
        self.restored: RestoreInfo | None = None
        self.last_save: SaveReport | None = None
        self.keeps_refused = False
        self.left = threading.Event()
        self.left.set()
        self.calls = Calls("")
        self._described: SaveArgs | None = None
        self._announcer = Announcer(on_save)
        # Managers, or one manager's saves and restores, may call from several threads.
        self._lock = threading.Lock()
        self._process = OneProcess("AdaCheckHandler")
        self._meeting, shadow = threading.Lock(), options.shadow
        self._neighbours = Neighbours(shadow) if shadow and shadow.directory is not None else None
        self._savers: dict[Line, Saver] = {}
        self.stock = StockCheckpoints()
        self._restorer = StepRestorer(self.stock, self._recorders, options.params_path, clock)

    @property
    def described(self) -> str:
        """The options without which processes wait for each other in vain, in words."""
        shadow = self._options.shadow
        if shadow is None or shadow.directory is None:
            return "a handler without Shadow(directory=...)"
        kept = f"copies={shadow.copies}, records={shadow.records}"
        return f"a handler with Shadow(directory=..., {kept})"

    @property
    def has_recorder(self) -> bool:
        """True if it may go on to train."""
        return bool(self._recorders)

    @property
    def has_memory(self) -> bool:
        """True if a state may be recovered from memory."""
        return self._options.shadow_directory is not None

    @jax_settings.own()
    def begin(
        self, directory: AnyPath, place: Callable[[], Place], args: SaveArgs
    ) -> tuple[Begun, SaveArgs]:
        """Begin a save on the caller's thread, under the caller's jax settings.

        When this returns, every buffer of the state may be donated.

        Returns:
            The save, and the state as it is to be stored with the arguments for Orbax.
        """
        self._process.enter()
        if isinstance(args.state, PreparedSave):
            return args.state.into(directory)
        return self._taken(directory, place, args, BEGUN)

    def _taken(
        self, directory: AnyPath, place: Callable[[], Place], args: SaveArgs, topic: str
    ) -> tuple[Begun, SaveArgs]:
        """Takes what is saved out of a state; an error is told to who asks for the topic."""
        final, begin_s = roots.committed_path(directory), self._clock()
        exchange = processes.exchange(final)  # before anything is refused in one process alone
        together = exchange and exchange.watching(self.calls)
        try:
            with _told(exchange, topic), self._consent(exchange) as consent:
                if self._neighbours is not None and exchange is not None:
                    with self._meeting:  # before anything that may fail in one of them alone
                        self._neighbours.meet()
                directories.check_writable(directory)
                if args.state is not KEPT:
                    line, save, stored = self._begin(final, place, args, exchange, consent)
                    return Begun(line, save, begin_s, together, is_again=False), stored
                found = place()
                saver = self._saver_of(found)
                with storage_named(final):
                    save = saver.begin_kept(final, found.step, exchange)
                begun = Begun(found.line, save, begin_s, together, is_again=True)
                return begun, self._described or SaveArgs()
        except BaseException:
            self.note_gap(is_lost=exchange is not None and args.state is not KEPT)
            raise

    @jax_settings.own()
    def prepare(self, final: AnyPath, args: SaveArgs) -> PreparedSave:
        """Begin a save, of which :meth:`begin` is told later, in all processes or none.

        ``final`` is the directory of the item once it is committed.
        """
        self._process.enter()
        place = functools.partial(roots.place_of, final, in_step=True)
        begun, stored = self._taken(final, place, args, _PREPARED)
        self._meet(begun, _PREPARED)
        if not begun.save.is_base:
            begun.returned_s, begun.together = self._clock(), None  # nothing is left that may fail
            stored = dataclasses.replace(stored, state=None)  # which may be donated
        return PreparedSave(begun, stored)

    def note_gap(self, *, is_lost: bool = False) -> None:
        """Notes that the save of a step was refused; ``is_lost`` if others may have begun it."""
        with contextlib.suppress(ValueError):
            if (saver := self.saver) is not None:
                saver.note_gap(is_lost=is_lost)

    @property
    def keeper(self) -> Keeper | None:
        """The keeper of the steps in memory; None before the first, or of several lines."""
        with contextlib.suppress(ValueError):
            if (saver := self.saver) is not None:
                return saver.kept
        return None

    def _begin(
        self,
        final: AnyPath,
        place: Callable[[], Place],
        args: SaveArgs,
        exchange: Exchange | None,
        consent: Consent | None,
    ) -> tuple[Line, Save, SaveArgs]:
        state = inputs.checked_state(args.state, args.save_args)
        step = inputs.step_number(args.step)
        file_bytes = inputs.file_bytes(args.ocdbt_target_data_file_size)
        state, save_args, cast = inputs.apply_casts(state, args.save_args)
        found = place()
        inputs.step_number(found.step, "give the manager steps from 0 on")
        custom_metadata = inputs.json_copy(args.custom_metadata)
        if not self._savers:
            _log.info("%s: the first save of a process compiles and exports programs.", final)
        with storage_named(final):
            save = self._saver_of(found).begin(
                final,
                found.step,
                state,
                step,
                cast=cast,
                custom_metadata=custom_metadata,
                exchange=exchange,
                consent=consent,
            )
        stored = SaveArgs(
            state,
            save_args=save_args,
            custom_metadata=custom_metadata,
            ocdbt_target_data_file_size=file_bytes,
        )
        return found.line, save, stored

    async def write(self, directory: AnyPath, begun: Begun, stored: SaveArgs) -> list[ocp.Future]:
        """Start to write this process's share of what :meth:`begin` returned.

        Returns:
            Futures that complete when this process's share is durable. They wait for the
            directories that Orbax makes.
        """
        futures: list[ocp.Future] = []
        save = begun.save
        try:
            if save.is_base:
                futures = await self._write_base(directory, begun, stored)
        except Exception as error:
            self._refuse(begun, error)
            raise
        self._meet(begun, BEGUN)
        layout = ArrayLayout(begun.names, stored.ocdbt_target_data_file_size)
        futures.append(ShareFuture(save, directory, layout, self.left))
        if not begun.returned_s:
            self._saver_at(begun.line).returns()
            begun.returned_s = self._clock()
        return futures

    def _meet(self, begun: Begun, topic: str) -> None:
        """Waits until all processes have come as far with a save that they begin alike.

        Else who goes on waits in Orbax for who does not.

        Raises:
            AdaCheckError: another process could not, or some save a base and others a delta.
        """
        if begun.together is not None:
            own, judge = {"is_base": begun.save.is_base}, functools.partial(_alike, begun.final)
            try:
                begun.together.agree(topic, own, judge)
            except Exception as error:
                self._refuse(begun, error)
                raise

    def _refuse(self, begun: Begun, error: Exception) -> None:
        """Notes that several processes do not go on with a save that was begun."""
        if begun.together is not None:
            self._saver_at(begun.line).refuse(begun.save, error, is_again=begun.is_again)
            self.note_gap(is_lost=not begun.is_again)

    def _saver_at(self, line: Line) -> Saver:
        with self._lock:
            return self._savers[line]

    async def _write_base(
        self, directory: AnyPath, begun: Begun, stored: SaveArgs
    ) -> list[ocp.Future]:
        """Start to write what Orbax writes of a base."""
        save = begun.save
        if save.keeps:
            self._described = dataclasses.replace(stored, state=described(stored.state))
        with _told(begun.exchange, BEGUN):
            futures, begun.entries = await self.stock.write(
                epath.Path(str(directory)),
                stored.state,
                stored.save_args,
                stored.custom_metadata,
            )
        begun.names = {
            leaf.path: Name(
                entry.name, stored_dtype(leaf.dtype), leaf.chunk_shape(entry.chunk_bytes)
            )
            for leaf in save.structure.leaves
            if (entry := begun.entries.get(leaf.path))
        }
        return futures

    @jax_settings.own()
    def commit(self, directory: AnyPath, begun: Begun) -> None:
        """Commit a save, in one process, once every process has written its share."""
        with storage_named(begun.final), commit.committing(begun.save, directory):
            digests: Mapping[str, str] = {}
            if begun.save.is_base:
                chunks = {path: each.chunk_shape for path, each in begun.names.items()}
                digests = self.stock.finalize(epath.Path(str(directory)), begun.entries, chunks)
            commit.commit(begun.save, directory, digests)
        report = report_of(begun.save, directory, begun.begin_s, begun.returned_s)
        self.last_save = report
        self._announcer.tell_saved(report)

    @jax_settings.own()
    def record_step(
        self, state: PyTree, step: int | None = None, *, away_bytes: int | None = None
    ) -> bool:
        """Take hold of a step for the next save; see :meth:`AdaCheckHandler.record_step`."""
        self._process.enter()
        inputs.expect_not_swapped(state, step)
        if (saver := self.saver) is None:
            inputs.checked_state(state)
            inputs.step_number(step)
            return False
        line = next(line for line, each in self._savers.items() if each is saver)
        is_own = away_bytes is None  # else the loop has called save
        with (
            self.calls.pending(f"record_step({step})", is_own=is_own) as count,
            self._consent(f"{line}, recorded") as consent,
        ):
            state = inputs.checked_state(state)
            step = inputs.step_number(step)
            is_kept = saver.defer(state, step, away_bytes=away_bytes, consent=consent)
            count(is_kept)
        return is_kept

    @contextlib.contextmanager
    def _consent(self, call: Exchange | str | None) -> Iterator[Consent | None]:
        """Consent of all processes to collectives in a call of all of them, or their refusal.

        The call is told by its exchange, or by a name, before anything fails in one of them.
        """
        found = None
        if self._recorders and jax.process_count() > 1:
            if isinstance(call, str):
                own = processes.exchange(call, is_save=False)
                call = own and own.watching(self.calls)
            exchange = call
            found = Consent(exchange.beside("copies")) if exchange is not None else None
        try:
            yield found
        except BaseException:
            if found is not None:
                found.refuse()
            raise
        if found is not None:
            for saver in [*self._savers.values()]:
                saver.leave(found)

    @property
    def saver(self) -> Saver | None:
        """The saver of the only line of steps; None before its first step.

        Raises:
            ValueError: there are several.
        """
        with self._lock:
            savers = [saver for saver in self._savers.values() if saver.has_steps]
        if len(savers) > 1:
            raise ValueError(
                f"expected a handler that saves one line of steps, found {len(savers)}: it is not "
                "known which of them this step belongs to. Use one handler for each."
            )
        return None if self._process.is_elsewhere or not savers else savers[0]

    @jax_settings.own()
    def restore(self, directory: AnyPath, args: RestoreArgs) -> PyTree:
        """Restore a step, bit-exact and verified; see :meth:`AdaCheckHandler.restore`."""
        self._process.enter()
        exchange = processes.exchange(f"{directory}, restored", is_save=False)
        exchange = exchange and exchange.watching(self.calls)
        together = RestoreAgreement(exchange and exchange.within(LONGEST_S))
        try:
            inputs.expect_tree(args.abstract_state)
            restored = self._restorer.restore(directory, args, together.agreed)
            with together.agreed(), self._consent(exchange) as consent:
                return self._follow(restored, consent)
        except BaseException as error:
            together.leave(error)
            raise

    def _follow(self, restored: Restored, consent: Consent | None) -> PyTree:
        """Notes a restored step, which the next save may follow; gives its state."""
        if restored.lineage is None:
            self.note_stock(restored.directory)
            return restored.state
        self.restored = restored.info
        if restored.times is not None:
            self._announcer.tell_restored(restored.info, restored.times)
        if restored.info.verified and not restored.info.rounded:
            place = roots.place_of(restored.directory)
            saver = self._saver_of(place)
            if restored.is_own:
                saver.resumer.follow(
                    restored.lineage,
                    place.step,
                    restored.leaves,
                    restored.state,
                    restored.measured,
                    consent,
                )
            else:
                saver.resumer.forget()
        return restored.state

    @jax_settings.own()
    def recover(
        self, root: AnyPath | str, abstract_state: PyTree, item: str | None = None
    ) -> tuple[int, PyTree] | None:
        """The state that a killed process left in memory; see :meth:`AdaCheckHandler.recover`."""
        self._process.enter()
        if not self.has_memory:
            raise ValueError(
                "expected a handler whose shadow has a directory, found one without: nothing "
                "outlives its process. Make it with AdaCheckHandler(..., "
                'shadow=Shadow(directory="/dev/shm/...")).'
            )
        there, known, begin_s = located(str(root)), None, self._clock()
        peers = RecoveringProcesses(there, self.calls)
        self.calls.note("recover() or restore_newest()")
        try:
            inputs.expect_tree(abstract_state)
            found = found_files(str(self._options.shadow_directory), _told_root(there), item)
            name = peers.item(found, item, abstract_state)
            known = _newest(there, name or None)
            saver = self._saver_of(Place((there, name or None), None))
            with self._consent(f"{there}, recovered") as consent:
                args = abstract_state, known, found, peers, replay, consent
                made = saver.resumer.recover(*args)
            saver.note("recover_s", self._clock() - begin_s)
        except ShadowFileError as error:
            is_first = isinstance(error, NoFilesError) and not _has_steps(there)
            _log.log(
                logging.INFO if is_first else logging.WARNING,
                "The state is not recovered from memory (restore it from storage): %s.",
                error,
            )
            return None
        except BaseException as error:
            peers.fail(error)
            raise
        stored, count = "no step" if known is None else f"step {known.step}", made.replayed_count
        _log.info(
            "Step %d is recovered from %s (%d updates replayed); storage has %s.",
            *(made.step, peers.source, count, stored),
        )
        self.restored = RestoreInfo(made.step, count, (), 0.0, source=peers.source)
        return made.step, made.state

    def note_stock(self, directory: AnyPath) -> None:
        """Note that a step was restored that stock Orbax saved: the next save is a base."""
        _log.warning("%s: stock Orbax saved this step: it was read, and not verified.", directory)
        self.restored = stock_info(directory)
        self._saver_of(roots.place_of(directory)).resumer.forget()

    def close(self) -> None:
        """Release what the savers and Orbax's handlers hold; in a forked child nothing."""
        if self._process.is_elsewhere:
            return
        with self._lock:
            savers = [*self._savers.values()]
        for saver in savers:
            saver.close()
        self.stock.close()

    def _saver_of(self, place: Place) -> Saver:
        """The saver of a line of steps; a run may have several items and managers."""
        file, peers = None, None
        if (
            shadow := self._options.shadow_directory
        ) is not None and place.line not in self._savers:
            root, item = place.line
            file = FilePlace(str(shadow), _told_root(root), item or "")
            if self._neighbours is not None and jax.process_count() > 1:
                with self._meeting:
                    peers = self._neighbours.of(f"{root} {item}")
                file = file.of(peers)
        with self._lock:
            if place.line not in self._savers:
                root, item = place.line
                self._savers[place.line] = Saver(
                    *(self._recorders, self._options, self._clock, file, peers),
                    keeps=self.keeps_refused,
                )
                self._learn_parents(*place.line)
            return self._savers[place.line]

    def _learn_parents(self, root: AnyPath, item: str | None) -> None:
        """Tell the preservation policy which step each delta on disk refers to."""
        if self._options.keep_lineage is None:
            return
        for directory in roots.items_of(root):
            linked = at(directory / LINEAGE)
            is_complete = linked.on_file_system and linked.is_folder  # as most are: not read
            if item not in (None, directory.name) or is_complete:
                continue
            with contextlib.suppress(AdaCheckError):  # it is damaged, and nothing builds on it
                manifest = manifest_file.read(directory)
                if isinstance(manifest, DeltaManifest):
                    needed = [referred(directory, manifest.parent.reference)]
                    if linked.is_folder:  # copied from a disk: it has what the root lacks
                        needed = [each.holder for each in resolve(directory).entries]
                    number = roots.place_of(directory).step
                    for parent in (roots.place_of(each).step for each in needed):
                        if number is not None and parent is not None:
                            self._options.keep_lineage.note(number, parent)


def _alike(where: AnyPath, reports: Sequence[Report]) -> Report:
    """Refuses a step of which some processes save a base, and others a delta."""
    for process, each in enumerate(reports):
        if each["is_base"] != reports[0]["is_base"]:
            one, other = (0, process) if reports[0]["is_base"] else (process, 0)
            raise AdaCheckError(
                f"{where}: the {len(reports)} processes did not decide alike: process {one} "
                f"writes a base, and process {other} does not. The step is not saved. Check that "
                "all of them see the same root, and that their handlers have the same options."
            )
    return {}


@contextlib.contextmanager
def _told(exchange: Exchange | None, topic: str) -> Iterator[None]:
    """Tell the other processes of an error, or they would wait for this one."""
    try:
        yield
    except Exception as error:
        if exchange is not None:
            exchange.fail(topic, error, "begin to save")
        raise


def _newest(root: AnyPath, item: str | None) -> Newest | None:
    """The newest step of a line in storage, whoever saved it."""
    every = ((roots.place_of(path), path) for path in roots.items_of(root))
    ours = {place.step: path for place, path in every if place.line[1] == item}
    numbers = [*(each for each in ours if each is not None), *roots.stock_steps(root, item)]
    if not numbers:
        return None
    number, lineage = max(numbers), None
    step, path = number, ours.get(number)
    if path is not None:
        try:
            step = manifest_file.read(path).step
            lineage = resolve(path)
        except AdaCheckError as error:
            _log.warning("%s: the newest step in storage cannot be built on: %s", path, error)
    return Newest(step, number, lineage)


def _has_steps(root: AnyPath) -> bool:
    """True unless a root is known to have no step."""
    with contextlib.suppress(OSError, AdaCheckError):
        return bool(roots.items_of(root) or roots.stock_steps(root))
    return True


def _told_root(root: AnyPath) -> str:
    """A root as a shadow's file names it: one text, by whatever links it is reached."""
    there = at(root)
    return there.storage.physical(there.key) if there.on_file_system else str(there)


def absolute(directory: epath.Path) -> AnyPath:
    """An absolute path, which Orbax demands for numbers and PRNG keys; or a place in a store.

    Raises:
        StorageError: a URL of a kind that is not supported.
    """
    return located(str(directory))


def described_lineage(directory: AnyPath) -> Lineage:
    """The lineage of a step whose base has whole files that describe its arrays.

    Raises:
        LineageError: a step that this one builds on is missing.
        IntegrityError: a file that describes the base is damaged.
        FormatError: a manifest is missing or cannot be read.
    """
    lineage = resolve(directory)
    damage = descriptions.damaged_descriptions(lineage.base_directory, lineage.base)
    for error in damage.values():
        raise error
    return lineage
