"""Element-wise updates are told from those whose bits depend on the order of a sum."""

import logging

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import adacheck_jax as adacheck
from adacheck_jax import lineage, manifest
from adacheck_jax.exactness import reductions_of
from tests import support
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
N = jax.ShapeDtypeStruct((8, 4), jnp.int32)


def reductions_of_update(tx):
    params = support.initial_params()

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return reductions_of(update, (params, tx.init(params), params))


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3, weight_decay=0.1),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 100)),
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
        optax.lion(1e-3),
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        optax.rmsprop(1e-3),
        optax.adagrad(1e-3),
        optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        contrib.schedule_free_adamw(1e-3),
    ],
    ids=lambda tx: type(tx).__name__,
)
def test_element_wise_optimizers(tx):
    assert reductions_of_update(tx).outputs == ()


@pytest.mark.parametrize(
    ("tx", "primitive"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "reduce_sum"),
        (optax.adafactor(1e-3, min_dim_size_to_factor=4), "reduce_sum"),
        (optax.lamb(1e-3), "reduce_sum"),
        (contrib.muon(1e-3), "dot_general"),
    ],
    ids=["clip inside", "adafactor", "lamb", "muon"],
)
def test_reducing_optimizers(tx, primitive):
    found = reductions_of_update(tx)
    assert found.outputs
    assert primitive in found.primitives


def test_only_the_results_that_a_sum_went_into():
    found = reductions_of(lambda x: (x * 2, x / x.sum(), x.T, jnp.max(x) * x), (X,))
    assert found.outputs == (1,)
    assert found.primitives == ("reduce_sum",)


def test_sums_are_found_through_calls_and_control_flow():
    inner = jax.jit(lambda x: x.mean())
    assert reductions_of(lambda x: x * inner(x), (X,)).outputs == (0,)
    assert reductions_of(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y + y.sum(), lambda y: y, x), (X,)
    ).outputs == (0,)
    assert not reductions_of(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y, x), (X,)
    ).outputs
    assert reductions_of(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y.T @ y, x), (X,)
    ).outputs == (0,)


def test_integer_sums_are_exact():
    assert not reductions_of(lambda n: n * n.sum(), (N,)).outputs


def test_an_unknown_operation_counts_as_a_sum():
    assert reductions_of(lambda x: jnp.linalg.qr(x)[0], (X,)).outputs == (0,)


def test_a_reducing_update_is_saved_as_bases_and_the_remedy_is_said_once(tmp_path, caplog):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    run = support.dict_run(mesh_of((4, 2)), tx)
    with (
        caplog.at_level(logging.WARNING, logger="adacheck_jax"),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        saved = save_steps(manager, run, 3)
        target = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 4))))
        assert_same_bits(manager.restore(3, args=target), saved[3])
    found = [step.manifest for step in lineage.steps_of(tmp_path)]
    assert all(isinstance(each, manifest.BaseManifest) for each in found)
    said = [record.getMessage() for record in caplog.records if "bases only" in record.getMessage()]
    assert len(said) == 1
    assert "reduce_sum" in said[0]
    assert "before the Recorder" in said[0]
