"""A delta's save does not wait for the step that is still computing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import manifest_file
from tests import support

ROUNDS = 100
"""Of a step that computes while it is saved: most of a second."""
WAITED = 30
"""Of a step that is waited for, and computes much longer than a save that does not wait."""


def slow(x, rounds=ROUNDS):
    """The zero of a long computation."""
    square = jnp.broadcast_to(x, (700, 700))
    total = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ square), square)[0, 0]
    return jnp.where(jnp.abs(total) > 2, 1.0, 0.0)


class Run:
    """A training loop whose steps are slow when they are told to be."""

    def __init__(self, make=optax.adam):
        self.recorder = adacheck.Recorder(make(1e-2))
        params = {"w": jnp.arange(4096.0).reshape(64, 64) / 4096, "b": jnp.ones((32, 32))}
        self.state = {"params": params, "opt": self.recorder.init(params), "key": jax.random.key(3)}
        self._step = jax.jit(self._advance, donate_argnums=0, static_argnums=2)

    def _advance(self, state, rounds, is_slow):
        delay = slow(state["params"]["b"][0, 0], rounds) if is_slow else 0.0
        gradients = jax.tree.map(lambda p: (p + delay) @ p.T, state["params"])
        updates, opt = self.recorder.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": jax.random.split(state["key"], 1)[0]}

    def advance(self, *, is_slow=False, rounds=ROUNDS):
        self.state = self._step(self.state, rounds, is_slow)
        return self.state

    @property
    def is_computing(self):
        return not self.state["params"]["w"].is_ready()


def bits_of(state):
    leaves = jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])})
    return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.fixture
def run():
    return Run()


def manager_of(root, run, **options):
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    return ocp.CheckpointManager(root, item_handlers=handler)


def save(manager, step, run):
    assert manager.save(step, args=adacheck.SaveArgs(run.state))


def begin(manager, run):
    """Four steps: after these a delta of one update is what is expected."""
    saved = {}
    run.advance(is_slow=True, rounds=1)
    for step in range(4):
        run.advance()
        save(manager, step, run)
        saved[step] = bits_of(run.state)
    manager.wait_until_finished()
    support.wait_for_compilers()
    return saved


def kind_of(root, step):
    return type(manifest_file.read(root / str(step) / "default"))


def test_a_delta_is_saved_while_its_step_computes(run, tmp_path):
    with manager_of(tmp_path, run) as manager:
        begin(manager, run)
        run.advance(is_slow=True)
        save(manager, 4, run)
        assert run.is_computing
        run.advance()  # donates what is being saved
        manager.wait_until_finished()
        assert kind_of(tmp_path, 4) is manifest.DeltaManifest


@pytest.mark.slow
def test_every_bit_of_a_step_that_was_not_waited_for_is_restored(tmp_path):
    expected, run = Run(), Run()
    with manager_of(tmp_path, run) as manager:
        saved = begin(manager, run)
        assert begin_without_saving(expected) == saved[3]
        for step in (4, 5, 6, 7):
            run.advance(is_slow=True)
            save(manager, step, run)
            assert run.is_computing
            expected.advance(is_slow=True, rounds=1)
            saved[step] = bits_of(expected.state)
        manager.wait_until_finished()
        for step, bits in saved.items():
            kind = manifest.DeltaManifest if step else manifest.BaseManifest
            assert kind_of(tmp_path, step) is kind
            restored = manager.restore(step, args=adacheck.RestoreArgs(run.state))
            assert bits_of(restored) == bits


def begin_without_saving(run):
    run.advance(is_slow=True, rounds=1)
    for _ in range(4):
        run.advance()
    return bits_of(run.state)


@pytest.mark.slow
def test_a_step_that_is_not_one_update_later_is_refused_and_the_next_is_a_base(run, tmp_path):
    with manager_of(tmp_path, run) as manager:
        saved = begin(manager, run)
        run.advance(is_slow=True)
        run.advance(is_slow=True)
        save(manager, 4, run)
        assert run.is_computing
        with pytest.raises(adacheck.AdaCheckError, match=r"went from 5 to 7: not one update"):
            manager.wait_until_finished()
        manager.reload()
        run.advance()
        save(manager, 5, run)
        saved[5] = bits_of(run.state)
        run.advance()
        save(manager, 6, run)
        saved[6] = bits_of(run.state)
        manager.wait_until_finished()
        assert kind_of(tmp_path, 5) is manifest.BaseManifest
        assert kind_of(tmp_path, 6) is manifest.DeltaManifest
        for step, bits in saved.items():
            assert bits_of(manager.restore(step, args=adacheck.RestoreArgs(run.state))) == bits
        assert 4 not in manager.all_steps()


def test_a_counter_that_is_there_to_be_read_makes_a_base_at_once(run, tmp_path):
    with manager_of(tmp_path, run) as manager:
        begin(manager, run)
        run.advance()
        run.advance()
        jax.block_until_ready(run.state)
        save(manager, 4, run)
        manager.wait_until_finished()
        assert kind_of(tmp_path, 4) is manifest.BaseManifest


@pytest.mark.slow
def test_saves_further_apart_than_the_last_wait_for_the_counter(run, tmp_path):
    with manager_of(tmp_path, run) as manager:
        begin(manager, run)
        run.advance()
        run.advance(is_slow=True, rounds=WAITED)
        save(manager, 5, run)
        assert not run.is_computing
        manager.wait_until_finished()
        assert kind_of(tmp_path, 5) is manifest.BaseManifest


@pytest.mark.slow
def test_an_optimizer_that_was_reset_while_it_computes_is_refused(tmp_path):
    run = Run(lambda rate: optax.adam(optax.linear_schedule(rate, 0.0, 100)))
    with manager_of(tmp_path, run) as manager:
        begin(manager, run)
        inner = run.recorder.tx.init(run.state["params"])
        run.state["opt"] = run.state["opt"]._replace(adacheck_inner=inner)
        run.advance(is_slow=True)
        save(manager, 4, run)
        assert run.is_computing
        with pytest.raises(ReplayError, match="does not give the state that was trained"):
            manager.wait_until_finished()
        run.advance()
        save(manager, 5, run)
        manager.wait_until_finished()
        assert kind_of(tmp_path, 5) is manifest.BaseManifest
        assert "adacheck_inner" in manifest_file.read(tmp_path / "5" / "default").caution.reason


@pytest.mark.slow
def test_accumulated_gradients_are_told_from_updates_in_the_background(tmp_path):
    recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9))
    tx = optax.MultiSteps(recorder, every_k_schedule=2)
    params = {"w": jnp.ones((32, 32))}
    state = {"params": params, "opt": tx.init(params)}

    def advance(state, is_slow):
        delay = slow(state["params"]["w"][0, 0], WAITED) if is_slow else 0.0
        gradients = jax.tree.map(lambda p: (p + delay) @ p.T, state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    step_of = jax.jit(advance, donate_argnums=0, static_argnums=1)
    handler = adacheck.AdaCheckHandler(recorder, params_path="params")
    saved = {}
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        for step in range(11):
            state = step_of(state, step > 7)
            assert manager.save(step, args=adacheck.SaveArgs(state))
            saved[step] = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        manager.wait_until_finished()
        assert len(manager.all_steps()) == 11
        for step, bits in saved.items():
            restored = manager.restore(step, args=adacheck.RestoreArgs(state))
            assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restored)] == bits
