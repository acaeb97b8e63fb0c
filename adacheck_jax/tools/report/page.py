"""The page of a report: one HTML file that loads nothing and runs no script."""

from __future__ import annotations

import importlib.resources
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jinja2 import Environment
from markupsafe import Markup
from rich.filesize import decimal

from adacheck_jax.tools.listing import FOREIGN, STOCK, StepSummary, saved_at
from adacheck_jax.tools.report import charts
from adacheck_jax.tools.report.gather import Report

MOST_ROWS, MOST_LEAVES, MOST_SERIES = 500, 120, 12

Figure = tuple[str, str, Markup]  # title, value and chart


def page_of(report: Report) -> str:
    """Draw a report.

    Returns:
        The text of an HTML file.
    """
    rows = _rows(report)
    leaves = report.statistics.leaves if report.statistics else ()
    leaves = sorted(leaves, key=lambda leaf: -leaf.state_bytes)[:MOST_LEAVES]
    changes = [each for leaf in leaves for each in report.changes.get(leaf.path, ()) if each]
    finite = [each for each in changes if math.isfinite(each)]
    # All values are escaped but those that are marked up: anybody names leaves and metrics.
    pages = Environment(autoescape=True)
    pages.filters["bytes"] = lambda size: decimal(size) if size else ""
    pages.filters["short"] = lambda value: f"{value:.4g}" if isinstance(value, float) else ""
    part = importlib.resources.files("adacheck_jax.tools.report").joinpath("page.html")
    return pages.from_string(part.read_text(encoding="utf-8")).render(
        report=report,
        charts=[
            ("Steps and what they cost", "", _costs(rows)),
            ("Training", report.norms_note, _training(report, rows)),
        ],
        leaves=leaves,
        ends=(min(finite), max(finite)) if finite else (),
        strip=charts.strip,
        rows=rows,
        most_rows=MOST_ROWS,
        kinds=Counter(row.kind for row in rows),
        logs={row.step: row for row in report.logs},
    )


def _rows(report: Report) -> list[StepSummary]:
    """The steps under the root, and recorded ones without a directory of their own."""
    said = report.damage
    rows = [
        replace(row, kind="damaged", error=said[row.item]) if row.item in said else row
        for row in report.summary.steps
    ]
    kept = frozenset(report.kept)
    for step, saved in report.held.items():
        if step in kept:
            rows.append(StepSummary(step, f"with {saved}", "deferred"))
        else:
            rows.append(StepSummary(step, "in a later step", "deleted"))
    return sorted(rows, key=lambda row: -1 if row.step is None else row.step)


def _costs(rows: Sequence[StepSummary]) -> list[Figure]:
    sizes = {
        kind: {row.step or 0: row.new_bytes for row in rows if row.kind == kind and row.new_bytes}
        for kind in ("base", "delta")
    }
    marks = [row.step or 0 for row in rows if row.kind in ("damaged", STOCK, FOREIGN)]
    times = [(row.step or 0, when) for row in rows if (when := saved_at(row))]
    pairs = itertools.pairwise(times)
    waits = {step: (now - last).total_seconds() for (_, last), (step, now) in pairs if now >= last}
    said = ", ".join(f"{kind}s {decimal(sum(each.values()))}" for kind, each in sizes.items())
    found = [("new bytes", said, Markup(charts.bars(sizes, marks)))] if any(sizes.values()) else []
    return found + _lines({"seconds between saves": waits})


def _training(report: Report, rows: Iterable[StepSummary]) -> list[Figure]:
    series: dict[str, dict[int, float]] = {}
    for name in ("gradient_norm", "update_norm", "learning_rate"):
        values = {row.step: getattr(row, name) for row in report.logs}
        series[name.replace("_", " ")] = {n: x for n, x in values.items() if x is not None}
    for row in rows:
        for name, value in row.metrics.items():
            series.setdefault(f"metric {name}", {})[row.step or 0] = value
    return _lines(dict([*series.items()][:MOST_SERIES]))


def _lines(series: Mapping[str, Mapping[int, float]]) -> list[Figure]:
    found = []
    for name, values in series.items():
        if values:
            step, value = [*values.items()][-1]
            found.append((name, f"{value:.4g} at step {step:,}", Markup(charts.line(values))))
    return found
