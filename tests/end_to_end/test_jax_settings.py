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
from tests import support
from tests.campaigns import contexts
from tests.save.loop import Loop
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of

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


def run_of(mesh):
    """A run with NaN and infinities in its state, a key, host values, and wide elements."""
    recorder = adacheck.Recorder(optax.adam(1e-2), dtype=jnp.bfloat16)
    run = support.program_of(mesh, recorder).run()
    train_step = run.train_step

    def advanced(state, data):
        trained = {name: leaf for name, leaf in state.items() if name != "rest"}
        rest = {
            "key": jax.random.key(run.count),
            "on_host": np.array([np.nan, np.inf, run.count]),
            "number": 3,
            "nibbles": jnp.arange(4).astype(jnp.uint4),
            "wide": jnp.arange(3.0) * np.inf,  # NaN among infinities
        }
        poisoned = jax.tree.map(lambda x: x * np.nan, data)
        return {**train_step(trained, poisoned), "rest": rest}

    run.train_step = advanced
    return run


def wanted(state, mesh):
    trained = {name: leaf for name, leaf in state.items() if name != "rest"}
    rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x,
        state["rest"],
    )
    return {**abstract(trained, mesh), "rest": rest}


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
    with wide, Loop(tmp_path, run_of(mesh_of((2,))), delta=delta) as loop:
        for step in range(1, 6):
            state = loop.train()
            loop.note()
            with everywhere(name, SETTINGS[name]):
                if step == 4 and delta == "auto":
                    assert loop.handler.record_step(state, step)
                    continue
                loop.manager.save(step, args=adacheck.SaveArgs(state))
                loop.manager.wait_until_finished()
        target, held = wanted(state, mesh_of((1,))), {4: 5} if delta == "auto" else {}
        with everywhere(name, SETTINGS[name]):
            for step, expected in loop.states.items():
                args = adacheck.RestoreArgs(target, step=step if step in held else None)
                found = loop.manager.restore(held.get(step, step), args=args)
                assert_same_bits(found, expected)
            assert loop.handler.restored.replayed_count == (0 if delta == "bits" else 4)
            assert not replica_report(state).divergences
