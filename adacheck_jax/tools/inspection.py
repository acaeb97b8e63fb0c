"""Description of one step and its leaves, from manifests and file sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.encodings.table import ENCODINGS
from adacheck_jax.format.manifest import BaseManifest, Delta, Update
from adacheck_jax.store.steps import folders
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools.history.differences import roles_of
from adacheck_jax.tools.steps import RecordedStep, RecordedSteps, undeleted


@dataclass(frozen=True, slots=True)
class LeafSummary:
    """One leaf of a step.

    Attributes:
        path: leaf path.
        description: data type and shape.
        group: its role in the update: ``params``, ``optimizer state`` (with derived trees),
            ``record`` (with extra arguments), or ``other``.
        exactness: for a leaf that the update computes, and that deltas replay: ``element-wise``
            (exact on every mesh), ``reducing`` (exact where it was saved), or ``passed through``;
            else None.
        source: source of a restore: ``replayed`` (computed from the base by the update),
            ``recorded`` (consumed by the update, and stored in a delta), ``differences`` (of its
            bits from step to step), ``stored``, ``same as`` another leaf (whose data it shares),
            ``kept from`` an earlier base, or, of an ephemeral leaf, ``stale`` with the step that
            had it so; several joined by ``+``.
        box_count: number of distinct boxes that it was cut into when it was saved.
        leaf_bytes: its size in memory, in bytes.
        fingerprint: 16 hexadecimal digits.
    """

    path: str
    description: str
    group: str
    exactness: str | None
    source: str
    box_count: int
    leaf_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StepDetails:
    """The output of ``adacheck inspect``.

    Attributes:
        step: step number.
        directory: path of the item directory that it is restored from.
        kind: ``base``, ``delta``, or ``deferred`` for a step that was saved with a later one.
        reason: the reason for this kind.
        update_count: number of updates so far, of all recorders; None without a recorder.
        parent: for a delta the step that it builds on, else None.
        base: step number of the base that a restore starts from.
        depth: number of deltas since the base, 0 for a base.
        recorded: deferred steps that were saved with it.
        replayed_count: number of updates that a restore replays.
        checks: comparison of each delta that a restore reads with the state before it was
            committed, by step number: ``full`` (every element was replayed and compared),
            ``sample`` (some of every leaf), ``identity`` (the saved arrays are those that the
            update returned), ``stored`` (nothing is replayed), or empty if it was not compared.
        problem: the reason why no further updates are replayed onto this step; None if they are.
        new_bytes: bytes that this step added; None in an object store, and for a step without a
            directory of its own.
        versions: versions of the packages that wrote the base.
        leaves: leaves, in tree order.
    """

    step: int
    directory: str
    kind: str
    reason: str
    update_count: int | None
    parent: int | None
    base: int
    depth: int
    recorded: tuple[int, ...]
    replayed_count: int
    checks: dict[int, str]
    problem: str | None
    new_bytes: int | None
    versions: dict[str, str]
    leaves: tuple[LeafSummary, ...]


def describe_step(root: AnyPath, number: int | None = None, item: str | None = None) -> StepDetails:
    """Describe one recorded step and its leaves.

    Raises:
        InputError: there is no such root, step or item.
        AdaCheckError: the step is damaged, or a step that it builds on is missing.
    """
    recorded = RecordedSteps(root, item)
    step = recorded.find(number)
    if error := recorded.damaged.get(step.number):
        raise error
    with undeleted(step.directory):
        return _described(step)


def _described(step: RecordedStep) -> StepDetails:
    lineage = step.lineage
    base, manifest, end = lineage.base, lineage.manifest, lineage.end
    groups = roles_of(len(base.leaves), base.update)
    exactness, sources = _exactness(base.update), _sources(lineage)
    if lineage.replayed_count:  # of what no delta replays, however it is computed, nothing is told
        exactness = {i: each for i, each in exactness.items() if "replayed" in sources[i]}
    leaves = tuple(
        LeafSummary(
            path=leaf.path,
            description=leaf.description,
            group=groups[index],
            exactness=exactness.get(index),
            source=sources[index],
            box_count=len(leaf.owners),
            leaf_bytes=leaf.nbytes,
            fingerprint=f"{end.fingerprints[index]:016x}",
        )
        for index, leaf in enumerate(lineage.leaves)
    )
    return StepDetails(
        step=step.number,
        directory=str(step.directory),
        kind=step.kind,
        reason=_reason(end),
        update_count=sum(end.counts) if end.counts else None,
        parent=manifest.parent and manifest.parent.step,
        base=base.step,
        depth=len(lineage.deltas),
        recorded=manifest.steps[:-1] if step.is_own else (),
        replayed_count=lineage.replayed_count,
        checks={delta.step: delta.checked for delta in lineage.deltas},
        problem=lineage.problem or (None if base.update else "the base holds no update program"),
        new_bytes=folders.new_bytes(step.directory) if step.is_own else None,
        versions=dict(base.versions),
        leaves=leaves,
    )


def _reason(end: BaseManifest | Delta) -> str:
    if isinstance(end, BaseManifest):
        return end.reason
    if not end.has_update:
        return "no update replayed"
    return "one update" if len(end.updates) == 1 else f"{len(end.updates)} updates"


def _exactness(update: Update | None) -> dict[int, str]:
    """Exactness of the replay of each leaf that the update computes, by leaf index."""
    if update is None:
        return {}
    found = dict.fromkeys(update.explained, "element-wise")
    found |= dict.fromkeys(update.reducing, "reducing")
    return found | dict.fromkeys(update.passed, "passed through")


def _sources(lineage: Lineage) -> list[str]:
    """Source of each leaf in a restore, by leaf index."""
    base, update = lineage.base, lineage.base.update
    stored = ["stored" for _ in base.leaves]
    for index, other in base.aliases:
        stored[index] = f"same as {base.leaves[other].path}"
    for index, step in base.kept:
        stored[index] = f"kept from {step}"
    sources: list[dict[str, None]] = [{} for _ in base.leaves]
    for delta in lineage.deltas:
        for index in computed_by(update, delta):
            sources[index]["replayed"] = None
        for position, index in enumerate(delta.stored):
            letters = {Encoding(pack.encodings[position]) for pack in delta.packs}
            used = [ENCODINGS[each] for each in letters - {Encoding.SAME}]
            if update is not None and delta.has_update and index in update.consumed:
                sources[index] = {"recorded": None}
            elif any(each.needs_old for each in used):
                sources[index]["differences"] = None
            else:
                sources[index] = {"stored": None}
    for index, step in lineage.end.stale:
        sources[index] = {f"stale, as step {step} had it": None}
    return [" + ".join(each) or own for each, own in zip(sources, stored, strict=True)]


def computed_by(update: Update | None, delta: Delta) -> frozenset[int]:
    """Indices of the leaves that a restore computes from this delta."""
    if update is None or not delta.has_update:
        return frozenset()
    return update.computed_by(delta.updates).difference(update.passed, delta.unreplayed)
