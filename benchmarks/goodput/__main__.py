"""Goodput of checkpointing systems under simulated failures, and what is uncertain about it.

    python -m benchmarks.goodput            # seconds
    python -m benchmarks.goodput --hosts 16384
    python -m benchmarks.goodput --figures FILE.toml --seed 1

Prints three Markdown tables: what becomes of the time with each system, the waste (1 - goodput) if
uncertain figures were half or twice what they are, and all figures with their sources. To try other
figures, change a copy of ``benchmarks/goodput/figures.toml``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.goodput.figures import DAY_S, FILE, cluster_of, figures_of, read
from benchmarks.goodput.simulation import Outcome, Sensitivity, outcomes, sensitivities

WORTH_SHOWING = 0.001
"""Changes of the waste below this share of the time are left out of the table."""
SHOWN_OF_THE_CLUSTER = ("stock Orbax", "adacheck_jax")
"""Systems that the cluster's uncertain figures are shown for: they change all systems alike."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2048, help="hosts of 8 devices")
    parser.add_argument("--figures", type=Path, default=FILE, help="file of figures")
    parser.add_argument("--runs", type=int, default=20, help="simulated runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of their failures")
    given = parser.parse_args(arguments)
    tables = read(given.figures)
    cluster = cluster_of(tables, given.hosts)
    print(
        f"{cluster.hosts:,} hosts, {cluster.devices:,} devices, a failure every "
        f"{cluster.mtbf_s / 3600:.3g} h for {cluster.duration_s / DAY_S:g} days, {given.runs} "
        f"runs, seed {given.seed}\n"
    )
    _show_outcomes(outcomes(tables, cluster, given.runs, given.seed))
    _show_sensitivities(sensitivities(tables, cluster, given.runs, given.seed))
    _show("system", "figure", "value", "kind", "source")
    for system in tables:
        for name, each in figures_of(tables, system, cluster).items():
            _row(system, f"`{name}`", f"{each.value:.3g}", each.kind, each.source)


def _show_outcomes(found: Iterable[Outcome]) -> None:
    _show("system", "goodput", "saving", "trained again", "down", "lost steps a failure", "saves")
    for each in found:
        shares = (each.goodput, each.saving, each.repeated, each.down)
        _row(
            each.system,
            *(f"{100 * x:.2f} %" for x in shares),
            f"{each.lost_a_failure:.1f}",
            each.schedule,
        )
    print()


def _show_sensitivities(found: Iterable[Sensitivity]) -> None:
    _show("system", "figure", "value", "halved", "waste", "doubled")
    for each in found:
        change = max(abs(each.halved - each.waste), abs(each.doubled - each.waste))
        is_of_cluster = each.figure.startswith("cluster.")
        if change < WORTH_SHOWING or (is_of_cluster and each.system not in SHOWN_OF_THE_CLUSTER):
            continue
        shares = (f"{100 * x:.2f} %" for x in (each.halved, each.waste, each.doubled))
        _row(each.system, f"`{each.figure}`", f"{each.value:.3g}", *shares)
    print()


def _show(*names: str) -> None:
    _row(*names)
    print("|" + "---|" * len(names))


def _row(*cells: str) -> None:
    print("".join(f"| {cell} " for cell in cells) + "|")


if __name__ == "__main__":
    main()
