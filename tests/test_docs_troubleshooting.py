"""The page on troubleshooting has every warning, and every error that users meet, by its words."""

import ast
import re

from adacheck_jax import errors
from tests.house import PACKAGE
from tests.test_links import ROOT

PAGE = " ".join(
    (ROOT / "docs" / "guide" / "troubleshooting.md").read_text().replace("`", "").split()
)
ROOMS = ("errors", "format", "device", "store", "update", "memory", "save", "restore", "adapter")
"""Rooms whose messages stand there one by one; those of commands and layouts stand together."""

ERRORS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.AdaCheckError)
}
LOUD = {"_log.warning", "_log.error", "_log.exception", "warnings.warn", "self.warn_once"}
NEVER_TOLD = (
    "given up, this step is being saved again",  # those who wait for it see another error
    "given up, since its save has failed",
    "was given up before it was written",
    "the copy of the state went on to another step",  # a base in the background, made later
    "the base is not wanted any more",
)


def text_of(node):
    """The words of a message, with a mark for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) for each in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "\0"


def words_of(text):
    """The words by which a message is found: the first few that are always the same."""
    parts = [re.sub(r"^\W+", "", part) for part in re.split(r"\0|%[sd]", text)]
    fixed = [part.split() for part in parts if len(part.split()) >= 3]
    return re.sub(r"[\s\W]+$", "", " ".join(fixed[0][:7])) if fixed else ""


def messages():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func)
                is_error = called in ERRORS and re.split(r"[/.]", name)[0] in ROOMS
                if is_error or called in LOUD:
                    words = words_of(text_of(node.args[0]))
                    if words and not any(each.startswith(words) for each in NEVER_TOLD):
                        yield f"{name}:{node.lineno}", words


def has_entry(words):
    """True if the page has a message; an entry may end earlier, if it can be told from others."""
    found = words.split()
    return any(" ".join(found[:n]) in PAGE for n in range(len(found), 2, -1))


def test_messages_have_their_entries():
    found = [*messages()]
    assert len(found) > 100
    assert not [(where, words) for where, words in found if not has_entry(words)]


def test_kinds_of_errors_have_their_entries():
    table = (ROOT / "docs" / "guide" / "errors.md").read_text()
    assert not [name for name in ERRORS - {"AdaCheckError"} if name not in PAGE]
    assert not [name for name in ERRORS - {"AdaCheckError"} if name not in table]
