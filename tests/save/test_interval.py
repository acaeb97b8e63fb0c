"""Every step of a run that saves at intervals: recorded or saved, and none of them left out."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of

INTERVAL = 5


@functools.cache
def compiled_run():
    return support.dict_run(mesh_of((1, 1)))


def new_run():
    run = compiled_run()
    return dataclasses.replace(run, state=jax.tree.map(jnp.copy, run.state), count=0)


def train(manager, handler, run, steps):
    """The loop of who saves at intervals: what is not recorded is saved."""
    states, recorded = {}, []
    for step in steps:
        states[step] = host_copy(run.advance())
        is_recorded = handler.record_step(run.state, step)
        manager.save(step, args=adacheck.SaveArgs(run.state), force=not is_recorded)
        if is_recorded:
            recorded.append(step)
    return states, recorded


def assert_all_there(root, run, states, unsaved=()):
    """Each step lies in one that is listed, and has its bits."""
    found = {}
    for saved in roots.steps_of(root):
        for step in (saved.step, *(d.step for d in getattr(saved.manifest, "recorded", ()))):
            found[step] = saved.step
    assert set(found) == set(states) - set(unsaved)
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        for step, saved in found.items():
            target = adacheck.RestoreArgs(abstract(run.state), step=step)
            assert_same_bits(manager.restore(saved, args=target), states[step])


def test_every_step_is_recorded_or_saved(tmp_path, caplog):
    run = new_run()
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, save_interval_steps=INTERVAL) as manager:
        states, recorded = train(manager, handler, run, range(12))
        assert list(manager.all_steps()) == [0, 5, 10]
        manager.save(11, args=adacheck.SaveArgs(run.state), force=True)  # the last is in memory
    assert recorded == [*range(1, 12)]  # there is nothing yet that the first one follows
    assert_all_there(tmp_path, run, states)
    assert not [r for r in caplog.records if r.name.startswith("adacheck") and r.levelno > 20]


@pytest.mark.slow
def test_a_resumed_run_records_from_its_first_step_on(tmp_path):
    run = new_run()
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, save_interval_steps=INTERVAL) as manager:
        states, _ = train(manager, handler, run, range(6))
    resumed = new_run()
    handler = adacheck.AdaCheckHandler(resumed.recorder)
    with manager_of(tmp_path, handler, save_interval_steps=INTERVAL) as manager:
        resumed.state = manager.restore(5, args=adacheck.RestoreArgs(abstract(resumed.state)))
        resumed.count = 6
        more, recorded = train(manager, handler, resumed, range(6, 11))
    assert recorded == [6, 7, 8, 9, 10]
    assert_all_there(tmp_path, run, states | more)


def test_a_step_that_is_neither_recorded_nor_saved_is_told_once(tmp_path, caplog):
    run = new_run()
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=2)
    with (
        manager_of(tmp_path, handler, save_interval_steps=INTERVAL) as manager,
        caplog.at_level(logging.WARNING, "adacheck_jax"),
    ):
        for step in range(6):
            run.advance()
            if not handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state))  # which the interval refuses
    told = [r.getMessage() for r in caplog.records if "neither" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Step 2 was neither recorded nor saved: record_step answered False")
    assert "max_deltas=2" in told[0]
    assert "force=True" in told[0]
