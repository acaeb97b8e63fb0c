"""Pictures of a report for the guide: ``python -m tests.cli.report_pictures docs/images ROOT``.

ROOT is that of a small run, such as one of ``examples/train_lm.py``. Needs Chromium.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from PIL import Image

from adacheck_jax.tools.report.gather import gather
from adacheck_jax.tools.report.page import page_of
from tests.cli.browser import Page, look

PICTURES = (
    ("report-desktop-light", 1400, 960, "light", 0),
    ("report-desktop-dark", 1400, 960, "dark", 2),
    ("report-phone-light", 400, 844, "light", 0),
    ("report-phone-dark", 400, 844, "dark", 1),
)
"""Name, width, height, scheme, and the section that is scrolled to."""


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("root", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        page = Path(work) / "report.html"
        report = gather(args.root.absolute())
        summary = dataclasses.replace(report.summary, root="/checkpoints/small-lm")
        shown = dataclasses.replace(report, summary=summary)
        page.write_text(page_of(shown))

        async def visit(browser: Page) -> None:
            for name, width, height, scheme, section in PICTURES:
                await browser.open(f"{page.as_uri()}?{name}", width, height, scheme)
                if section:
                    top = f"document.querySelectorAll('section')[{section}]"
                    await browser.value(f"{top}.scrollIntoView()")
                await browser.picture(args.output / f"{name}.png")
                _reduce(args.output / f"{name}.png")

        look(visit)


def _reduce(path: Path) -> None:
    """Writes a picture with as many colours as it needs."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(192).save(path, optimize=True)


if __name__ == "__main__":
    main()
