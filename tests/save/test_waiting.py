"""A delta's save does not wait for the step that is still computing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from tests import support
from tests.save.loop import Loop, computing, manifest_of

ROUNDS = 100
"""Of a step that computes while it is saved: most of a second."""


def slow(x: Any, rounds: int) -> Any:
    """The zero of a long computation."""
    square = jnp.broadcast_to(x, (700, 700))
    total = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ square), square)[0, 0]
    return jnp.where(jnp.abs(total) > 2, 1.0, 0.0)


class Run(support.Run):
    """A run whose steps take as many rounds as it is told; without any they compute the same."""

    def __init__(self) -> None:
        recorder = adacheck.Recorder(optax.adam(1e-2))
        params = {"w": jnp.arange(4096.0).reshape(64, 64) / 4096, "b": jnp.ones((32, 32))}
        state = {"params": params, "opt": recorder.init(params), "key": jax.random.key(3)}
        self.rounds = 0

        @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
        def step(state: Any, rounds: int) -> Any:
            params = state["params"]
            delay = slow(params["b"][0, 0], rounds) if rounds else 0.0
            gradients = jax.tree.map(lambda p: (p + delay) @ p.T, params)
            updates, opt = recorder.update(gradients, state["opt"], params)
            key = jax.random.split(state["key"], 1)[0]
            return {"params": optax.apply_updates(params, updates), "opt": opt, "key": key}

        super().__init__(recorder, state, lambda state, _: step(state, self.rounds))

    @property
    def is_computing(self) -> bool:
        return not self.state["params"]["w"].is_ready()


def begun(root: Any) -> tuple[Loop, Run]:
    """After four steps a delta of one update is what is expected; the next ones are slow."""
    run = Run()
    loop = Loop(root, run)
    loop.train()
    loop.run.rounds = 1
    loop.save(4)
    support.wait_for_compilers()
    run.rounds = ROUNDS
    return loop, run


@pytest.mark.slow
def test_every_bit_of_a_step_that_was_not_waited_for_is_restored(tmp_path):
    """Recorded or saved; its state is donated meanwhile."""
    (loop, run), expected = begun(tmp_path), Run()
    for _ in range(5):
        expected.advance()
    for deed in "srrss":
        state = loop.train()
        args = adacheck.SaveArgs(state)
        if deed == "r":
            assert loop.handler.record_step(state, loop.number)
        else:
            assert loop.manager.save(loop.number, args=args)
        assert run.is_computing
        loop.states[loop.number] = support.host_copy(expected.advance())
    run.advance()
    assert loop.check() == "BRRRRRR"


@pytest.mark.slow
def test_another_state_of_a_recorded_number_is_an_error(tmp_path):
    loop, run = begun(tmp_path)
    assert loop.handler.record_step(loop.train(), loop.number)
    assert loop.manager.save(loop.number, args=adacheck.SaveArgs(run.advance()))
    error = "step 6 as it was recorded, with 6 updates; found 7"
    with pytest.raises(adacheck.AdaCheckError, match=error):
        loop.manager.wait_until_finished()
    assert loop.check() == "BRRR"


def test_a_delta_is_saved_while_its_step_computes(tmp_path):
    loop, run = begun(tmp_path)
    assert loop.manager.save(loop.number + 1, args=adacheck.SaveArgs(loop.train()))
    assert run.is_computing
    run.advance()  # donates what is being saved
    loop.manager.close()
    assert manifest_of(tmp_path, loop.number).has_update


def test_a_counter_that_is_there_to_be_read_makes_a_base_at_once(tmp_path):
    loop = Loop(tmp_path)
    loop.save(3)
    jax.block_until_ready(loop.train(2))
    loop.put()
    assert loop.check() == "BRRB"


@pytest.mark.parametrize("what", ["two updates", "an optimizer that was reset"])
def test_a_step_that_is_not_one_update_later_is_refused_and_the_next_is_a_base(tmp_path, what):
    loop = Loop(tmp_path)
    loop.save(3)
    support.wait_for_compilers()
    with computing():
        if what == "two updates":
            loop.train(2)
            error: Any = adacheck.AdaCheckError, "went from 3 to 5: not one update"
        else:
            node = loop.run.state["opt_state"][1]
            fresh = loop.run.recorder.tx.init(loop.run.state["params"])
            opt_state = (loop.run.state["opt_state"][0], node._replace(adacheck_inner=fresh))
            loop.run.state = {**loop.run.state, "opt_state": opt_state}
            loop.train()
            error = ReplayError, "does not give the state that was trained"
        loop.put()
        loop.fail(*error)
    loop.save(2)
    assert loop.check() == "BRRBR"
    reason = manifest_of(tmp_path, 5).caution.reason
    assert ("adacheck_inner" in reason) == (what != "two updates")


def test_a_save_at_another_interval_waits_for_the_counter(tmp_path):
    """It may be of several updates; where the interval is the last one it is of one."""
    loop = Loop(tmp_path)
    loop.save(3)
    support.wait_for_compilers()
    with computing():
        loop.train(2)
        loop.number += 1
        loop.put()
    assert loop.check() == "BRRB"
