"""A stock Orbax manager that tells its handler, and whose saves go on while storage is away."""

# Threads: a training loop's thread saves and closes; any may wait, restore and ask. Orbax's thread
# ends a save (``_finalize``).

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter import directories, inputs
from adacheck_jax.adapter.arguments import RestoreArgs, SaveArgs, expect_args, in_item
from adacheck_jax.adapter.away import outage, restores
from adacheck_jax.adapter.away.ending import Ending, goes_on
from adacheck_jax.adapter.away.opening import Opener, beginning, is_own_thread
from adacheck_jax.adapter.away.storage_sink import StorageSink
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.adapter.inputs import expected_step
from adacheck_jax.adapter.reports import expect_outside_callback
from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, Closing, noted_by
from adacheck_jax.processes.lockstep import Lockstep
from adacheck_jax.store.steps import deletion
from adacheck_jax.store.storage.location import located

_log = logging.getLogger(__name__)

_ASKING = (
    *("all_steps", "latest_step", "best_step", "reload", "should_save", "delete"),
    *("item_metadata", "metadata", "metrics", "is_saving_in_progress", "check_for_errors"),
)
"""Questions of callers that need the save begun last to be known, as :meth:`restore` does."""


def one_at_a_time(calls: Callable[..., Any]) -> Callable[..., Any]:
    """A method that threads call one after another: in Orbax's saves and waits would mix up."""

    @functools.wraps(calls)
    def called(self: AdaCheckManager, step: Any, *args: Any, **kwargs: Any) -> Any:
        expect_outside_callback(f"{calls.__name__}({step})")  # which would wait for its own end
        self.handler.run.lines.process.enter()
        with self.calling:
            return calls(self, step, *args, **kwargs)

    return called


