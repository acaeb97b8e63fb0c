"""A base with the values of a delta's step, written into a directory of its own.

It is the base of the delta's lineage once more, with other values: arrays of the same names and
chunks, and the same descriptions, so that all that stock Orbax read of the old base it reads of the
new one. The bits of the given values are compared with the step's fingerprints, as in a save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.errors import IntegrityError, MismatchError, first_line
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import (
    DESCRIPTIONS,
    BaseManifest,
    DeltaManifest,
    Leaf,
    Replaced,
    Update,
)
from adacheck_jax.store import links, volume_reader, zarr
from adacheck_jax.store.base_writer import (
    ArrayLayout,
    BaseWriter,
    EarlierBase,
    Name,
    agreed,
    merge,
    seldom_changed,
)
from adacheck_jax.store.sharing import Agree, Report
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.marks import TREE_METADATA
from adacheck_jax.store.storage.location import AnyPath, Location
from adacheck_jax.store.zarr import Compression

BEGIN, WRITTEN = "begin", "written"
"""Topics: the directory is empty; every process has written its part."""


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that write one base together, as one of them reaches the others.

    Attributes:
        process: index of this process. Process 0 makes the base of what all have written.
        agree: has all of them agree.
    """

    process: int
    agree: Agree


_AS_IT_WAS = (
    "Nothing was changed; the step is the delta that it was, and is restored where this file is "
    "not needed."
)


@dataclass(frozen=True, slots=True)
class _Draft:
    """Parts that a base takes over from the old one; ``stored`` are leaves that have elements."""

    lineage: Lineage
    delta: DeltaManifest
    stored: Mapping[int, Leaf]
    names: Mapping[str, Name]
    compression: Compression
    files: Mapping[str, bytes]


def write(
    directory: Location,
    lineage: Lineage,
    blocks: Mapping[int, Blocks],
    team: Team,
    earlier_sums: Mapping[int, int] | None,
) -> BaseManifest | None:
    """Writes this process's part of a base durably; and process 0 the base, of all parts.

    The directory, where nothing is, lies below the same root as the step. The other arguments are
    those of :func:`~adacheck_jax.store.compaction.in_place.prepared`.

    Returns:
        The base's manifest, as it was written; None in other processes than 0.

    Raises:
        MismatchError: a leaf or a part of it is missing, or a box is not of whole chunks.
        IntegrityError: the values are not those that were saved, or files of the old base are
            damaged.
        AdaCheckError: another process failed.
        OSError: from the file system.
    """
    draft = _drafted(lineage)
    _check_blocks(draft, blocks)
    own = _write_part(draft, directory, blocks, team, earlier_sums)
    made: list[BaseManifest] = []

    def judge(reports: Sequence[Report]) -> Report:
        _check_parts(draft, reports)
        made.append(_completed(draft, directory, reports))
        return {}

    team.agree(WRITTEN, own, judge)
    return made[0] if made else None


def _drafted(lineage: Lineage) -> _Draft:
    delta, base, source = lineage.manifest, lineage.base, lineage.base_directory
    assert isinstance(delta, DeltaManifest)
    stored = {i: leaf for i, leaf in enumerate(lineage.leaves) if leaf.nbytes}
    wanted = {name: base.described.get(name) for name in sorted(DESCRIPTIONS)}
    files = {x: manifest_file.read_other(source / x, y, _AS_IT_WAS) for x, y in wanted.items()}
    tree = files[TREE_METADATA]
    names, compression = _names(source, tree, [*stored.values()])
    body = {**json.loads(tree), "custom_metadata": delta.custom_metadata}
    files[TREE_METADATA] = json.dumps(body).encode()
    if update := _update(base.update, lineage.problem):
        for platform, digest in update.programs.items():
            name = manifest_file.update_file(platform)
            files[name] = manifest_file.read_other(source / name, digest, _AS_IT_WAS)
    return _Draft(lineage, delta, stored, names, compression, files)


def _write_part(
    draft: _Draft,
    directory: Location,
    blocks: Mapping[int, Blocks],
    team: Team,
    earlier_sums: Mapping[int, int] | None,
) -> Report:
    """Writes the arrays of which this process has boxes."""
    base, leaves = draft.lineage.base, draft.lineage.leaves
    if earlier_sums is None:
        # A fingerprint is made of the sums of all processes that wrote the old base.
        earlier_sums = dict(enumerate(base.fingerprints)) if base.process_count == 1 else {}
    own = {i: blocks[i] for i in draft.stored if blocks.get(i)}
    sums = {
        i: combine([fingerprint_of(block, box.start) for box, block in own.get(i, {}).items()])
        for i in draft.stored
    }
    earlier = EarlierBase(draft.lineage, earlier_sums)
    seldom = frozenset[int]()
    if update := base.update:
        seldom = seldom_changed(leaves, update.explained.union(update.consumed, update.counts))
    writer = BaseWriter(leaves, own, earlier, seldom, draft.compression)
    layout = ArrayLayout(draft.names)
    report = writer.write(directory, team.process, sums, layout, team.agree)
    sizes = [sum(box.size for box in own.get(i, ())) for i in draft.stored]
    return report | {"sums": [*sums.values()], "sizes": sizes}


