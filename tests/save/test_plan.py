"""Decisions by numbers: base, replayed delta, or differences."""

import dataclasses
import itertools
import types

import pytest

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Link, Update
from adacheck_jax.plan import decision, save_plan, situation
from adacheck_jax.plan.options import Options
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update import program as update_program
from adacheck_jax.update.binding import recorders_of
from adacheck_jax.update.recorder_state import LAST_COUNT
from tests import support

UPDATE = Update(
    (0,), (1,), (2,), (), (3,), ((1, 1, 1, 0),), (), (), "", "", {"cpu": "0" * 64}, "0.10.2", True
)
BASE = BaseManifest(10, (5,), (), (), UPDATE, "first", (), (), 1, {})
NO_PROGRAM = BaseManifest(10, (5,), (), (), None, "first", (), (), 1, {})
NO_COUNT = BaseManifest(10, (), (), (), UPDATE, "first", (), (), 1, {})
NO_RECORDER = BaseManifest(10, (), (), (), None, "first", (), (), 1, {})
LINK = Link(12, "../12", "0" * 64)
THIRD_DELTA = DeltaManifest(13, (8,), (0,), (), (), (), (), "sample", parent=LINK, depth=3)
THIRD_WITHOUT_RECORDER = DeltaManifest(13, (), (), (), (), (), (), "stored", parent=LINK, depth=3)

FROM_BASE = {"parent": BASE, "step": 11, "counts": (6,)}
FROM_THIRD = {"parent": THIRD_DELTA, "step": 14, "counts": (9,)}
WITHOUT_RECORDER = {"base": NO_RECORDER, "parent": NO_RECORDER, "counts": ()}
PROBLEM = "the update does not reproduce params/kernel"


def decide(
    base=BASE,
    parent=BASE,
    problem="",
    step=11,
    counts=(6,),
    max_deltas=4,
    delta="auto",
    is_first=False,
):
    facts = None
    if base is not None and parent is not None:
        lineage = types.SimpleNamespace(base=base, problem=problem)
        facts = situation.Facts(parent.step, parent.depth, parent.counts, lineage, 0, True, (), ())
    given = situation.Situation(
        *(step, None, None, counts, True, frozenset(), facts, True, is_first, True, 1, True),
        max_deltas,
    )
    return decision.by_counters(given, Options(delta=delta))


@pytest.mark.parametrize("delta", ["auto", "bits"])
@pytest.mark.parametrize("problem", ["", PROBLEM])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"base": None}, "no parent"),
        ({"parent": None}, "no parent"),
        ({"base": None, "parent": None}, "no parent"),
        ({"step": 10}, "step 10 does not follow step 10"),
        ({"step": 9}, "step 9 does not follow step 10"),
        ({"max_deltas": 0}, "0 deltas"),
        ({**FROM_THIRD, "max_deltas": 3}, "3 of 3 deltas"),
        ({**FROM_THIRD, "max_deltas": 2}, "3 of 2 deltas"),
    ],
)
def test_a_base_is_due_whatever_the_deltas_and_the_reason_is_told(delta, problem, case, reason):
    decision = decide(**case, problem=problem, delta=delta)
    assert decision.is_base
    assert decision.kind == "base"
    assert decision.updates == ()
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM}, "no update program"),
        ({"base": NO_COUNT, "parent": NO_COUNT}, "no update program"),
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM, "problem": PROBLEM}, "no update program"),
        ({"parent": THIRD_WITHOUT_RECORDER, "step": 14}, "no update program"),
        ({"counts": (7,)}, "from 5 to 7"),
        ({"counts": (4,)}, "from 5 to 4"),
        ({**FROM_THIRD, "counts": (10,)}, "from 8 to 10"),
        (WITHOUT_RECORDER, "no recorder"),
        ({**WITHOUT_RECORDER, "base": None, "parent": None}, "no recorder"),
        ({"counts": ()}, "no recorder"),
    ],
)
def test_a_base_is_due_where_updates_cannot_be_replayed_and_the_reason_is_told(case, reason):
    decision = decide(**case)
    assert decision.kind == "base"
    assert decision.updates == ()
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("case", "updates"),
    [
        (FROM_BASE, (0,)),
        ({"counts": (5,)}, ()),
        ({"step": 500}, (0,)),
        ({"max_deltas": 1}, (0,)),
        (FROM_THIRD, (0,)),
        ({**FROM_THIRD, "counts": (8,)}, ()),
    ],
)
def test_a_delta_replays_as_many_updates_as_the_counter_advanced(case, updates):
    decision = decide(**case)
    assert not decision.is_base
    assert decision.kind == "replay"
    assert decision.updates == updates
    assert decision.is_planned


@pytest.mark.parametrize(
    "case", [FROM_BASE, FROM_THIRD, {"counts": (5,)}, {"counts": (7,)}, {"counts": (1,)}]
)
def test_a_problem_speaks_against_replay_and_is_the_reason(case):
    assert decide(**case, problem=PROBLEM) == decision.Decision("bits", PROBLEM)


