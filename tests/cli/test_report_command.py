"""``adacheck report``: the command and its page as a text."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from adacheck_jax.tools.listing import StepSummary
from adacheck_jax.tools.report.gather import LeafReport, Report
from adacheck_jax.tools.report.page import page_of
from tests.cli.report_pages import many_steps, small
from tests.data.make_golden import unpack

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "a</script><script>alert(1)</script><!--\"'><img src=x onerror=alert(1)>{{ 7*7 }}$name$"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps")
    unpack(ROOT / "tests/data/v7", path)
    return path / "replayed"


@pytest.fixture
def run(golden, tmp_path):
    return Path(shutil.copytree(golden, tmp_path / "run"))


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """The elements of a page, what they may load, and the rows of its tables."""

    LINKS: ClassVar = ("src", "href", "action", "xlink:href", "srcset", "poster", "data")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.handlers, self.rows = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in self.LINKS]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def page_at(path):
    return Page(path.read_text())


def text_of(page):
    """All that a page says, in one line."""
    return " ".join(re.sub(r"(?s)<style>.*?</style>|<[^>]+>", " ", page).split())


def test_a_page_is_written_and_written_again(run, tmp_path):
    output = tmp_path / "pages/report.html"
    output.parent.mkdir()
    for _ in range(2):
        done = report(run, "-o", output)
        assert done.exit_code == 0, done.output
        assert re.fullmatch(r"\S*report\.html: \d steps, .* on disk\n", done.output)
    assert [each.name for each in output.parent.iterdir()] == ["report.html"]
    said = text_of(output.read_text())
    for each in ("gradient norm", "update norm", "new bytes", "replayed", "seconds between saves"):
        assert each in said
    assert "Checked now structure no array was read" in said
    assert "Not looked at: the array bytes" in said
    assert "no damage" not in said.lower()
    newest = next(row for row in page_at(output).rows if row[0].isdecimal())
    assert newest[1] in ("base", "delta")
    assert float(newest[7]) > 0  # its gradient norm


def test_json_has_the_fields_of_the_report(run):
    done = report(run, "--json", "--norms", "0")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output).keys() == {f.name for f in dataclasses.fields(Report)}


@pytest.mark.slow
def test_a_damaged_step_is_told_by_the_exit_code_and_the_page_is_there(run, tmp_path):
    (run / "2/default/adacheck/manifest.json").write_text("{}")
    output = tmp_path / "report.html"
    done = report(run, "-o", output)
    assert done.exit_code == 1
    assert "1 damaged" in done.output
    row = next(row for row in page_at(output).rows if row[0] == "2")
    assert row[1] == "damaged"
    assert "manifest" in row[-1]
    assert "1 damaged; no array was read" in text_of(output.read_text())


@pytest.mark.parametrize(
    ("root", "output", "message"),
    [
        ("run", ".", "expected a file in a directory"),
        ("run", "run/report.html", "expected a place outside of the checkpoint root"),
        ("none", "x.html", "expected a checkpoint root"),
    ],
)
def test_a_root_or_a_place_where_no_page_can_be_is_refused(run, tmp_path, root, output, message):
    done = report(tmp_path / root, "-o", tmp_path / output)
    assert done.exit_code == 2
    assert message in done.output
    assert not [*tmp_path.rglob("*.html")]


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_an_error_that_names_the_extra(run, tmp_path, monkeypatch, package):
    for name in [*sys.modules]:
        if name.startswith((f"{package}.", "adacheck_jax.tools.report.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delattr("adacheck_jax.tools.report.page", raising=False)
    done = report(run, "-o", tmp_path / "report.html")
    assert done.exit_code == 2
    assert "pip install 'adacheck-jax[report]'" in done.output
    assert report(run, "--json", "--norms", "0").exit_code == 0


def test_no_name_breaks_out_of_the_page():
    def page(name):
        row = StepSummary(0, name, "base", metrics={name: 1.0}, error=name)
        facts = {"leaves": (LeafReport(name, 8, 8, 8),), "redundancy": {name: 10}, "kept": (0,)}
        return page_of(small((row,), f"/{name}", norms_note=name, **facts))

    hostile, plain = Page(page(HOSTILE)), Page(page("w"))
    assert hostile.tags == plain.tags
    assert "script" not in hostile.tags
    assert hostile.handlers == []
    assert hostile.links == plain.links
    assert any(row[:1] == [HOSTILE] for row in hostile.rows)


def test_a_page_loads_nothing_and_may_run_no_script():
    text = page_of(many_steps(60, 9))
    page = Page(text)
    assert {link[: len("data:")] for link in page.links if not link.startswith("#")} == {"data:"}
    assert "default-src 'none'" in text
    assert not re.search(r"script-src|url\((?!#)|@import", text)
    assert "script" not in page.tags


def test_ten_thousand_steps_are_a_small_page():
    text = page_of(many_steps())
    assert len(text.encode()) < 3_000_000
    numbers = [int(row[0]) for row in Page(text).rows if row[0].isdecimal()]
    assert numbers == [*range(9999, 9499, -1)]
    assert "5003/default: expected the bits that were saved" in text_of(text)


def test_deferred_and_deleted_steps_have_rows_and_values_that_are_not_finite_marks():
    page = Page(page_of(small(kept=(0, 1, 3), held={2: 2, 3: 4})))
    rows = {row[0]: row[1:3] for row in page.rows}
    assert rows["2"] == ["deleted", "in a later step"]
    assert rows["3"] == ["deferred", "with 4"]
    rows = tuple(
        StepSummary(n, f"{n}/x", "delta", metrics={"loss": value})
        for n, value in enumerate([1.0, float("nan"), float("inf"), 2.0])
    )
    marked, plain = page_of(small(rows)), page_of(small((rows[0], rows[3])))
    assert "var(--bad); stroke" in marked
    assert "var(--bad); stroke" not in plain


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_colours_can_be_told_from_what_they_lie_on():
    """Contrasts as WCAG 2 level AA asks for them, of text and of marks, in both schemes."""
    for css in page_of(small()).split("@media (prefers-color-scheme: dark)", 1):
        found = {x: luminance(colour) for x, colour in re.findall(r"--([\w-]+): (#[0-9a-f]+)", css)}
        for name, least in {"ink": 4.5, "soft": 4.5, "bad": 4.5, "base": 3, "delta": 3}.items():
            for below in ("box", "page"):
                dark, light = sorted((found[name], found[below]))
                assert (light + 0.05) / (dark + 0.05) >= least, (name, below)
