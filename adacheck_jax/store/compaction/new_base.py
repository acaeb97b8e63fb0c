"""A base with the values of a delta's step, written into a directory of its own.

It is the base of the delta's lineage once more, with other values: arrays of the same names, cut
into the same boxes and chunks, and the same descriptions, so that all that stock Orbax read of the
old base it reads of the new one. Its bits are compared with the step's fingerprints: those of the
given values, or those of what was written, read back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.errors import IntegrityError, MismatchError, first_line
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Leaf, Replaced, Update
from adacheck_jax.store import links, volume_reader, volumes
from adacheck_jax.store.base_writer import (
    BaseWriter,
    EarlierBase,
    Layout,
    Name,
    agreed,
    seldom_changed,
)
from adacheck_jax.store.compaction.team import ALONE, WRITTEN, Report, Team
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.stock import TREE_METADATA
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.store.zarr import Compression

_CODECS: dict[str, Compression] = {"blosc": "fast", "zstd": "small"}
"""Choices of a codec, by its name in the metadata of the arrays that were stored with it."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """Parts that a base takes over from the old one.

    Attributes:
        lineage: the step's lineage.
        delta: the step's manifest.
        stored: the leaves that have elements, by leaf index.
        names: their arrays, by leaf path.
        compression: the compression of the arrays.
        files: the files beside the arrays by name: descriptions, and exported update programs.
    """

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
    *,
    read_back: bool,
    team: Team = ALONE,
    earlier_sums: Mapping[int, int] | None = None,
) -> BaseManifest | None:
    """Writes this process's part of a base durably; and process 0 the base, of all parts.

    Args:
        directory: directory for the files, where nothing is; below the same root as the step.
        lineage: the step's lineage, which ends at a saved delta.
        blocks: elements of the leaves by leaf index and box, boxes of whole chunks; those of all
            processes together are every element once.
        read_back: True to compare what was written with the saved fingerprints, False to compare
            the blocks.
        team: the processes that write it.
        earlier_sums: this process's contributions to the fingerprints of the old base, as far as
            they are known.

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
    own = _write_part(draft, directory, blocks, team, earlier_sums, sums=not read_back)
    made: list[BaseManifest] = []

    def judge(reports: Sequence[Report]) -> Report:
        _check_parts(draft, reports)
        made.append(_completed(draft, directory, reports, read_back=read_back))
        return {}

    team.agree(WRITTEN, own, judge)
    return made[0] if made else None


def _drafted(lineage: Lineage) -> _Draft:
    delta, base, source = lineage.manifest, lineage.base, lineage.base_directory
    assert isinstance(delta, DeltaManifest)
    stored = {i: leaf for i, leaf in enumerate(base.leaves) if leaf.nbytes}
    programs, described = _programs(lineage), _descriptions(lineage)
    names, compression = _names(source, described[TREE_METADATA], [*stored.values()])
    described[TREE_METADATA] = _with_metadata(described[TREE_METADATA], delta.custom_metadata)
    return _Draft(lineage, delta, stored, names, compression, {**described, **programs})


def _write_part(
    draft: _Draft,
    directory: Location,
    blocks: Mapping[int, Blocks],
    team: Team,
    earlier_sums: Mapping[int, int] | None,
    *,
    sums: bool,
) -> Report:
    """Writes the arrays of which this process has boxes."""
    base, found = draft.lineage.base, dict[int, int]()
    if earlier_sums is None:
        # A fingerprint is made of the sums of all processes that wrote the old base.
        earlier_sums = dict(enumerate(base.fingerprints)) if base.process_count == 1 else {}
    if sums:
        for i in draft.stored:
            own = blocks.get(i, {})
            found[i] = combine([fingerprint_of(each, box.start) for box, each in own.items()])
    earlier = EarlierBase(draft.lineage.base_directory, base.step, base.leaves, earlier_sums)
    contributions = dict(enumerate(draft.delta.fingerprints)) if team.is_alone else found
    writer = BaseWriter(
        base.leaves,
        {i: blocks[i] for i in draft.stored if blocks.get(i)},
        earlier,
        _still(base.leaves, base.update),
        Layout(draft.names),
        draft.compression,
    )
    report = writer.write(directory, team.process, contributions)
    sizes = {i: sum(box.size for box in blocks.get(i, {})) for i in draft.stored}
    return report | {"sums": [*found.items()], "sizes": [*sizes.items()]}


def _completed(
    draft: _Draft, directory: Location, reports: Sequence[Report], *, read_back: bool
) -> BaseManifest:
    """Makes a base of the parts that all processes have written; the manifest comes last."""
    delta, lineage = draft.delta, draft.lineage
    contents: dict[str, Sequence[str] | None] = {}
    for report in reports:
        contents |= report["volumes"]
    volumes.merge(directory, contents)
    for name, data in draft.files.items():
        (directory / name).write(data)
    directory.sync(*(directory / name for name in draft.files))
    if read_back:
        for i, leaf in draft.stored.items():
            _check(directory, leaf, draft.names[leaf.path], delta.fingerprints[i])
    files = {name for name, _ in links.base_files(directory)} | {manifest_file.FILE}
    writers = {i: [n for n, each in enumerate(_sizes(reports, i)) if each] for i in draft.stored}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in draft.files.items()}
    made = dataclasses.replace(
        lineage.base,
        step=delta.step,
        counts=delta.counts,
        fingerprints=delta.fingerprints,
        update=_update(lineage.base.update, lineage.problem),
        reason=f"delta {lineage.delta_count} of base {lineage.base.step}, compacted",
        aliases=agreed(reports, "aliases", writers),
        kept=agreed(reports, "kept", writers),
        described={name: digests[name] for name in sorted(manifests.DESCRIPTIONS)},
        directory_step=delta.directory_step,
        caution=delta.caution,
        stale=delta.stale,
        replica=delta.replica,
        replaces=Replaced(delta.checksum, delta.depth, tuple(sorted(files))),
    )
    manifest, _ = manifest_file.write(directory, made)
    directory.sync(directory / manifest_file.FILE, deep=True)
    return dataclasses.replace(made, checksum=manifest.checksum)


