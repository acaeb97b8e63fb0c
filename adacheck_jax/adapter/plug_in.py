"""The door for trainers that make their own Orbax manager: one of this library in its place.

A trainer names items, handlers and arguments of stock Orbax itself. No handler of Orbax sees more
than one item, so items that an update ties are put together where a whole call is seen: in the
manager. :mod:`~adacheck_jax.adapter.trainer_items` has the translation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME

from adacheck_jax.adapter import directories, trainer_items
from adacheck_jax.adapter.arguments import RestoreArgs, SaveArgs
from adacheck_jax.adapter.away import restores
from adacheck_jax.adapter.away.orbax_manager import AdaCheckManager, one_at_a_time
from adacheck_jax.adapter.handler import AdaCheckHandler, HandlerOptions
from adacheck_jax.adapter.manager import expect_options, handler_and_options
from adacheck_jax.adapter.trainer_items import StepItems, Ties
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.update.binding import RecorderArgument


@contextlib.contextmanager
def plug_in(
    recorder: RecorderArgument = None, **handler: Unpack[HandlerOptions]
) -> Iterator[list[AdaCheckManager]]:
    """Make each ``ocp.CheckpointManager`` of a trainer one that saves deltas.

    ::

        recorder = adacheck.Recorder(optax.adamw(3e-4))
        with adacheck.plug_in(recorder):  # around the call in which the trainer makes its manager
            trainer = PeftTrainer(model, recorder, config)
        trainer.train(batches)

    A manager that is made in the block, by whatever module, keeps its directory, options, item
    names and handlers, and so does one of a trainer's subclass. Pytrees (``StandardSave``,
    ``PyTreeSave``, and subclasses) are saved by an :class:`AdaCheckHandler`, other items as before.
    Params and optimizer state in different items are one line of steps, under the names of both,
    such as ``model_params+optimizer_state``; the trainer restores each by its own name, alone or
    with others. A pytree that the update does not touch is saved under its own name, each time
    whole. A step that stock Orbax wrote is restored too, also into an optimizer state with a
    Recorder in it, and the next save is a base.

    The block holds for all threads. It replaces ``ocp.CheckpointManager.__new__``, which stays
    replaced, and outside of a block does what it did.

    Args:
        recorder: as for :class:`AdaCheckHandler`.
        **handler: options of :class:`AdaCheckHandler`.

    Yields:
        The managers, as they are made.

    Raises:
        AdaCheckError: no manager was made in the block.
        TypeError: an option that no handler has.
        ValueError: options that contradict each other, or that belong to an API that Orbax has
            given up.
    """
    expect_options("plug_in (options of the manager stay the trainer's)", handler)
    AdaCheckHandler(recorder, **handler).close()  # what is wrong is an error here
    block = _Block(recorder, handler)
    # Never taken back: Python's own __new__ would refuse arguments once it was replaced.
    ocp.CheckpointManager.__new__ = _new
    _blocks.append(block)
    try:
        yield block.made
    finally:
        _blocks.remove(block)
    if not block.made:
        raise AdaCheckError(
            "plug_in: expected a call of ocp.CheckpointManager in the block, found none: nothing "
            "would be saved as deltas. Put the block around the call that makes the trainer's "
            "manager; a trainer that makes it later needs its training in the block."
        )


@dataclasses.dataclass(eq=False)
class _Block:
    """A block of :func:`plug_in`, and the managers made in it."""

    recorder: RecorderArgument
    options: HandlerOptions
    made: list[AdaCheckManager] = dataclasses.field(default_factory=list)


_blocks = list[_Block]()
"""Blocks under way; the last one is the innermost."""


def _new(cls: Any, *_args: Any, **_kwargs: Any) -> Any:
    """A manager of Orbax, whose constructor Python calls next."""
    if not _blocks or issubclass(cls, AdaCheckManager):
        return object.__new__(cls)
    made = object.__new__(_plugged(cls))
    made.block = _blocks[-1]
    return made


@functools.cache
def _plugged(cls: Any) -> Any:
    """The class in the place of Orbax's, or of a trainer's subclass with the methods of both."""
    if cls is ocp.CheckpointManager:
        return TrainerManager
    return type(cls.__name__, (cls, TrainerManager), {"__module__": cls.__module__})


class TrainerManager(AdaCheckManager):
    """A manager with the constructor and arguments of stock Orbax; :func:`plug_in` makes one."""

    block: _Block

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        place = directories.root_path(str(directory))
        options = options or ocp.CheckpointManagerOptions()
        if options.prevent_write_metrics and checkpointers is item_handlers is handler_registry:
            raise ValueError(  # v1 saves by handlers of its own
                f"{place}: expected a manager of Orbax v0 in plug_in, found that of a v1 "
                "Checkpointer. Make it in `with adacheck.v1.context(AdaCheckHandler(recorder)):`."
            )
        block = self.block
        own, found = handler_and_options(place, block.recorder, options, {**block.options})
        is_mapping = isinstance(item_handlers, Mapping)
        handlers: dict[str, Any] = {"item_handlers": own, "checkpointers": checkpointers}
        if is_mapping or item_handlers is None:
            others = {**item_handlers} if is_mapping else {}
            registry = trainer_items.registry(own, handler_registry, others)
            handlers = {"handler_registry": registry, "checkpointers": checkpointers}
        super().__init__(own, place, options=found, metadata=metadata, logger=logger, **handlers)
        self._ties = Ties(own.run.has_recorder, block.options.get("params_path"))
        if is_mapping or item_names:
            self._default_item.set(False)
        block.made.append(self)

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
        """As Orbax's, with arguments of stock Orbax or of this library."""
        if args is None:
            raise ValueError(
                f"plug_in: expected save({step}, args=...), found no args=; Orbax has given up "
                "items=. Nothing was saved."
            )
        if not (force or self._is_due(step)):
            return False
        args, tied, others = self._ties.saving(args)
        self._opener.wait()  # the save before may still make its line of steps
        self.handler.run.lines.note_updates({**dict.fromkeys(others, False), tied: True})
        custom_metadata = custom_metadata or None  # tunix gives an empty one
        return super().save(step, items, save_kwargs, metrics, True, args, custom_metadata)

    def _state_item(self, args: Any) -> str | None:
        if not isinstance(args, ocp.args.Composite):
            return None
        ours = (name for name, x in args.items() if isinstance(x, (SaveArgs, RestoreArgs)))
        return next(ours, "")

    @one_at_a_time
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """As Orbax's, with arguments of stock Orbax or of this library."""
        if args is None or not isinstance(args, ocp.args.Composite):
            args = trainer_items.restore_args(args) if trainer_items.is_tree(args) else args
            found = super().restore(step, items, restore_kwargs, directory, args)
            return trainer_items.apart(found) if isinstance(found, ocp.args.Composite) else found
        self.wait_until_finished()  # as Orbax's restore; then what was saved last is there
        number = self.latest_step() if step is None and directory is None else step
        held = StepItems({}) if number is None else self._held(number, directory or self.directory)
        with restores.deletion_detected(self, number) if directory is None else nullcontext():
            asked = held.restoring(args, self.handler.metadata)
        found = super().restore(number, items, restore_kwargs, directory, asked)
        return trainer_items.apart(found, args.keys())

    def metadata(self, step: int | None = None) -> Any:
        """As Orbax's, with the items under the trainer's names."""
        found: Any = super().metadata(step)
        if step is None:
            return found
        described = found.item_metadata
        held = self._held(step, self.directory)
        if not isinstance(described, Mapping):
            default = held.directories.get(DEFAULT_ITEM_NAME)
            if described is None and default is not None:
                described = self.handler.metadata(default)
            return dataclasses.replace(found, item_metadata=described)
        items = {
            name: self.handler.metadata(held.directories[name])
            if each is None and held.is_tree(name)
            else each
            for name, each in described.items()
        }
        shown = trainer_items.described(items)
        return dataclasses.replace(found, item_metadata=type(described)(**shown))

    def _held(self, step: int, root: Any) -> StepItems:
        try:
            return StepItems.of(self._get_read_step_directory(step, epath.Path(root)))
        except ValueError:  # there is no such step, where names have a prefix
            return StepItems({})
