"""The lines of steps of a training run: a saver each, and the calls of all processes about them."""

# Threads: any that saves, restores or ends a save. ``_lock`` guards ``_savers``; while it is held a
# saver may be made and a root be listed, but no method of a saver is called that takes the saver's
# own lock. ``Neighbours._meeting`` is held while all processes hear of each other, once.

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax

from adacheck_jax.adapter.restoring import finding
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.memory.files import step_file
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.peers import Peers
from adacheck_jax.plan.options import Options, Shadow
from adacheck_jax.processes import run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.consent import Consent
from adacheck_jax.processes.gate import Gate
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.save.line import backlog as backlogs
from adacheck_jax.save.line.backlog import Backlog
from adacheck_jax.save.saver import Saver
from adacheck_jax.store import claims
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lookup import referred
from adacheck_jax.store.steps.roots import Line, Place
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update.binding import Recorders


class Neighbours:
    """The processes, as they were told to keep each other's state; asked once.

    Args:
        shadow: the caller's choices.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow, self._meeting = shadow, threading.Lock()
        self._known: tuple[str, tuple[str, ...]] | None = None

    def meet(self) -> tuple[str, tuple[str, ...]]:
        """A name for this run, and the domains; the first call waits for all processes."""
        with self._meeting:
            if self._known is None:
                domain = self._shadow.domain or _domain()
                own: Report = {"domain": domain, "run": claims.new_token()}
                exchange = run.exchange("the memory of all processes")
                answer = exchange.agree("hello", own, _introduced)
                self._known = answer["run"], tuple(answer["domains"])
            return self._known

    def of(self, line: str) -> Peers:
        """The processes, for one line of steps; waits as :meth:`meet`."""
        name, domains = self.meet()
        copies = min(self._shadow.copies, len({*domains}) - 1)
        return Peers(name, domains, copies, Gate(line))


def _introduced(reports: Sequence[Report]) -> Report:
    """A name for this run, and the failure domain of each process."""
    return {"run": reports[0]["run"], "domains": [each["domain"] for each in reports]}


def _domain() -> str:
    """The slice of this process's devices, where there are several; else its machine."""
    slices = {getattr(each, "slice_index", None) for each in jax.devices()}
    if len(slices) > 1:
        return f"slice {getattr(jax.local_devices()[0], 'slice_index', None)}"
    return f"machine {step_file.boot()}"


