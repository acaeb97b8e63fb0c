"""All that a plan is made from: the caller's options, and facts about the state and its parent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from adacheck_jax.device import replicas
from adacheck_jax.save.exported_update import Check, ExportedUpdate
from adacheck_jax.save.snapshot import Structure
from adacheck_jax.schedule.adaptive import AdaptivePolicy
from adacheck_jax.schedule.line import MaxDeltas
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.store.zarr import Compression

Counts = tuple[int, ...]
"""The update counter of each recorder in a state; none without a recorder."""

Kind = Literal["base", "replay", "bits"]
"""A full state; what the updates since the parent consumed; differences from the parent's bits."""

Delta = Literal["auto", "bits"]
"""Deltas that may be written: replayed updates, and differences of bits where these are not exact;
or differences alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of the caller; :class:`~adacheck_jax.AdaCheckHandler` says what each of them means.

    Raises:
        ValueError: an option has a value that it cannot have.
    """

    max_deltas: MaxDeltas = "auto"
    params_path: str | Mapping[str, str] | None = None
    keep_lineage: KeepLineage | None = None
    delta: Delta = "auto"
    check: Check = "auto"
    compression: Compression = "none"
    check_replicas: replicas.Mode = "warn"
    shadow_bytes: int | None = None
    shadow_directory: AnyPath | str | None = None
    background_bases: bool = True
    ephemeral: Sequence[str] = ()

    def __post_init__(self) -> None:
        most, is_policy = self.max_deltas, isinstance(self.max_deltas, AdaptivePolicy)
        if not (is_policy or most == "auto" or (isinstance(most, int) and most >= 0)):
            raise ValueError(
                'expected max_deltas to be an int >= 0, "auto" or an AdaptivePolicy, found '
                f"{most!r}"
            )
        shadow = self.shadow_bytes
        if not (shadow is None or (isinstance(shadow, int) and shadow >= 0)):
            raise ValueError(f"expected shadow_bytes to be None or an int >= 0, found {shadow!r}")
        self._check_directory()
        if not isinstance(self.background_bases, bool):
            raise ValueError(
                f"expected background_bases to be True or False, found {self.background_bases!r}"
            )
        if isinstance(self.ephemeral, str) or not all(isinstance(p, str) for p in self.ephemeral):
            raise ValueError(
                "expected ephemeral to be a sequence of patterns of leaf paths, found "
                f"{self.ephemeral!r}. Write ephemeral=('*/residual',)."
            )
        if self.ephemeral and self.shadow_directory is not None:
            raise ValueError(
                "expected no ephemeral leaves with a shadow_directory, found "
                f"{self.ephemeral!r}: what is recovered from memory has the bits of every leaf."
            )
        if not isinstance(self.keep_lineage, KeepLineage | None):
            raise ValueError(
                f"expected keep_lineage to be a KeepLineage, found {self.keep_lineage!r}. Write "
                "keep = KeepLineage(policy), and give it to the manager too."
            )
        for name, known in (
            ("delta", Delta),
            ("check", Check),
            ("compression", Compression),
            ("check_replicas", replicas.Mode),
        ):
            if (choice := getattr(self, name)) not in get_args(known):
                raise ValueError(
                    f"expected {name} to be one of {get_args(known)}, found {choice!r}"
                )

    def _check_directory(self) -> None:
        directory, shadow = self.shadow_directory, self.shadow_bytes
        if directory is None:
            return
        is_path = isinstance(directory, str) or hasattr(directory, "__fspath__")
        if not is_path or not str(directory) or "://" in str(directory):
            raise ValueError(
                "expected shadow_directory to be a directory of this machine, such as "
                f'"/dev/shm/myrun", found {directory!r}'
            )
        if shadow == 0 or self.check != "auto" or self.delta != "auto" or not self.has_deltas:
            raise ValueError(
                'expected check="auto", delta="auto", and no shadow_bytes=0 or max_deltas=0 with a '
                f"shadow_directory, found check={self.check!r}, delta={self.delta!r}, "
                f"shadow_bytes={shadow} and max_deltas={self.max_deltas!r}: there is no shadow to "
                "lie in it."
            )

    @property
    def has_deltas(self) -> bool:
        """True if not every save is a base."""
        return self.max_deltas != 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the step that the next one would follow.

    Attributes:
        step: step number.
        depth: number of deltas between its base and it.
        counts: update counters of its state; None while they are still being computed.
        lineage: the saved step on the disk that it is, or is deferred behind; None where there is
            none to build on.
        deferred_count: number of deferred steps between that saved step and the next one.
        saved: the facts that only a step saved by this process has; None for a restored one.
        has_witness: True if an update of its state can be checked.
        copied: leaves of which host copies are kept.
        has_moved: True if its state lay on other devices or had another update.
    """

    step: int
    depth: int
    counts: Counts | None
    lineage: Lineage | None
    deferred_count: int
    saved: SavedFacts | None
    has_witness: bool
    copied: Collection[int]
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class SavedFacts:
    """Facts about a step that this process saved.

    Attributes:
        step: step number.
        structure: structure of its state.
        kind: kind of its save.
        interval: steps between its own parent and it.
        replayable: True if no leaf of an update was stored in another data type.
        follows_saved: True if it has a parent on the disk.
        failure: the step is known not to have been saved.
    """

    step: int
    structure: Structure
    kind: Kind
    interval: int
    replayable: bool
    follows_saved: bool
    failure: bool


@dataclass(frozen=True, slots=True)
class BackgroundFacts:
    """Bases made in the background: what one process knows, or what all processes agreed on.

    Attributes:
        are_possible: True if the next delta could become one.
        newest_depth: number of the newest of them among the deltas of its line; 0 for none.
        newest_s: seconds that it took.
    """

    are_possible: bool = False
    newest_depth: int = 0
    newest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """A state to save, and all that a plan may know about it.

    Attributes:
        step: step number; None if neither the caller nor the directory gives it.
        structure: structure of the state.
        update: its exported update.
        counts: update counters; None while they are still being computed.
        replayable: True if no leaf of an update is stored in another data type.
        distrusted: leaves whose replay was found wrong in a way that a sample may miss.
        parent: the step that a delta would follow; None for none.
        is_only: True if no other step could be followed instead.
        is_first: True if nothing was saved or restored before.
        keeps_ancestors: True if the steps that a delta builds on live as long as it does.
        process_count: number of processes that save together.
        is_checker_ready: True if a check would not wait for a compiler.
        longest_lineage: number of deltas that may follow the base, as the schedule has it now.
        makes_bases: True if a delta can become a base in the background. Until it is one, the
            lineage may grow to twice that length.
        is_shadow_beyond: True if the shadow followed another step, and cannot go back.
    """

    step: int | None
    structure: Structure
    update: ExportedUpdate
    counts: Counts | None
    replayable: bool
    distrusted: frozenset[int]
    parent: Facts | None
    is_only: bool
    is_first: bool
    keeps_ancestors: bool
    process_count: int
    is_checker_ready: bool
    longest_lineage: int
    makes_bases: bool = False
    is_shadow_beyond: bool = False

    @property
    def most_deltas(self) -> int:
        """Number of deltas after the base from which on the next save has to be a base."""
        return self.longest_lineage * (2 if self._may_make_base else 1)

    @property
    def is_base_due(self) -> bool:
        """True if the next delta is to become a base."""
        parent = self.parent
        due = parent is not None and parent.depth + 1 >= self.longest_lineage
        return due and self._may_make_base

    @property
    def _may_make_base(self) -> bool:
        # A base has no room for deferred steps: they would be lost.
        return self.makes_bases and not (self.parent and self.parent.deferred_count)
