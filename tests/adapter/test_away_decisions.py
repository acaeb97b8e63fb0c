"""What a manager does with a step while storage may be away, whatever it knows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.away.acknowledged import by_all
from adacheck_jax.adapter.away.deciding import Action, SaveState, StorageFacts, decide
from adacheck_jax.adapter.away.outage import Look, Outage
from adacheck_jax.store.storage.location import at

FACTS = st.builds(
    StorageFacts,
    in_flight=st.sampled_from(SaveState),
    is_due=st.booleans(),
    has_gap=st.booleans(),
    is_ours=st.booleans(),
    is_new=st.booleans(),
    is_acknowledged=st.booleans(),
    has_refused=st.booleans(),
    deferred=st.integers(0, 20),
    portion=st.integers(1, 20),
    fits=st.booleans(),
    answers=st.sampled_from([None, True, False]),
)


@given(FACTS)
def test_a_step_is_saved_only_where_nothing_is_lost_by_it(facts):
    action = decide(facts)
    if facts.in_flight is SaveState.FAILED:
        assert action is Action.RESOLVE
        return
    if action in (Action.SAVE, Action.WRITE):
        assert facts.answers is True
        assert facts.in_flight is SaveState.ENDED
        assert facts.is_due
        assert not facts.has_gap
    if facts.deferred and not facts.fits:
        assert action is Action.WAIT
    if action is Action.SAVE:  # with all that is in memory, or nothing is
        assert not facts.has_refused
        assert not facts.is_acknowledged or (facts.is_ours and facts.deferred < facts.portion)
    if action is Action.WRITE:
        assert facts.has_refused or facts.deferred
    if action is Action.RECORD:
        assert facts.is_ours
        assert facts.is_new


@given(FACTS)
def test_storage_is_looked_at_once(facts):
    if decide(facts) is not Action.LOOK:
        return
    assert facts.answers is None
    for answers in (True, False):
        found = decide(dataclasses.replace(facts, answers=answers))
        assert found not in (Action.LOOK, Action.RESOLVE)
        if not answers:
            assert found in (Action.RECORD, Action.WAIT)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_save_in_regular_time_is_a_save(is_ours):
    facts = StorageFacts(
        in_flight=SaveState.ENDED,
        is_due=True,
        has_gap=False,
        is_ours=is_ours,
        is_new=True,
        is_acknowledged=False,
        has_refused=False,
        deferred=0,
        portion=2,
        fits=True,
        answers=True,
    )
    assert decide(facts) is Action.SAVE


def test_a_disk_that_is_read_only_does_not_answer(tmp_path, monkeypatch):
    outage = Outage()
    look = Look(at(tmp_path), outage)
    assert look.answers(3)
    monkeypatch.setattr(directories, "_why_unwritable", lambda _: "it is read-only")
    assert not look.answers(3)
    assert outage.is_away
    assert "read-only" in str(outage.error)


def test_a_step_is_kept_if_all_keep_it_in_the_room_that_all_have():
    reports = [{"is_kept": True, "room_bytes": 7}, {"is_kept": False, "room_bytes": 5}]
    assert by_all(reports) == {"is_kept": False, "room_bytes": 5}
    assert by_all(reports[:1]) == reports[0]


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.mark.parametrize(
    ("saved_bytes", "patience_s"), [(0, 5.0), (1_600_000_000, 16.0), (10**12, 60.0)]
)
def test_a_first_save_is_waited_for_by_its_bytes(saved_bytes, patience_s):
    clock = Seconds()
    outage = Outage(clock)
    outage.begin()
    assert outage.patience_s(saved_bytes) == patience_s
    clock.s = 3.0
    assert outage.patience_s(saved_bytes) == patience_s - 3.0
    outage.hang()
    assert outage.patience_s(saved_bytes) == 0.0


def test_a_save_that_was_slow_is_waited_for_longer_next_time_and_one_refused_is_not():
    clock = Seconds()
    outage = Outage(clock)

    def patience_s(took_s, error=None):
        outage.begin()
        waited_s = outage.patience_s(0)
        clock.s += took_s
        if error is not None:
            outage.refuse(error)
        elif took_s > waited_s:
            outage.hang()
        outage.end(took_s)
        outage.begin()
        return outage.patience_s(0)

    assert patience_s(1.0) == 5.0
    assert patience_s(2.0) == 8.0
    assert patience_s(1000.0, OSError("away")) == 8.0
    assert patience_s(1000.0) == 32.0  # an hour in which storage hangs makes no hour of patience
    assert not outage.is_away
