"""A save: begun on the caller's thread, written in every process, committed in one."""

# Threads: begin and record_step run on the caller's threads, write on Orbax's event loop and the
# threads of its futures, commit on a thread of the manager's. ``last`` is replaced whole.

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter import directories, inputs
from adacheck_jax.adapter.arguments import KEPT, SaveArgs
from adacheck_jax.adapter.reports import Announcer, SaveReport, report_of
from adacheck_jax.adapter.saving.lines import Lines
from adacheck_jax.adapter.saving.share_future import ShareFuture
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints, described
from adacheck_jax.adapter.stock.descriptions import ArrayEntry, stored_dtype
from adacheck_jax.device import jax_settings
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.processes import run
from adacheck_jax.processes.meetings import ALONE, Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.save import commit
from adacheck_jax.save.one_save import Save
from adacheck_jax.save.saver import Saver
from adacheck_jax.store import claims
from adacheck_jax.store.base_writer import ArrayLayout, Name
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.roots import Line, Place
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)

_BEGUN = "begun"
"""Topic of the exchange about the saves that all processes have begun."""
_PREPARED = "prepared"
"""Topic of the exchange about the saves of which all processes have taken the state."""


@dataclass(slots=True)
class Begun:
    """A save that is not committed yet.

    Attributes:
        line: root and item that the step belongs to.
        saver: saver of that line.
        save: the save.
        stored: the state as it is to be stored, with the arguments for Orbax, until it is written.
        begin_s: reading of the clock when the caller called.
        together: exchange of the processes that begin it; that of one alone once all have.
        is_again: True if it writes what storage refused before.
        returned_s: reading of the clock when the rest was left to the background; 0 before.
        entries: arrays of a base that Orbax left to this library, by leaf path.
        names: the same as they are stored.
    """

    line: Line
    saver: Saver
    save: Save
    stored: SaveArgs
    begin_s: float
    together: Exchange
    is_again: bool
    returned_s: float = 0.0
    entries: Mapping[str, ArrayEntry] = dataclasses.field(default_factory=dict)
    names: Mapping[str, Name] = dataclasses.field(default_factory=dict)


