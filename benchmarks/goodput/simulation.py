"""Goodput of checkpointing systems: failures of a cluster, replayed against what each system keeps.

A run is a series of failures with exponential times between them. Each is of one kind: of the
software (a process starts again, the host's memory survives), of a host (its memory is lost), or of
a rack (copies in the memory of neighbours may be lost with it). All systems meet the same failures.
After each one a run goes on from the newest step that some tier still has, after the restart and
that tier's restore; a failure may come meanwhile. What a system does is in
``systems``.

What saves block is spread evenly over the steps between them, which leaves the mean as it is: for
one tier without background writes the result is that of Daly (2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.goodput.figures import KINDS, Cluster, Figure, figures_of
from benchmarks.goodput.systems import SYSTEMS
from benchmarks.goodput.tiers import Behaviour

Tables = Mapping[str, Mapping[str, Any]]
"""Tables of ``figures.toml``."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Failures of several runs.

    Attributes:
        uptime_s: seconds from each failure to the next; the last ones reach the end of the run:
            (failures, runs).
        kind: index in ``KINDS`` of the failure at the end of each: (failures, runs).
        luck: uniform numbers that decide whether a tier survives it: (failures, runs).
        is_failure: False where the uptime ends with the run: (failures, runs).
    """

    uptime_s: np.ndarray
    kind: np.ndarray
    luck: np.ndarray
    is_failure: np.ndarray

    @classmethod
    def drawn(cls, cluster: Cluster, runs: int, seed: int) -> Trace:
        """Draw the failures of a number of runs."""
        random = np.random.default_rng(seed)
        mean = cluster.duration_s / cluster.mtbf_s
        count = math.ceil(mean + 8 * math.sqrt(mean) + 8)
        ends_s = np.cumsum(random.exponential(cluster.mtbf_s, (count, runs)), axis=0)
        kind = random.choice(len(KINDS), (count, runs), p=cluster.shares)
        luck = random.uniform(size=(count, runs))
        is_failure = ends_s < cluster.duration_s
        ends_s = np.minimum(ends_s, cluster.duration_s)
        uptime_s = np.diff(ends_s, axis=0, prepend=0.0)
        used = int(is_failure.sum(axis=0).max()) + 1
        return cls(*(x[:used] for x in (uptime_s, kind, luck, is_failure)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The time of one system, as shares that sum to 1; means over all runs.

    Attributes:
        system: name of the system.
        schedule: its tiers and their intervals, in words.
        goodput: steps that were kept, at the length of a step without saves.
        goodput_error: standard error of the goodput.
        saving: what saves added to all steps.
        repeated: steps that were lost, at the length of a step without saves.
        down: restarts, restores, and parts of steps.
        failures: failures of a run.
        lost_steps: steps of a run that were lost.
        lost_a_failure: steps that a failure lost.
    """

    system: str
    schedule: str
    goodput: float
    goodput_error: float
    saving: float
    repeated: float
    down: float
    failures: float
    lost_steps: float
    lost_a_failure: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The waste (1 - goodput) of a system if one uncertain figure were another.

    Attributes:
        system: name of the system.
        figure: name of the figure; of the cluster's with ``cluster.`` before it.
        value: its value.
        halved: waste with half of the value.
        waste: waste with the value.
        doubled: waste with twice the value.
    """

    system: str
    figure: str
    value: float
    halved: float
    waste: float
    doubled: float


def figures(tables: Tables, system: str, cluster: Cluster) -> dict[str, Figure]:
    """The figures of a system by its name in ``SYSTEMS``; what follows a comma is its schedule."""
    return figures_of(tables, system.partition(",")[0], cluster)


def outcomes(tables: Tables, cluster: Cluster, runs: int = 20, seed: int = 0) -> list[Outcome]:
    """Simulate all systems on a cluster.

    Args:
        tables: figures of the systems.
        cluster: the cluster and its failures.
        runs: number of simulated runs.
        seed: seed of their failures.
    """
    trace = Trace.drawn(cluster, runs, seed)
    return [
        _outcome(system, cluster, figures(tables, system, cluster), trace) for system in SYSTEMS
    ]


def _outcome(system: str, cluster: Cluster, own: Mapping[str, Figure], trace: Trace) -> Outcome:
    values = {name: each.value for name, each in own.items()}
    return replayed(system, SYSTEMS[system](values, cluster), cluster, trace)


def sensitivities(
    tables: Tables, cluster: Cluster, runs: int = 20, seed: int = 0
) -> list[Sensitivity]:
    """One row for each uncertain figure of each system, and of the cluster."""
    trace, rows = Trace.drawn(cluster, runs, seed), []
    for system in SYSTEMS:
        own = figures(tables, system, cluster)
        waste = 1 - _outcome(system, cluster, own, trace).goodput
        for name, figure in own.items():
            if figure.is_uncertain:
                half, double = (
                    1 - _outcome(system, cluster, {**own, name: figure.scaled(by)}, trace).goodput
                    for by in (0.5, 2.0)
                )
                rows.append(Sensitivity(system, name, figure.value, half, waste, double))
        for name, figure in cluster.figures.items():
            if figure.is_uncertain:
                changed = [_scaled(cluster, name, by) for by in (0.5, 2.0)]
                half, double = (
                    1 - _outcome(system, each, figures(tables, system, each), trace).goodput
                    for each in changed
                )
                row = Sensitivity(system, f"cluster.{name}", figure.value, half, waste, double)
                rows.append(row)
    return rows


def _scaled(cluster: Cluster, name: str, by: float) -> Cluster:
    value = cluster.value(name)
    room = cluster.shares[1] if name.endswith("_share") else math.inf  # the hosts' failures
    return cluster.changed(**{name: min(value * by, value + room)})


def replayed(name: str, behaviour: Behaviour, cluster: Cluster, trace: Trace) -> Outcome:
    """Replay failures against what one system keeps.

    Args:
        name: name of the system.
        behaviour: its tiers.
        cluster: the cluster; the trace is of its failures.
        trace: failures of the runs.
    """
    run = _Runs(behaviour, cluster, trace.uptime_s.shape[1])
    for uptime_s, kind, luck, is_failure in zip(
        trace.uptime_s, trace.kind, trace.luck, trace.is_failure, strict=True
    ):
        run.train(uptime_s)
        run.fail(kind, luck, is_failure)
    total_s, step_s = cluster.duration_s, cluster.step_s
    kept = run.step * step_s / total_s
    lost = run.lost * step_s / total_s
    saving = (run.step + run.lost) * (run.whole_step_s - step_s) / total_s
    failures = float(trace.is_failure.sum(axis=0).mean())
    return Outcome(
        system=name,
        schedule=", ".join(tier.described() for tier in behaviour.tiers),
        goodput=float(kept.mean()),
        goodput_error=float(kept.std() / math.sqrt(len(kept))),
        saving=float(saving.mean()),
        repeated=float(lost.mean()),
        down=float((1 - kept - lost - saving).mean()),
        failures=failures,
        lost_steps=float(run.lost.mean()),
        lost_a_failure=float(run.lost.mean()) / failures if failures else 0.0,
    )


class _Runs:
    """All runs of one system, from failure to failure; arrays are of shape (runs,).

    Attributes:
        step: steps of each run that are done.
        lost: steps that were lost so far.
        whole_step_s: seconds of a step with what saves add to it.
    """

    def __init__(self, behaviour: Behaviour, cluster: Cluster, runs: int) -> None:
        self._tiers, self._cluster = behaviour.tiers, cluster
        saves_s = sum(tier.blocking_s(cluster.step_s) for tier in self._tiers)
        self.whole_step_s = cluster.step_s * (1 + behaviour.slowdown) + saves_s
        self.step = np.zeros(runs)
        self.lost = np.zeros(runs)
        self._resumed = np.zeros(runs)
        self._progress = np.zeros(runs)
        self._down_s = np.zeros(runs)
        self._held = [np.zeros(runs) for _ in self._tiers]

    def train(self, uptime_s: np.ndarray) -> None:
        """Let time pass: first what is left of restart and restore, then steps."""
        self._resumed = self.step
        training_s = np.maximum(uptime_s - self._down_s, 0)
        self._progress = self._resumed + training_s / self.whole_step_s
        self.step = np.floor(self._progress)

    def fail(self, kind: np.ndarray, luck: np.ndarray, is_failure: np.ndarray) -> None:
        """End the steps of runs that fail, and go back to the newest step that a tier has."""
        for index, tier in enumerate(self._tiers):
            saved = tier.newest(self._progress, self.whole_step_s)
            held = np.where(saved > self._resumed, saved, self._held[index])
            survives = luck < np.asarray(tier.survives)[kind]
            self._held[index] = np.where(survives, held, -1.0)
        newest = np.max(self._held, axis=0)
        restores = [tier.restoring_s(newest) for tier in self._tiers]
        possible = [
            np.where(h == newest, r, np.inf) for h, r in zip(self._held, restores, strict=True)
        ]
        restarts_s = np.asarray(self._cluster.restarts_s)[kind]
        self.lost += np.where(is_failure, self.step - newest, 0)
        self.step = np.where(is_failure, newest, self.step)
        self._down_s = restarts_s + np.min(possible, axis=0)
