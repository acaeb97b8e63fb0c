"""Restore of one step: find its lineage, read the base, replay, verify, build the caller's tree."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp

from adacheck_jax.adapter import reports
from adacheck_jax.adapter.arguments import RestoreArgs, RestoreInfo
from adacheck_jax.adapter.reports import RestoreTimes
from adacheck_jax.adapter.restoring import finding
from adacheck_jax.adapter.restoring.finding import OtherSteps
from adacheck_jax.adapter.stock import descriptions
from adacheck_jax.adapter.stock import restoring as stock_restoring
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.wanted.relayout import Relayout
from adacheck_jax.adapter.wanted.targets import Target
from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StepDeletedError,
)
from adacheck_jax.format import byte_loops
from adacheck_jax.format import manifest as manifests
from adacheck_jax.restore import check, replay, working_set
from adacheck_jax.restore.agreed import ALONE, Agreed
from adacheck_jax.restore.compiled_update import CompiledUpdates
from adacheck_jax.store import host_memory
from adacheck_jax.store.steps import deletion, identity, lookup, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update.binding import Recorders

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step.

    Attributes:
        state: the tree that the caller gets.
        info: the step's number, and how exact its leaves are.
        directory: item directory that the step was read from.
        lineage: base and deltas that were read; None if stock Orbax saved the step.
        leaves: verified leaves in the base's order, on the devices of the replay.
        is_own: True if the step is the directory's own, so that a delta may build on it; False for
            an earlier step that the directory also holds.
        times: seconds that the restore took; None if stock Orbax saved the step.
    """

    state: PyTree
    info: RestoreInfo
    directory: AnyPath
    lineage: Lineage | None
    leaves: list[Any]
    is_own: bool
    times: RestoreTimes | None = None


@dataclass(frozen=True, slots=True)
class _Base:
    """A base that was read, with all that replaying updates onto it needs.

    Attributes:
        target: the caller's abstract state.
        programs: the update, being compiled.
        leaves: the base's leaves, on the devices of the replay; see :func:`replay_onto`.
        left_out: indices of the leaves that updates consume, and the caller does not want.
        rounded: indices of the leaves that these devices replay to rounding only.
        moved: wanted shardings of the leaves that are replayed on other devices, by leaf path.
        relayout: the transformation into the caller's layout; None if it is the saved one.
    """

    target: Target
    programs: CompiledUpdates
    leaves: list[Any]
    left_out: frozenset[int]
    rounded: frozenset[int]
    moved: dict[str, Any]
    relayout: Relayout | None


