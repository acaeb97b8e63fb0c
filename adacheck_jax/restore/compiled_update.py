"""The update program of a lineage: vetted, loaded and compiled while the base is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.export

from adacheck_jax.device.background import in_background
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.errors import AdaCheckError, FormatError, unreadable
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.restore.progress import Progress
from adacheck_jax.restore.working_set import abstract_leaf, replay_shardings
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from adacheck_jax.update.binding import Recorders, bind_all
from adacheck_jax.update.compiling import cut_program
from adacheck_jax.update.params_search import LeafType
from adacheck_jax.update.program import Kept, UpdateFunction

_log = logging.getLogger(__name__)

Shardings = Mapping[int, jax.sharding.Sharding]
"""The sharding for replay of each leaf that an update takes, by leaf index."""


class CompiledUpdates:
    """Update programs, each loaded once and compiled once for each set of shardings.

    Attributes:
        waited_s: seconds for which :meth:`get` waited for programs.
    """

    def __init__(
        self,
        recorders: Recorders | None = None,
        params_path: str | Mapping[str, str] | None = None,
    ) -> None:
        self._recorders = recorders or {}
        self._params_path = params_path
        self.waited_s = 0.0
        self._loaded: dict[str, Future[_Loaded]] = {}
        self._compiled: dict[tuple[Hashable, ...], Future[UpdateFunction]] = {}

    def begin_loading(self, lineage: Lineage) -> None:
        """Load the update on a new thread, while the shardings of its leaves are chosen."""
        update = lineage.base.update
        if update is not None and update.programs and lineage.replayed_count:
            self._loading(lineage, update)

    def begin_compiling(self, lineage: Lineage, placements: Mapping[str, Any]) -> None:
        """Compile on a new thread, while the base is read."""
        update, specs = lineage.base.update, lineage.base.leaves
        if update is None or lineage.base.checksum not in self._loaded:
            return
        if any(specs[i].key_type for i in (*update.inner, *update.extra)):
            return  # the sharding of a key's data is known once the key is read
        leaves = [abstract_leaf(spec, placements[spec.path]) for spec in specs]
        self._compiling(lineage, update, replay_shardings(leaves, update))

    def get(
        self, lineage: Lineage, update: Update, shardings: Shardings, progress: Progress
    ) -> UpdateFunction:
        """The program for leaves on these shardings; waits until it is compiled.

        Raises:
            FormatError: there is no update that can be read here.
            IntegrityError: the stored program is not the one that was written.
        """
        begin_s, compiling = time.monotonic(), self._compiling(lineage, update, shardings)
        try:
            program = progress.compiled(compiling)
        except AdaCheckError:  # its file may be gone with the step's directory: another one has it
            checksum = lineage.base.checksum
            self._loaded.pop(checksum, None)
            self._compiled = {k: x for k, x in self._compiled.items() if k[0] != checksum}
            raise
        self.waited_s += time.monotonic() - begin_s
        return program

    def _loading(self, lineage: Lineage, update: Update) -> Future[_Loaded]:
        checksum = lineage.base.checksum
        if checksum not in self._loaded:
            self._loaded[checksum] = in_background(
                lambda: _load(lineage, update, self._recorders, self._params_path)
            )
        return self._loaded[checksum]

    def _compiling(
        self, lineage: Lineage, update: Update, shardings: Shardings
    ) -> Future[UpdateFunction]:
        key = lineage.base.checksum, *shardings.values()
        if key not in self._compiled:
            loading, specs = self._loading(lineage, update), lineage.base.leaves
            where = str(_file_of(lineage))
            self._compiled[key] = in_background(
                lambda: compiled(loading.result(), update, specs, shardings, where)
            )
        return self._compiled[key]


_Loaded = jax.export.Exported | UpdateFunction
"""The stored program, or the given recorders' update."""

_kept: Kept[UpdateFunction] = Kept(4)
"""Compiled programs of earlier restores."""


def compiled(
    loaded: _Loaded, update: Update, specs: Sequence[Leaf], shardings: Shardings, where: str
) -> UpdateFunction:
    """An update compiled for some shardings; a stored one may be kept from an earlier restore.

    One from a file was loaded first, so that it is compared with its digest also if it is kept.
    """
    lists = update.params, update.inner, update.record, update.extra
    abstract = [[abstract_leaf(specs[i], shardings[i]) for i in each] for each in lists]
    key = (
        update.programs.get(update_program.platform()),
        tuple(tuple((x.shape, x.dtype, x.sharding) for x in each) for each in abstract),
        len(update.counts),
        *update_program.environment().values(),
    )
    stored = loaded if isinstance(loaded, jax.export.Exported) else None
    if stored is not None and (kept := _kept.get(key)) is not None:
        return kept
    state = [[shardings[i] for i in each] for each in lists[:2]]
    switches = update_program.switches(len(update.counts), shardings=shardings.values())
    by_layouts = any(is_narrow(x.dtype) for each in abstract for x in each)  # jax calls it so
    compiled: Any = None
    # Only what is pinned has the same bits in any program.
    if stored is not None and update.pinned and not update.reducing and not by_layouts:
        compiled = cut_program.compiled(stored, abstract, switches)
    if compiled is None:
        function: Any = exported_program.function_of(stored, where) if stored else loaded
        jitted = update_program.jit_update(function, *state)
        compiled = jitted if by_layouts else jitted.lower(*abstract, switches).compile()
    if stored is not None:
        _kept.put(key, compiled)
    return compiled


def _load(
    lineage: Lineage,
    update: Update,
    recorders: Recorders,
    params_path: str | Mapping[str, str] | None,
) -> _Loaded:
    """The stored update program, or the recorders' updates where this jax cannot read it."""
    path = _file_of(lineage)
    try:
        data = at(path).read()
    except OSError as error:
        raise unreadable(path, error) or FormatError(
            f"{path}: expected the exported update of the base for this platform, found none "
            f"({error.strerror}); the base has it for {', '.join(update.programs)}. Restore on one "
            "of these, or restore a base step."
        ) from error
    try:
        return exported_program.vetted(data, update, str(path))
    except FormatError as error:
        if not recorders:
            raise
        _log.warning("Replaying the given recorder's update instead of the file's: %s", error)
    types = {leaf.path: LeafType(*leaf.logical) for leaf in lineage.base.leaves}
    return update_program.joint_function(bind_all(recorders, types, params_path))


def _file_of(lineage: Lineage) -> AnyPath:
    return lineage.base_directory / manifest_file.update_file(update_program.platform())
