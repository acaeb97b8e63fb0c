"""One training run: what handlers of either Orbax API remember between the steps that they save."""

# Threads: restores and recoveries run on the caller's threads. ``restored`` is replaced whole.

from __future__ import annotations

import logging
import time

from adacheck_jax.adapter import inputs
from adacheck_jax.adapter.arguments import RestoreArgs, RestoreInfo
from adacheck_jax.adapter.recovery import Delivery, NoFilesError, found_files, replay
from adacheck_jax.adapter.reports import Announcer, OnSave, stock_info
from adacheck_jax.adapter.restoring import finding
from adacheck_jax.adapter.restoring.restorer import Restored, StepRestorer
from adacheck_jax.adapter.saving.lines import Lines, shadow_root
from adacheck_jax.adapter.saving.saves import Saves
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.device import jax_settings
from adacheck_jax.device.trees import PyTree
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.plan.options import Options
from adacheck_jax.processes.attempts import RestoreAgreement
from adacheck_jax.processes.consent import Consent
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.roots import Place
from adacheck_jax.store.storage.location import AnyPath, located
from adacheck_jax.update.binding import RecorderArgument, recorders_of

_log = logging.getLogger(__name__)


class TrainingRun:
    """Saves and restores of the steps of one training run.

    Args:
        recorder: the :class:`Recorder`, or several.
        options: the caller's choices.
        on_save: called with the report of each save that this process committed.

    Attributes:
        lines: the lines of steps that it saves.
        saves: its saves.
        restored: report of the last restore.
        stock: reader and writer of bases.
    """

    def __init__(
        self, recorder: RecorderArgument, options: Options, on_save: OnSave | None = None
    ) -> None:
        self._options = options
        recorders = recorders_of(recorder)
        if options.shadow_directory is not None and not recorders:
            raise ValueError(
                "expected a recorder with Shadow(directory=...), found none: without one there is "
                "no shadow to lie in it. Give it: AdaCheckHandler(recorder, ...)."
            )
        self.has_recorder = bool(recorders)
        self.restored: RestoreInfo | None = None
        self.stock, self._announcer = StockCheckpoints(), Announcer(on_save)
        self.lines = Lines(recorders, options)
        self.saves = Saves(self.lines, self.stock, self._announcer)
        self._restorer = StepRestorer(self.stock, recorders, options.params_path)

    @property
    def described(self) -> str:
        """The options without which processes wait for each other in vain, in words."""
        shadow = self._options.shadow
        if shadow is None or shadow.directory is None:
            return "a handler without Shadow(directory=...)"
        kept = f"copies={shadow.copies}, records={shadow.records}"
        return f"a handler with Shadow(directory=..., {kept})"

    @property
    def has_memory(self) -> bool:
        """True if a state may be recovered from memory."""
        return self._options.shadow_directory is not None

    @jax_settings.own()
    def restore(self, directory: AnyPath, args: RestoreArgs) -> PyTree:
        """Restore a step, bit-exact and verified; see :meth:`AdaCheckHandler.restore`."""
        self.lines.process.enter()
        exchange = self.lines.exchange(f"{directory}, restored")
        together = RestoreAgreement(exchange)
        try:
            inputs.expect_tree(args.abstract_state)
            restored = self._restorer.restore(directory, args, together.agreed)
            with together.agreed(), self.lines.consent(exchange) as consent:
                self._follow(restored, consent)
                return restored.state
        except BaseException as error:
            together.leave(error)
            raise

    def _follow(self, restored: Restored, consent: Consent | None) -> None:
        """Notes a restored step, which the next save may follow."""
        if restored.lineage is None or restored.times is None:
            self.note_stock(restored.directory, restored.info)
            return
        self.restored = restored.info
        self._announcer.tell_restored(restored.info, restored.times)
        if restored.info.verified and not restored.info.rounded:
            place = roots.place_of(restored.directory)
            resumer = self.lines.saver_of(place).resumer
            if restored.is_own:
                what = restored.lineage, place.step, restored.leaves, restored.state
                costs = restored.times.costs(len(restored.lineage.deltas))
                resumer.follow(*what, costs, consent)
            else:
                resumer.forget()

    def note_stock(self, directory: AnyPath, info: RestoreInfo | None = None) -> None:
        """Note that a step was restored that stock Orbax saved: the next save is a base."""
        _log.warning("%s: stock Orbax saved this step: it was read, and not verified.", directory)
        self.restored = info or stock_info(directory)
        self.lines.saver_of(roots.place_of(directory)).resumer.forget()

    @jax_settings.own()
    def recover(
        self, root: AnyPath | str, abstract_state: PyTree, item: str | None = None
    ) -> tuple[int, PyTree] | None:
        """The state that a killed process left in memory; see :meth:`AdaCheckHandler.recover`."""
        lines = self.lines
        lines.process.enter()
        if not self.has_memory:
            raise ValueError(
                "expected a handler whose shadow has a directory, found one without: nothing "
                "outlives its process. Make it with AdaCheckHandler(..., "
                'shadow=Shadow(directory="/dev/shm/...")).'
            )
        there, known, begin_s = located(str(root)), None, time.monotonic()
        exchange, delivery = lines.exchange(f"{there} in memory"), Delivery(there)
        lines.calls.note("recover() or restore_newest()")
        try:
            inputs.expect_tree(abstract_state)
            where = str(self._options.shadow_directory), shadow_root(there)
            found, name = found_files(exchange, *where, item, abstract_state)
            known = finding.newest(there, name or None)
            saver = lines.saver_of(Place((there, name or None), None))
            with lines.consent(lines.exchange(f"{there}, recovered")) as consent:
                args = abstract_state, known, found, exchange, delivery.deliver, replay, consent
                made = saver.resumer.recover(*args)
            saver.note("recover_s", time.monotonic() - begin_s)
        except ShadowFileError as error:
            is_first = isinstance(error, NoFilesError) and not finding.has_steps(there)
            _log.log(
                logging.INFO if is_first else logging.WARNING,
                "The state is not recovered from memory (restore it from storage): %s.",
                error,
            )
            return None
        except BaseException as error:
            exchange.fail(error, "recover its part")
            raise
        count = made.replayed_count
        if known is None:
            _log.warning(
                "%s has no step in storage: step %d is recovered from %s (%s). To begin anew, "
                "remove that directory, and start again.",
                *(there, made.step, delivery.source, self._options.shadow_directory),
            )
        else:
            _log.info(
                "Step %d is recovered from %s (%d updates replayed); storage has step %d.",
                *(made.step, delivery.source, count, known.step),
            )
        self.restored = RestoreInfo(made.step, count, (), 0.0, source=delivery.source)
        return made.step, made.state

    def close(self) -> None:
        """Release what the savers and Orbax's handlers hold; in a forked child nothing."""
        if not self.lines.process.is_elsewhere:
            self.lines.close()
            self.stock.close()
