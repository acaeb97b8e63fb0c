"""Records that a saved step is made of: bases, deltas, leaves, updates and packs.

A base's manifest describes the leaves; a delta's manifest names its parent and does not repeat what
the base says, so its size does not grow with the lineage. The JSON form is in
:mod:`~adacheck_jax.format.manifest_json`, the file in
:mod:`~adacheck_jax.store.steps.manifest_file`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from adacheck_jax.format.boxes import Box, Cuts, chunk_shape, grid

SHARDINGS = "_sharding"
DESCRIPTIONS = frozenset({"_METADATA", SHARDINGS, "array_metadatas/process_0"})
"""Files of a base that stock Orbax reads beside the arrays, constant once the manifest exists."""
ITEMSIZES_BYTES = {
    **dict.fromkeys(("bool", "int1", "int2", "int4", "int8"), 1),
    **dict.fromkeys(("uint1", "uint2", "uint4", "uint8"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element in memory, for each data type that a leaf may have: those of JAX.

Other names are refused: numpy takes many more (``object``, ``V8``), and tensorstore ends the
process on some (``r16``).
"""
NOT_STORED = frozenset({"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"})
"""Those of them that tensorstore 0.1.86 does not store."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the saved state.

    Attributes:
        path: leaf path.
        shape: global shape of the stored words (for a typed PRNG key, of its key data).
        dtype: numpy name of the stored elements' type.
        itemsize_bytes: bytes of one stored element.
        key_type: data type of a typed PRNG key (``key<fry>``), else None.
        cuts: cut points of the leaf's boxes when it was saved.
        owners: the process that wrote each box, in :func:`~adacheck_jax.format.boxes.grid` order.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    key_type: str | None
    cuts: Cuts
    owners: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of the words that are split into planes; a complex element consists of two."""
        is_complex = self.dtype.startswith("complex")
        return self.itemsize_bytes // 2 if is_complex else self.itemsize_bytes

    @property
    def boxes(self) -> list[Box]:
        """Distinct boxes, in the order of ``owners``."""
        return grid(self.cuts)

    def boxes_of(self, process: int) -> list[Box]:
        """Boxes that one process writes."""
        pairs = zip(self.boxes, self.owners, strict=True)
        return [box for box, owner in pairs if owner == process]

    def chunk_shape(self, wanted_bytes: int | None) -> tuple[int, ...]:
        """Shape of its chunks in a base: the caller may want smaller or larger ones."""
        return chunk_shape(self.cuts, self.itemsize_bytes, wanted_bytes)

    def is_like(self, other: Leaf) -> bool:
        """True if another leaf differs in its boxes at most."""
        return self == dataclasses.replace(other, cuts=self.cuts, owners=self.owners)

    @property
    def description(self) -> str:
        """Data type and logical shape, for people and for comparisons."""
        shape, dtype = self.logical
        return f"{dtype}{list(shape)}"

    @property
    def logical(self) -> tuple[tuple[int, ...], str]:
        """Shape and data type as the state holds it: of a typed PRNG key, not of its data."""
        return (self.shape[:-1], self.key_type) if self.key_type else (self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Grid:
    """Boxes of one leaf and their owners; in a delta, where they are others than before.

    Attributes:
        cuts, owners: as of a :class:`Leaf`.
    """

    cuts: Cuts
    owners: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(points[-1] for points in self.cuts)


@dataclass(frozen=True, slots=True)
class Update:
    """The exported update program, and the leaves that it takes and returns.

    The program maps ``(params, inner, record, extra)`` to ``(params, inner)``.

    Attributes:
        params, inner, record, extra: indices of leaves, in argument order; those of several
            recorders one after another.
        counts: leaf index of each recorder's update counter.
        parts: numbers of leaves in the four lists that belong to each recorder.
        reducing: indices of computed leaves whose bits depend on the order of a sum: they are exact
            where the update runs as its own program on the mesh that it was saved on.
        passed: indices of computed leaves that the update returns as it took them.
        placement: digest of devices, mesh and cuts of all leaves, for an update with reducing
            leaves, whose deltas all lie so; else empty.
        problem: reason why no update is replayed onto this base; empty where updates are.
        programs: digests of the serialized programs, by platform; none with a problem.
        jax_version: version of the jax that exported the programs.
        pinned: True if every rounding is fixed, so that any program computes the same bits.
    """

    params: tuple[int, ...]
    inner: tuple[int, ...]
    record: tuple[int, ...]
    extra: tuple[int, ...]
    counts: tuple[int, ...]
    parts: tuple[tuple[int, int, int, int], ...]
    reducing: tuple[int, ...]
    passed: tuple[int, ...]
    placement: str
    problem: str
    programs: Mapping[str, str]
    jax_version: str
    pinned: bool

    @property
    def explained(self) -> frozenset[int]:
        """Indices of the leaves that replay computes."""
        return frozenset(self.params + self.inner)

    @property
    def consumed(self) -> tuple[int, ...]:
        """Indices of the leaves that a delta stores because the update consumed them."""
        return self.record + self.extra

    def computed_by(self, updates: Collection[int]) -> frozenset[int]:
        """Indices of the leaves that the updates of these recorders compute."""
        return self._of(updates, self.params, 0) | self._of(updates, self.inner, 1)

    def consumed_by(self, updates: Collection[int]) -> frozenset[int]:
        """Indices of the leaves that the updates of these recorders consume."""
        return self._of(updates, self.record, 2) | self._of(updates, self.extra, 3)

    def brought_by(self, delta: Delta) -> frozenset[int]:
        """Indices of the leaves that the updates of a delta consume, as it stores them."""
        return self.consumed_by(delta.updates).intersection(delta.stored)

    def _of(self, updates: Collection[int], leaves: Sequence[int], n: int) -> frozenset[int]:
        ends = [*itertools.accumulate(sizes[n] for sizes in self.parts)]
        own = [leaves[ends[k] - sizes[n] : ends[k]] for k, sizes in enumerate(self.parts)]
        return frozenset(i for k in updates if k < len(own) for i in own[k])


@dataclass(frozen=True, slots=True)
class Link:
    """The step that a delta builds on.

    Attributes:
        step: step number.
        reference: path of its item directory, relative to the delta's own item directory.
        checksum: checksum of the manifest that it was saved with.
    """

    step: int
    reference: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Pack:
    """One process's section of a pack: the boxes that it wrote for one delta.

    Attributes:
        encodings: one :class:`~adacheck_jax.format.encodings.form.Encoding` letter for
            each stored leaf.
        aliases: pairs of extents, numbered in plan order: the first equals the second, an earlier
            one, and has no place of its own.
        raw_bytes, compressed_bytes: sizes of the section in either array, runs of zeros included.
        raw_zeros, compressed_zeros: half-open ranges of blocks of zeros that were not stored. Other
            missing blocks are lost.
        coded: bytes in either array of each extent that has its own size, in plan order.
    """

    encodings: str
    aliases: tuple[tuple[int, int], ...]
    raw_bytes: int
    compressed_bytes: int
    raw_zeros: tuple[tuple[int, int], ...]
    compressed_zeros: tuple[tuple[int, int], ...]
    coded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Caution:
    """Findings of the checks of a run, remembered across restarts.

    Attributes:
        reason: reason why the run is cautious; empty if it is not.
        distrusted: indices of the leaves that replay got wrong in a few elements, which a check of
            a sample may miss: they are stored, and not replayed.
    """

    reason: str = ""
    distrusted: tuple[int, ...] = ()


NO_CAUTION = Caution()
CHECKS = frozenset({"full", "sample", "identity", "stored", ""})
"""Comparisons of a delta's replay with the state, before the delta was saved.

``full``: all elements. ``sample``: small leaves whole, and blocks of the others. ``identity``: the
saved arrays are those that the replayed program had returned. ``stored``: nothing is replayed.
Empty: none, by a release before 0.2.
"""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The delta that a base took the place of: it was compacted.

    Attributes:
        checksum: checksum of the delta's manifest, by which the deltas that follow name the step.
        depth: the delta's number in its line of deltas, from which those that follow count on.
        files: paths of the base's files, relative to its item directory: whoever links them knows
            by this list that none is missing.
    """

    checksum: str
    depth: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """A full state at one step.

    Attributes:
        step: step number.
        counts: value of each recorder's update counter; none without a recorder.
        leaves: every leaf of the state, in tree order.
        fingerprints: one 64-bit digest a leaf.
        update: the update program; None without a recorder, and where leaves were cast.
        reason: reason why this step is a base.
        aliases: pairs of leaf indices: the data of the first equals the second's, stored once.
        kept: pairs of a leaf index and a step: the base of that step wrote the leaf's data, and
            this one holds hard links to it.
        process_count: number of processes that wrote it.
        versions: package versions at save time.
        environment: settings that arithmetic may depend on: compiler flags, 64-bit types.
        described: digests of the files that describe the arrays, by name.
        directory_step: number in the name of the step's directory, None if it had none. ``step``,
            the caller's number, may differ.
        caution: findings of the checks so far.
        replaces: the delta that the step was before it was compacted; None if it was saved as a
            base.
        stale: as of a :class:`Delta`; of a step that was compacted.
        replica: as of a :class:`Delta`.
        checksum: checksum of this manifest; empty until it is encoded.
        kind, parent: ``base``, and None for the step that it builds on.
    """

    step: int
    counts: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    fingerprints: tuple[int, ...]
    update: Update | None
    reason: str
    aliases: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    process_count: int
    versions: Mapping[str, str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directory_step: int | None = None
    caution: Caution = NO_CAUTION
    replaces: Replaced | None = None
    stale: tuple[tuple[int, int], ...] = ()
    replica: str = ""
    checksum: str = ""
    kind: ClassVar[Literal["base"]] = "base"
    parent: ClassVar[None] = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of all steps that were saved with it: of itself alone."""
        return (self.step,)

    @property
    def depth(self) -> int:
        """Number that the deltas after it count on from: 0, or that of the delta it replaces."""
        return self.replaces.depth if self.replaces else 0

    @property
    def saved_checksum(self) -> str:
        """Checksum of the manifest that the step was saved with; compaction keeps it."""
        return self.replaces.checksum if self.replaces else self.checksum


@dataclass(frozen=True, slots=True)
class Delta:
    """Data that reproduces one step from the step before it.

    Attributes:
        step: step number.
        counts: value of each recorder's update counter; none without a recorder.
        updates: positions of the recorders whose update is replayed.
        stored: indices of the leaves that this delta stores boxes of, ascending. A leaf that the
            update passes through is put in place before the update, any other one after it.
        unreplayed: indices of the leaves that the update computes, but not as they were trained:
            they are the parent's leaves, changed by the stored boxes.
        packs: one section a process.
        fingerprints: one 64-bit digest for every leaf of the state after this step.
        checked: comparison that its replay passed, one of :data:`CHECKS`.
        stale: pairs of a leaf and a step: the leaf is ephemeral, and has the bits of that earlier
            step, as its fingerprint has; those that were trained are not stored.
        replica: device whose replica was saved, such as ``"gpu:3"``; empty if all replicas were
            equal, or were not compared.
    """

    step: int
    counts: tuple[int, ...]
    updates: tuple[int, ...]
    stored: tuple[int, ...]
    unreplayed: tuple[int, ...]
    packs: tuple[Pack, ...]
    fingerprints: tuple[int, ...]
    checked: str
    stale: tuple[tuple[int, int], ...] = ()
    replica: str = ""

    @property
    def has_update(self) -> bool:
        """True if an update is replayed."""
        return bool(self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaManifest(Delta):
    """The delta of a saved step, and the deltas of the deferred steps before it.

    Attributes:
        parent: the saved step that this one builds on.
        depth: number of deltas since the base that began its line, its own included. A step of
            the line may have become a base since, so a lineage may be shorter.
        problem: reason why no further update is replayed, of a release before 0.2, which did not
            check every delta.
        custom_metadata: the caller's own JSON, kept for ``metadata()``.
        directory_step: number in the name of the step's directory, None if it had none. ``step``,
            the caller's number, may differ.
        recorded: deltas of the deferred steps between the parent and this one, oldest first. Their
            sections lie one after another in the packs.
        caution: findings of the checks so far.
        grids: boxes of each leaf in its packs and in those of the deltas that follow; empty where
            they and the number of processes are those of the parent.
        checksum: checksum of this manifest; empty until it is encoded.
        kind: ``delta``.
    """

    parent: Link
    depth: int
    problem: str = ""
    custom_metadata: Any = None
    directory_step: int | None = None
    recorded: tuple[Delta, ...] = ()
    caution: Caution = NO_CAUTION
    grids: tuple[Grid, ...] = ()
    checksum: str = ""
    kind: ClassVar[Literal["delta"]] = "delta"

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of all steps that were saved with it: of the deferred ones, and of itself."""
        return (*(each.step for each in self.recorded), self.step)

    @property
    def saved_checksum(self) -> str:
        """Checksum of the manifest that the step was saved with."""
        return self.checksum

    @property
    def process_count(self) -> int:
        """Number of processes that wrote it."""
        return len(self.packs)

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """Deltas since the parent, oldest first."""
        names = [field.name for field in dataclasses.fields(Delta)]
        return (*self.recorded, Delta(**{name: getattr(self, name) for name in names}))


Manifest = BaseManifest | DeltaManifest
