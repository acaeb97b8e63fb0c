"""When a base is written: the lineage's length decides, and is bounded by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.plan.when_base import BaseDue, LineageLength

LONGEST = st.integers(1, 12)


@given(LONGEST, st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_a_lineage_is_bounded_whatever_becomes_of_bases_in_the_background(longest, can, saves):
    deltas, put = 0, None  # deltas behind the newest base; those behind one that is being made
    for asked, is_done in saves:
        deferred = 0
        while (
            deferred < asked and LineageLength(deltas, deferred, longest, can).has_room_for_deferred
        ):
            deferred, deltas, put = deferred + 1, deltas + 1, None if put is None else put + 1
        due = LineageLength(deltas, deferred, longest, can).due
        if due is BaseDue.NOW:
            deltas, put = 0, None
            continue
        assert can or due is BaseDue.NOT_YET, "nothing is put in a delta's place unasked"
        deltas, put = deltas + 1, None if put is None else put + 1
        if due is BaseDue.IN_BACKGROUND and put is None:
            put = 0
        if is_done and put is not None:
            deltas, put = put, None
        assert deltas <= longest * (2 if can else 1)


@given(st.integers(0, 40), st.integers(1, 9), LONGEST, st.booleans())
def test_a_save_of_deferred_steps_is_no_base_and_the_one_behind_it_may_be(
    deltas, deferred, longest, can
):
    assert LineageLength(deltas + deferred, deferred, longest, can).due is BaseDue.NOT_YET
    behind = LineageLength(deltas + deferred + 1, 0, longest, can)
    assert (behind.due is BaseDue.NOW) == (behind.deltas >= behind.most)


@given(LONGEST, st.booleans())
def test_a_base_is_due_once_and_not_before(longest, can):
    dues = [LineageLength(n, 0, longest, can).due for n in range(2 * longest + 1)]
    first, last = (longest - 1, 2 * longest) if can else (longest, longest)
    assert [n for n, each in enumerate(dues) if each is BaseDue.IN_BACKGROUND] == [
        *range(first, last)
    ]
    assert [n for n, each in enumerate(dues) if each is BaseDue.NOW] == [
        *range(last, 2 * longest + 1)
    ]
