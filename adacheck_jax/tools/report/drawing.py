"""The page of a report: one HTML file that needs nothing else, and may run no other script."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
from string import Template

from adacheck_jax.tools.report import encode
from adacheck_jax.tools.report.facts import Report

SCRIPTS = ("base.js", "charts.js", "heat.js", "table.js", "main.js")
"""Parts of one script, in this order."""


def page_of(report: Report, watch_s: int | None = None) -> str:
    """Draw a report.

    Args:
        report: the report.
        watch_s: seconds after which the page loads itself again; None if it does not.

    Returns:
        The text of an HTML file.
    """
    style = _part("page.css")
    script = "\n".join(map(_part, SCRIPTS))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    name = report.root.rstrip("/").rpartition("/")[2] or report.root
    return Template(_part("page.html")).substitute(
        policy=policy,
        version=html.escape(report.version),
        title=html.escape(f"{name}: adacheck report"),
        name=html.escape(name),
        root=html.escape(report.root),
        style=style,
        script=script,
        data=encode.script_safe(encode.payload(report, watch_s)),
    )


def _part(name: str) -> str:
    parts = importlib.resources.files("adacheck_jax.tools.report") / "page"
    return (parts / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
