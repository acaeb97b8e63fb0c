"""Documents: every relative link leads to a file and a heading, and every code block compiles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("document", WITH_CODE, ids=name)
def test_code_blocks_compile(document):
    for language, code in FENCED.findall(document.read_text()):
        if language == "python":
            compile(code, name(document), "exec")