@pytest.mark.parametrize("problem", ["", PROBLEM])
@pytest.mark.parametrize(
    "case",
    [
        FROM_BASE,
        FROM_THIRD,
        {"counts": (5,)},
        {"counts": (77,)},
        {"counts": ()},
        {"max_deltas": 1},
        WITHOUT_RECORDER,
        {**WITHOUT_RECORDER, "parent": THIRD_WITHOUT_RECORDER, "step": 14},
        {"base": NO_PROGRAM, "parent": NO_PROGRAM},
        {"base": NO_COUNT, "parent": NO_COUNT},
    ],
)
def test_differences_need_neither_recorder_nor_counter_nor_program(problem, case):
    decision = decide(**case, problem=problem, delta="bits")
    assert not decision.is_base
    assert (decision.kind, decision.updates) == ("bits", ())


CASES = itertools.product(
    [None, BASE, NO_PROGRAM, NO_COUNT, NO_RECORDER],
    [None, BASE, NO_COUNT, THIRD_DELTA, THIRD_WITHOUT_RECORDER],
    ["", PROBLEM],
    [10, 14],
    [(), (5,), (6,), (8,), (9,)],
    [0, 3, 4],
)


def test_each_way_of_saving_writes_only_what_it_may():
    found = {"auto": set(), "bits": set()}
    for base, parent, problem, step, counts, max_deltas in CASES:
        for delta, kinds in found.items():
            decision = decide(base, parent, problem, step, counts, max_deltas, delta)
            kinds.add(decision.kind)
            assert decision.reason
            assert len(decision.updates) <= (decision.kind == "replay")
            assert decision.kind != "replay" or not problem
    assert found == {"auto": {"base", "replay", "bits"}, "bits": {"base", "bits"}}


@pytest.mark.parametrize(
    ("counts", "updates", "reason"),
    [
        ((6, 7), (), "no update"),
        ((7, 7), (0,), "one update"),
        ((6, 8), (1,), "one update"),
        ((7, 8), (0, 1), "2 updates"),
    ],
)
def test_of_several_recorders_each_makes_one_update_or_none(counts, updates, reason):
    base = BaseManifest(10, (6, 7), (), (), UPDATE, "first", (), (), 1, {})
    decision = decide(base, base, counts=counts)
    assert (decision.kind, decision.updates, decision.reason) == ("replay", updates, reason)


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


@pytest.mark.parametrize("counts", [(8, 7), (6, 6), (7, 9), (6,), (6, 7, 0)])
def test_a_recorder_more_or_less_or_one_that_skipped_is_due_a_base(counts):
    base = BaseManifest(10, (6, 7), (), (), UPDATE, "first", (), (), 1, {})
    decision = decide(base, base, counts=counts)
    assert decision.is_base
    assert not decision.is_planned


@pytest.mark.parametrize(
    ("case", "is_planned"),
    [
        ({"base": None, "is_first": True}, True),
        ({"base": None}, False),
        ({"step": 10}, False),
        ({"max_deltas": 0}, True),
        ({**FROM_THIRD, "max_deltas": 3}, True),
        ({"counts": (7,)}, False),
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM}, False),
        (WITHOUT_RECORDER, True),
    ],
)
def test_a_base_is_planned_where_the_options_say_so(case, is_planned):
    decision = decide(**case)
    assert decision.is_base
    assert decision.is_planned == is_planned


@pytest.fixture(scope="module")
def structure():
    run = support.dict_run(support.mesh_of((1, 1)))
    return Snapshots(recorders_of(run.recorder), None).take(run.state).structure


UPDATED = ExportedUpdate(b"a program")


def situation_of(structure, counts, *, leaves=None, deferred_count=0, step=7, longest=20):
    """A state behind step 6, which had made 6 updates and was saved as a replayed delta."""
    update = types.SimpleNamespace(
        programs={update_program.platform(): UPDATED.digest}, reducing=(), placement=""
    )
    leaves = leaves or structure.leaves
    base = types.SimpleNamespace(leaves=leaves, update=update)
    lineage = types.SimpleNamespace(base=base, problem="", is_recut=False)
    known = None if counts is None else (6,)
    facts = situation.Facts(
        *(6, 5, known, lineage, deferred_count, True, leaves, leaves),
        *(False, structure, "replay", 1),
    )
    return situation.Situation(
        *(step, structure, UPDATED, counts, True, frozenset(), facts),
        *(True, False, True, 1, True, longest),
    )


@pytest.mark.parametrize("count", [6, 7])
def test_a_speculative_plan_that_was_checked_is_the_plan_of_known_counters(structure, count):
    guess = save_plan.speculate(situation_of(structure, None), Options())
    assert guess
    assert guess.is_speculative
    known = save_plan.plan(situation_of(structure, (count,)), Options())
    assert guess.check((count,), (6,), 6) == known
    assert known.check((count,), (6,), 6) is known
    assert known.decision.updates == (0,) * (count - 6)
    assert set(known.unchanged).isdisjoint(known.stored)
    replayed = structure.computed_by(known.decision.updates)
    assert {*known.unchanged, *known.stored, *replayed} == {*range(len(structure.leaves))}


