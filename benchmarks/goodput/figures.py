"""Figures of the simulation, read from ``figures.toml``, and the cluster that they describe."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("software", "host", "rack")
"""Kinds of failure: a process starts again, a host's memory is lost, several hosts' at once."""

DAY_S = 86_400.0
FILE = Path(__file__).with_name("figures.toml")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and where it comes from.

    Attributes:
        value: the number; its name tells the unit.
        kind: kind of its source: published, measured, assumed or given.
        source: the source in words.
    """

    value: float
    kind: str
    source: str

    @property
    def is_uncertain(self) -> bool:
        """True for a guess, and for what was measured elsewhere; half of nothing is nothing."""
        return self.kind in ("assumed", "measured") and self.value > 0

    def scaled(self, by: float) -> Figure:
        """The figure multiplied by a number."""
        return dataclasses.replace(self, value=self.value * by)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, the training run on it, and its failures.

    Attributes:
        figures: its table of ``figures.toml``.
        hosts: number of hosts, with 8 devices each.
        duration_s: length of the training run.
    """

    figures: Mapping[str, Figure]
    hosts: int = 2048
    duration_s: float = 54 * DAY_S

    def changed(self, **values: float) -> Cluster:
        """The cluster with other values of its figures."""
        changed = {
            name: dataclasses.replace(self.figures[name], value=value)
            for name, value in values.items()
        }
        return dataclasses.replace(self, figures={**self.figures, **changed})

    def value(self, name: str) -> float:
        """Value of a figure."""
        return self.figures[name].value

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return 8 * self.hosts

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the whole cluster."""
        return DAY_S / (self.value("failures_a_device_day") * self.devices)

    @property
    def step_s(self) -> float:
        """Seconds of a training step without saves."""
        return self.value("step_s")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Share of each of ``KINDS`` in the failures."""
        software, rack = self.value("software_share"), self.value("rack_share")
        return software, 1 - software - rack, rack

    @property
    def restarts_s(self) -> tuple[float, ...]:
        """Seconds from a failure of each of ``KINDS`` to the restore."""
        return tuple(self.value(f"{kind}_restart_s") for kind in KINDS)

    def gb(self, what: str) -> float:
        """Gigabytes of "state" or "record" that each host saves, every byte once."""
        return self.value("params") * self.value(f"{what}_bytes_a_param") / self.hosts / 1e9


def read(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Tables of the file, as they stand there."""
    return tomllib.loads(path.read_text())


def cluster_of(tables: Mapping[str, Mapping[str, Any]], hosts: int = 2048) -> Cluster:
    """The cluster of a file, with a number of hosts."""
    return Cluster({name: Figure(**row) for name, row in tables["cluster"].items()}, hosts)


def figures_of(
    tables: Mapping[str, Mapping[str, Any]], system: str, cluster: Cluster
) -> dict[str, Figure]:
    """The figures of a system on a cluster."""
    return {name: _figure(tables, system, name, cluster) for name in tables[system]}


def _figure(
    tables: Mapping[str, Mapping[str, Any]], system: str, name: str, cluster: Cluster
) -> Figure:
    if system == "cluster":
        return cluster.figures[name]
    row = tables[system][name]
    if "like" in row:
        other, _, figure = row["like"].rpartition(".")
        same = _figure(tables, other, figure, cluster)
        source = row.get("source", f"as {other}: {figure}")
        return Figure(same.value * row.get("times", 1.0), "assumed", source)
    value, source = row["value"], row["source"]
    if "at_gb" in row:
        source += f": {value * 1e3:,.0f} ms at {row['at_gb'] * 1e3:,.4g} MB, by bytes of a host"
        value = value / row["at_gb"] * cluster.gb(row["of"])
    return Figure(value, row["kind"], source)
