"""The page of a report: one HTML file that loads nothing and runs no script.

Its charts are small SVG pictures in the colours of the page.
"""

from __future__ import annotations

import base64
import importlib.resources
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.image
import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from rich.filesize import decimal

from adacheck_jax.tools.listing import FOREIGN, STOCK, StepSummary, saved_at
from adacheck_jax.tools.report.gather import Report

MOST_ROWS, MOST_LEAVES, MOST_SERIES = 500, 120, 12
_THEME = {f"#00000{n}": name for n, name in enumerate(("base", "delta", "bad", "soft", "line"), 1)}
"""Colours that stand for those of the page, which has others in the dark."""
_BASE, _DELTA, _BAD, _SOFT, _LINE = _THEME
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts, which a page can search
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "path.simplify_threshold": 0.5,
    "font.size": 8,
    "lines.linewidth": 1.2,
    "axes.grid.axis": "y",
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _LINE),
    **dict.fromkeys(("xtick.color", "ytick.color"), _SOFT),
}


Figure = tuple[str, str, Markup]  # title, value and chart


def page_of(report: Report) -> str:
    """Draw a report.

    Returns:
        The text of an HTML file.
    """
    rows = _rows(report)
    leaves = report.leaves[:MOST_LEAVES]
    changes = [change for leaf in leaves for change in leaf.changes if change]
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
        strip=_strip,
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
    found = [("new bytes", said, Markup(_bars(sizes, marks)))] if any(sizes.values()) else []
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
            found.append((name, f"{value:.4g} at step {step:,}", Markup(_line(values))))
    return found


def _bars(sizes: Mapping[str, Mapping[int, int]], marks: Iterable[int]) -> str:
    """New bytes of bases and deltas; of many steps the sums over some steps a bar."""
    numbers = [step for each in sizes.values() for step in each]
    low, high = min(numbers), max(numbers) + 1
    edges = np.linspace(low, high, min(high - low, 300) + 1) - 0.5

    def draw(axes: Any) -> None:
        below = np.zeros(len(edges) - 1)
        for own, colour in zip(sizes.values(), (_BASE, _DELTA), strict=True):
            added, _ = np.histogram([*own], edges, weights=[*own.values()])
            axes.bar(edges[:-1], added, 0.8 * np.diff(edges), below, align="edge", color=colour)
            below += added
        axes.yaxis.set_major_formatter(EngFormatter("B"))

    return _chart(draw, marks)


def _line(values: Mapping[int, float]) -> str:
    """A curve of finite values by step number, with marks where one is not finite."""
    shown = {step: value for step, value in values.items() if np.isfinite(value)}

    def draw(axes: Any) -> None:
        axes.plot([*shown], [*shown.values()], "." if len(shown) < 3 else "-", color=_BASE)
        if shown and 0 < 50 * min(shown.values()) < max(shown.values()):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())

    return _chart(draw, values.keys() - shown.keys())


def _strip(changes: Sequence[float | None], lowest: float, highest: float) -> str:
    """URI of an image of one pixel a step: the brighter, the larger the change on a log scale."""
    values = np.log([[each or np.nan for each in changes]])
    file, (low, high) = io.BytesIO(), np.log((lowest, highest))
    matplotlib.image.imsave(file, values, low, high, "viridis", "png", metadata={"Software": ""})
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _chart(draw: Callable[[Any], None], marks: Iterable[int]) -> str:
    steps = sorted(marks)
    with matplotlib.rc_context(_STYLE):
        figure = Drawing(figsize=(4.4, 1.9))
        axes = figure.add_axes((0.14, 0.12, 0.84, 0.82))
        draw(axes)
        axes.plot(steps, [1] * len(steps), "v", color=_BAD, transform=axes.get_xaxis_transform())
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    text = re.sub(r"(?s)^.*?(?=<svg )|<(metadata|style).*?</\1>", "", file.getvalue())
    return re.sub("|".join(_THEME), lambda found: f"var(--{_THEME[found[0]]})", text)