class StepRestorer:
    """Restores steps for one handler.

    Args:
        stock: reader of bases.
        recorders: recorders of the handler, used if this jax cannot read the exported update.
        params_path: leaf path of the trained params, as given to the handler.
    """

    def __init__(
        self,
        stock: StockCheckpoints,
        recorders: Recorders,
        params_path: str | Mapping[str, str] | None,
    ) -> None:
        self._stock = stock
        self._recorders = recorders
        self._params_path = params_path

    @jax_settings.own()
    def restore(self, path: AnyPath, args: RestoreArgs, agreed: Agreed = ALONE) -> Restored:
        """Restore a step, or with ``skip_damaged`` the newest older one that can be restored.

        Several processes agree before each collective that none of them has failed. Raises what
        :meth:`AdaCheckHandler.restore` raises.
        """
        begin_s = time.monotonic()
        try:
            with deletion.detected(path):
                if args.step is None and roots.is_stock(path):
                    with agreed():
                        return self._restored_stock(path, args)
                return self._restore_found(path, args, agreed, begin_s)
        except (FormatError, IntegrityError, LineageError) as error:
            if not args.skip_damaged:
                raise
            return self._restore_other(path, args, agreed, error)

    def _restore_found(
        self, path: AnyPath, args: RestoreArgs, agreed: Agreed, begin_s: float
    ) -> Restored:
        """Restore a step, once more if a step of its lineage became a base while it was read."""
        with agreed():
            lineage = finding.lineage_of(path, args.step)
        try:
            return self._restore(path, lineage, args, agreed, begin_s)
        except (FormatError, IntegrityError, LineageError):
            with agreed():
                again = finding.lineage_of(path, args.step)
                if again.checksums == lineage.checksums:
                    raise
            _log.info("%s: a step was compacted while it was read; reading it again.", path)
            return self._restore(path, again, args, agreed, begin_s)

    def _restored_stock(self, path: AnyPath, args: RestoreArgs) -> Restored:
        """A step that stock Orbax saved, which no delta can build on."""
        if args.rules is not None:
            raise MismatchError(
                f"{path}: expected a step of this library to transform, found one that stock Orbax "
                "saved. Restore it in its own layout, save it, and transform that step."
            )
        state, converted = stock_restoring.restore(path, args, self._stock)
        info = dataclasses.replace(reports.stock_info(path), converted=converted)
        return Restored(state, info, path, None, [], is_own=False)

    def _restore_other(
        self, path: AnyPath, args: RestoreArgs, agreed: Agreed, error: AdaCheckError
    ) -> Restored:
        """Restore the newest step before a bad one, from its own lineage or another directory.

        The bad step's own lineage comes first: its steps need not have directories of their own.
        In the place of a step that was deleted it is the newest one of all.
        """
        is_gone = isinstance(error, StepDeletedError) and not at(path).is_folder
        others = OtherSteps(path, args.step, is_gone=is_gone)
        bad: set[tuple[str, ...]] = set()  # files of the steps that cannot be restored
        inner, last = self._newest_within(path, args, agreed, bad), error
        plain = dataclasses.replace(args, step=None)
        while inner is not None or others.newest is not None:
            _log.warning("Skipping a step that cannot be restored: %s", last)
            newest = others.newest
            if inner is not None and (newest is None or newest.step < inner[1].end.step):
                (place, lineage), inner = inner, None
            else:
                place, lineage = others.take(), None
            try:
                with deletion.detected(place):
                    with agreed():
                        found = lineage or finding.resolve(place)
                        if lineage is None and identity.of_lineage(found) in bad:
                            raise IntegrityError(f"{place}: it has the files of a bad step.")
                    restored = self._restore(place, found, args, agreed)
            except (FormatError, IntegrityError, LineageError) as another:
                last = another
                if lineage is None:
                    other = self._newest_within(place, plain, agreed, bad)
                    both = filter(None, (inner, other))
                    inner = max(both, key=lambda each: each[1].end.step, default=None)
                if isinstance(another, StepDeletedError):
                    others.look_again()
                continue
            others.tell(restored.info.step)
            return restored
        raise error

    def _newest_within(
        self, path: AnyPath, args: RestoreArgs, agreed: Agreed, bad: set[tuple[str, ...]]
    ) -> tuple[AnyPath, Lineage] | None:
        """The newest exact step in a bad step's directory; adds files of bad steps to ``bad``."""
        try:
            with agreed():
                lineage = lookup.held(path)
                lineage = lineage if args.step is None else lineage.until(args.step)
        except (FormatError, IntegrityError, LineageError):  # no whole manifest in it
            return None
        if identity.of_lineage(lineage) in bad:
            return None
        try:
            with agreed():
                base = self._read(path, lineage, args, agreed)
            rounded = frozenset() if args.require_exact else base.rounded
            found = replay.newest_exact(
                *(base.leaves, lineage, base.programs),
                rounded=rounded,
                read_once=args.read_once,
                agreed=agreed,
            )
        except (FormatError, IntegrityError):  # of the base, so no step of this lineage is left
            found = None
        files, good = identity.of_lineage(lineage), [] if found is None else found.steps
        for part in map(lineage.to, lineage.steps[len(good) :]):
            bad.add((*files[: len(part.entries)], str(part.left_out)))
        return None if found is None else (path, found)

    def _restore(
        self,
        path: AnyPath,
        lineage: Lineage,
        args: RestoreArgs,
        agreed: Agreed,
        begin_s: float | None = None,
    ) -> Restored:
        """Restore the last step of a lineage, of which a look-up may have begun at ``begin_s``."""
        found_s, end = time.monotonic(), lineage.entries[-1]
        size_bytes = sum(leaf.nbytes for leaf in lineage.base.leaves)
        is_own = end.holder == path and not end.is_link
        if is_own and (misplaced := roots.misplaced(path, lineage.manifest)):
            _log.warning("%s: %s; it was moved there.", path, misplaced)
        with agreed():
            base = self._read(path, lineage, args, agreed)
            host_memory.return_freed(size_bytes)  # before more is read beside it
            read_s, left_out = time.monotonic(), base.left_out
            # A rounded leaf's fingerprint verifies nothing: then the records' checksums have to.
            with _explained(lineage):
                leaves = replay.replay_onto(
                    *(base.leaves, lineage, base.programs, args.read_once),
                    checked=bool(base.rounded),
                    agreed=agreed,
                )
            leaves = [None if i in left_out else leaf for i, leaf in enumerate(leaves)]
            host_memory.return_freed(size_bytes)
            replayed_s = time.monotonic()
        with agreed():
            with _explained(lineage):
                rounded = check.check_bits(leaves, lineage, path, rounded=base.rounded)
            info = reports.info_of(lineage, rounded, path, args.require_exact)
        base.leaves.clear()  # else those that are copied now would take their memory twice
        for i, spec in enumerate(lineage.base.leaves):
            leaves[i] = transfer.like(leaves[i], base.target.wanted[spec.path])
        named = {spec.path: leaf for spec, leaf in zip(lineage.base.leaves, leaves, strict=True)}
        target = base.target
        with agreed():
            if base.moved:
                target.move(base.moved, named)
                check.check_types([*named.values()], lineage.base.leaves, path)
            if base.relayout:
                target, named = base.relayout.target, base.relayout.transformed(named)
            info = dataclasses.replace(info, converted=target.converted(named))
        with agreed():
            state = target.finish(named)
        begin_s = found_s if begin_s is None else begin_s
        total_s, waited_s = time.monotonic() - begin_s, base.programs.waited_s
        replay_s = replayed_s - read_s - waited_s
        times = RestoreTimes(total_s, found_s - begin_s, read_s - found_s, replay_s, waited_s)
        is_own = is_own and not lineage.left_out and base.relayout is None
        return Restored(state, info, path, lineage, leaves, is_own, times)

    def _read(self, path: AnyPath, lineage: Lineage, args: RestoreArgs, agreed: Agreed) -> _Base:
        """Read the base of a lineage onto the devices on which its updates are replayed."""
        size_bytes = sum(leaf.nbytes for leaf in lineage.base.leaves)
        _log.info(
            "restoring step %d: reading the base of step %d (%s bytes); %d deltas follow it",
            *(lineage.end.step, lineage.base.step, f"{size_bytes:,}", len(lineage.deltas)),
        )
        byte_loops.expect(size_bytes)  # it is fingerprinted once it is read
        programs = CompiledUpdates(self._recorders, self._params_path)
        programs.begin_loading(lineage)
        damage = descriptions.damaged_descriptions(lineage.base_directory, lineage.base)
        shardings_damage = damage.pop(manifests.SHARDINGS, None)
        for error in damage.values():
            raise error
        saved_tree = self._stock.described(lineage.base_directory)
        relayout = None if args.rules is None else Relayout(args, lineage.base, path)
        reading = args if relayout is None else relayout.reading
        target = Target(reading, lineage.base.leaves, saved_tree, path, shardings_damage)
        placements = target.placements(lineage)
        bound = check.bound_to_mesh(lineage)
        there = target.saved_placements(lineage) if bound else {}
        rounded = bound if there is None else frozenset[int]()
        there = {} if there is None else there
        there |= _apart(lineage, placements | there)
        wanted = placements | there
        programs.begin_compiling(lineage, wanted)
        specs = lineage.base.leaves
        from_deltas = target.taken_from_deltas(lineage, wanted)
        abstract = {
            x.path: working_set.abstract_leaf(x, wanted[x.path])
            for x in specs
            if x.path in from_deltas
        }
        wanted |= dict.fromkeys(abstract)
        read = self._stock.read(
            *(lineage.base_directory, specs, wanted, saved_tree, args.read_once, agreed),
            is_donated=lineage.replayed_count > 0,
        )
        leaves = [*(read | abstract).values()]
        not_wanted = {path for path in abstract if target.wanted[path] is ocp.PLACEHOLDER}
        left_out = frozenset(i for i, spec in enumerate(specs) if spec.path in not_wanted)
        check.check_types(leaves, specs, lineage.base_directory)
        moved = {each: placements[each] for each in there}
        return _Base(target, programs, leaves, left_out, rounded, moved, relayout)


@contextlib.contextmanager
def _explained(lineage: Lineage) -> Iterator[None]:
    """Has the bytes of its deltas say what is damaged, if they are."""
    try:
        yield
    except IntegrityError:
        replay.check_stored(lineage)
        raise


def _apart(lineage: Lineage, placements: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings for replay of the leaves that lie in some processes alone, by leaf path."""
    update, specs = lineage.base.update, lineage.base.leaves
    if update is None or not lineage.replayed_count:
        return {}
    leaves = [working_set.abstract_leaf(spec, placements[spec.path]) for spec in specs]
    found = working_set.apart_shardings(leaves, update)
    return {specs[i].path: sharding for i, sharding in found.items()}
