"""Charts of a report: small SVG pictures in the colours of the page, which run no script."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

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


def bars(sizes: Mapping[str, Mapping[int, int]], marks: Iterable[int]) -> str:
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


def line(values: Mapping[int, float]) -> str:
    """A curve of finite values by step number, with marks where one is not finite."""
    shown = {step: value for step, value in values.items() if np.isfinite(value)}

    def draw(axes: Any) -> None:
        axes.plot([*shown], [*shown.values()], "." if len(shown) < 3 else "-", color=_BASE)
        if shown and 0 < 50 * min(shown.values()) < max(shown.values()):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())

    return _chart(draw, values.keys() - shown.keys())


def strip(changes: Sequence[float | None], lowest: float, highest: float) -> str:
    """URI of an image of one pixel a step: the brighter, the larger the change on a log scale."""
    values = np.log([[each or np.nan for each in changes]])
    file, (low, high) = io.BytesIO(), np.log((lowest, highest))
    matplotlib.image.imsave(file, values, low, high, "viridis", "png", metadata={"Software": ""})
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _chart(draw: Callable[[Any], None], marks: Iterable[int]) -> str:
    steps = sorted(marks)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 1.9))
        axes = figure.add_axes((0.14, 0.12, 0.84, 0.82))
        draw(axes)
        axes.plot(steps, [1] * len(steps), "v", color=_BAD, transform=axes.get_xaxis_transform())
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    text = re.sub(r"(?s)^.*?(?=<svg )|<(metadata|style).*?</\1>", "", file.getvalue())
    return re.sub("|".join(_THEME), lambda found: f"var(--{_THEME[found[0]]})", text)
