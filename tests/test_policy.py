import pytest

from adacheck_jax import policy
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Link, Update

UPDATE = Update((0,), (1,), (2,), (), 3, {"cpu": "0" * 64}, "0.10.2")
BASE = BaseManifest(10, 5, (), (), UPDATE, "first", 1, {})
NO_PROGRAM = BaseManifest(10, 5, (), (), None, "first", 1, {})
NO_COUNT = BaseManifest(10, None, (), (), UPDATE, "first", 1, {})
THIRD_DELTA = DeltaManifest(13, 8, True, Link(12, "../12", "0" * 64), 3, (), (), ())


def decide(base=BASE, parent=BASE, step=11, count=6, max_deltas=4):
    return policy.decide(base, parent, step=step, count=count, max_deltas=max_deltas)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"base": None}, "no parent"),
        ({"parent": None}, "no parent"),
        ({"base": NO_PROGRAM, "parent": NO_PROGRAM}, "no update program"),
        ({"base": NO_COUNT, "parent": NO_COUNT}, "no update program"),
        ({"step": 10}, "step 10 does not follow step 10"),
        ({"step": 9}, "step 9 does not follow step 10"),
        ({"max_deltas": 0}, "max_deltas=0"),
        ({"parent": THIRD_DELTA, "step": 14, "count": 9, "max_deltas": 3}, "3 of max_deltas=3"),
        ({"count": 7}, "from 5 to 7"),
        ({"count": 4}, "from 5 to 4"),
    ],
)
def test_a_base_is_due_and_the_reason_is_told(case, reason):
    decision = decide(**case)
    assert decision.is_base
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("case", "update_count"),
    [
        ({}, 1),
        ({"count": 5}, 0),
        ({"step": 500}, 1),
        ({"max_deltas": 1}, 1),
        ({"parent": THIRD_DELTA, "step": 14, "count": 9}, 1),
        ({"parent": THIRD_DELTA, "step": 14, "count": 8}, 0),
    ],
)
def test_a_delta_replays_as_many_updates_as_the_counter_advanced(case, update_count):
    decision = decide(**case)
    assert not decision.is_base
    assert decision.update_count == update_count
