"""Decisions by numbers: base, replayed delta, or differences."""

import itertools
import types

import pytest

from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Link, Update
from adacheck_jax.plan import decision, situation
from adacheck_jax.plan.options import Options
from adacheck_jax.update.recorder_state import LAST_COUNT

UPDATE = Update(
    (0,), (1,), (2,), (), (3,), ((1, 1, 1, 0),), (), (), "", "", {"cpu": "0" * 64}, "0.10.2", True
)


def base_of(counts, update):
    return BaseManifest(10, counts, (), (), update, "first", (), (), 1, {})


BASE, NO_PROGRAM = base_of((5,), UPDATE), base_of((5,), None)
NO_COUNT, NO_RECORDER, TWO = base_of((), UPDATE), base_of((), None), base_of((6, 7), UPDATE)
LINK = Link(12, "../12", "0" * 64)
THIRD = DeltaManifest(13, (8,), (0,), (), (), (), (), "sample", parent=LINK, depth=3)
THIRD_WITHOUT = DeltaManifest(13, (), (), (), (), (), (), "stored", parent=LINK, depth=3)
PROBLEM = "the update does not reproduce params/kernel"


def decide(
    base=BASE, parent=BASE, problem="", step=14, counts=(6,), most=4, delta="auto", is_first=False
):
    facts = None
    if base is not None and parent is not None:
        lineage = types.SimpleNamespace(base=base, problem=problem)
        facts = situation.Facts(parent.step, parent.depth, parent.counts, lineage, 0, True, (), ())
    given = situation.Situation(
        *(step, None, None, counts, True, frozenset(), facts, True, is_first, True, 1, True), most
    )
    return decision.by_counters(given, Options(delta=delta))


FROM_THIRD = {"parent": THIRD, "counts": (9,)}
WITHOUT = {"base": NO_RECORDER, "parent": NO_RECORDER, "counts": ()}
TWINS = {"base": TWO, "parent": TWO}
NOT_PLANNED = "not planned: "
DECISIONS = [
    # A base is due whatever the deltas.
    ({"base": None}, NOT_PLANNED + "no parent"),
    ({"parent": None}, NOT_PLANNED + "no parent"),
    ({"base": None, "is_first": True}, "no parent"),
    ({"step": 10}, NOT_PLANNED + "step 10 does not follow step 10"),
    ({"step": 9, "problem": PROBLEM}, NOT_PLANNED + "step 9 does not follow step 10"),
    ({"most": 0}, "0 deltas"),
    ({**FROM_THIRD, "most": 3}, "3 of 3 deltas"),
    ({**FROM_THIRD, "most": 2, "problem": PROBLEM}, "3 of 2 deltas"),
    # It is due where updates cannot be replayed.
    ({"base": NO_PROGRAM, "parent": NO_PROGRAM}, NOT_PLANNED + "no update program"),
    ({"base": NO_COUNT, "parent": NO_COUNT}, NOT_PLANNED + "no update program"),
    ({"base": NO_PROGRAM, "parent": NO_PROGRAM, "problem": PROBLEM}, NOT_PLANNED + "no update pro"),
    ({"parent": THIRD_WITHOUT}, NOT_PLANNED + "no update program"),
    ({"counts": (7,)}, NOT_PLANNED + "from 5 to 7"),
    ({"counts": (4,)}, NOT_PLANNED + "from 5 to 4"),
    ({**FROM_THIRD, "counts": (10,)}, NOT_PLANNED + "from 8 to 10"),
    (WITHOUT, "no recorder"),
    ({**WITHOUT, "base": None, "parent": None}, "no recorder"),
    ({"counts": ()}, "no recorder"),
    *(({**TWINS, "counts": x}, NOT_PLANNED) for x in [(8, 7), (6, 6), (7, 9), (6,), (6, 7, 0)]),
    # A delta replays as many updates as the counters advanced.
    ({}, (0,)),
    ({"counts": (5,)}, ()),
    ({"step": 500}, (0,)),
    ({"most": 1}, (0,)),
    (FROM_THIRD, (0,)),
    ({**FROM_THIRD, "counts": (8,)}, ()),
    ({**TWINS, "counts": (6, 7)}, ()),
    ({**TWINS, "counts": (7, 7)}, (0,)),
    ({**TWINS, "counts": (6, 8)}, (1,)),
    ({**TWINS, "counts": (7, 8)}, (0, 1)),
    # A problem speaks against it.
    *(({"problem": PROBLEM, "counts": (n,)}, "bits") for n in (6, 5, 7, 1)),
    ({**FROM_THIRD, "problem": PROBLEM}, "bits"),
]


@pytest.mark.parametrize(("case", "expected"), DECISIONS)
def test_a_decision_follows_from_steps_counters_and_the_length_of_the_lineage(case, expected):
    made = decide(**case)
    if isinstance(expected, tuple):
        number = {0: "no update", 1: "one update"}.get(len(expected), f"{len(expected)} updates")
        assert made == decision.Decision("replay", number, expected)
    elif expected == "bits":
        assert made == decision.Decision("bits", PROBLEM)
    else:
        assert (made.kind, made.updates) == ("base", ())
        assert made.is_planned == (not expected.startswith(NOT_PLANNED))
        assert expected.removeprefix(NOT_PLANNED) in made.reason


EVERY = itertools.product(
    *(
        [None, BASE, NO_PROGRAM, NO_COUNT, NO_RECORDER],
        [None, BASE, NO_COUNT, THIRD, THIRD_WITHOUT],
    ),
    *(["", PROBLEM], [10, 14], [(), (5,), (6,), (8,), (9,)], [0, 3, 4]),
)


def test_each_way_of_saving_writes_only_what_it_may():
    """Differences need neither recorder nor counter nor program."""
    found = {"auto": set(), "bits": set()}
    for base, parent, problem, step, counts, most in EVERY:
        for delta, kinds in found.items():
            made = decide(base, parent, problem, step, counts, most, delta)
            kinds.add(made.kind)
            assert made.reason
            assert len(made.updates) <= (made.kind == "replay")
            assert made.kind != "replay" or not problem
            if delta == "bits":
                is_due = base is None or parent is None or step <= parent.step
                assert made.is_base == (is_due or parent.depth >= most)
    assert found == {"auto": {"base", "replay", "bits"}, "bits": {"base", "bits"}}


@pytest.mark.parametrize(
    ("before", "after", "updates"),
    [
        ((LAST_COUNT - 1,), (LAST_COUNT,), (0,)),
        ((LAST_COUNT, LAST_COUNT), (1, LAST_COUNT), (0,)),
        ((LAST_COUNT,), (0,), None),
        ((LAST_COUNT,), (2,), None),
        ((LAST_COUNT,), (LAST_COUNT + 1,), None),
        ((0,), (1,), (0,)),
    ],
)
def test_behind_the_last_number_of_updates_comes_the_first(before, after, updates):
    assert decision.advanced(before, after) == updates
