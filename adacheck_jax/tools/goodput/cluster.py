"""A cluster, what is trained on it, and how often it fails, with the source of each figure.

A figure is *published* (its authors' own claim, on their hardware), *measured* (here:
``docs/guide/cost.md``, scaled by the bytes of a host), *assumed* (a guess: halve and double it), or
*given*: what is trained, and what the caller says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KINDS = ("software", "host", "rack")
"""Kinds of failure: a process starts again, a host's memory is lost, several hosts' at once."""

DAY_S = 86_400.0
SourceKind = Literal["published", "measured", "assumed", "given"]
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and where it comes from.

    Attributes:
        value: the number; its name tells the unit.
        kind: kind of its source.
        source: the source in words.
    """

    value: float
    kind: SourceKind
    source: str

    @property
    def is_uncertain(self) -> bool:
        """True for a guess, and for what was measured elsewhere; half of nothing is nothing."""
        return self.kind in ("assumed", "measured") and self.value > 0

    def scaled(self, by: float) -> Figure:
        """The figure multiplied by a number."""
        return dataclasses.replace(self, value=self.value * by)

    @classmethod
    def given(cls, system: str, name: str, value: float) -> Figure:
        """A figure that the caller gives.

        Raises:
            ValueError: it is no finite number, or negative.
        """
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value >= 0):
            raise ValueError(f"{system}: expected {name} to be a number >= 0, found {value!r}")
        return cls(float(value), "given", "by the caller")


def published(value: float, source: str) -> Figure:
    """A figure that somebody published."""
    return Figure(value, "published", source)


def assumed(value: float, source: str) -> Figure:
    """A figure that nobody published or measured."""
    return Figure(value, "assumed", source)


CLUSTER_FIGURES: Mapping[str, Figure] = {
    "failures_a_device_day": published(
        419 / 54 / 16_384, "Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs"
    ),
    "software_share": assumed(0.13, "an eighth; Llama 3's were mostly hardware"),
    "rack_share": assumed(35 / 419, "Llama 3: 35 of 419 were switches and cables; taken as racks"),
    "params": Figure(405e9, "given", "Llama 3 405B"),
    "state_bytes_a_param": Figure(14, "given", "bfloat16 params, float32 masters, Adam moments"),
    "record_bytes_a_param": Figure(2, "given", "bfloat16 gradients"),
    "step_s": assumed(6, "16 million tokens a step at 400 TFLOP/s a GPU: 5.9 s"),
    "software_restart_s": assumed(120, "noticing it, starting the processes, compiling"),
    "host_restart_s": assumed(300, "the same, and replacing a host"),
    "rack_restart_s": assumed(600, "the same, and replacing several"),
}
"""Figures of the cluster and of what is trained on it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, the training run on it, and its failures.

    Attributes:
        hosts: number of hosts.
        devices_per_host: accelerators of each.
        duration_s: length of the training run.
        figures: all else.

    Raises:
        ValueError: there are no hosts or devices, nothing is trained, or shares exceed 1.
    """

    hosts: int = 2048
    devices_per_host: int = 8
    duration_s: float = 54 * DAY_S
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=lambda: CLUSTER_FIGURES)

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1 or not self.duration_s > 0:
            raise ValueError("expected at least one host, one device a host, and some time")
        for name in ("failures_a_device_day", "params", "step_s"):
            if not self.figures[name].value > 0:
                raise ValueError(f"cluster: expected {name} to be more than 0, found 0")
        if min(self.shares) < -1e-12:
            raise ValueError("cluster: software_share and rack_share sum to more than 1")

    def changed(self, values: Values) -> Cluster:
        """The cluster with other figures.

        Raises:
            ValueError: there is no such figure, or it cannot have this value.
        """
        if unknown := values.keys() - self.figures.keys():
            known = [*self.figures]
            raise ValueError(f"cluster: expected some of {known}, found {sorted(unknown)}")
        given = {name: Figure.given("cluster", name, value) for name, value in values.items()}
        return dataclasses.replace(self, figures={**self.figures, **given})

    def with_mtbf(self, mtbf_s: float) -> Cluster:
        """The cluster with another mean time between failures, of all of it."""
        return self.changed({"failures_a_device_day": DAY_S / mtbf_s / self.devices})

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the whole cluster."""
        return DAY_S / (self.figures["failures_a_device_day"].value * self.devices)

    @property
    def step_s(self) -> float:
        """Seconds of a training step without saves."""
        return self.figures["step_s"].value

    @property
    def shares(self) -> tuple[float, float, float]:
        """Share of each of ``KINDS`` in the failures."""
        software, rack = (self.figures[f"{kind}_share"].value for kind in ("software", "rack"))
        return software, 1 - software - rack, rack

    @property
    def restarts_s(self) -> tuple[float, float, float]:
        """Seconds from a failure of each of ``KINDS`` to the restore."""
        software, host, rack = (self.figures[f"{kind}_restart_s"].value for kind in KINDS)
        return software, host, rack

    @property
    def mean_restart_s(self) -> float:
        """Mean seconds from a failure to the restore."""
        return sum(x * s for x, s in zip(self.shares, self.restarts_s, strict=True))

    @property
    def state_gb(self) -> float:
        """Gigabytes of state that each host saves, every byte of the state once."""
        return self._gb("state_bytes_a_param")

    @property
    def record_gb(self) -> float:
        """Gigabytes of recorded gradient that each host saves."""
        return self._gb("record_bytes_a_param")

    def _gb(self, each: str) -> float:
        return self.figures["params"].value * self.figures[each].value / self.hosts / 1e9
