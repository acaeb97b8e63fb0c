"""Saves and restores under the jax settings with which users look for faults of their own."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.tools import replica_report
from tests.campaigns import contexts
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, place

SETTINGS = {
    "jax_disable_jit": True,
    "jax_no_tracing": True,
    "jax_transfer_guard": "disallow",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": True,
}


@contextlib.contextmanager
def everywhere(name, value):
    """A setting of all threads, as an environment variable gives it."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


class Training:
    """Adam with NaN and infinities in its state, a key, host values, and wide elements."""

    def __init__(self, mesh):
        self.recorder = adacheck.Recorder(optax.adam(1e-2), dtype=jnp.bfloat16)
        params = {"w": jnp.ones((16, 32)), "b": jnp.zeros(32)}
        self.mesh, self.count = mesh, 0
        self.state = place({"params": params, "opt_state": self.recorder.init(params)}, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, self.state)

        def train_step(state, grads):
            updates, opt_state = self.recorder.update(grads, state["opt_state"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

        self.train_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)

    def advance(self):
        rng = np.random.default_rng(self.count)
        grads = {"w": rng.standard_normal((16, 32), np.float32), "b": np.full(32, np.nan)}
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
        self.state = self.train_step(self.state, grads)
        self.count += 1
        rest = {
            "key": jax.random.key(self.count),
            "on_host": np.array([np.nan, np.inf, self.count]),
            "number": 3,
            "nibbles": jnp.arange(4).astype(jnp.uint4),
            "wide": jnp.arange(3.0) * np.inf,  # NaN among infinities
        }
        return {**self.state, "rest": rest}

    def wanted(self, state, mesh):
        on_mesh = {name: abstract(state[name], mesh) for name in ("params", "opt_state")}
        rest = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x,
            state["rest"],
        )
        return {**on_mesh, "rest": rest}


@pytest.mark.first(0, slow=len(contexts.COVERING))
@pytest.mark.parametrize("names", contexts.PAIRS, ids=" ".join)
def test_a_run_goes_on_inside_contexts(tmp_path, names):
    assert contexts.unexpected(names, contexts.trial(names, tmp_path)) == {}
    assert jax.dtypes.canonicalize_dtype("float64") != "float64"  # no setting is left behind


def test_elements_of_64_bits_are_refused_by_name_where_jax_makes_none(tmp_path):
    with jax.enable_x64(True):
        state = {"wide": jnp.arange(5.0) / 3, "count": jnp.arange(3)}
    expected = host_copy(state)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        manager.save(1, args=adacheck.SaveArgs(state))  # the state has them, whatever is set
        manager.wait_until_finished()
        with pytest.raises(MismatchError, match=r"wide: expected float64\[5\], found float32"):
            manager.restore(1, args=adacheck.RestoreArgs(abstract(state)))
        with jax.enable_x64(True):
            args = adacheck.RestoreArgs(abstract(state))
            assert_same_bits(manager.restore(1, args=args), expected)


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize(
    ("name", "delta"), [*((name, "auto") for name in SETTINGS), ("jax_transfer_guard", "bits")]
)
def test_saves_and_restores_work_under(tmp_path, name, delta):
    wide = everywhere(name, True) if name == "jax_enable_x64" else contextlib.nullcontext()
    with wide:
        training, saved = Training(mesh_of((2,))), {}
        handler = adacheck.AdaCheckHandler(
            None if delta == "bits" else training.recorder, delta=delta
        )
        with manager_of(tmp_path, handler) as manager:
            for step in (1, 2, 3):
                state = training.advance()
                saved[step] = host_copy(state)
                with everywhere(name, SETTINGS[name]):
                    manager.save(step, args=adacheck.SaveArgs(state))
                    manager.wait_until_finished()
            if delta == "auto":
                state = training.advance()
                saved[4] = host_copy(state)
                with everywhere(name, SETTINGS[name]):
                    assert handler.record_step(state)
            wanted = training.wanted(state, mesh_of((1,)))
            state = training.advance()
            saved[5] = host_copy(state)
            with everywhere(name, SETTINGS[name]):
                manager.save(5, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
                for step, expected in saved.items():
                    at = 5 if step == 4 else step
                    args = adacheck.RestoreArgs(wanted, step=step if step == 4 else None)
                    assert_same_bits(manager.restore(at, args=args), expected)
                assert handler.restored.replayed_count == (0 if delta == "bits" else 4)
                assert not replica_report(state).divergences
