"""Exported updates: made once for all handlers of a recorder, and gone with it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update import exported_program
from adacheck_jax.update.binding import recorders_of
from tests import support
from tests.save.loop import Loop


def exported_by_a_new_handler(recorder, params, check="full"):
    state = {"params": params, "opt": recorder.init(params)}
    structure = Snapshots(recorders_of(recorder), None).take(state).structure
    return ExportedUpdates(check).of(structure)


def test_an_update_is_exported_once_for_all_handlers_of_a_recorder(monkeypatch):
    export, count = exported_program.export, []

    def counted(*args):
        if "cpu" in args[3]:  # those for other platforms are exported in the background
            count.append(1)
        return export(*args)

    monkeypatch.setattr(exported_program, "export", counted)
    recorder, params = adacheck.Recorder(optax.sgd(0.1, momentum=0.9)), {"w": jnp.ones(8)}
    first = exported_by_a_new_handler(recorder, params)
    assert first.files().keys() == {*exported_program.PLATFORMS}
    assert exported_by_a_new_handler(recorder, params) is first
    assert len(count) == 1
    assert exported_by_a_new_handler(recorder, params, check="sample") is not first
    other = exported_by_a_new_handler(recorder, {"w": jnp.ones(9)})
    assert other.digest != first.digest
    another = adacheck.Recorder(optax.sgd(0.1, momentum=0.9))
    assert exported_by_a_new_handler(another, params) is not first
    assert len(count) == 4


def counting(rate):
    """Gradient descent at ``rate[0]``, and a list that grows with each call of its update."""
    calls = []

    def update(updates, state, params=None):
        del params
        calls.append(len(jax.tree.leaves(updates)))
        return jax.tree.map(lambda g: -rate[0] * g, updates), state

    return optax.GradientTransformation(optax.sgd(0.1).init, update), calls


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_update_is_not_called_again_for_its_export_and_its_samples(is_compiled):
    tx, calls = counting([0.5])
    recorder, params = adacheck.Recorder(tx), {f"w{i}": jnp.ones((8, 16)) for i in range(3)}
    opt = recorder.init(params)
    update = jax.jit(recorder.update) if is_compiled else recorder.update
    update(params, opt, params)
    calls.clear()
    exported = exported_by_a_new_handler(recorder, params, check="auto")
    assert exported.program
    assert exported.engine == "sample"
    assert not calls


def test_what_is_exported_is_what_was_trained_with_though_the_update_reads_another_value_now():
    rate = [0.5]
    recorder, params = adacheck.Recorder(counting(rate)[0]), {"w": jnp.arange(8.0)}
    opt, step = recorder.init(params), jax.jit(recorder.update)
    step(params, opt, params)
    rate[0] = 0.25  # the compiled step goes on with what it was traced with
    updates, _ = step(params, opt, params)
    program = exported_by_a_new_handler(recorder, params)
    function = exported_program.load_own(program.program)
    (found,), _ = function([params["w"]], [], [params["w"]], [], jnp.uint32(0))
    assert np.array_equal(found, params["w"] + updates["w"])


def test_an_update_that_reads_what_the_train_step_computes_is_stored(tmp_path):
    rate = [jnp.float32(1)]

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: -rate[0] * x, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    recorder = adacheck.Recorder(tx)

    @jax.jit
    def step(state, data):
        rate[0] = 0.1 * data[0][0, 0]
        updates, opt = recorder.update(state["params"], state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    params = {"w": jnp.linspace(0.0, 1.0, 40)}
    state = {"params": params, "opt": recorder.init(params)}
    loop = Loop(tmp_path, support.Run(recorder, state, step))
    loop.save(4)
    loop.check()


def test_what_is_kept_for_handlers_lives_as_long_as_the_recorder():
    def functions_of_a_recorder():
        recorder = adacheck.Recorder(optax.sgd(0.1))
        assert recorder.once("key", lambda: [recorder]) == [recorder]
        assert recorder.once("key", list) == [recorder]
        return weakref.ref(recorder.init)

    functions = functions_of_a_recorder()
    gc.collect()
    assert functions() is None


def test_a_recorder_keeps_few_values():
    recorder = adacheck.Recorder(optax.sgd(0.1))
    made = [recorder.once(key, object) for key in range(100)]
    assert recorder.once(99, object) is made[99]
    assert recorder.once(0, object) is not made[0]
