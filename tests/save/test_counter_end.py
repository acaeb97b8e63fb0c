"""The update counter at its end, and past it: what was reported as saved is restored bit by bit."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.errors import FormatError
from adacheck_jax.save import commit
from adacheck_jax.update.recorder_state import LAST_COUNT
from tests import support
from tests.save.test_checks import assert_all_restorable, kinds

OPTIONS = {name: {"shadow": shadow} for name, shadow in support.SHADOWS.items()}
OPTIONS["bits"] = {"delta": "bits"}


@functools.cache
def program():
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"average": average})

    @jax.jit
    def step(state, number):
        params = state["params"]
        grads = jax.tree.map(lambda p: jnp.sin(3 * p + number), params)
        updates, inner = recorder.update(grads, state["opt_state"], params)
        params = optax.apply_updates(params, updates)
        mean = recorder.derive("average", inner, params, state["average"])
        return {"params": params, "opt_state": inner, "average": mean}

    return recorder, step


def average(params, old, count):
    share = 1 / count.astype(jnp.float32)  # an error where it is 0
    return jax.tree.map(lambda p, a: a + share * (p - a), params, old)


class Run:
    """A run whose counter is near its end; more elements than a sample takes whole."""

    def __init__(self, root, count, **options):
        self.recorder, self._step = program()
        params = {"w": jnp.linspace(-1, 1, 72 * 64).reshape(64, 72), "b": jnp.ones(64)}
        inner = self.recorder.init(params)._replace(adacheck_count=jnp.int32(count))
        self.state = {"params": params, "opt_state": inner, "average": params}
        self.root, self.options, self.number, self.saved = root, options, 0, {}
        self._open()

    def _open(self):
        self.handler = adacheck.AdaCheckHandler(self.recorder, **self.options)
        self.manager = support.manager_of(self.root, self.handler)

    @property
    def count(self):
        return int(self.state["opt_state"].adacheck_count)

    def train(self):
        self.state = jax.block_until_ready(self._step(self.state, float(self.number)))
        self.number += 1

    def save(self):
        assert self.manager.save(self.number, args=adacheck.SaveArgs(self.state))
        self.saved[self.number] = support.host_copy(self.state)

    def record_or_save(self):
        if self.handler.record_step(self.state, self.number):
            self.saved[self.number] = support.host_copy(self.state)
        else:
            self.save()

    def reopen(self):
        self.manager.close()
        self._open()
        target = support.abstract(self.state)
        self.state = self.manager.restore(self.number, args=adacheck.RestoreArgs(target))

    def close(self):
        self.manager.close()
        assert_all_restorable(self.root, self.saved, self.state)


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("computing", [False, True], ids=["ready", "computing"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("left", [2, 3, 4, 5, 6, 7])
def test_a_run_goes_on_past_the_end_of_its_counter(tmp_path, monkeypatch, left, options, computing):
    run = Run(tmp_path, LAST_COUNT - left, **OPTIONS[options])
    for does in ("save", "save", "save", "record", "record", "save", "reopen", "save", "record"):
        if does == "reopen":
            run.reopen()
            continue
        run.train()
        with monkeypatch.context() as patch:
            if computing:  # nothing is looked at before its save returns
                patch.setattr(transfer, "are_ready", lambda _: False)
            run.save() if does == "save" else run.record_or_save()
    run.train()
    run.save()
    assert run.count == 9 - left
    run.close()
    assert len(run.saved) == 9
    assert set(kinds(tmp_path)[1:]) == ({"D"} if options == "bits" else {"R"})


@pytest.mark.first(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [LAST_COUNT, -(2**31), -1, 5])
def test_a_counter_that_stands_still_while_the_state_goes_on_is_noticed(tmp_path, count, options):
    """As that of an optimizer does which counts to the end of its type and no further."""
    run = Run(tmp_path, count, **OPTIONS[options])
    for _ in range(5):
        run.train()
        inner = run.state["opt_state"]._replace(adacheck_count=jnp.int32(count))
        run.state = {**run.state, "opt_state": inner}
        run.save()
    run.close()
    assert len(run.saved) == 5


@pytest.mark.first(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [-(2**31), -3])
def test_a_negative_counter_is_saved(tmp_path, count, options):
    run = Run(tmp_path, count, **OPTIONS[options])
    for _ in range(5):
        run.train()
        run.record_or_save()
    run.train()
    run.save()
    run.close()


def test_what_no_reader_could_read_is_not_committed(tmp_path, monkeypatch):
    run = Run(tmp_path, 0)
    for _ in range(2):
        run.train()
        run.save()
    run.manager.wait_until_finished()
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_pairs", lambda values: ((-1, 0),))
        run.save()
        with pytest.raises(FormatError, match="expected a manifest that can be read back"):
            run.manager.wait_until_finished()
    del run.saved[run.number]
    assert not (tmp_path / str(run.number)).exists()
    run.manager.reload()
    run.train()
    run.save()
    run.close()
    assert kinds(tmp_path) == ["B", "R", "B"]
