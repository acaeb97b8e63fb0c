"""Pictures of a report for the guide: ``python -m tests.cli.report_pictures docs/images``.

Trains a small run first, or takes the one that ``--root`` names. Needs Chromium.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from PIL import Image

import adacheck_jax
from adacheck_jax.tools.report.drawing import page_of
from adacheck_jax.tools.report.gather import gather
from tests.cli.browser import Page, look
from tests.cli.report_run import train

PICTURES = (
    ("report-desktop-light", 1280, 960, "light", "body"),
    ("report-desktop-dark", 1280, 960, "dark", "#heat-section"),
    ("report-phone-light", 390, 844, "light", "body"),
    ("report-phone-dark", 390, 844, "dark", "#heat-section"),
)
"""Name, width, height, scheme, and the part of the page at the top."""


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--root", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        root = args.root or Path(work) / "run"
        if args.root is None:
            train(root)
        page = Path(work) / "report.html"
        report = gather(root.absolute(), adacheck_jax.__version__)
        shown = dataclasses.replace(report, root="/checkpoints/small-lm")
        page.write_text(page_of(shown))

        async def visit(browser: Page) -> None:
            for name, width, height, scheme, top in PICTURES:
                await browser.open(f"{page.as_uri()}?{name}#step-26", width, height, scheme)
                await browser.value(f"document.querySelector('{top}').scrollIntoView()")
                await browser.picture(args.output / f"{name}.png")
                _reduce(args.output / f"{name}.png")

        look(visit)


def _reduce(path: Path) -> None:
    """Writes a picture with as many colours as it needs."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(192).save(path, optimize=True)


if __name__ == "__main__":
    main()
