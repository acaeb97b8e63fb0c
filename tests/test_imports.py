"""Arrows point downward, between rooms and inside each; BUILD.md shows what is there."""

import graphlib

import pytest

from tests import house

ROOMS = [room for room in house.MAY_IMPORT if room not in house.MODULES]
"""Without what is one module: the exception tree, and the public names for Orbax v1."""


def test_the_arrows_between_rooms_make_no_circle():
    list(graphlib.TopologicalSorter(house.MAY_IMPORT).static_order())  # raises CycleError


def test_the_arrows_between_modules_make_no_circle():
    graph = {name: inside - {house.FACADE} for name, (inside, _) in house.IMPORTS.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", house.MODULES)
def test_a_module_imports_what_its_room_may(name):
    inside, outside = house.IMPORTS[name]
    room = house.room_of(name)
    may = {room, *house.MAY_IMPORT[room]}
    forbidden = {x for x in inside if house.room_of(x) not in may}
    assert not forbidden, f"{name} imports {sorted(forbidden)}; see MAY_IMPORT in tests/house.py"
    assert outside <= house.MAY_USE.get(room, set())


def test_checkpoints_are_touched_through_a_storage_alone():
    found = {name for name, path in house.MODULES.items() if house.touches_files(path)}
    assert found == house.MAY_TOUCH_FILES.keys(), "see MAY_TOUCH_FILES in tests/house.py"


def test_only_what_users_import_gives_names_of_several_modules():
    inits = {path.parent.name: path for path in house.PACKAGE.rglob("__init__.py")}
    assert {name for name, path in inits.items() if any(house.imports_of(path))} == {
        house.FACADE,
        "layout",  # of which users write rules
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_small_and_says_what_it_is_for(room):
    own = [name for name in house.MODULES if name.rpartition(".")[0] == room]
    assert len(own) <= house.LARGEST_ROOM
    text = (house.PACKAGE / room / "__init__.py").read_text()
    assert text.count(". ") + text.count(".\n") >= 3
    assert "Begin with" in " ".join(text.split())


def test_build_md_shows_the_house_as_it_is():
    text = house.BUILD.read_text()
    assert text == house.drawn(text), "run: python -m tests.house"
