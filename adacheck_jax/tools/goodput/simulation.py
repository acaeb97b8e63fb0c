"""Goodput of checkpointing systems: failures of a cluster, replayed against what each system keeps.

A run is a series of failures with exponential times between them. Each is of one kind: of the
software (a process starts again, the host's memory survives), of a host (its memory is lost), or of
a rack (copies in the memory of neighbours may be lost with it). All systems meet the same failures.
After each one a run goes on from the newest step that some tier still has, after the restart and
that tier's restore; a failure may come meanwhile. What a system does is in
:mod:`~adacheck_jax.tools.goodput.systems`.

What saves block is spread evenly over the steps between them, which leaves the mean as it is: for
one tier without background writes the result is that of Daly (2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adacheck_jax.tools.goodput.cluster import KINDS, Cluster, Figure
from adacheck_jax.tools.goodput.systems import SYSTEMS, System
from adacheck_jax.tools.goodput.tiers import Behaviour

Wishes = Mapping[str, Mapping[str, float]]
"""Values of figures in place of the known ones, by ``cluster`` or the name of a system."""


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
class NamedFigure:
    """A figure that went into the simulation.

    Attributes:
        system: ``cluster``, or the name of a system.
        name: name of the figure.
        value: its value.
        kind: where it comes from: published, measured, assumed or given.
        source: the same in words.
    """

    system: str
    name: str
    value: float
    kind: str
    source: str


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


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """Goodput of all systems on one cluster.

    Attributes:
        hosts: number of hosts.
        devices: number of devices of all hosts.
        duration_s: length of each run.
        mtbf_s: mean seconds between failures.
        runs: number of runs.
        seed: seed of their failures.
        outcomes: what became of the time, for each system.
        figures: all figures, with their sources.
        sensitivities: the waste with other values of what is assumed, or was measured on
            another machine; empty unless asked for.
    """

    hosts: int
    devices: int
    duration_s: float
    mtbf_s: float
    runs: int
    seed: int
    outcomes: tuple[Outcome, ...]
    figures: tuple[NamedFigure, ...]
    sensitivities: tuple[Sensitivity, ...] = ()


def goodput_report(
    cluster: Cluster,
    wishes: Wishes | None = None,
    *,
    runs: int = 20,
    seed: int = 0,
    is_sensitivity: bool = False,
) -> GoodputReport:
    """Simulate all systems on a cluster.

    Args:
        cluster: the cluster and its failures.
        wishes: values in place of known figures.
        runs: number of simulated runs.
        seed: seed of their failures.
        is_sensitivity: whether to vary uncertain figures; takes some twenty times as long.

    Raises:
        ValueError: a wish names no system or none of its figures, or has a value that cannot be.
    """
    wishes = wishes or {}
    if unknown := wishes.keys() - {"cluster", *(each.name for each in SYSTEMS)}:
        known = ["cluster", *(each.name for each in SYSTEMS)]
        raise ValueError(f"expected one of {known}, found {sorted(unknown)}")
    cluster = cluster.changed(wishes.get("cluster", {}))
    trace = Trace.drawn(cluster, runs, seed)
    outcomes, figures, sensitivities = [], _named("cluster", cluster.figures), []
    for system in SYSTEMS:
        own = _changed(system.name, system.figures(cluster), wishes.get(system.name, {}))
        outcomes.append(_outcome(system, cluster, own, trace))
        figures += _named(system.name, own)
        if is_sensitivity:
            waste = 1 - outcomes[-1].goodput
            wish = wishes.get(system.name, {})
            sensitivities += _sensitivities(system, cluster, own, wish, trace, waste)
    return GoodputReport(
        hosts=cluster.hosts,
        devices=cluster.devices,
        duration_s=cluster.duration_s,
        mtbf_s=cluster.mtbf_s,
        runs=runs,
        seed=seed,
        outcomes=tuple(outcomes),
        figures=tuple(figures),
        sensitivities=tuple(sensitivities),
    )


def _named(system: str, figures: Mapping[str, Figure]) -> list[NamedFigure]:
    return [
        NamedFigure(system, name, each.value, each.kind, each.source)
        for name, each in figures.items()
    ]


def _changed(
    system: str, figures: Mapping[str, Figure], wishes: Mapping[str, float]
) -> dict[str, Figure]:
    if unknown := wishes.keys() - figures.keys():
        raise ValueError(f"{system}: expected some of {[*figures]}, found {sorted(unknown)}")
    given = {name: Figure.given(system, name, value) for name, value in wishes.items()}
    return {**figures, **given}


def _outcome(
    system: System, cluster: Cluster, figures: Mapping[str, Figure], trace: Trace
) -> Outcome:
    values = {name: each.value for name, each in figures.items()}
    behaviour = system.behaviour(values, cluster)
    return replayed(system.name, behaviour, cluster, trace)


def _sensitivities(
    system: System,
    cluster: Cluster,
    own: Mapping[str, Figure],
    wish: Mapping[str, float],
    trace: Trace,
    waste: float,
) -> list[Sensitivity]:
    """One row for each uncertain figure of the system, and for each of the cluster's."""
    rows = []
    for name, figure in own.items():
        if figure.is_uncertain:
            changed = [
                _outcome(system, cluster, {**own, name: figure.scaled(by)}, trace)
                for by in (0.5, 2.0)
            ]
            half, double = (1 - each.goodput for each in changed)
            rows.append(Sensitivity(system.name, name, figure.value, half, waste, double))
    for name, figure in cluster.figures.items():
        if figure.is_uncertain:
            changed = []
            for by in (0.5, 2.0):
                value = figure.value * by
                if name.endswith("_share"):  # the hosts' failures make room
                    value = min(value, figure.value + cluster.shares[1])
                other = cluster.changed({name: value})
                figures = _changed(system.name, system.figures(other), wish)
                changed.append(_outcome(system, other, figures, trace))
            half, double = (1 - each.goodput for each in changed)
            rows.append(
                Sensitivity(system.name, f"cluster.{name}", figure.value, half, waste, double)
            )
    return rows


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
