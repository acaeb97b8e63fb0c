"""Arrows point downward, between rooms and inside each; BUILD.md shows what is there."""

import graphlib

from tests import house

ROOMS = [room for room in house.MAY_IMPORT if room not in house.MODULES]
"""Without what is one module: the exception tree, and the public names for Orbax v1."""


def test_the_arrows_between_rooms_make_no_circle():
    list(graphlib.TopologicalSorter(house.MAY_IMPORT).static_order())  # raises CycleError


def test_the_arrows_between_modules_make_no_circle():
    graph = {name: inside - {house.FACADE} for name, (inside, _) in house.imports().items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_arrows_between_the_parts_of_a_folder_make_no_circle():
    """A part is a module, or a folder with all that lies in it."""
    folders = {name.rpartition(".")[0] for name in house.MODULES} - {""}
    for folder in folders:
        graph = {}
        for name, (inside, _) in house.imports().items():
            if (own := house.part_of(name, folder)) is not None:
                parts = {house.part_of(each, folder) for each in inside}
                graph.setdefault(own, set()).update(parts - {own, None})
        list(graphlib.TopologicalSorter(graph).static_order())


def test_modules_import_what_their_rooms_may():
    forbidden = []
    for name, (inside, outside) in house.imports().items():
        room = house.room_of(name)
        may = {room, *house.MAY_IMPORT[room]}
        found = {x for x in inside if house.room_of(x) not in may}
        found |= outside - house.MAY_USE.get(room, set())
        forbidden += [f"{name} imports {each}" for each in sorted(found)]
    assert not forbidden, f"{forbidden}; see MAY_IMPORT and MAY_USE in tests/house.py"


def test_checkpoints_are_touched_through_a_storage_alone():
    found = {name for name, path in house.MODULES.items() if house.touches_files(path)}
    assert found == house.MAY_TOUCH_FILES.keys(), "see MAY_TOUCH_FILES in tests/house.py"


def test_only_what_users_import_gives_names_of_several_modules():
    inits = {path.parent.name: path for path in house.PACKAGE.rglob("__init__.py")}
    assert {name for name, path in inits.items() if any(house.imports_of(path))} == {
        house.FACADE,
        *("layout", "publish", "tools", "update"),  # of which some names are public
    }


def test_rooms_are_small_and_say_what_they_are_for():
    for room in ROOMS:
        own = [name for name in house.MODULES if name.rpartition(".")[0] == room]
        assert len(own) <= house.LARGEST_ROOM, room
        text = (house.PACKAGE / room / "__init__.py").read_text()
        assert text.count(". ") + text.count(".\n") >= 3, room
        assert "Begin with" in " ".join(text.split()), room


def test_build_md_shows_the_house_as_it_is():
    text = house.BUILD.read_text()
    assert text == house.drawn(text), "run: python -m tests.house"
