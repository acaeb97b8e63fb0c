"""The update counter at its end, and past it: what was reported as saved is restored bit by bit."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError
from adacheck_jax.save import commit
from adacheck_jax.update.recorder_state import LAST_COUNT
from tests import support
from tests.save.loop import Loop, computing

OPTIONS = {name: {"shadow": shadow} for name, shadow in support.SHADOWS.items()}
OPTIONS["bits"] = {"delta": "bits"}
COUNT = "opt_state/adacheck_count"


@functools.cache
def program():
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"average": average})

    @jax.jit
    def step(state, data):
        params = state["params"]
        grads = jax.tree.map(lambda p: jnp.sin(3 * p + data[0][0, 0]), params)
        updates, inner = recorder.update(grads, state["opt_state"], params)
        params = optax.apply_updates(params, updates)
        mean = recorder.derive("average", inner, params, state["average"])
        return {"params": params, "opt_state": inner, "average": mean}

    return recorder, step


def average(params, old, count):
    share = 1 / count.astype(jnp.float32)  # an error where it is 0
    return jax.tree.map(lambda p, a: a + share * (p - a), params, old)


def loop_at(root, count, **options):
    """A run whose counter is near its end; more elements than a sample takes whole."""
    recorder, step = program()
    params = {"w": jnp.linspace(-1, 1, 72 * 64).reshape(64, 72), "b": jnp.ones(64)}
    inner = recorder.init(params)._replace(adacheck_count=jnp.int32(count))
    state = {"params": params, "opt_state": inner, "average": params}
    train_step = lambda state, data: jax.block_until_ready(step(state, data))  # noqa: E731
    return Loop(root, support.Run(recorder, state, train_step), **options)


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("is_computing", [False, True], ids=["ready", "computing"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("left", [2, 3, 4, 5, 6, 7])
def test_a_run_goes_on_past_the_end_of_its_counter(tmp_path, left, options, is_computing):
    loop = loop_at(tmp_path, LAST_COUNT - left, **OPTIONS[options])
    for does in ("save", "save", "save", "record", "record", "save", "reopen", "save", "record"):
        if does == "reopen":
            loop.manager.wait_until_finished()
            loop.reopen()
            continue
        with computing(is_computing):  # nothing is looked at before its save returns
            if does == "save":
                loop.train()
                loop.put()
            else:
                loop.keep()
    loop.save()
    assert int(loop.run.state["opt_state"].adacheck_count) == 9 - left
    assert len(loop.states) == 9
    assert {*loop.check()[1:]} == ({"D"} if options == "bits" else {"R"})


@pytest.mark.first(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [LAST_COUNT, -(2**31), -1, 5])
def test_a_counter_that_stands_still_while_the_state_goes_on_is_noticed(tmp_path, count, options):
    """As that of an optimizer does which counts to the end of its type and no further."""
    loop = loop_at(tmp_path, count, **OPTIONS[options])
    for _ in range(5):
        loop.train()
        loop.edit(COUNT, lambda _: jnp.int32(count))
        loop.put()
    loop.check()


@pytest.mark.first(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [-(2**31), -3])
def test_a_negative_counter_is_saved(tmp_path, count, options):
    loop = loop_at(tmp_path, count, **OPTIONS[options])
    loop.keep(5)
    loop.save()
    loop.check()


def test_what_no_reader_could_read_is_not_committed(tmp_path, monkeypatch):
    loop = loop_at(tmp_path, 0)
    loop.save(2)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_pairs", lambda values: ((-1, 0),))
        loop.train()
        loop.put()
        loop.fail(FormatError, "expected a manifest that can be read back")
    assert not (tmp_path / "3").exists()
    loop.save()
    assert loop.check() == "BRB"