class AdaCheckManager(Closing, ocp.CheckpointManager):
    """A stock Orbax manager that tells its handler; :func:`checkpoint_manager` makes one.

    Where it saves nothing but the state, its ``save`` goes on while storage is away: see
    ``docs/guide/storage-away.md``.

    Attributes:
        handler: the handler, for ``record_step``, ``recover``, ``restored`` and ``last_save``.
        calling: held through each ``save`` and ``restore``.
    """

    def __init__(self, handler: AdaCheckHandler, root: epath.Path, **arguments: Any) -> None:
        self.handler, run = handler, handler.run
        handlers, options = arguments.get("item_handlers"), arguments["options"]
        named = handlers.items() if isinstance(handlers, Mapping) else ()
        self._item = next((name for name, each in named if each is handler), None)
        is_alone = jax.process_count() == 1
        may_go_on = handlers is handler or "handler_registry" in arguments
        keeps = may_go_on and (is_alone or options.enable_async_checkpointing)
        run.lines.keeps_refused = keeps
        self._together = together = Lockstep(root)
        run.lines.calls = together.calls
        names = sorted(name for name, _ in named)
        together.introduce(f"{run.described}, items={names}, {_described(options)}")
        if not is_alone:
            together.open(functools.partial(_make_root, root, options))
            arguments["options"] = options = dataclasses.replace(options, create=False)
        self._opener, self._is_closed = Opener(self), False
        self.calling = threading.RLock()
        self._ending = Ending(self, run.lines, together)
        parts = run, together, self._opener, self._ending
        self._sink = StorageSink(self, *parts) if keeps else None
        self._newest_known, self._has_warned = -1, False  # restored here last, or saved since
        if keeps and not is_alone:
            arguments["options"] = self._ending.met(options)
        with directories.answering(root):
            super().__init__(root, **arguments)
        _open_managers.add(self)
        if (newest := self.latest_step()) is None and not options.read_only:
            xla_call.begin()  # a restore that comes first it would hold up
        elif newest is not None and run.has_recorder:
            self.reached_preemption(newest)  # or JAX would end a resumed run at step 1

    @one_at_a_time
    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: ocp.args.CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """As Orbax's; while storage is away the step is kept in memory, if there is room.

        Raises:
            ValueError: ``step`` is no step number, or ``args`` are none of this library.
            AdaCheckError: the manager is closed.
            StorageError: storage refuses the step, and memory has no room for it; or it refused an
                earlier one that cannot be written again. The message names the steps that are in
                memory, and those that are lost.
        """
        step = expected_step(step, "give save the number of the step")
        item = self._state_item(args)
        check = functools.partial(expect_args, args, SaveArgs, item)
        if self._is_closed:
            raise AdaCheckError(
                f"{self.directory}: the manager is closed: step {step} is not saved."
            )
        beside, saves = (items, save_kwargs, metrics, custom_metadata), self.handler.run.saves

        def save(prepared: SaveArgs | None = None, force: bool | None = True) -> bool:
            if prepared is None:  # else the caller may have left
                saves.left.clear()
            with beginning():
                return super(AdaCheckManager, self).save(
                    *(step, items, save_kwargs, metrics, force),
                    args=in_item(prepared, item) if prepared else args,
                    custom_metadata=custom_metadata,
                )

        try:
            if (sink := self._sink) is None:
                is_called = jax.process_count() > 1 and (force or self.should_save(step))
                if is_called:
                    self._together.begin()
                    self._together.decided(dict, f"save({step})", check)
                else:
                    check()
                is_saved = save(force=is_called or force)
            elif force or self._is_due(step):
                given: Any = args
                state = given if item is None else given.get(item)
                is_alone = item is None or [*given] == [item]
                is_ours = is_alone and all(each is None for each in beside)
                is_saved = sink.save(step, state, save, check, item, is_ours=is_ours)
            else:
                check()
                is_saved = False
            return self._note_result(step, is_saved=is_saved)
        finally:
            saves.left.set()

    def _note_result(self, step: int, *, is_saved: bool) -> bool:
        """Notes a saved step; warns once of one that is refused since the root has later ones."""
        if is_saved:
            self._newest_known = max(self._newest_known, step)
            return True
        newest = None if self._has_warned or step <= self._newest_known else self.latest_step()
        if newest is not None and step <= newest:
            self._has_warned = True
            _log.warning(
                "%s: step %d is not saved: the root has step %d already, and only later steps are "
                "saved to it. Go on from that one (restore_newest), delete the steps from %d on "
                "(manager.delete), or give this run a root of its own.",
                *(self.directory, step, newest, step),
            )
        return False

    def _state_item(self, args: Any) -> str | None:
        """Name of the state's item among arguments; None if it has no name."""
        return self._item

    def _is_due(self, step: int) -> bool:
        """True if the options say that a step is saved, and it is not in memory."""
        sink = self._sink
        return (sink is None or step > sink.acknowledged.last) and self.should_save(step)

    def restore_newest(self, abstract_state: PyTree) -> tuple[int, PyTree] | None:
        """The newest state that can be had: from memory, here or of other processes, or storage.

        ::

            first = 0
            if (found := manager.restore_newest(state)) is not None:
                newest, state = found
                first = newest + 1

        Memory serves where the handler's shadow has a directory and what is there is as new as
        storage (:meth:`AdaCheckHandler.recover`). Other items stay with storage: where
        ``latest_step()`` is less than the step, a data iterator restored from it is behind by as
        many steps, and a warning says so.

        Args:
            abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays, of the
                whole state.

        Returns:
            The number of the step and its state, verified; None if there is none yet.
        """
        if self.handler.run.has_memory:
            found = self.handler.recover(str(self.directory), abstract_state, item=self._item)
            if found is not None:
                if self._item is not None:
                    restores.tell_behind(self.directory, found[0], self.latest_step())
                return found
        if (newest := self.latest_step()) is None:
            return None
        found = self.restore(newest, args=in_item(RestoreArgs(abstract_state), self._item))
        return newest, found if self._item is None else found[self._item]

    @one_at_a_time
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """As Orbax's; also of a step that was recorded and that a later one holds.

        Of several processes all call it, for the same step and a state of the same leaves.

        Raises:
            ValueError: ``args`` are none of this library, or the step is no number.
            AdaCheckError: the processes do not call alike.
            StepDeletedError: it was deleted before or while it was read.
            FileNotFoundError: no step holds it; or a later one does, and other items than the
                state are asked for, of which there are none.
        """
        given: object = step
        if not isinstance(given, int | str | np.number | None):
            raise ValueError(
                f"expected restore(step, args=...), found a {type(given).__name__} as the step. "
                "Give the number of a step, and the state by args=adacheck.RestoreArgs(state)."
            )
        call, item = f"restore({step})", self._state_item(args)
        expect_same = functools.partial(inputs.expect_same, where=f"{self.directory}")
        self._together.meet(call, lambda: restores.described(args, item), expect_same)
        self._opener.wait()
        is_own = directory is None  # of another root the manager lists no steps
        if is_own and (found := self.latest_step() if step is None else step) is not None:
            self._newest_known = found
        with restores.deletion_detected(self, step) if is_own else contextlib.nullcontext():
            try:
                return super().restore(step, items, restore_kwargs, directory, args)
            except (FileNotFoundError, ValueError) as error:  # the latter where names have a prefix
                root = located(str(directory or self.directory))
                known = self.all_steps() if is_own else None
                holder, args = restores.in_holder(step, root, known, args, error)
                return super().restore(holder, directory=directory, args=args)
            except KeyError as error:
                if not is_own:
                    raise
                return restores.without_item(self, step, args, item, error)

    @property
    def _is_elsewhere(self) -> bool:
        """True in a child that was forked from the process that has saved or restored."""
        return self.handler.run.lines.process.is_elsewhere

    def reached_preemption(self, step: int) -> bool:
        """As Orbax's, for the training loop alone.

        JAX ends a run at the step after the last one that it was asked about. Threads that begin
        and end a save ask too, for a metric, of a step that the loop may have left behind: no
        process would ever come to the step after it.
        """
        return not is_own_thread() and super().reached_preemption(step)

    def wait_until_finished(self) -> None:
        """As Orbax's, and then writes the steps that are kept in memory since storage was away.

        Recorded steps stay there, and take nothing from the caller's arrays any more.

        Raises:
            StorageError: storage refuses them; the message names them.
        """
        expect_outside_callback("wait_until_finished()")
        if self._is_elsewhere:
            return
        if (sink := self._sink) is not None and sink.is_asked:
            sink.wait()
        else:
            self._opener.wait_until_finished()
        lines, saves = self.handler.run.lines, self.handler.run.saves
        if saves.left.is_set() and not is_own_thread():  # else Orbax asks while a save begins
            lines.finish()

    def close(self) -> None:
        """Writes all recorded steps, and closes the manager as Orbax does.

        While an error is under way it tries once, and stays open where storage hangs. An error that
        leaves a ``with`` block is raised as it is, and one of closing is its note; else the
        traceback of one of closing shows the other one first.

        Raises:
            StorageError: storage refuses them for a minute; the message names the steps that are
                lost.
        """
        if self._is_elsewhere:
            return
        with self.closing() as in_haste:
            expect_outside_callback("close()")
            try:
                if self._sink is not None:
                    self._sink.close(in_haste=in_haste)
                elif in_haste and not self._ending.wait(outage.PATIENCE_S):
                    raise goes_on(self)
            except BaseException as error:
                if self._ending.wait(0.0):
                    with noted_by(error):
                        self._end()
                else:
                    _left_open.append(self)
                raise
            self._end()

    def _end(self) -> None:
        """Closes the manager as Orbax does."""
        self._sink, self._is_closed = None, True
        self._ending.keeps_refused = False
        _open_managers.discard(self)
        self._opener.wait()
        try:
            ocp.CheckpointManager.close(self)
        finally:
            self._opener.close()

    def _load_checkpoint_infos(self, *args: Any, **kwargs: Any) -> list[Any]:
        """As Orbax's, without newest steps of which no file is left; retention removes others."""
        found, names = super()._load_checkpoint_infos(*args, **kwargs), self._step_name_format
        where = located(str(self.directory))
        while found and deletion.is_emptied(where / names.build_name(found[-1].step)):
            found.pop()
        return found

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        self._ending.finalize(step, steps_to_remove)

    def _wait_for_checkpointers(self) -> None:
        self._ending.expect_written()


