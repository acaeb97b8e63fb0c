"""``adacheck report``: the command, its page as a text, and beside a running training."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from adacheck_jax.tools.report import drawing, encode
from adacheck_jax.tools.report.facts import Report, StepFacts, Verification
from tests.cli.report_pages import many_steps
from tests.data.make_golden import unpack

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "a</script><script>alert(1)</script><!--\"'&$name\u2028"


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
    """The elements of a page, and the JSON in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.data, self._in_data = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._in_data = ("id", "data") in attrs
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]

    def handle_endtag(self, tag):
        self._in_data = False

    def handle_data(self, data):
        if self._in_data:
            self.data += data


def data_of(path):
    return json.loads(Page(path.read_text()).data)


def small(name="run", **changes):
    steps = (StepFacts(0, "base", "0/default"), StepFacts(1, "delta", "1/default"))
    found = Report(
        root=f"/tmp/{name}",
        made_at="2026-01-01T00:00:00+00:00",
        version="1",
        disk_bytes=5,
        saved_count=2,
        recorded_count=2,
        newest=1,
        leaf_count=None,
        update="",
        steps=steps,
        savings=None,
        leaves=(),
        changes=None,
        restored_count=0,
        norms_note="",
        verification=Verification(2, 0, (), {}, ()),
    )
    return dataclasses.replace(found, **changes)


def test_a_page_is_written_and_written_again(run, tmp_path):
    output = tmp_path / "pages/report.html"
    output.parent.mkdir()
    for _ in range(2):
        done = report(run, "-o", output)
        assert done.exit_code == 0, done.output
        assert re.fullmatch(r"\S*report\.html: \d recorded steps, .* on disk\n", done.output)
    assert [each.name for each in output.parent.iterdir()] == ["report.html"]
    found = data_of(output)
    assert found["summary"]["recorded"] == len(found["steps"]["step"]) > 1
    assert found["steps"]["gradient"] is not None


def test_json_has_the_fields_of_the_report(run):
    done = report(run, "--json", "--norms", "0")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output).keys() == {f.name for f in dataclasses.fields(Report)}


def test_a_damaged_step_is_told_by_the_exit_code_and_the_page_is_there(run, tmp_path):
    (run / "2/default/adacheck/manifest.json").write_text("{}")
    done = report(run, "-o", tmp_path / "report.html")
    assert done.exit_code == 1
    assert "1 damaged step" in done.output
    assert data_of(tmp_path / "report.html")["verification"]["damaged_count"] == 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "expected a file to write, found a directory"),
        ("none/report.html", "expected a directory, found none"),
        ("run/report.html", "expected a place outside of the checkpoint root"),
        ("run/2/report.html", "expected a place outside of the checkpoint root"),
    ],
)
def test_a_place_where_no_page_can_be_is_refused(run, tmp_path, output, message):
    done = report(run, "-o", tmp_path / output)
    assert done.exit_code == 2
    assert message in done.output


def test_a_wrong_call_is_refused(tmp_path, run):
    assert "expected a checkpoint root" in report(tmp_path / "none").output
    (tmp_path / "empty").mkdir()
    done = report(tmp_path / "empty", "-o", tmp_path / "x.html")
    assert (done.exit_code, (tmp_path / "x.html").exists()) == (2, False)
    done = report(run, "--watch", "--json")
    assert (done.exit_code, "found both" in done.output) == (2, True)


def test_no_name_breaks_out_of_the_page():
    steps = (StepFacts(0, "damaged", "0/default", metrics={HOSTILE: 1.0}, error=HOSTILE),)
    text = drawing.page_of(small(HOSTILE, steps=steps, norms_note=HOSTILE))
    page, plain = Page(text), Page(drawing.page_of(small()))
    assert page.tags == plain.tags
    assert page.tags.count("script") == 2
    assert json.loads(page.data)["steps"]["error"]["0"] == HOSTILE
    assert [*json.loads(page.data)["steps"]["metrics"]] == [HOSTILE]
    assert "alert(1)</script>" not in text


def test_a_page_asks_for_nothing():
    text = drawing.page_of(small())
    assert {link.partition(":")[0].partition("#")[0] for link in Page(text).links} == {"", "data"}
    assert "default-src 'none'" in text
    assert json.loads(Page(text).data)["watch"] is None
    assert json.loads(Page(drawing.page_of(small(), 5)).data)["watch"] == 5


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (1.23456789, 1.23457),
        (3.0, 3),
        (1e300, 1e300),
    ],
)
def test_numbers_are_json(value, wanted):
    assert encode.number(value) == wanted


def test_ten_thousand_steps_are_a_small_page():
    text = drawing.page_of(many_steps())
    assert len(text.encode()) < 3_000_000
    assert len(json.loads(Page(text).data)["steps"]["step"]) == 10_000


def test_the_parts_of_the_page_are_in_the_package():
    parts = importlib.resources.files("adacheck_jax.tools.report").joinpath("page")
    names = {each.name for each in parts.iterdir()}
    assert names >= {"page.html", "page.css", "main.js"}
    assert {name for name in names if name.endswith(".js")} == {*drawing.SCRIPTS}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("below", ["surface", "bg"])
@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 4.5) for name in ("ink", "soft", "link", "good", "bad")),
        *((name, 3) for name in ("base", "delta", "stock", "deferred", "damaged", "edge", "focus")),
    ],
)
def test_colours_can_be_told_from_what_they_lie_on(scheme, below, name, least):
    """Contrasts as WCAG 2 level AA asks for them, of text and of marks."""
    style = (importlib.resources.files("adacheck_jax.tools.report") / "page/page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light if scheme == "light" else dark))
    one, two = sorted((luminance(found[each]) for each in (name, below)), reverse=True)
    assert (one + 0.05) / (two + 0.05) >= least


def luminance(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.slow
def test_watching_follows_a_run_and_ends_clearly(run, tmp_path):
    output, later = tmp_path / "report.html", tmp_path / "later"
    newest = max(int(each.name) for each in run.iterdir() if each.name.isdecimal())
    shutil.move(run / str(newest), later)
    command = [sys.executable, "-m", "adacheck_jax.cli.main", "report", str(run), "--watch"]
    process = subprocess.Popen(
        [*command, "-o", str(output), "--norms", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        assert "Ctrl-C ends it" in next(lines)
        assert "recorded steps" in next(lines)
        first = data_of(output)
        assert (first["watch"], first["summary"]["newest"] < newest) == (5, True)
        shutil.move(later, run / str(newest))
        assert "recorded steps" in next(lines)
        assert data_of(output)["summary"]["newest"] == newest
        process.send_signal(signal.SIGINT)
        assert next(lines) == f"stopped; {output} has the steps up to {newest}\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert data_of(output)["watch"] is None
