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
from collections.abc import Mapping, Sequence
from typing import Any

from adacheck_jax.errors import IntegrityError, MismatchError, first_line
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Leaf, Replaced, Update
from adacheck_jax.store import links, volume_reader, volumes
from adacheck_jax.store.base_writer import BaseWriter, EarlierBase, Layout, Name, seldom_changed
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.stock import TREE_METADATA
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.store.zarr import Compression

_CODECS: dict[str, Compression] = {"blosc": "fast", "zstd": "small"}
"""Choices of a codec, by its name in the metadata of the arrays that were stored with it."""


def write(
    directory: Location, lineage: Lineage, blocks: Mapping[int, Blocks], *, read_back: bool
) -> BaseManifest:
    """Writes a base durably.

    Args:
        directory: directory for the files, where nothing is; below the same root as the step.
        lineage: the step's lineage, which ends at a saved delta.
        blocks: elements of every leaf that has any, by leaf index and box; boxes of whole chunks.
        read_back: True to compare what was written with the saved fingerprints, False to compare
            the blocks.

    Returns:
        The base's manifest, as it was written.

    Raises:
        MismatchError: a leaf is missing.
        IntegrityError: the values are not those that were saved, or files of the old base are
            damaged.
        OSError: from the file system.
    """
    delta, base, source = lineage.manifest, lineage.base, lineage.base_directory
    assert isinstance(delta, DeltaManifest)
    stored = {i: leaf for i, leaf in enumerate(base.leaves) if leaf.nbytes}
    _check_blocks(stored, blocks)
    if not read_back:
        _check_values(stored, blocks, delta.fingerprints)
    programs, described = _programs(lineage), _descriptions(lineage)
    names, compression = _names(source, described[TREE_METADATA], [*stored.values()])
    described[TREE_METADATA] = _with_metadata(described[TREE_METADATA], delta.custom_metadata)
    is_alone = base.process_count == 1  # else a fingerprint is made of several processes' sums
    report = BaseWriter(
        base.leaves,
        {i: blocks[i] for i in stored},
        EarlierBase(
            source, base.step, base.leaves, dict(enumerate(base.fingerprints)) if is_alone else {}
        ),
        _still(base.leaves, base.update),
        Layout(names),
        compression,
    ).write(directory, 0, dict(enumerate(delta.fingerprints)))
    volumes.merge(directory, report["volumes"])
    for name, data in {**described, **programs}.items():
        (directory / name).write(data)
    directory.sync(*(directory / name for name in (*described, *programs)))
    if read_back:
        for i, leaf in stored.items():
            _check(directory, leaf, names[leaf.path], delta.fingerprints[i])
    files = {name for name, _ in links.base_files(directory)} | {manifest_file.FILE}
    made = dataclasses.replace(
        base,
        step=delta.step,
        counts=delta.counts,
        fingerprints=delta.fingerprints,
        update=_update(base.update, lineage.problem),
        reason=f"delta {lineage.delta_count} of base {base.step}, compacted",
        aliases=tuple(sorted(report["aliases"])),
        kept=tuple(sorted(report["kept"])),
        described={n: hashlib.sha256(data).hexdigest() for n, data in described.items()},
        directory_step=delta.directory_step,
        caution=delta.caution,
        stale=delta.stale,
        replaces=Replaced(delta.checksum, delta.depth, tuple(sorted(files))),
    )
    manifest, _ = manifest_file.write(directory, made)
    directory.sync(directory / manifest_file.FILE, deep=True)
    return dataclasses.replace(made, checksum=manifest.checksum)


def _check_blocks(stored: Mapping[int, Leaf], blocks: Mapping[int, Blocks]) -> None:
    """Raises if a leaf has no block, or one that does not fit its box or the leaf's type."""
    for i, leaf in stored.items():
        found = [(box, each.shape, each.dtype.name) for box, each in blocks.get(i, {}).items()]
        if not found or any((box.shape, leaf.dtype) != (s, dtype) for box, s, dtype in found):
            shown = [f"{dtype}{list(shape)} for {box}" for box, shape, dtype in found[:3]]
            raise MismatchError(
                f"leaf {leaf.path}: expected blocks of {leaf.dtype}{list(leaf.shape)} with the "
                f"shapes of their boxes, found {', '.join(shown) or 'none'}. Nothing was changed; "
                "pass the whole state as it was saved."
            )


def _check_values(
    stored: Mapping[int, Leaf], blocks: Mapping[int, Blocks], fingerprints: Sequence[int]
) -> None:
    """Raises if the blocks have not the bits that were saved."""
    for i, leaf in stored.items():
        sums = [fingerprint_of(each, box.start) for box, each in blocks[i].items()]
        if combine(sums) != fingerprints[i]:
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