def _sizes(reports: Sequence[Report], leaf: int) -> list[int]:
    """Elements of a leaf that each process has written."""
    return [dict(report["sizes"])[leaf] for report in reports]


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
    for i, leaf in draft.stored.items():
        elements, expected = sum(_sizes(reports, i)), math.prod(leaf.shape)
        if elements != expected:
            raise MismatchError(
                f"leaf {leaf.path}: expected blocks of {leaf.dtype}{list(leaf.shape)} that have "
                f"its {expected} elements, found {elements}. Nothing was changed; pass the whole "
                "state as it was saved."
            )
        sums = [dict(report["sums"]).get(i) for report in reports]
        told = [each for each in sums if each is not None]
        if told and combine(told) != draft.delta.fingerprints[i]:
            raise IntegrityError(
                f"leaf {leaf.path}: expected the bits that were saved, found others in the state "
                "that was given. The step is as it was."
            )


def _names(
    source: AnyPath, tree: bytes, leaves: Sequence[Leaf]
) -> tuple[dict[str, Name], Compression]:
    """The arrays of the old base by leaf path, and the compression that they were stored with.

    Args:
        source: directory of the old base.
        tree: Orbax's tree metadata.
        leaves: the leaves that have elements.
    """
    try:
        entries = json.loads(tree)["tree_metadata"].values()
        keys = [[str(key["key"]) for key in each["key_metadata"]] for each in entries]
        known = {"/".join(each): ".".join(each) for each in keys}
        described = volume_reader.descriptions(source, [known[leaf.path] for leaf in leaves])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{source}: expected Orbax's description of {len(leaves)} arrays, found that it cannot "
            f"be read ({type(error).__name__}: {first_line(error)}). Nothing was changed; the base "
            "that the step builds on is damaged."
        ) from error
    pairs = [*zip(leaves, described, strict=True)]
    names = {leaf.path: Name(known[leaf.path], x.dtype, x.chunk_shape) for leaf, x in pairs}
    codecs = {codec for each in described for codec in each.codecs}
    for codec, compression in _CODECS.items():
        if codec in codecs:
            return names, compression
    return names, "none"


def _still(leaves: Sequence[Leaf], update: Update | None) -> frozenset[int]:
    if update is None:
        return frozenset()
    return seldom_changed(leaves, update.explained.union(update.consumed, update.counts))


def _update(update: Update | None, problem: str) -> Update | None:
    """The update of the new base; without its programs if none is replayed any more."""
    if update is None or problem == update.problem:
        return update
    return dataclasses.replace(update, problem=problem, programs={})


def _programs(lineage: Lineage) -> dict[str, bytes]:
    """The exported update programs, by file name."""
    update, found = _update(lineage.base.update, lineage.problem), {}
    for platform, digest in (update.programs if update else {}).items():
        name = manifest_file.update_file(platform)
        found[name] = _read(lineage.base_directory / name, digest)
    return found


def _descriptions(lineage: Lineage) -> dict[str, bytes]:
    """The files that describe the arrays of the old base to Orbax, by name."""
    digests = lineage.base.described
    return {
        name: _read(lineage.base_directory / name, digests.get(name))
        for name in sorted(manifests.DESCRIPTIONS)
    }


def _with_metadata(tree: bytes, custom_metadata: Any) -> bytes:
    """Orbax's tree metadata with the JSON of a step's caller."""
    return json.dumps({**json.loads(tree), "custom_metadata": custom_metadata}).encode()


def _read(path: AnyPath, digest: str | None) -> bytes:
    try:
        data = at(path).read()
    except FileNotFoundError as error:
        raise IntegrityError(
            f"{path}: expected a file of the base, found none. Nothing was changed; the step can "
            "be restored where this file is not needed, and not be compacted."
        ) from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise IntegrityError(
            f"{path}: expected the file that was written with the base, found other bytes. Nothing "
            "was changed; the step can be restored where this file is not needed, and not be "
            "compacted."
        )
    return data


def _check(directory: Location, leaf: Leaf, name: Name, expected: int) -> None:
    """Raises if what was written of a leaf has not the bits that were saved."""
    why = "other bits"
    try:
        if volume_reader.fingerprint_of_array(directory, name.name, leaf.dtype) == expected:
            return
    except ValueError as error:
        why = first_line(error)
    raise IntegrityError(
        f"leaf {leaf.path}: expected the bits that were saved, found in the new base, read "
        f"back, {why}. The step is as it was; pass the step's own state, or look after the disk."
    )
