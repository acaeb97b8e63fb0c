"""Documents: every relative link leads to a file and a heading; docs/README.md lists every page."""

import ast
import contextlib
import functools
import importlib
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def name(path):
    return str(path.relative_to(ROOT))


@functools.cache
def anchors(document):
    """Anchors that headings get: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_relative_links_lead_somewhere():
    wrong = []
    for document in DOCUMENTS:
        text = FENCED.sub("", document.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append(f"{name(document)}: {target}")
    assert not wrong, f"there is no such file or heading: {wrong}"


def test_every_page_is_listed():
    contents = ROOT / "docs" / "README.md"
    links = re.findall(r"^(?:-|\d+\.) \[[^\]]+\]\(([^)]+)\)", contents.read_text(), re.MULTILINE)
    listed = {Path(os.path.normpath(contents.parent / path)) for path in links}
    pages = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")} - {contents}
    missing = sorted(name(page) for page in pages - listed)
    assert not missing, f"add a line to docs/README.md for each of {missing}"


PACKAGE = ROOT / "adacheck_jax"
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
REFERENCE = re.compile(r":(?:mod|func|class|meth|attr|data|exc):`~?([\w.]+)`")
IN_BACKTICKS = re.compile(r"`([\w.]+(?:[/.][\w.]+)+)`")


def names_in(module):
    """Names that a module defines or imports, and those of the members of its classes."""
    found = {"adacheck_jax", module.stem}
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(ast.unparse(each).removeprefix("self.") for each in targets)
    return found


def classes_in(module):
    tree = ast.parse(module.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def is_there(dotted):
    """True if a dotted path from the package on leads to a module, or to a name in one."""
    value, *attributes = importlib.import_module("adacheck_jax"), *dotted.split(".")[1:]
    where = "adacheck_jax"
    for name in attributes:
        where = f"{where}.{name}"
        with contextlib.suppress(ImportError):
            importlib.import_module(where)
        if not hasattr(value, name) and name not in getattr(value, "__annotations__", {}):
            return False
        value = getattr(value, name, None)
    return True


def test_what_docstrings_refer_to_is_there():
    gone = []
    modules = sorted(PACKAGE.rglob("*.py"))
    every = set().union(*map(names_in, modules))
    classes = {each for module in modules for each in classes_in(module)}
    for module in modules:
        own = names_in(module)
        for target in REFERENCE.findall(module.read_text()):
            first, *rest = target.split(".")
            if first == "adacheck_jax":
                known = is_there(target)
            else:  # a member may be one of a base class
                known = first in own | (classes if rest else every) and {*rest} <= every
            if not known:
                gone.append(f"{name(module)}: {target}")
    assert not gone, gone


def test_files_and_modules_that_documents_name_are_there():
    gone = []
    folders = (ROOT, PACKAGE, ROOT / "examples")
    for document in DOCUMENTS:
        for target in IN_BACKTICKS.findall(FENCED.sub("", document.read_text())):
            first, *rest = re.split(r"[./]", target)
            if first not in {*ROOMS, "tests", "benchmarks"} or not rest:
                continue
            if target.endswith(".py") or "/" in target:
                known = any((folder / target).exists() for folder in folders)
            else:
                at = folders[first in ROOMS] / first
                while rest and (at / rest[0]).is_dir():
                    at /= rest.pop(0)
                known = (
                    not rest
                    or (at / f"{rest[0]}.py").exists()
                    or rest[0] in names_in(at / "__init__.py")
                )
            if not known:
                gone.append(f"{name(document)}: {target}")
    assert not gone, gone


def test_every_promise_names_tests_that_are_there():
    page = (ROOT / "docs" / "reference" / "promises.md").read_text()
    promises = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    rows = re.findall(r"^\| (\d+) \| (`tests/.*`) \|$", page, re.MULTILINE)
    assert [number for number, _ in rows] == promises
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        assert test in {x.name for x in nodes if isinstance(x, ast.FunctionDef)}, f"{path}: {test}"
