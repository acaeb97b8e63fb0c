"""The handler of Orbax v1: its calls to save, load and describe steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Generator, Sequence
from typing import Any, ClassVar

from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.future import Future

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.arguments import HANDLER_NAME, RestoreArgs, SaveArgs
from adacheck_jax.adapter.restoring.finding import described_lineage
from adacheck_jax.adapter.saving.saves import Begun
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.adapter.v1 import options
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import storage_named
from adacheck_jax.processes.messages import Report
from adacheck_jax.store.steps import deletion, roots
from adacheck_jax.store.steps.marks import COMMIT_MARK, TREE_METADATA
from adacheck_jax.store.steps.roots import is_stock
from adacheck_jax.store.storage.location import AnyPath, at, located

_COMMIT = "commit"
"""Topic of the exchange about the commit."""

_HINT = (
    "This step is a delta of adacheck_jax, and builds on another step. Load it in `with "
    "adacheck_jax.v1.context(): ...`"
)


class StateHandler(ocp.handlers.CheckpointableHandler[PyTree, PyTree]):
    """Saves every step: periodic bases, and deltas between them.

    Orbax constructs one for each operation, from a subclass that :func:`handler_class` makes.

    Attributes:
        run: the training run.
    """

    run: ClassVar[TrainingRun]

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: PyTree
    ) -> Awaitable[None]:
        """Start a save of a state, or of ``SaveArgs``; see :meth:`AdaCheckHandler.async_save`.

        Returns:
            The rest of the save, to be awaited on another thread.

        Raises:
            ValueError: the context wants another form of storage.
        """
        is_args = isinstance(checkpointable, SaveArgs)
        args = checkpointable if is_args else SaveArgs(checkpointable)
        with _directories_awaited_if_refused(directory.path):
            path, args = located(str(directory.path)), options.saving(args)
            begun = self.run.saves.begin(path, lambda: roots.place_of(path, in_step=True), args)
            futures = await self.run.saves.write(path, begun)
        return _Rest(self.run, directory, begun, futures)

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: PyTree | None = None
    ) -> Awaitable[PyTree]:
        """Restore onto an abstract state, or by ``RestoreArgs``; stock checkpoints are Orbax's.

        See :meth:`AdaCheckHandler.restore`.

        Raises:
            ValueError: the context wants another way of loading.
        """
        is_args = isinstance(abstract_checkpointable, RestoreArgs)
        args = abstract_checkpointable if is_args else RestoreArgs(abstract_checkpointable)
        path = located(str(directory))
        if is_stock(path) and not is_args:
            loading = await ocp.handlers.PyTreeHandler().load(directory, abstract_checkpointable)
            self.run.note_stock(path)
            return loading
        args = options.loading(args)
        # Here and not in the awaitable: Orbax gives the errors of that one another type.
        return _ready(self.run.restore(path, args))

    async def metadata(self, directory: ocp.path.Path) -> PyTree:
        """Orbax's tree of abstract leaves of a step; see :meth:`AdaCheckHandler.metadata`."""
        path = located(str(directory))
        with deletion.detected(path):
            described = path if is_stock(path) else described_lineage(path).base_directory
        return await ocp.handlers.PyTreeHandler().metadata(epath.Path(str(described)))

    def is_handleable(self, checkpointable: Any) -> bool:
        """True: the checkpointable has this handler's name, and :meth:`save` says what is wrong."""
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """True: what has this handler's name is its own, and :meth:`load` says what is wrong."""
        return True


def handler_class(run: TrainingRun) -> type[StateHandler]:
    """The handler's class for one training run.

    Orbax writes a class's name beside every step, and finds the handler by it. The name is that of
    the v0 handler, because the steps are the same: each reads what the other one wrote.
    """
    module, _, name = HANDLER_NAME.rpartition(".")
    return type(name, (StateHandler,), {"run": run, "__module__": module, "__qualname__": name})


class _Rest:
    """The rest of a save, after the caller's thread: wait for what is written, and commit.

    Attributes:
        commit_futures: the futures, under the name by which Orbax cancels them.
    """

    def __init__(
        self,
        run: TrainingRun,
        directory: ocp.path.PathAwaitingCreation,
        begun: Begun,
        futures: Sequence[Future],
    ) -> None:
        self.commit_futures = futures
        self._run, self._directory, self._begun = run, directory, begun

    def __await__(self) -> Generator[Any, None, None]:
        return self._finish().__await__()

    async def _finish(self) -> None:
        path = located(str(await self._directory.await_creation()))
        await asyncio.to_thread(self._commit_together, path)

    def _commit_together(self, path: AnyPath) -> None:
        """Commit in one process, once all have written; the others wait for it.

        The first process commits, but Orbax renames the step as soon as its own first process is
        here, whichever that is.
        """
        exchange = self._begun.save.attempt.exchange
        with exchange.telling("write its share"):
            for future in self.commit_futures:
                future.result()
        exchange.agree(_COMMIT, {}, lambda _: self._commit(path))

    def _commit(self, path: AnyPath) -> Report:
        with storage_named(self._begun.save.directory):
            if not self._begun.save.is_base:
                # Without this file Orbax takes an item for no pytree, and never asks its handler.
                _write(path / TREE_METADATA, _tree_metadata())
            if roots.is_written_in_place(path):
                # ``ocp.save`` marks the step alone, at the end; the Checkpointer its items too.
                _write(path / COMMIT_MARK, b"")
        self._run.saves.commit(path, self._begun)
        return {}


def _directories_awaited_if_refused(
    directory: ocp.path.Path,
) -> contextlib.AbstractContextManager[None]:
    """Wait for Orbax's directories before a save is refused, if they are being made by now.

    The Checkpointer makes them on other threads, from before a handler is called; ``ocp.save``
    makes them later, and the item's without a temporary name of its own.
    """
    is_later = roots.TMP_SUFFIX in directory.parent.name and roots.TMP_SUFFIX not in directory.name
    return contextlib.nullcontext() if is_later else directories.made_even_if_refused(directory)


def _write(path: AnyPath, data: bytes) -> None:
    place = at(path)
    place.write(data)
    place.sync()


def _tree_metadata() -> bytes:
    """A tree of one leaf for stock Orbax, whose errors name the leaf and its unknown type."""
    entry = {
        "key_metadata": [{"key": _HINT, "key_type": 2}],
        "value_metadata": {"value_type": _HINT, "skip_deserialize": False},
    }
    tree = {"tree_metadata": {str((_HINT,)): entry}, "use_ocdbt": True, "use_zarr3": True}
    return json.dumps(tree).encode()


async def _ready(state: PyTree) -> PyTree:
    return state