def _make_root(root: epath.Path, options: ocp.CheckpointManagerOptions) -> None:
    """Makes the root as Orbax does for a process alone."""
    if options.create and not root.exists():
        mode = options.file_options.path_permission_mode
        root.mkdir(parents=True, exist_ok=True, mode=mode)


def _described(options: ocp.CheckpointManagerOptions) -> str:
    """The options of Orbax without which processes wait for each other in vain, in words."""
    names = ("create", "enable_async_checkpointing", "save_interval_steps")
    return ", ".join(f"{name}={getattr(options, name)}" for name in names)


def _behind_opening(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Orbax's manager that waits until the last save has begun."""

    @functools.wraps(method)
    def waiting(self: AdaCheckManager, *args: Any, **kwargs: Any) -> Any:
        if not self._is_elsewhere:
            self._opener.wait()
        return method(self, *args, **kwargs)

    return waiting


def _until_they_stay(reload: Callable[[Any], None]) -> Callable[[Any], None]:
    """Orbax's ``reload``, again where a step goes while it is looked at: each goes once."""

    @functools.wraps(reload)
    def looking(self: AdaCheckManager) -> None:
        before: set[epath.Path] | None = None
        while True:
            try:
                return reload(self)
            except FileNotFoundError:
                there = {*self.directory.iterdir()}
                if there == before:
                    raise
                before = there

    return looking


for _name in _ASKING:
    _method = getattr(ocp.CheckpointManager, _name)
    _method = restores.detecting_deletions(_method) if _name == "metadata" else _method
    _method = _until_they_stay(_method) if _name == "reload" else _method
    setattr(AdaCheckManager, _name, _behind_opening(_method))

_open_managers = weakref.WeakSet[AdaCheckManager]()
_left_open = list[AdaCheckManager]()
"""Those among them whose callers may have let go of them."""


def _finish() -> None:
    """Waits for saves when the process ends; later no thread of theirs could begin another one."""
    for each in [each for each in _open_managers if not each._is_elsewhere]:
        try:
            if jax.process_count() == 1:
                each.wait_until_finished()
            else:  # without what others would have to decide with it
                each._opener.wait_until_finished()
        except Exception as error:
            _log.error("%s: the process ends, and a step is not saved: %s", each.directory, error)


# Unlike those of atexit these are called before the executors of all modules refuse work.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
