"""Copies that are sent: nobody enters a collective alone, and what does not come is known."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format.boxes import Box
from adacheck_jax.memory.sending import plans
from adacheck_jax.memory.sending.plans import SendPlan, SentBox
from adacheck_jax.memory.sending.wire import Received
from adacheck_jax.processes.consent import Consent
from adacheck_jax.processes.run import Processes
from adacheck_jax.processes.service import Patience
from tests.adapter.memory_service import MemoryService

CHOICES = st.sampled_from(["the same", "another", "", None])
"""What a process sends: nothing without a shadow, and None where its save fails early."""


@given(st.lists(CHOICES, min_size=2, max_size=4))
def test_all_send_or_none(chosen):
    service = MemoryService()
    every = [Processes(n, len(chosen), service, Patience(look_s=0.05)) for n in range(len(chosen))]
    consents = [Consent(each.exchange("a step").beside("copies")) for each in every]

    def answer(consent: Consent, what: str | None, thread: ThreadPoolExecutor) -> bool:
        if what is None:
            consent.refuse()
            return False
        found = consent.begin(what, thread).result()
        consent.refuse()  # the save fails after that: the others have been told
        return found

    with ThreadPoolExecutor(2 * len(chosen)) as pool:
        asked = [pool.submit(answer, *each, pool) for each in zip(consents, chosen, strict=True)]
        found = {each.result() for each in asked}
    for each in every:
        each.close()
    assert found == {len({*chosen}) == 1 and chosen[0] not in ("", None)}


@given(st.sets(st.tuples(*[st.integers(0, 7)] * 2).filter(lambda pair: pair[0] != pair[1])))
def test_in_a_round_each_process_sends_to_one_and_gets_from_one(pairs):
    rounds = plans._rounds(pairs)
    assert sorted(pair for each in rounds for pair in each.items()) == sorted(pairs)
    for each in rounds:
        assert len({*each.values()}) == len(each)


FIRST, SECOND = Box((0,), (3,)), Box((3,), (5,))


def received_of(leaves: tuple[int, ...]) -> Received:
    """Boxes of processes 1 and 2, of two leaves of which some are sent."""
    kept = {i: [(1, FIRST), (2, SECOND)] for i in (0, 1)}
    pieces = [
        [SentBox(i, FIRST, 0, 4, 3 * n, 3) for n, i in enumerate(leaves)],
        [SentBox(i, SECOND, 0, 4, 2 * n, 2) for n, i in enumerate(leaves)],
    ]
    dtype = np.dtype(np.float32)
    return Received(SendPlan([dtype] * 2, kept, None, [], pieces, ""))


def rows_of(*values: Any) -> list[Any]:
    """A row for each round, of one lane."""
    return [[[np.array(each, np.float32).view(np.uint32)]] for each in values]


def test_what_came_is_cut_into_boxes():
    received = received_of((0, 1))
    received.rows.set_result(rows_of([1, 2, 3, 4, 5, 6], [7, 8, 9, 10]))
    assert received.lost() == set()
    assert {box: [*x] for box, x in received[0].items()} == {FIRST: [1, 2, 3], SECOND: [7, 8]}
    assert {box: [*x] for box, x in received[1].items()} == {FIRST: [4, 5, 6], SECOND: [9, 10]}


@pytest.mark.parametrize("why", ["nobody sent", "the collective failed"])
def test_what_does_not_come_is_lost_and_the_step_goes_on(why):
    received = received_of((0,))
    if why == "nobody sent":
        received.rows.set_result(None)
    else:
        received.rows.set_exception(RuntimeError("gloo"))
    assert received.lost() == {1, 2}
    assert {box: [*x] for box, x in received[0].items()} == {FIRST: [0] * 3, SECOND: [0] * 2}


def test_a_leaf_that_this_process_alone_stores_costs_the_copies():
    received, own = received_of((0,)), {1: {Box((5,), (7,)): np.ones(2, np.float32)}}
    blocks = received.joined(own)
    received.rows.set_result(rows_of([1, 2, 3], [7, 8]))
    assert received.lost() == {1, 2}
    assert [*blocks[1]] == [Box((5,), (7,)), FIRST, SECOND]
