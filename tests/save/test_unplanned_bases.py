"""Full states, one after another, that nobody planned: one warning says why and what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adacheck_jax as adacheck
from tests import support
from tests.save.loop import Loop, computing, kinds


@pytest.fixture
def told(caplog):
    """The warnings of this library so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("adacheck_jax")]


def test_the_handler_was_given_no_recorder(tmp_path, told):
    run = support.dict_run(support.mesh_of((1, 1)))
    run.recorder = None
    with Loop(tmp_path, run) as loop:
        loop.save(4)
    (message,) = told()
    assert "the handler was given no recorder" in message
    assert "AdaCheckHandler(recorder)" in message


@pytest.mark.first(1)
@pytest.mark.parametrize("waits", [True, False])
def test_several_updates_lie_between_two_saves(tmp_path, told, waits):
    """As with ``save_interval_steps`` and nothing recorded in between."""
    with Loop(tmp_path) as loop, computing(not waits):
        for _ in range(4):
            jax.block_until_ready(loop.train(4))
            loop.number += 3
            loop.put()
    assert kinds(tmp_path) == [*"BBBB"]
    (message,) = told()
    assert "the update counter went from 8 to 12: not one update" in message
    assert "record_step" in message


@pytest.mark.first(2, slow=4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, jnp.int32(0)),  # the number in the first state of a flax run
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.ones(4, np.float32), np.ones(2, np.float32)),
    ],
    ids=["number", "narrower", "same bytes", "shorter"],
)
def test_a_leaf_gets_another_type_or_shape(tmp_path, told, before, after):
    wanted = {}
    with Loop(tmp_path) as loop:
        for note in (before, after, after, before, after):
            loop.train()
            wanted[loop.number] = loop.run.state | {"note": note}
            loop.run.state = wanted[loop.number]
            loop.put()
            loop.run.state = {x: y for x, y in wanted[loop.number].items() if x != "note"}
    assert kinds(tmp_path) == [*"BBRBB"]
    (message,) = told()
    assert "note changed from" in message
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for step, saved in loop.states.items():
            found = manager.restore(step, args=adacheck.RestoreArgs(wanted[step]))
            support.assert_same_bits(found, saved)


@pytest.mark.slow
def test_two_handlers_take_turns(tmp_path, told):
    loops = [Loop(tmp_path)]
    loops.append(Loop(tmp_path, loops[0].run))
    for step in range(8):
        loop = loops[step % 2]
        loop.number = step
        loop.save()
    for loop in loops:
        loop.manager.close()
    assert kinds(tmp_path) == [*"BBBBBBBB"]
    assert len(told()) == 2  # of each handler one
    for message in told():
        assert "of two handlers that take turns each sees every second step alone" in message


def test_what_options_ask_for_and_another_run_that_begins_in_a_root_are_told_nothing(
    tmp_path, told
):
    """Its counters begin anew; after its own first base it is saved as deltas."""
    with Loop(tmp_path, max_deltas=1) as loop:
        loop.save(5)
    with Loop(tmp_path, max_deltas=2) as loop:
        loop.number = 9
        loop.save(3)
    assert kinds(tmp_path) == [*"BRBRB", *"BRR"]
    assert not told()


def test_steps_of_one_handler_are_removed_by_another(tmp_path, told):
    """So that no save finds the step that it would build on."""
    with Loop(tmp_path) as loop:
        for _ in range(4):
            loop.save()
            loop.manager.delete(loop.number)
    (message,) = [each for each in told() if each.startswith("Steps are saved as full states")]
    assert "no parent step to build on" in message
    assert "a root and a handler of its own" in message
