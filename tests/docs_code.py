"""Runs the code of pages of the documentation, block after block, each page in a new directory.

``python -m tests.docs_code docs/guide/resuming.md`` runs what a reader would: Python blocks in one
namespace, commands of ``sh`` blocks, and blocks with a ``title`` written into a file of that name.
The directory is made in the working directory, and has the page's name.
A page that does not import the library goes on from the quick start, as it is run before. Comments
tell what a reader need not see::

    <!-- runs: no, because REASON -->     the next block is not run
    <!-- runs: twice -->                  the next block is run twice, each time from nothing
    <!-- python ... -->, <!-- sh ... -->  a block that is run and not shown
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import processes
from tests.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUICK_START = "README.md"

LANGUAGES = ("python", "sh", "toml", "json", "text", "mermaid")
DIFFERENCE_IS_TOLD = ("diff", "bisect")
"""Commands whose exit code 1 is an answer."""

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$"
    r"|^<!-- (?P<hidden>python|sh)\n(?P<unseen>.*?)^-->$"
    r"|^ *<!-- runs: (?P<mark>no, because [^>]+|twice) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page.

    Attributes:
        line: number of its first line.
        language: the word after the fence.
        code: its text, without the page's indentation.
        title: name of the file that it stands for, or empty.
        mark: what a comment before it says of running it, or empty.
        is_hidden: True if readers do not see it.
    """

    line: int
    language: str
    code: str
    title: str
    mark: str
    is_hidden: bool

    @property
    def runs(self) -> bool:
        """True if the block is code that is run, or a file that others read."""
        is_code = self.language in ("python", "sh") or bool(self.title)
        return is_code and not self.mark.startswith("no")


def blocks_of(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order."""
    text, mark = page.read_text(), ""
    for found in _BLOCK.finditer(text):
        if found["mark"]:
            mark = found["mark"]
            continue
        is_hidden = found["hidden"] is not None
        title = re.search(r'title="([^"]+)"', found["info"] or "")
        yield Block(
            line=text.count("\n", 0, found.start()) + 2,
            language=found["hidden"] or found["language"],
            code=textwrap.dedent(found["unseen"] if is_hidden else found["code"]),
            title=title[1] if title else "",
            mark=mark,
            is_hidden=is_hidden,
        )
        mark = ""


def goes_on(blocks: Sequence[Block]) -> bool:
    """True if a page's code goes on from the quick start."""
    python = [each.code for each in blocks if each.language == "python" and each.runs]
    return (bool(python) and "import adacheck_jax" not in python[0]) or _needs_root(blocks)


def _needs_root(blocks: Sequence[Block]) -> bool:
    """True if a page has no Python, and commands that read the quick start's root."""
    languages = {each.language for each in blocks if each.runs}
    return languages == {"sh"} and any("checkpoints" in each.code for each in blocks)


def run_page(page: Path) -> int:
    """Run a page, and tell how many of its blocks were run."""
    blocks = [*blocks_of(page)]
    namespace: dict[str, Any] = {}
    Path("examples").symlink_to(ROOT / "examples")  # commands of the pages name scripts in it
    if goes_on(blocks):
        place, before = _quick_start()
        shutil.copytree(place, ".", dirs_exist_ok=True)
        namespace = {**before, "state": _copied(before["state"])}  # which a page may donate
    count = 0
    for block in blocks:
        if block.runs:
            again = 2 if block.mark == "twice" else 1
            for _ in range(again):
                namespace = _run(page, block, {} if again > 1 else namespace)
            count += not block.is_hidden
    return count


@functools.cache
def _quick_start() -> tuple[Path, dict[str, Any]]:
    """The files and the names of the quick start, which is run once for all pages of a process."""
    there, place = Path.cwd(), Path(tempfile.mkdtemp(prefix="quick-start-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    block = next(each for each in blocks_of(ROOT / QUICK_START) if each.language == "python")
    os.chdir(place)
    try:
        return place, _run(ROOT / QUICK_START, block, {})
    finally:
        os.chdir(there)


def _copied(state: Any) -> Any:
    import jax

    return jax.tree.map(jax.numpy.copy, state)


def _run(page: Path, block: Block, namespace: dict[str, Any]) -> dict[str, Any]:
    if block.title:
        Path(block.title).write_text(block.code)
    elif block.language == "python":
        code = "\n" * (block.line - 1) + block.code  # so that errors name the page's line
        exec(compile(code, str(page), "exec"), namespace)
    else:
        for command in block.code.replace("\\\n", " ").splitlines():
            _run_command(page, block, command)
    return namespace


def _run_command(page: Path, block: Block, command: str) -> None:
    words = shlex.split(command, comments=True)
    if not words:
        return
    is_plain, told = not {"|", ">", "&&", "&"} & {*words}, False
    if words[0] == "adacheck" and is_plain:
        code = _adacheck(words[1:])  # here: a process of its own would import all anew
        told = code == 1 and words[1] in DIFFERENCE_IS_TOLD
    elif words[0] == "python" and words[1].endswith(".py") and is_plain:
        child = processes.forked(Path(words[1]).resolve(), *words[2:], directory=Path.cwd())
        print(child.ended())
        code = child.returncode
    else:
        code = subprocess.run(["bash", "-uc", command], check=False).returncode
    if code and not told:
        raise SystemExit(f"{page}:{block.line}: {command}: exit code {code}")


def _adacheck(words: Sequence[str]) -> int:
    from adacheck_jax.cli.main import app

    try:
        app([*words])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main(pages: Sequence[Path]) -> None:
    """Run pages one after another: importing takes longer than most of them."""
    there = Path.cwd()
    for page in [each.absolute() for each in pages]:
        place = there / page.stem
        place.mkdir()
        os.chdir(place)
        print(f"{page.name}: {run_page(page)} blocks run", flush=True)


if __name__ == "__main__":
    main([*map(Path, sys.argv[1:])])
