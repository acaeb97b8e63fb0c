"""One word, one meaning: classes and modules that are told apart by their names alone."""

import ast
import collections

from tests import house

SHARED_MODULE_NAMES = {
    "differences",
    "fingerprint",
    "handler",
    "identity",
    "options",
    "plan",
    "records",
    "rules",
    "transform",
}
"""Names of several modules, told apart by their rooms. The list may only shrink."""


def test_no_two_classes_have_one_name():
    places = collections.defaultdict(list)
    for module, path in house.MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_more_modules_share_a_name():
    counts = collections.Counter(module.rpartition(".")[2] for module in house.MODULES)
    assert {name for name, count in counts.items() if count > 1} == SHARED_MODULE_NAMES
