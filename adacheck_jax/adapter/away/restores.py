"""A stock Orbax manager that restores also what a step holds beside itself, or memory holds."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter import inputs
from adacheck_jax.adapter.arguments import RestoreArgs, expect_args
from adacheck_jax.adapter.away.lockstep import Lockstep
from adacheck_jax.adapter.away.opening import OpeningManager
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.adapter.reports import expect_outside_callback
from adacheck_jax.device.trees import PyTree
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import located

_log = logging.getLogger(__name__)


class RestoringManager(OpeningManager):
    """A manager that knows the handler of the state.

    Attributes:
        handler: the handler, for ``record_step``, ``recover``, ``restored`` and ``last_save``.
    """

    def __init__(self, handler: AdaCheckHandler, root: epath.Path, **arguments: Any) -> None:
        self.handler, handlers = handler, arguments.get("item_handlers")
        named = handlers.items() if isinstance(handlers, Mapping) else ()
        self._item = next((name for name, each in named if each is handler), None)
        self._together = Lockstep(root)
        handler.run.calls = self._together.calls
        self._together.introduce(handler.run.described)
        super().__init__(root, **arguments)

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
                self._tell_behind(found[0])
                return found
        if (newest := self.latest_step()) is None:
            return None
        args: Any = RestoreArgs(abstract_state)
        if self._item is None:
            return newest, self.restore(newest, args=args)
        args = ocp.args.Composite(**{self._item: args})
        return newest, self.restore(newest, args=args)[self._item]

    def _tell_behind(self, recovered: int) -> None:
        """Warns of other items that storage has of an earlier step than was recovered."""
        newest = self.latest_step()
        if self._item is not None and newest is not None and newest < recovered:
            _log.warning(
                "%s: the state of step %d was in memory, and the other items are in storage, of "
                "step %d: %d behind. Restore them with restore(%d, args=...), and move a data "
                "iterator on by as many batches as the steps between took.",
                *(self.directory, recovered, newest, recovered - newest, newest),
            )

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
            ValueError: ``args`` are none of this library.
            AdaCheckError: the processes do not call alike.
            FileNotFoundError: no step holds it; or a later one does, and other items than the
                state are asked for, of which there are none.
        """

        def described() -> Mapping[str, str]:
            expect_args(args, RestoreArgs, self._item)
            own: Any = args
            if own is not None and self._item is not None:
                own = own.get(self._item)
            if own is None or jax.process_count() == 1:
                return {}
            return inputs.described(own.abstract_state)

        expect_outside_callback(f"restore({step})")
        self._together.meet(f"restore({step})", described)
        try:
            return super().restore(step, items, restore_kwargs, directory, args)
        except (FileNotFoundError, ValueError) as error:  # the latter where names have a prefix
            holder, root = None, located(str(directory or self.directory))
            if step is not None:
                holder = roots.holder_of(step, root)
            if holder in (None, step):
                raise
            if isinstance(args, RestoreArgs) and args.step is None:
                args = dataclasses.replace(args, step=step)
                return super().restore(holder, directory=directory, args=args)
            raise FileNotFoundError(
                f"{root}: expected step {step} with all that is asked for, found its state alone, "
                f"recorded in step {holder}. Restore that: manager.restore({holder}, "
                f"args=ocp.args.Composite(state=adacheck.RestoreArgs(state, step={step})))."
            ) from error
