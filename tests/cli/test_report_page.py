"""The page of a report in a real browser: nothing loaded, nothing wrong, and keys that work."""

from __future__ import annotations

import asyncio

import pytest

from adacheck_jax.tools.report import drawing
from adacheck_jax.tools.report.facts import StepFacts
from tests.cli.report_pages import many_steps
from tests.cli.test_report_command import HOSTILE, small

browser = pytest.importorskip("tests.cli.browser", reason="aiohttp is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed"),
]
SCREENS = [(1280, 900), (390, 844)]
STEP = "document.getElementById('facts-title').textContent"


def written(tmp_path, report, watch_s=None):
    path = tmp_path / "report.html"
    path.write_text(drawing.page_of(report, watch_s))
    return path


async def check_quiet(page, path):
    assert page.console == []
    assert {url.partition("#")[0] for url in page.requests} == {path.as_uri()}


@pytest.mark.parametrize(
    "report",
    [
        many_steps(),
        many_steps(7, 3),
        many_steps(1, 1),
        small(),
        small(steps=(StepFacts(None, "damaged", "x", error="no manifest"),), newest=None),
        small(HOSTILE, steps=(StepFacts(4, "damaged", HOSTILE, metrics={HOSTILE: 1.0}),)),
    ],
    ids=["many", "few", "one", "nothing recorded", "no number", "hostile"],
)
def test_a_page_loads_nothing_and_fits_its_screen(tmp_path, report):
    path = written(tmp_path, report)

    async def visit(page):
        for width, height in SCREENS:
            for scheme in ("light", "dark"):
                await page.open(path, width, height, scheme)
                assert await page.value("document.documentElement.dataset.drawnMs") is not None
                assert await page.value("document.documentElement.scrollWidth") == width
        await check_quiet(page, path)

    browser.look(visit)


def test_keys_move_the_cursor_and_zoom(tmp_path):
    path = written(tmp_path, many_steps(200, 9))

    async def visit(page):
        await page.open(path, *SCREENS[0])
        assert await page.value(STEP) == "Step 199"
        await page.value("document.getElementById('timeline').focus()")
        for key, wanted in (
            ("ArrowLeft", "Step 198"),
            ("PageDown", "Step 188"),
            ("Home", "Step 0"),
            ("ArrowLeft", "Step 0"),
            ("ArrowRight", "Step 1"),
            ("PageUp", "Step 11"),
        ):
            await page.press(key)
            assert await page.value(STEP) == wanted
        slider = "document.getElementById('timeline')"
        assert await page.value(f"{slider}.getAttribute('aria-valuenow')") == "12"
        said = await page.value(f"{slider}.getAttribute('aria-valuetext')")
        assert said.startswith("Step 11: kind deferred step, saved with step 13")
        assert await page.value("location.hash") == "#step-11"
        await page.press("+")
        assert await page.value("VIEW.high - VIEW.low") < 120
        await page.press("End")  # the range follows the cursor
        assert await page.value("VIEW.low < 199 && 199 < VIEW.high")
        await page.press("0")
        assert await page.value("VIEW.high - VIEW.low") > 199
        await page.value("document.querySelector('.heat .plane').focus()")
        before = await page.value("document.getElementById('heat-status').textContent")
        await page.press("ArrowDown")
        after = await page.value("document.getElementById('heat-status').textContent")
        assert before.partition(":")[0] != after.partition(":")[0]
        await check_quiet(page, path)

    browser.look(visit)


def test_the_table_has_pages_kinds_and_anchors(tmp_path):
    path = written(tmp_path, many_steps(6000, 3))
    rows = "[...document.querySelectorAll('#table tbody tr th')].map((each) => each.textContent)"

    async def visit(page):
        await page.open(path, *SCREENS[0])
        assert await page.value(rows) == [f"{n:,}" for n in range(5999, 5949, -1)]
        await page.value("document.querySelector('[aria-label=\"Next page\"]').click()")
        assert (await page.value(rows))[0] == "5,949"
        select = "const each = document.getElementById('kind'); each.value = 'damaged';"
        await page.value(f"{select} each.dispatchEvent(new Event('change'))")
        assert await page.value(rows) == ["5,003"]
        await page.value("document.querySelector('#table tbody a').click()")
        await asyncio.sleep(0.2)  # until the address has changed
        assert await page.value(STEP) == "Step 5,003"
        assert "expected the bits" in await page.value(
            "document.getElementById('facts').textContent"
        )
        await check_quiet(page, path)

    browser.look(visit)


def test_a_watched_page_loads_itself_again_and_keeps_its_step(tmp_path):
    path = written(tmp_path, many_steps(20, 3), watch_s=1)

    async def visit(page):
        await page.open(f"{path.as_uri()}#step-7", *SCREENS[0])
        assert await page.value(STEP) == "Step 7"
        await page.value("document.getElementById('timeline').focus()")
        await page.press("ArrowLeft")
        written(tmp_path, many_steps(30, 3), watch_s=1)
        await page.loaded()
        assert await page.value("COUNT") == 30
        assert await page.value(STEP) == "Step 6"
        await page.press("End")  # the focus is where it was; the newest step is followed
        assert await page.value(STEP) == "Step 29"
        written(tmp_path, many_steps(40, 3), watch_s=1)
        await page.loaded()
        assert await page.value(STEP) == "Step 39"
        await check_quiet(page, path)

    browser.look(visit)
