"""Full states, one after another, that nobody planned: one warning says why and what to do."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import manager_of, mesh_of


@functools.cache
def compiled_run():
    return support.dict_run(mesh_of((1, 1)))


def new_run():
    run = compiled_run()
    return dataclasses.replace(run, state=jax.tree.map(jnp.copy, run.state), count=0)


@pytest.fixture
def told(caplog):
    """The warnings of this library so far."""
    caplog.set_level(logging.WARNING, "adacheck_jax")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("adacheck_jax")]


def bases(root):
    return sum(isinstance(step.manifest, BaseManifest) for step in roots.steps_of(root))


def save(manager, run, step, every=1):
    for _ in range(every):
        run.advance()
    manager.save(step, args=adacheck.SaveArgs(run.state))
    manager.wait_until_finished()


def test_the_handler_was_given_no_recorder(tmp_path, told):
    run = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for step in range(4):
            save(manager, run, step)
    (message,) = told()
    assert "the handler was given no recorder" in message
    assert "AdaCheckHandler(recorder)" in message


@pytest.mark.first(1)
@pytest.mark.parametrize("waits", [True, False])
def test_several_updates_lie_between_two_saves(tmp_path, told, waits):
    """As with ``save_interval_steps`` and nothing recorded in between."""
    run = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(0, 16, 4):
            for _ in range(4):
                run.advance()
            if waits:
                jax.block_until_ready(run.state)
            manager.save(step, args=adacheck.SaveArgs(run.state))
    assert bases(tmp_path) == 4
    (message,) = told()
    assert "the update counter went from 8 to 12: not one update" in message
    assert "record_step" in message


def test_a_run_that_saves_every_update_is_told_nothing(tmp_path, told):
    run = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=1)) as manager:
        for step in range(5):
            save(manager, run, step)
    assert bases(tmp_path) == 3
    assert not told()


@pytest.mark.slow
def test_two_handlers_take_turns(tmp_path, told):
    run = new_run()
    handlers = [adacheck.AdaCheckHandler(run.recorder) for _ in range(2)]
    managers = [manager_of(tmp_path, handler) for handler in handlers]
    for step in range(8):
        save(managers[step % 2], run, step)
    for manager in managers:
        manager.close()
    assert bases(tmp_path) == 8
    assert len(told()) == 2  # of each handler one
    for message in told():
        assert "of two handlers that take turns each sees every second step alone" in message


def test_another_run_begins_in_a_root_with_steps(tmp_path, told):
    """Its counters begin anew; after its own first base it is saved as deltas."""
    old = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(old.recorder)) as manager:
        for step in range(3):
            save(manager, old, step)
    run = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(10, 13):
            save(manager, run, step)
    assert bases(tmp_path) == 2
    assert not told()


def test_steps_of_one_handler_are_removed_by_another(tmp_path, told):
    """So that no save finds the step that it would build on."""
    run = new_run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in range(4):
            save(manager, run, step)
            manager.delete(step)
    (message,) = [each for each in told() if each.startswith("Steps are saved as full states")]
    assert "no parent step to build on" in message
    assert "a root and a handler of its own" in message
