"""Documents: every block of code runs, in one process for several pages."""

import os
import sys
from pathlib import Path

import pytest

from tests import docs_code, processes
from tests.docs_code import ROOT

PAGES = {
    str(page.relative_to(ROOT)): [*docs_code.blocks_of(page)]
    for page in [*docs_code.PAGES, *(ROOT / f"{x}.md" for x in ("BUILD", "CONTRIBUTING"))]
}
RUN = [name for name, blocks in PAGES.items() if any(each.runs for each in blocks)]
FIRST = "README.md"
LONG = "docs/guide/clusters.md"
"""A page that starts processes."""
OTHERS = [name for name in RUN if name not in (FIRST, LONG)]
MOST_NOT_RUN = 8
"""Blocks that may be left out; a new one has to be worth it."""


@pytest.mark.timeout(900)  # several processes, and examples
@pytest.mark.first(0, slow=4)
@pytest.mark.parametrize(
    "names",
    [[FIRST], [LONG], OTHERS[::2], OTHERS[1::2]],
    ids=["first", "long", "one half", "other half"],
)
def test_pages_run(names, tmp_path):
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    pages = [ROOT / name for name in names]
    run = processes.forked("tests.docs_code", *pages, environment=environment, directory=tmp_path)
    (said,) = processes.outputs([run])
    told = [line for line in said.splitlines() if line.endswith(" blocks run")]
    for name, line in zip(names, told, strict=True):
        shown = sum(each.runs and not each.is_hidden for each in PAGES[name])
        assert line == f"{Path(name).name}: {shown} blocks run"


def test_every_block_says_what_it_is():
    for name, blocks in PAGES.items():
        for block in blocks:
            where = f"{name}:{block.line}"
            assert block.language in docs_code.LANGUAGES, f"{where}: a fence without a language"
            if block.language == "python":
                compile(block.code, where, "exec")


def test_few_blocks_are_left_out():
    left = [
        f"{name}:{block.line}: {block.mark}"
        for name, blocks in PAGES.items()
        for block in blocks
        if block.mark.startswith("no")
    ]
    assert len(left) <= MOST_NOT_RUN, "\n".join(left)
