"""The module table in BUILD.md is the law: no import that it does not list."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adacheck_jax"
OUTSIDE = {"jax": "jax", "jaxlib": "jax", "orbax": "orbax", "tensorstore": "tensorstore"}
PURE = {"errors", "boxes", "manifest", "policy"}
FACADE = "adacheck_jax"  # re-exports the public names: free to import, and needs no row


def table():
    """Module name to the names that it may import, and to the outside packages."""
    build = ROOT / "BUILD.md"
    text = build.read_text() if build.is_file() else ""
    between = re.search(r"<!-- modules -->\n(.*?)<!-- /modules -->", text, re.DOTALL)
    if between is None:
        pytest.fail("BUILD.md has no module table between <!-- modules --> and <!-- /modules -->")
    rows = [line.strip().strip("|").split("|") for line in between[1].splitlines() if "|" in line]
    names = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]
    names = [row for row in names if row[0]]  # not the head of the table
    assert all(len(row) == 4 for row in names), "expected: module, purpose, modules, packages"
    found = {module: (set(inside), set(outside)) for (module,), _, inside, outside in names}
    assert len(found) == len(names), "expected one row for each module"
    return found


def modules():
    """Module name, relative to the package, to its file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts) or FACADE] = path
    return found


def imports_of(name):
    """The package's modules, and the outside packages, that one module imports anywhere."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        for target in _targets(node, MODULES[name]):
            first, _, rest = target.partition(".")
            if first == PACKAGE.name:
                inside.add(_module_of(rest))
            elif first in OUTSIDE:
                outside.add(OUTSIDE[first])
    return inside - {name}, outside


def _targets(node, path):
    """Dotted names that one import statement takes, made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).parent.parts
        base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _module_of(dotted):
    """The longest part of a dotted name that is a module; the facade if none is."""
    parts = dotted.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or FACADE


MODULES = modules()
NAMES = sorted(MODULES.keys() - {FACADE})


def test_the_table_lists_every_module_and_no_other():
    listed = table().keys() - {FACADE}
    written = {n for n in NAMES if MODULES[n].name != "__init__.py" or any(imports_of(n))}
    assert not written - listed, f"BUILD.md does not list {sorted(written - listed)}"
    assert not listed - set(NAMES), f"BUILD.md lists {sorted(listed - set(NAMES))}: no modules"


def test_the_table_allows_no_cycle_and_names_only_modules():
    allowed = {name: inside for name, (inside, _) in table().items()}
    unknown = {name: sorted(inside - MODULES.keys()) for name, inside in allowed.items()}
    assert {name: each for name, each in unknown.items() if each} == {}
    facade = {FACADE: imports_of(FACADE)[0]}
    graphlib.TopologicalSorter(allowed | facade).prepare()  # raises CycleError


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_what_its_row_allows(name):
    inside, outside = imports_of(name)
    may_inside, may_outside = table().get(name, (set(), set()))
    forbidden = sorted((inside - may_inside) | (outside - may_outside))
    assert not forbidden, f"{name} imports {forbidden}, which its row in BUILD.md does not allow"


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_modules_reach_no_outside_package(name):
    waiting, seen = [name], set()
    while waiting:
        each = waiting.pop()
        seen.add(each)
        inside, outside = imports_of(each)
        assert outside == set(), f"{name} reaches {each}, which imports {sorted(outside)}"
        waiting.extend(inside - seen)


def test_the_table_gives_tensorstore_to_what_reads_and_writes_arrays():
    assert {name for name, (_, outside) in table().items() if "tensorstore" in outside} == {
        "arrays",
        "reads",
        "volumes",
    }
