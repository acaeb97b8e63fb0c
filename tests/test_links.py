"""Documents: every relative link leads to a file and a heading; docs/README.md lists every page."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def name(path):
    return str(path.relative_to(ROOT))


def anchors(document):
    """Anchors that headings get: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(document):
    text = FENCED.sub("", document.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(file), f"{target}: there is no such heading"


def test_every_page_is_listed():
    contents = ROOT / "docs" / "README.md"
    links = re.findall(r"^(?:-|\d+\.) \[[^\]]+\]\(([^)]+)\)", contents.read_text(), re.MULTILINE)
    listed = {Path(os.path.normpath(contents.parent / path)) for path in links}
    pages = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")} - {contents}
    missing = sorted(name(page) for page in pages - listed)
    assert not missing, f"add a line to docs/README.md for each of {missing}"
