"""Hooks of mkdocs: what makes one site of the pages that are also read on a code host.

* Pages beside ``docs`` (README.md, CHANGELOG.md and others) and the example scripts become pages.
* Blocks in lists are indented as mkdocs wants it.
* Relative links, which lead through the repository, are led to the pages.
* The navigation is the list in ``docs/README.md``.
* The picture of the house in BUILD.md, which a code host draws, is drawn here.
* ``<!-- api: NAME ... -->`` becomes the reference of these public names; ``NAME()`` is one whose
  methods are not for users.
* ``<!-- commands -->`` becomes the help of every command.
"""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.testing import CliRunner

from adacheck_jax.cli.main import app

ROOT = Path(__file__).parents[2]
CONTENTS = "docs/README.md"
BESIDE_DOCS = {
    "README.md": "index.md",
    CONTENTS: "contents.md",
    "BUILD.md": "design/build.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "SECURITY.md": "reference/security.md",
}
"""Places in the site of pages that lie elsewhere in the repository."""

HOUSE = "house.svg"
"""The picture of the house, beside the page that shows it."""

PUBLIC = {
    "": "__init__.py",
    "errors.": "errors.py",
    "v1.": "v1.py",
    **{f"{room}.": f"{room}/__init__.py" for room in ("layout", "publish", "tools", "update")},
}
"""Files that give public names, by what stands before these names."""
WIDTH = 90
"""Columns of the help of a command."""

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def place_of(path: str) -> str:
    """The place of a file of the repository in the site."""
    if path in BESIDE_DOCS:
        return BESIDE_DOCS[path]
    if path.startswith("examples/"):
        return posixpath.splitext(path)[0] + ".md"
    return path.removeprefix("docs/")


def relinked(text: str, source: str) -> str:
    """A page's text with links that lead through the site.

    Args:
        text: Markdown, with links that lead through the repository.
        source: path of the page in the repository.
    """
    here = posixpath.dirname(place_of(source))

    def target(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        if "://" in match[2] or not path:
            return match[0]
        place = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        return f"{match[1]}{posixpath.relpath(place, here or '.')}{hash_}{anchor}{match[3]}"

    pieces, end = [], 0
    for fence in FENCED.finditer(text):
        pieces += [LINK.sub(target, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(target, text[end:])])


def indented(text: str) -> str:
    """A page's text with four spaces before what belongs to an item of a list."""
    lines, in_fence = [], False
    for line in text.split("\n"):
        in_fence ^= line.startswith("```")
        lines.append(line if in_fence else re.sub(r"^ {2,3}?(?=\S| {2})", "    ", line))
    return "\n".join(lines)


def examples() -> Iterator[tuple[str, str]]:
    """Paths in the repository and pages of the example scripts."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        told = (ast.get_docstring(ast.parse(code)) or path.stem).partition("\n")[0]
        text = f"# {path.name}\n\n{told}\n\n```python\n{code}```\n"
        yield f"examples/{path.name}", text


def identifiers() -> dict[str, str]:
    """Full names of the public names, by which the reference is made of the source alone."""
    found: dict[str, str] = {}
    for prefix, file in PUBLIC.items():
        for node in ast.walk(ast.parse((ROOT / "adacheck_jax" / file).read_text())):
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = f"adacheck_jax.{prefix}{node.name}"
            elif isinstance(node, ast.ImportFrom) and "adacheck_jax." in (node.module or ""):
                found |= {prefix + each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def commands() -> str:
    """The help of all commands, in the order in which ``adacheck --help`` lists them."""
    sections = []
    for name in typer.main.get_command(app).commands:
        shown = CliRunner().invoke(
            app,
            [name, "--help"],
            prog_name="adacheck",
            terminal_width=WIDTH,
            max_content_width=WIDTH,
        )
        sections.append(f"### adacheck {name}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(sections)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes the navigation: a tab for each heading of the contents, a section for each list."""
    nav: list[Any] = [{"Home": [{"Quick start": BESIDE_DOCS["README.md"]}, BESIDE_DOCS[CONTENTS]]}]
    for part in re.split(r"^## ", (ROOT / CONTENTS).read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        first, *groups = re.split(r"^### ", body, flags=re.MULTILINE)
        pages = _listed(first)
        for group in groups:
            name, _, listed = group.partition("\n")
            pages.append({name.strip(): _listed(listed)})
        nav.append({title.strip(): pages})
    config.nav = nav
    return config


def _listed(text: str) -> list[Any]:
    links = re.findall(r"^(?:[-*]|\d+\.) \[([^\]]+)\]\(([^)#]+)\)", text, re.MULTILINE)
    return [
        {title: place_of(posixpath.normpath(posixpath.join("docs", path)))} for title, path in links
    ]


def _drawn(graph: str) -> str:
    """The picture of a graph in Mermaid's words, which a site without network cannot draw."""
    path = ROOT / "docs" / "images" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    return draw.house(re.findall(r"(\w+) --> (\w+)", graph)).svg()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in ``docs``."""
    for source, place in BESIDE_DOCS.items():
        text = relinked((ROOT / source).read_text(), source)
        if graph := re.search(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            text = text.replace(graph[0], f"![Rooms of the code]({HOUSE})")
            uri = posixpath.join(posixpath.dirname(place), HOUSE)
            files.append(File.generated(config, uri, content=_drawn(graph[1])))
        files.append(File.generated(config, place, content=text))
    for source, text in examples():
        files.append(File.generated(config, place_of(source), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to pages, and puts names and commands into their places."""
    if page.file.generated_by is None:
        markdown = relinked(markdown, f"docs/{page.file.src_uri}")
    markdown = indented(markdown)
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    names = identifiers()

    def reference(name: str) -> str:
        alone = "\n    options:\n      members: false" if name.endswith("()") else ""
        return f"::: {names[name.removesuffix('()')]}{alone}\n"

    return re.sub(
        r"^<!-- api: (.*?) -->$",
        lambda found: "\n".join(map(reference, found[1].split())),
        markdown,
        flags=re.MULTILINE | re.DOTALL,
    )
