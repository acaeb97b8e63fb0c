"""The page of a report in a real browser: nothing loaded, nothing run, and it fits its screen."""

from __future__ import annotations

import pytest

from adacheck_jax.tools.listing import StepSummary
from adacheck_jax.tools.report.page import page_of
from tests.cli.report_pages import many_steps, small
from tests.cli.test_report_command import HOSTILE

browser = pytest.importorskip("tests.cli.browser", reason="aiohttp is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed"),
]
SCREENS = [(1400, 900), (400, 844)]
INK = "getComputedStyle(document.body).color"
TICK = "getComputedStyle(document.querySelector('svg text')).fill"


def written(tmp_path, report):
    path = tmp_path / "report.html"
    path.write_text(page_of(report))
    return path


async def check_quiet(page, path):
    assert page.console == []
    assert {url for url in page.requests if not url.startswith("data:")} == {path.as_uri()}


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (many_steps, ()),
        (many_steps, (7, 3)),
        (many_steps, (1, 1)),
        (small, ((StepSummary(None, "x", None, error="no manifest"),),)),
        (small, ((StepSummary(4, HOSTILE, "base", metrics={HOSTILE: 1.0}, error=HOSTILE),),)),
    ],
    ids=["many", "few", "one", "no number", "hostile"],
)
def test_a_page_loads_nothing_runs_nothing_and_fits_its_screen(tmp_path, made, given):
    path = written(tmp_path, made(*given))

    async def visit(page):
        for width, height in SCREENS:
            for scheme in ("light", "dark"):
                await page.open(path, width, height, scheme)
                assert await page.value("document.documentElement.scrollWidth") == width
                assert await page.value("document.scripts.length") == 0
        await check_quiet(page, path)

    browser.look(visit)


def test_text_of_charts_follows_the_scheme(tmp_path):
    path = written(tmp_path, many_steps(20, 3))

    async def visit(page):
        found = []
        for scheme in ("light", "dark"):
            await page.open(path, *SCREENS[0], scheme)
            found.append((await page.value(INK), await page.value(TICK)))
        assert found[0][0] != found[1][0]
        assert found[0][1] != found[1][1]

    browser.look(visit)
