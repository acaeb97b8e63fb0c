"""The update program of a lineage: vetted, loaded and compiled while the base is read."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adacheck_jax.device import transfer
from adacheck_jax.errors import FormatError, unreadable
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.restore import progress
from adacheck_jax.restore.working_set import replay_shardings
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import at
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from adacheck_jax.update.binding import Recorders, bind_all
from adacheck_jax.update.kept import Kept
from adacheck_jax.update.params_search import LeafType
from adacheck_jax.update.program import UpdateFunction

_log = logging.getLogger(__name__)

Shardings = Mapping[int, jax.sharding.Sharding]
"""The sharding for replay of each leaf that an update takes, by leaf index."""


class CompiledUpdates:
    """Update programs, each loaded once and compiled once for each set of shardings.

    Args:
        recorders: recorders whose updates replace a stored program that this jax cannot read.
        params_path: leaf path of the params, as given to the handler.
        clock: a monotonic clock.

    Attributes:
        waited_s: seconds for which :meth:`get` waited for programs.
    """

    def __init__(
        self,
        recorders: Recorders | None = None,
        params_path: str | Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorders = recorders or {}
        self._params_path = params_path
        self._clock, self.waited_s = clock, 0.0
        self._loaded: dict[str, Future[_Loaded]] = {}
        self._compiled: dict[Hashable, Future[UpdateFunction]] = {}

    def begin_loading(self, lineage: Lineage) -> None:
        """Load the update on a new thread, while the shardings of its leaves are chosen.

        Args:
            lineage: the lineage to restore.
        """
        update = lineage.base.update
        if update is not None and update.programs and lineage.replayed_count:
            future = self._loaded[lineage.base.checksum] = Future()
            load = functools.partial(_load, lineage, update, self._recorders, self._params_path)
            update_program.in_background(load, future)

    def begin_compiling(self, lineage: Lineage, placements: Mapping[str, Any]) -> None:
        """Compile on a new thread, while the base is read.

        Args:
            lineage: the lineage, after :meth:`begin_loading`.
            placements: the sharding that each leaf is read onto, by leaf path.
        """
        update, specs = lineage.base.update, lineage.base.leaves
        if update is None or lineage.base.checksum not in self._loaded:
            return
        if any(specs[i].key_type for i in (*update.inner, *update.extra)):
            return  # the sharding of a key's data is known once the key is read
        leaves = [abstract_leaf(spec, placements[spec.path]) for spec in specs]
        shardings = replay_shardings(leaves, update)
        future = self._compiled[_key(lineage, shardings)] = Future()
        x64 = transfer.x64_enabled()

        lists = update.params, update.inner, update.record, update.extra
        abstract = [[abstract_leaf(specs[i], shardings[i]) for i in each] for each in lists]
        compiles_alike = _compiles_alike(update, abstract, x64)

        def compile_it() -> Any:
            # First: it compares the stored program with its digest also if one is kept.
            loaded = self._loaded[lineage.base.checksum].result()
            kept = _kept.get(compiles_alike) if loaded.is_stored else None
            if kept is not None:
                return kept
            jitted = self._jitted(lineage, update, shardings)
            every = [shardings[i] for each in lists for i in each]
            switches = update_program.switches(len(update.counts), shardings=every)
            compiled = jitted.lower(*abstract, switches).compile()
            if loaded.is_stored:
                _kept.put(compiles_alike, compiled)
            return compiled

        update_program.in_background(compile_it, future)

    def get(self, lineage: Lineage, update: Update, shardings: Shardings) -> UpdateFunction:
        """The program for leaves on these shardings; waits until it is compiled.

        Args:
            lineage: the lineage to replay.
            update: the update of its base.
            shardings: the shardings for replay, by leaf index.

        Raises:
            FormatError: there is no update that can be read here.
            IntegrityError: the stored program is not the one that was written.
        """
        key, begin_s = _key(lineage, shardings), self._clock()
        if key not in self._compiled:
            made = Future[UpdateFunction]()
            made.set_result(self._shared(lineage, update, shardings))
            self._compiled[key] = made  # not before: a program that cannot be loaded is never done
        program = progress.compiled(lineage.end.step, self._compiled[key])
        self.waited_s += self._clock() - begin_s
        return program

    def _shared(self, lineage: Lineage, update: Update, shardings: Shardings) -> UpdateFunction:
        """The jitted update; of bases with the same program that of the first, compiled once."""
        # First: it compares the stored program with its digest also if one is kept.
        jitted = self._jitted(lineage, update, shardings)
        if self._recorders:  # it may be their update, and not the stored program
            return jitted
        specs = lineage.base.leaves
        lists = update.params, update.inner, update.record, update.extra
        abstract = [[abstract_leaf(specs[i], shardings[i]) for i in each] for each in lists]
        key = "jitted", _compiles_alike(update, abstract, transfer.x64_enabled())
        kept = _kept.get(key)
        if kept is None:
            _kept.put(key, kept := jitted)
        return kept

    def _jitted(self, lineage: Lineage, update: Update, shardings: Shardings) -> Any:
        loaded = self._loaded.get(lineage.base.checksum)
        if loaded is None:
            function = _load(lineage, update, self._recorders, self._params_path).function
        else:
            function = loaded.result().function
        state = [[shardings[i] for i in each] for each in (update.params, update.inner)]
        return update_program.jit_update(function, *state)


def _key(lineage: Lineage, shardings: Shardings) -> Hashable:
    return lineage.base.checksum, *shardings.values()


def abstract_leaf(spec: Leaf, sharding: Any) -> jax.ShapeDtypeStruct:
    """A leaf that is not read, or not yet; a host value if its placement is no sharding."""
    on_devices = isinstance(sharding, jax.sharding.Sharding)
    return jax.ShapeDtypeStruct(
        spec.shape, jnp.dtype(spec.dtype), sharding=sharding if on_devices else None
    )


class _Loaded(NamedTuple):
    """An update over flat leaves.

    Attributes:
        function: the update.
        is_stored: True for the stored program, False for the given recorders' update.
    """

    function: UpdateFunction
    is_stored: bool


_kept: Kept[UpdateFunction] = Kept(4)
"""Compiled programs of earlier restores."""


def _compiles_alike(
    update: Update, leaves: Sequence[Sequence[jax.ShapeDtypeStruct]], x64: bool
) -> Hashable:
    """Everything that a compiled program depends on."""
    described = tuple((x.shape, x.dtype, x.sharding) for each in leaves for x in each)
    sizes = tuple(map(len, leaves))
    digest = update.programs.get(update_program.platform())
    settings = tuple(update_program.environment().values())
    return digest, sizes, described, len(update.counts), x64, settings


def _load(
    lineage: Lineage,
    update: Update,
    recorders: Recorders,
    params_path: str | Mapping[str, str] | None,
) -> _Loaded:
    """The stored update program, or the recorders' updates where this jax cannot read it."""
    path = lineage.base_directory / manifest_file.update_file(update_program.platform())
    try:
        data = at(path).read()
    except OSError as error:
        if refused := unreadable(path, error):
            raise refused from error
        raise FormatError(
            f"{path}: expected the exported update of the base for this platform, found none "
            f"({error.strerror}); the base has it for {', '.join(update.programs)}. Restore on one "
            "of these, or restore a base step."
        ) from error
    try:
        return _Loaded(exported_program.load(data, update, str(path)), is_stored=True)
    except FormatError as error:
        if not recorders:
            raise
        _log.warning("Replaying the given recorder's update instead of the file's: %s", error)
    types = _types_of(lineage.base.leaves)
    function = update_program.joint_function(bind_all(recorders, types, params_path))
    return _Loaded(function, is_stored=False)


def _types_of(leaves: Sequence[Leaf]) -> dict[str, LeafType]:
    """Shape and data type of every leaf; of a typed PRNG key as the state holds it."""
    return {
        leaf.path: LeafType(leaf.shape[:-1], leaf.key_type)
        if leaf.key_type
        else LeafType(leaf.shape, leaf.dtype)
        for leaf in leaves
    }
