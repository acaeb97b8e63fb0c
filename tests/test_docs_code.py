"""Documents: every block of code runs, in a process of its own for each page."""

import os
import subprocess
import sys

import pytest

from tests import docs_code
from tests.docs_code import ROOT

PAGES = {
    str(page.relative_to(ROOT)): [*docs_code.blocks_of(page)]
    for page in [*docs_code.PAGES, *(ROOT / f"{x}.md" for x in ("BUILD", "CONTRIBUTING"))]
}
RUN = [name for name, blocks in PAGES.items() if any(each.runs for each in blocks)]
MOST_NOT_RUN = 8
"""Blocks that may be left out; a new one has to be worth it."""


@pytest.mark.timeout(900)  # several processes, and examples
@pytest.mark.first(1, slow=99)  # README.md
@pytest.mark.parametrize("name", RUN)
def test_a_page_runs(name, tmp_path):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = [os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(programs),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs_code", ROOT / name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    shown = sum(each.runs and not each.is_hidden for each in PAGES[name])
    assert done.stdout.splitlines()[-1] == f"{shown} blocks run"


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    for block in PAGES[name]:
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
