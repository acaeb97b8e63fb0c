"""Choices of the caller, checked once: how a run saves, and the copy that checks it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from adacheck_jax.device import replicas
from adacheck_jax.schedule.adaptive import AdaptivePolicy
from adacheck_jax.schedule.line import MaxDeltas
from adacheck_jax.state.exported_update import Check
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.store.zarr import Compression

Delta = Literal["auto", "bits"]
"""Deltas that may be written: replayed updates, and differences of bits where these are not exact;
or differences alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """A copy of the state that follows training: all of a delta's replay is compared with it.

    It lies in host memory, and follows updates that are pinned and element-wise. Where it does not
    fit, or an update is another, a sample is compared, and the log says so.

    Attributes:
        bytes: the most host memory that it may take in this process; it needs as much as this
            process writes of a base, and a record; copies take as much again. None for half of what
            is free, shared by up to eight processes.
        directory: a directory of this machine in memory, such as ``"/dev/shm/myrun"``, in which it
            lies in a file: a process that is killed and started again here gets its state back
            without reading storage (:meth:`AdaCheckHandler.recover`). It is made if it is not
            there, and the file stays when training ends: remove the directory then. The file holds
            a whole state and two records; each of several processes has a file of its own, with
            what it writes of a base, and copies.
        records: True to keep in the directory the last base and what each step since it brought,
            which devices replay at a recovery, in place of a state that the host computes. None for
            that where the host turns out to compute other bits than the devices, or cannot compute
            the update. Before ``bytes`` are used up the next save is a base.
        copies: number of other failure domains in whose memory what a process writes of a base is
            kept too, where there are so many; 0 for none. What devices of theirs do not hold anyway
            (data parallelism) is sent to them, by collectives in the calls that save, record and
            restore.
        domain: name of the failure domain of this process; processes of one name are lost
            together. None for its machine, or for the slice of its devices where there are several.
        background_bases: True to turn saved deltas into bases in the background, from the shadow,
            so that the loop writes the first base alone. It does so with a policy as
            ``max_deltas``, where files can be hard-linked and each process has memory for two
            shadows. Give False to a manager that deletes in the background
            (``enable_background_delete``): its deletion of a step fails if it meets the change of
            the step's files.
        on_devices: True for a second copy on the devices of the state, in place of one in host
            memory: it follows every update that can be replayed, and makes no bases.

    Raises:
        ValueError: an argument has a value that it cannot have, alone or beside the others.
    """

    bytes: int | None = None
    directory: AnyPath | str | None = None
    records: Literal[True] | None = None
    copies: int = 1
    domain: str | None = None
    background_bases: bool = True
    on_devices: bool = False

    def __post_init__(self) -> None:
        most, directory = self.bytes, self.directory
        if not (most is None or (isinstance(most, int) and most > 0)):
            raise ValueError(
                f"expected Shadow(bytes=...) to be None or an int > 0, found {most!r}. Write "
                "shadow=None for no shadow."
            )
        for name in ("background_bases", "on_devices"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(
                    f"expected Shadow({name}=...) to be True or False, found {value!r}"
                )
        if self.records not in (None, True) or (self.records and directory is None):
            raise ValueError(
                "expected Shadow(records=...) to be None, or True with a directory, found "
                f"records={self.records!r} and directory={directory!r}"
            )
        if not isinstance(self.copies, int) or isinstance(self.copies, bool) or self.copies < 0:
            raise ValueError(
                f"expected Shadow(copies=...) to be an int >= 0, found {self.copies!r}"
            )
        if directory is None and self.copies > 1:
            raise ValueError(
                f"expected a directory with Shadow(copies={self.copies}), found none: copies lie "
                'in it. Give it, Shadow(directory="/dev/shm/myrun", ...), or leave copies out.'
            )
        if not isinstance(self.domain, str | None):
            raise ValueError(f"expected Shadow(domain=...) to be a name, found {self.domain!r}")
        is_path = isinstance(directory, str) or hasattr(directory, "__fspath__")
        if directory is not None and (not is_path or not str(directory) or "://" in str(directory)):
            raise ValueError(
                "expected Shadow(directory=...) to be a directory of this machine, such as "
                f'"/dev/shm/myrun", found {directory!r}'
            )
        if directory is not None and (path := Path(str(directory))).exists() and not path.is_dir():
            raise ValueError(
                f"expected Shadow(directory=...) to be a directory, found a file at {directory}. "
                "Name another place; the directory is made if it is not there."
            )
        if self.on_devices and (most is not None or directory is not None):
            raise ValueError(
                "expected neither bytes nor a directory with Shadow(on_devices=True), found "
                f"bytes={most} and directory={directory!r}: they are for a copy in host memory."
            )


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of the caller; :class:`~adacheck_jax.AdaCheckHandler` says what they mean."""

    max_deltas: MaxDeltas = "auto"
    params_path: str | Mapping[str, str] | None = None
    keep_lineage: KeepLineage | None = None
    delta: Delta = "auto"
    compression: Compression = "none"
    check_replicas: replicas.Mode = "warn"
    shadow: Shadow | None = Shadow()
    ephemeral: Sequence[str] = ()

    def __post_init__(self) -> None:
        most, is_policy = self.max_deltas, isinstance(self.max_deltas, AdaptivePolicy)
        if not (is_policy or most == "auto" or (isinstance(most, int) and most >= 0)):
            raise ValueError(
                'expected max_deltas to be an int >= 0, "auto" or an AdaptivePolicy, found '
                f"{most!r}"
            )
        if not isinstance(self.shadow, Shadow | None):
            raise ValueError(f"expected shadow to be a Shadow or None, found {self.shadow!r}")
        rarer_s = most.storage_mtbf_s if isinstance(most, AdaptivePolicy) else None
        if rarer_s is not None and self.shadow_directory is None:
            raise ValueError(
                f"expected Shadow(directory=...) with storage_mtbf_s={rarer_s!r}, found none: "
                "where no memory outlives its process, every failure needs storage."
            )
        patterns = self.ephemeral if isinstance(self.ephemeral, Collection) else (self.ephemeral,)
        if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
            raise ValueError(
                "expected ephemeral to be a sequence of patterns of leaf paths, found "
                f"{self.ephemeral!r}. Write ephemeral=('*/residual',)."
            )
        if not isinstance(self.keep_lineage, KeepLineage | None):
            raise ValueError(
                f"expected keep_lineage to be a KeepLineage, found {self.keep_lineage!r}. Write "
                "keep = KeepLineage(policy), and give it to the manager too."
            )
        for name, known in (
            ("delta", Delta),
            ("compression", Compression),
            ("check_replicas", replicas.Mode),
        ):
            if (choice := getattr(self, name)) not in get_args(known):
                raise ValueError(
                    f"expected {name} to be one of {get_args(known)}, found {choice!r}"
                )
        if self.shadow_directory is None:
            return
        if self.ephemeral:
            raise ValueError(
                "expected no ephemeral leaves with Shadow(directory=...), found "
                f"{self.ephemeral!r}: what is recovered from memory has the bits of every leaf."
            )
        if self.delta != "auto" or not self.has_deltas:
            raise ValueError(
                'expected delta="auto" and no max_deltas=0 with Shadow(directory=...), found '
                f"delta={self.delta!r} and max_deltas={self.max_deltas!r}: there is no shadow to "
                "lie in it."
            )

    @property
    def has_deltas(self) -> bool:
        """True if not every save is a base."""
        return self.max_deltas != 0

    @property
    def check(self) -> Check:
        """The comparison of a delta's replay with its state."""
        if self.shadow is None:
            return "sample"
        return "full" if self.shadow.on_devices else "auto"

    @property
    def host_shadow(self) -> Shadow | None:
        """The copy in host memory; None if there is none."""
        return None if self.check != "auto" else self.shadow

    @property
    def shadow_directory(self) -> AnyPath | str | None:
        """The directory in memory in which the shadow lies; None for none."""
        return None if self.shadow is None else self.shadow.directory