class Lines:
    """The savers of a run, which may have several items and managers.

    Args:
        recorders: the recorders.
        options: the caller's choices.

    Attributes:
        process: the process that the run works in.
        calls: calls of the training loop; those of its manager, if that compares them.
        keeps_refused: True if its manager writes again what storage refused; set before any step is
            saved or restored.
    """

    def __init__(self, recorders: Recorders, options: Options) -> None:
        self._recorders, self._options = recorders, options
        self.process, self.calls = OneProcess("AdaCheckHandler"), Calls("")
        self.keeps_refused = False
        self._lock = threading.Lock()
        self._savers: dict[Line, Saver] = {}
        self._plain = frozenset[str | None]()
        shadow = options.shadow
        self._neighbours = Neighbours(shadow) if shadow and shadow.directory is not None else None

    @property
    def are_none(self) -> bool:
        """True before the first one is saved or restored."""
        return not self._savers

    def _with_steps(self) -> list[tuple[Line, Saver]]:
        """The lines with steps, and their savers; none in a forked child."""
        with self._lock:
            found = [each for each in self._savers.items() if each[1].has_steps]
        return [] if self.process.is_elsewhere else found

    @property
    def only(self) -> tuple[Line, Saver] | None:
        """The only line with steps, and its saver; None before its first step.

        Raises:
            ValueError: there are several.
        """
        if len(found := self._with_steps()) > 1:
            raise ValueError(
                f"expected a handler that saves one line of steps, found {len(found)}: it is not "
                "known which of them this step belongs to. Use one handler for each."
            )
        return found[0] if found else None

    def is_only(self, item: str) -> bool:
        """True unless there are steps of another item."""
        found = self._with_steps()
        return len(found) < 2 and all(line[1] == item for line, _ in found)

    @property
    def backlog(self) -> Backlog:
        """The backlog of the steps in memory; an empty one without any, or of several lines."""
        found = self._with_steps()
        return found[0][1].backlog if len(found) == 1 else backlogs.empty()

    def fits(self, state: PyTree) -> bool:
        """True if a save of a state can write the steps in memory too, which have its leaves."""
        found = self._with_steps()
        return len(found) != 1 or found[0][1].fits(state)

    def note_gap(self, *, is_lost: bool = False) -> None:
        """Notes that the save of a step was refused; ``is_lost`` if others may have begun it."""
        if len(found := self._with_steps()) == 1:
            found[0][1].note_gap(is_lost=is_lost)

    def note_updates(self, items: Mapping[str | None, bool]) -> None:
        """Notes which items have states that a Recorder's update computes: all, unless told.

        Others have bases alone, which no report tells. An item of which that changes begins a new
        line.
        """
        with self._lock:
            plain = self._plain - {*items} | {name for name, has in items.items() if not has}
            changed, self._plain = plain ^ self._plain, plain
            gone = [self._savers.pop(line) for line in [*self._savers] if line[1] in changed]
        for saver in gone:
            saver.close()

    def has_bases_alone(self, line: Line) -> bool:
        """True for an item of which :meth:`note_updates` said that no update computes it."""
        return bool(self._recorders) and line[1] in self._plain

    def saver_of(self, place: Place) -> Saver:
        """The saver of a line of steps, which the first call makes."""
        with self._lock:
            if place.line in self._savers:
                return self._savers[place.line]
        file, peers, (root, item) = None, None, place.line
        if (shadow := self._options.shadow_directory) is not None:
            file = FilePlace(str(shadow), shadow_root(root), item or "")
            if self._neighbours is not None and jax.process_count() > 1:
                peers = self._neighbours.of(f"{root} {item}")
                file = file.of(peers)
        with self._lock:
            if place.line not in self._savers:
                recorders, options = self._recorders, self._options
                if self.has_bases_alone(place.line):
                    recorders, file, peers = {}, None, None
                    options = dataclasses.replace(options, max_deltas=0, shadow=None)
                self._savers[place.line] = Saver(
                    recorders, options, place=file, peers=peers, keeps=self.keeps_refused
                )
                if self._options.keep_lineage is not None:
                    _learn_parents(self._options.keep_lineage, *place.line)
            return self._savers[place.line]

    def exchange(self, where: object) -> Exchange:
        """An exchange about a call that all processes make alike."""
        return run.exchange(where, is_save=False).watching(self.calls)

    @contextlib.contextmanager
    def consent(self, exchange: Exchange) -> Iterator[Consent | None]:
        """Consent of all processes to collectives in a call of all of them, or their refusal.

        The call is told by its exchange, before anything fails in one of them.
        """
        found = None
        if self._recorders and not exchange.is_alone:
            found = Consent(exchange.beside("copies"))
        try:
            yield found
        except BaseException:
            if found is not None:
                found.refuse()
            raise
        if found is not None:
            for saver in [*self._savers.values()]:
                saver.leave(found)

    def meet(self) -> None:
        """Has processes that keep each other's state hear of each other, once."""
        if self._neighbours is not None:
            self._neighbours.meet()

    def finish(self) -> None:
        """Waits until recorded steps are out of the caller's arrays."""
        for saver in () if self.process.is_elsewhere else [*self._savers.values()]:
            saver.finish()

    def close(self) -> None:
        """Closes the savers."""
        with self._lock:
            savers = [*self._savers.values()]
        for saver in savers:
            saver.close()


def _learn_parents(keep: KeepLineage, root: AnyPath, item: str | None) -> None:
    """Tell the preservation policy which step each delta on disk refers to."""
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
                    needed = [each.holder for each in finding.resolve(directory).entries]
                number = roots.place_of(directory).step
                for parent in (roots.place_of(each).step for each in needed):
                    if number is not None and parent is not None:
                        keep.note(number, parent)


def shadow_root(root: AnyPath) -> str:
    """A root as a shadow's file names it: one text, by whatever links it is reached."""
    there = at(root)
    return there.storage.physical(there.key) if there.on_file_system else str(there)
