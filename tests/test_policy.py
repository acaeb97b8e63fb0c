import itertools

import pytest

from adacheck_jax import policy
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Link, Update

UPDATE = Update((0,), (1,), (2,), (), 3, (), (), "", "", {"cpu": "0" * 64}, "0.10.2")
BASE = BaseManifest(10, 5, (), (), UPDATE, "first", (), (), 1, {})
NO_PROGRAM = BaseManifest(10, 5, (), (), None, "first", (), (), 1, {})
NO_COUNT = BaseManifest(10, None, (), (), UPDATE, "first", (), (), 1, {})
NO_RECORDER = BaseManifest(10, None, (), (), None, "first", (), (), 1, {})
THIRD_DELTA = DeltaManifest(13, 8, True, Link(12, "../12", "0" * 64), 3, (), (), ())
THIRD_WITHOUT_RECORDER = DeltaManifest(13, None, False, Link(12, "../12", "0" * 64), 3, (), (), ())

FROM_BASE = {"parent": BASE, "step": 11, "count": 6}
FROM_THIRD = {"parent": THIRD_DELTA, "step": 14, "count": 9}
WITHOUT_RECORDER = {"base": NO_RECORDER, "parent": NO_RECORDER, "count": None}
PROBLEM = "the update does not reproduce params/kernel"


def decide(base=BASE, parent=BASE, problem="", step=11, count=6, max_deltas=4, delta="auto"):
    tip = parent and policy.Tip(parent.step, parent.count, parent.depth)
    return policy.decide(
        base, tip, problem=problem, step=step, count=count, max_deltas=max_deltas, delta=delta
    )


@pytest.mark.parametrize("delta", ["auto", "replay", "bits"])
@pytest.mark.parametrize("problem", ["", PROBLEM])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"base": None}, "no parent"),
        ({"parent": None}, "no parent"),
        ({"base": None, "parent": None}, "no parent"),
        ({"step": 10}, "step 10 does not follow step 10"),
        ({"step": 9}, "step 9 does not follow step 10"),
        ({"max_deltas": 0}, "max_deltas=0"),
        ({**FROM_THIRD, "max_deltas": 3}, "3 of max_deltas=3"),
        ({**FROM_THIRD, "max_deltas": 2}, "3 of max_deltas=2"),
    ],
)
def test_a_base_is_due_whatever_the_deltas_and_the_reason_is_told(delta, problem, case, reason):
    decision = decide(**case, problem=problem, delta=delta)
    assert decision.is_base
    assert decision.kind == "base"
    assert decision.update_count == 0
    assert reason in decision.reason


@pytest.mark.parametrize("delta", ["auto", "replay"])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM}, "no update program"),
        ({"base": NO_COUNT, "parent": NO_COUNT}, "no update program"),
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM, "problem": PROBLEM}, "no update program"),
        ({"parent": THIRD_WITHOUT_RECORDER, "step": 14}, "no update program"),
        ({"count": 7}, "from 5 to 7"),
        ({"count": 4}, "from 5 to 4"),
        ({**FROM_THIRD, "count": 10}, "from 8 to 10"),
        (WITHOUT_RECORDER, "no recorder"),
        ({**WITHOUT_RECORDER, "base": None, "parent": None}, "no recorder"),
        ({"count": None}, "no recorder"),
    ],
)
def test_a_base_is_due_where_updates_cannot_be_replayed_and_the_reason_is_told(delta, case, reason):
    decision = decide(**case, delta=delta)
    assert decision.kind == "base"
    assert decision.update_count == 0
    assert reason in decision.reason


@pytest.mark.parametrize("delta", ["auto", "replay"])
@pytest.mark.parametrize(
    ("case", "update_count"),
    [
        (FROM_BASE, 1),
        ({"count": 5}, 0),
        ({"step": 500}, 1),
        ({"max_deltas": 1}, 1),
        (FROM_THIRD, 1),
        ({**FROM_THIRD, "count": 8}, 0),
    ],
)
def test_a_delta_replays_as_many_updates_as_the_counter_advanced(delta, case, update_count):
    decision = decide(**case, delta=delta)
    assert not decision.is_base
    assert decision.kind == "replay"
    assert decision.update_count == update_count


@pytest.mark.parametrize("case", [FROM_BASE, FROM_THIRD, {"count": 5}, {"count": 7}, {"count": 1}])
@pytest.mark.parametrize(("delta", "kind"), [("auto", "bits"), ("replay", "base")])
def test_a_problem_speaks_against_replay_and_is_the_reason(case, delta, kind):
    decision = decide(**case, problem=PROBLEM, delta=delta)
    assert decision == policy.Decision(kind, PROBLEM, 0)


@pytest.mark.parametrize("problem", ["", PROBLEM])
@pytest.mark.parametrize(
    "case",
    [
        FROM_BASE,
        FROM_THIRD,
        {"count": 5},
        {"count": 77},
        {"count": None},
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
    assert (decision.kind, decision.update_count) == ("bits", 0)


CASES = itertools.product(
    [None, BASE, NO_PROGRAM, NO_COUNT, NO_RECORDER],
    [None, BASE, NO_COUNT, THIRD_DELTA, THIRD_WITHOUT_RECORDER],
    ["", PROBLEM],
    [10, 14],
    [None, 5, 6, 8, 9],
    [0, 3, 4],
)


def test_each_way_of_saving_writes_only_what_it_may():
    may = {"auto": {"base", "replay", "bits"}, "replay": {"base", "replay"}}
    found = {"auto": set(), "replay": set(), "bits": set()}
    for base, parent, problem, step, count, max_deltas in CASES:
        for delta, kinds in found.items():
            decision = decide(base, parent, problem, step, count, max_deltas, delta)
            kinds.add(decision.kind)
            assert decision.reason
            assert decision.update_count <= (decision.kind == "replay")
            assert decision.kind != "replay" or not problem
    assert found == {**may, "bits": {"base", "bits"}}
