"""The handler's options, as every part of a save takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from adacheck_jax.device import replicas
from adacheck_jax.store.compression import Compression
from adacheck_jax.store.retention import KeepLineage

Delta = Literal["auto", "bits"]
"""Deltas that may be written: replayed updates, and differences of bits where these are not exact;
or differences alone."""

Check = Literal["sample", "full"]
"""Elements of a delta's replay that are compared with the state before the delta is saved."""


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of the caller; :class:`~adacheck_jax.AdaCheckHandler` says what each of them means.

    Raises:
        ValueError: an option has a value that it cannot have.
    """

    max_deltas: int = 20
    params_path: str | Mapping[str, str] | None = None
    keep_lineage: KeepLineage | None = None
    delta: Delta = "auto"
    check: Check = "sample"
    compression: Compression = "auto"
    check_replicas: replicas.Mode = "warn"

    def __post_init__(self) -> None:
        if not isinstance(self.max_deltas, int) or self.max_deltas < 0:
            raise ValueError(f"expected max_deltas to be an int >= 0, found {self.max_deltas!r}")
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
