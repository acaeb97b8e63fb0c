"""Plots for people, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:
    from adacheck_jax.tools.goodput.simulation import GoodputReport

_SUFFIXES = (".png", ".svg")
_PARTS = {
    "saving": "saving",
    "repeated": "steps trained again",
    "down": "restart and restore",
}


def draw_goodput(report: GoodputReport, path: Path) -> None:
    """Draw the time that each system loses, by what it goes into.

    Args:
        report: outcomes of a simulation.
        path: file to write, of a kind in ``_SUFFIXES``.

    Raises:
        InputError: matplotlib is not installed, or the file is of another kind.
        OSError: the file cannot be written.
    """
    if path.suffix not in _SUFFIXES:
        raise InputError(f"--plot: expected a file that ends in .png or .svg, found {path}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install 'adacheck-jax[plot]'.") from error
    outcomes = report.outcomes[::-1]
    names = [each.system for each in outcomes]
    figure = Figure(figsize=(9, 0.45 * len(outcomes) + 1.5), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(outcomes)
    for field, label in _PARTS.items():
        lengths = [100 * getattr(each, field) for each in outcomes]
        axes.barh(names, lengths, left=left, label=label)
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    axes.set_xlabel("% of the time that is not goodput")
    axes.set_title(f"{report.devices:,} devices, a failure every {report.mtbf_s / 3600:.3g} h")
    axes.legend()
    figure.savefig(path, dpi=150)