class Saves:
    """Saves of the steps of one training run.

    A save is three calls: :meth:`begin` on the caller's thread, :meth:`write` in every process, and
    :meth:`commit` in one process, after the writes of all processes. :class:`AdaCheckHandler` says
    what their arguments are.

    Args:
        lines: lines of steps of the run.
        stock: writer of what Orbax has of a base.
        announcer: hears of each save that this process committed.

    Attributes:
        last: report of the last save that this process committed.
        left: set while no caller is in a manager that says so.
    """

    def __init__(self, lines: Lines, stock: StockCheckpoints, announcer: Announcer) -> None:
        self._lines, self._stock, self._announcer = lines, stock, announcer
        self.last: SaveReport | None = None
        self.left = threading.Event()
        self.left.set()
        self._described: SaveArgs | None = None

    @jax_settings.own()
    def begin(self, directory: AnyPath, place: Callable[[], Place], args: SaveArgs) -> Begun:
        """Begin a save on the caller's thread, under the caller's jax settings.

        One that was prepared goes on, as the state of its arguments. When this returns, every
        buffer of the state may be donated.

        Raises:
            AdaCheckError: it was prepared for another directory.
        """
        self._lines.process.enter()
        if not isinstance(begun := args.state, Begun):
            return self._taken(directory, place, args)
        if (final := roots.committed_path(directory)) != begun.save.directory:
            raise AdaCheckError(f"{final}: expected {begun.save.directory}. The step is not saved.")
        directories.check_writable(directory)
        return begun

    @jax_settings.own()
    def prepare(self, final: AnyPath, args: SaveArgs) -> Begun:
        """Begin a save, of which :meth:`begin` is told later, in all processes or none.

        ``final`` is the directory of the item once it is committed.
        """
        self._lines.process.enter()
        place = functools.partial(roots.place_of, final, in_step=True)
        begun = self._taken(final, place, args)
        self._meet(begun, _PREPARED)
        if not begun.save.is_base:
            begun.together = ALONE  # nothing is left that may fail
            begun.returned_s = time.monotonic()
            begun.stored.state = None  # which may be donated
        return begun

    def _taken(self, directory: AnyPath, place: Callable[[], Place], args: SaveArgs) -> Begun:
        """Takes what is saved out of a state; an error is told to all."""
        lines = self._lines
        final, begin_s = roots.committed_path(directory), time.monotonic()
        exchange = run.exchange(final)  # before anything is refused in one process alone
        together, is_again = exchange.watching(lines.calls), args.state is KEPT
        try:
            with exchange.telling("begin to save"), lines.consent(exchange) as consent:
                if not exchange.is_alone:
                    lines.meet()  # before anything that may fail in one of them alone
                directories.check_writable(directory)
                stored, cast = self._described or SaveArgs(), frozenset[str]()
                if not is_again:
                    stored, cast = _checked(args)
                found = place()
                inputs.step_number(found.step, "give the manager steps from 0 on")
                if lines.are_none:
                    _log.info(
                        "%s: the first save of a process compiles and exports programs.", final
                    )
                with storage_named(final):
                    saver = lines.saver_of(found)
                    if is_again:
                        save = saver.begin_kept(final, found.step, exchange)
                    else:
                        save = saver.begin(
                            *(final, found.step, stored.state, stored.step),
                            cast=cast,
                            exchange=exchange,
                            consent=consent,
                        )
                        save.custom_metadata = stored.custom_metadata
                return Begun(found.line, saver, save, stored, begin_s, together, is_again)
        except BaseException:
            lines.note_gap(is_lost=not (exchange.is_alone or is_again))
            raise

    async def write(self, directory: AnyPath, begun: Begun) -> list[ocp.Future]:
        """Start to write this process's share of what :meth:`begin` returned.

        Returns:
            Futures that complete when this process's share is durable. They wait for the
            directories that Orbax makes.
        """
        futures: list[ocp.Future] = []
        save = begun.save
        stored, begun.stored = begun.stored, SaveArgs()  # a save under way keeps no state alive
        try:
            if save.is_base:
                futures = await self._write_base(directory, begun, stored)
        except Exception as error:
            self._refuse(begun, error)
            raise
        self._meet(begun, _BEGUN)
        layout = ArrayLayout(begun.names, stored.ocdbt_target_data_file_size)
        futures.append(ShareFuture(save, directory, layout, self.left))
        if not begun.returned_s:
            begun.saver.returns()
            begun.returned_s = time.monotonic()
        return futures

    def _meet(self, begun: Begun, topic: str) -> None:
        """Waits until all processes have come as far with a save that they begin alike.

        Else who goes on waits in Orbax for who does not.

        Raises:
            AdaCheckError: another process could not, or some save a base and others a delta.
        """
        if not begun.together.is_alone:
            own, judge = (
                {"is_base": begun.save.is_base},
                functools.partial(_alike, begun.save.directory),
            )
            try:
                begun.together.agree(topic, own, judge)
            except Exception as error:
                self._refuse(begun, error)
                raise

    def _refuse(self, begun: Begun, error: Exception) -> None:
        """Notes that several processes do not go on with a save that was begun."""
        if not begun.together.is_alone:
            begun.saver.refuse(begun.save, error, is_again=begun.is_again)
            self._lines.note_gap(is_lost=not begun.is_again)

    async def _write_base(
        self, directory: AnyPath, begun: Begun, stored: SaveArgs
    ) -> list[ocp.Future]:
        """Start to write what Orbax writes of a base."""
        save = begun.save
        if save.keeps:
            self._described = dataclasses.replace(stored, state=described(stored.state))
        with begun.save.attempt.exchange.telling("begin to save"):
            futures, begun.entries = await self._stock.write(
                epath.Path(str(directory)), stored.state, stored.save_args, stored.custom_metadata
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
        save, claim = begun.save, (jax.process_index(), begun.save.attempt.token)
        with storage_named(save.directory), claims.committing(directory, *claim):
            digests: Mapping[str, str] = {}
            if save.is_base:
                chunks = {path: each.chunk_shape for path, each in begun.names.items()}
                digests = self._stock.finalize(epath.Path(str(directory)), begun.entries, chunks)
            commit.commit(save, directory, digests)
        if not self._lines.has_bases_alone(begun.line):
            self.last = report_of(save, directory, begun.begin_s, begun.returned_s)
            self._announcer.tell_saved(self.last)

    @jax_settings.own()
    def record_step(
        self, state: PyTree, step: int | None = None, *, away_bytes: int | None = None
    ) -> bool:
        """Take hold of a step for the next save; see :meth:`AdaCheckHandler.record_step`."""
        lines = self._lines
        lines.process.enter()
        inputs.expect_not_swapped(state, step)
        if (only := lines.only) is None:
            inputs.checked_state(state)
            inputs.step_number(step)
            return False
        line, saver = only
        is_own = away_bytes is None  # else the loop has called save
        with (
            lines.calls.pending(f"record_step({step})", is_own=is_own) as count,
            lines.consent(lines.exchange(f"{line}, recorded")) as consent,
        ):
            state = inputs.checked_state(state)
            step = inputs.step_number(step)
            is_kept = saver.defer(state, step, away_bytes=away_bytes, consent=consent)
            count(is_kept)
        return is_kept


def _checked(args: SaveArgs) -> tuple[SaveArgs, frozenset[str]]:
    """Arguments of a save with its casts applied, once all are checked; and the leaves cast."""
    state = inputs.checked_state(args.state)
    state, save_args, cast = inputs.apply_casts(state, args.save_args)
    stored = SaveArgs(
        state,
        inputs.step_number(args.step),
        save_args=save_args,
        custom_metadata=inputs.json_copy(args.custom_metadata),
        ocdbt_target_data_file_size=inputs.file_bytes(args.ocdbt_target_data_file_size),
    )
    return stored, cast


def _alike(where: AnyPath, reports: Sequence[Report]) -> Report:
    """Refuses a step of which some processes save a base, and others a delta."""
    for process, each in enumerate(reports):
        if each["is_base"] != reports[0]["is_base"]:
            one, other = (0, process) if reports[0]["is_base"] else (process, 0)
            raise AdaCheckError(
                f"{where}: the {len(reports)} processes did not decide alike: process {one} "
                f"writes a base, and process {other} does not. The step is not saved. Check that "
                "all of them save states of the same leaves, see the same root, and that their "
                "handlers have the same options."
            )
    return {}
