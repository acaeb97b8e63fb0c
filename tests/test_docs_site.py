"""The site: pictures are as their sources draw them, the reference has every name and command."""

import importlib.util
import re

import typer

import adacheck_jax
from adacheck_jax import errors, layout, publish, tools, update, v1
from adacheck_jax.cli.main import app
from tests.test_links import ROOT


def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "images" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_as_drawn():
    for picture in draw().PICTURES:
        file = ROOT / "docs" / "images" / f"{picture.__name__}.svg"
        assert file.read_text() == picture().svg(), f"{file}: run python docs/images/draw.py"


def test_the_guide_has_every_command():
    guide = (ROOT / "docs" / "guide" / "command-line.md").read_text()
    for name in typer.main.get_command(app).commands:
        assert f"adacheck {name} " in guide, name


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = [
        name.removesuffix("()")
        for page in pages
        for names in re.findall(r"<!-- api: ([^>]+) -->", page.read_text())
        for name in names.split()
    ]
    public = {*adacheck_jax.__all__}
    for module in (errors, layout, publish, tools, update, v1):
        below = {*module.__all__} - {*adacheck_jax.__all__}
        public |= {f"{module.__name__.rpartition('.')[2]}.{name}" for name in below}
    assert len(shown) == len(set(shown))
    assert set(shown) == public
