"""The site: pictures and commands are as their sources draw them, the reference has every name."""

import importlib.util
import re

import pytest

import adacheck_jax
from adacheck_jax import layout, v1
from tests import command_reference
from tests.test_links import ROOT


def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "images" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("picture", draw().PICTURES, ids=lambda picture: picture.__name__)
def test_pictures_are_as_drawn(picture):
    file = ROOT / "docs" / "images" / f"{picture.__name__}.svg"
    assert file.read_text() == picture().svg(), "run: python docs/images/draw.py"


def test_the_page_of_commands_is_as_drawn():
    page = command_reference.PAGE.read_text()
    assert page == command_reference.drawn(page), "run: python -m tests.command_reference"


@pytest.mark.parametrize("name", command_reference.commands())
def test_a_command_stands_in_both_lists(name):
    assert re.search(rf"^\|[^|]+\|[^|]*`{name}\b", command_reference.PAGE.read_text(), re.MULTILINE)
    assert f"adacheck {name} " in (ROOT / "docs" / "guide" / "command-line.md").read_text()


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = [
        name.removesuffix("()")
        for page in pages
        for names in re.findall(r"<!-- api: ([^>]+) -->", page.read_text())
        for name in names.split()
    ]
    only_v1 = {f"v1.{name}" for name in v1.__all__ if name not in adacheck_jax.__all__}
    assert len(shown) == len(set(shown))
    assert set(shown) == {
        *adacheck_jax.__all__,
        *(f"layout.{name}" for name in layout.__all__),
        *only_v1,
    }