def _completed(draft: _Draft, directory: Location, reports: Sequence[Report]) -> BaseManifest:
    """Makes a base of the parts that all processes have written; the manifest comes last."""
    delta, lineage = draft.delta, draft.lineage
    merge(directory, reports)
    for name, data in draft.files.items():
        (directory / name).write(data)
    directory.sync(*(directory / name for name in draft.files))
    files = {name for name, _ in links.base_files(directory)} | {manifest_file.FILE}
    sizes = zip(draft.stored, zip(*(each["sizes"] for each in reports), strict=True), strict=True)
    writers = {i: [n for n, size in enumerate(each) if size] for i, each in sizes}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in draft.files.items()}
    made = dataclasses.replace(
        lineage.base,
        step=delta.step,
        counts=delta.counts,
        leaves=lineage.leaves,  # of which the deltas behind it are, too
        process_count=delta.process_count,
        fingerprints=delta.fingerprints,
        update=_update(lineage.base.update, lineage.problem),
        reason=f"delta {lineage.delta_count} of base {lineage.base.step}, compacted",
        aliases=agreed(reports, "aliases", writers),
        kept=agreed(reports, "kept", writers),
        described={name: digests[name] for name in sorted(DESCRIPTIONS)},
        directory_step=delta.directory_step,
        caution=delta.caution,
        stale=delta.stale,
        replica=delta.replica,
        replaces=Replaced(delta.checksum, delta.depth, tuple(sorted(files))),
    )
    manifest, _ = manifest_file.write(directory, made)
    directory.sync(directory / manifest_file.FILE, deep=True)
    return dataclasses.replace(made, checksum=manifest.checksum)


def _check_blocks(draft: _Draft, blocks: Mapping[int, Blocks]) -> None:
    """Raises if a block does not fit its box or the leaf's type, or its box the chunks."""
    for i, leaf in draft.stored.items():
        lengths = draft.names[leaf.path].chunk_shape
        for box, block in blocks.get(i, {}).items():
            if (box.shape, leaf.dtype) != (block.shape, block.dtype.name):
                raise MismatchError(
                    f"leaf {leaf.path}: expected blocks of {leaf.dtype}{list(leaf.shape)} with "
                    f"the shapes of their boxes, found {block.dtype.name}{list(block.shape)} for "
                    f"{box}. Nothing was changed; pass the whole state as it was saved."
                )
            if not box.is_of_chunks(lengths, leaf.shape):
                raise MismatchError(
                    f"leaf {leaf.path}: expected boxes of whole chunks of {list(lengths)}, found "
                    f"{box}. Nothing was changed; pass the boxes that a base has."
                )


def _check_parts(draft: _Draft, reports: Sequence[Report]) -> None:
    """Raises if elements are missing, or have not the bits that were saved."""
    for n, (i, leaf) in enumerate(draft.stored.items()):
        elements, expected = sum(each["sizes"][n] for each in reports), math.prod(leaf.shape)
        if elements != expected:
            raise MismatchError(
                f"leaf {leaf.path}: expected blocks of {leaf.dtype}{list(leaf.shape)} that have "
                f"its {expected} elements, found {elements}. Nothing was changed; pass the whole "
                "state as it was saved."
            )
        if combine([each["sums"][n] for each in reports]) != draft.delta.fingerprints[i]:
            raise IntegrityError(
                f"leaf {leaf.path}: expected the bits that were saved, found others in the state "
                "that was given. The step is as it was."
            )


def _names(
    source: AnyPath, tree: bytes, leaves: Sequence[Leaf]
) -> tuple[dict[str, Name], Compression]:
    """The arrays of the old base by leaf path, and the compression that they were stored with."""
    try:
        entries = json.loads(tree)["tree_metadata"].values()
        keys = [[str(key["key"]) for key in each["key_metadata"]] for each in entries]
        known = {"/".join(each): ".".join(each) for each in keys}
        described = volume_reader.descriptions(
            zarr.database_in(source), [known[leaf.path] for leaf in leaves]
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{source}: expected Orbax's description of {len(leaves)} arrays, found that it cannot "
            f"be read ({type(error).__name__}: {first_line(error)}). Nothing was changed; the base "
            "that the step builds on is damaged."
        ) from error
    pairs = [*zip(leaves, described, strict=True)]
    names = {leaf.path: Name(known[leaf.path], x.dtype, x.chunk_shape) for leaf, x in pairs}
    compression: Compression = "none"  # small leaves have none
    for each in described:
        compression = zarr.CHAINS.get(each.codecs, "none") if compression == "none" else compression
    return names, compression


def _update(update: Update | None, problem: str) -> Update | None:
    """The update of the new base; without its programs if none is replayed any more."""
    if update is None or problem == update.problem:
        return update
    return dataclasses.replace(update, problem=problem, programs={})