@pytest.mark.parametrize("count", [5, 8])
def test_a_speculative_plan_is_refused_where_it_was_not_one_update(structure, count):
    guess = save_plan.speculate(situation_of(structure, None), Options())
    assert guess
    with pytest.raises(adacheck.AdaCheckError, match=f"went from 6 to {count}: not one update"):
        guess.check((count,), (6,), 6)


@pytest.mark.parametrize("change", [{"step": 9}, {"step": None}, {"leaves": ()}, {"longest": 5}])
def test_nothing_is_guessed_at_another_interval_or_without_a_step(structure, change):
    found = save_plan.speculate(situation_of(structure, None, **change), Options())
    assert (found is None) == ("leaves" not in change)


@pytest.mark.parametrize("counts", [None, (7,)])
def test_the_longest_lineage_is_a_fact_and_no_option(structure, counts):
    """Step 6 is a fifth delta: where a lineage has five at most, a base follows."""
    for longest, options in ((5, Options(max_deltas=99)), (6, Options(max_deltas=1))):
        given = situation_of(structure, counts, longest=longest)
        made = save_plan.plan(given, options) if counts else save_plan.speculate(given, options)
        assert (made is None or made.is_base) == (longest == 5)
        deferred = save_plan.plan_deferred(given, options)
        assert deferred == f"the lineage would be longer than max_deltas={longest}"
    found = save_plan.plan_deferred(situation_of(structure, None, longest=7), Options())
    assert isinstance(found, save_plan.SavePlan)


def test_behind_deferred_steps_a_whole_state_is_a_delta_or_they_are_given_up(structure):
    kept = save_plan.plan(situation_of(structure, (9,), deferred_count=2), Options())
    assert (kept.decision.kind, kept.is_whole, kept.given_up) == ("bits", True, "")
    assert kept.stored == tuple(range(len(structure.leaves)))
    other = save_plan.plan(
        situation_of(structure, (7,), deferred_count=2, leaves=structure.leaves[:-1]), Options()
    )
    assert other.is_base
    assert "leaves" in other.given_up


def restored_elsewhere(structure, **about):
    """A state behind step 6, which was restored onto other devices than it was saved from."""
    given = situation_of(structure, (7,), **about)
    before = tuple(dataclasses.replace(each, owners=()) for each in structure.leaves)
    lineage = given.parent.lineage
    lineage.leaves = lineage.base.leaves = before
    facts = dataclasses.replace(given.parent, structure=None, kind=None, interval=0)
    return dataclasses.replace(given, parent=facts)


def test_a_state_that_was_restored_onto_other_devices_goes_on_with_deltas(structure):
    given = restored_elsewhere(structure)
    made = save_plan.plan(given, Options())
    assert (made.decision.kind, made.decision.updates) == ("replay", (0,))
    assert isinstance(save_plan.plan_deferred(given, Options()), save_plan.SavePlan)
    facts = dataclasses.replace(given.parent, leaves=given.parent.lineage.leaves)
    moved = dataclasses.replace(given, parent=facts)  # since it was restored
    assert "the sharding of" in save_plan.plan(moved, Options()).decision.reason
    assert "other shardings" in save_plan.plan_deferred(moved, Options())


def test_what_adds_up_elements_goes_on_where_its_base_lay(structure):
    given = restored_elsewhere(structure)
    update = given.parent.lineage.base.update
    for own in ((), (0,)):
        update.reducing, update.placement = (0,), "where the base lay"
        summing = dataclasses.replace(given, update=dataclasses.replace(UPDATED, reducing=own))
        assert "the mesh changed" in save_plan.plan(summing, Options()).decision.reason
        update.placement = structure.placement
        assert save_plan.plan(summing, Options()).decision.kind == "replay"
    update.reducing, update.placement = (), ""
    summing = dataclasses.replace(given, update=dataclasses.replace(UPDATED, reducing=(0,)))
    assert "the mesh changed" in save_plan.plan(summing, Options()).decision.reason


def test_a_base_in_the_background_is_none_of_a_lineage_with_other_boxes(structure):
    given = dataclasses.replace(situation_of(structure, (7,), longest=6), makes_bases=True)
    assert save_plan.plan(given, Options()).makes_base
    given.parent.lineage.is_recut = True
    assert not save_plan.plan(given, Options()).makes_base
    given = dataclasses.replace(restored_elsewhere(structure, longest=6), makes_bases=True)
    assert not save_plan.plan(given, Options()).makes_base


def test_what_a_check_finds_wrong_is_stored_and_the_rest_is_replayed(structure):
    given = situation_of(structure, (7,))
    made = save_plan.plan(given, Options())
    (wrong, *others) = sorted(structure.computed - set(made.stored))
    corrected = save_plan.planned(given, made.decision, Options(), wrong=frozenset({wrong}))
    assert set(corrected.stored) == {*made.stored, wrong}
    assert corrected.unreplayed == {wrong}
    assert wrong in corrected.kept
    assert set(others).isdisjoint(corrected.stored)
