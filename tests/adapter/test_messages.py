"""Errors that say what to do, and are shown whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError, RecorderError
from adacheck_jax.tools import verification
from tests.support import manager_of


@pytest.mark.first(1)
@pytest.mark.parametrize("is_inside", [True, False])
def test_gradients_of_single_examples_tell_where_the_recorder_goes(tmp_path, is_inside):
    private = contrib.differentially_private_aggregate(1.0, 0.1, key=0)
    inner = optax.chain(private, optax.sgd(0.1)) if is_inside else optax.sgd(0.1)
    recorder = adacheck.Recorder(inner)
    tx = recorder if is_inside else optax.chain(recorder, private)
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    grads = jax.tree.map(lambda p: jnp.ones((5, *p.shape)), params)
    _, opt_state = tx.update(grads, tx.init(params), params)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        args = adacheck.SaveArgs({"params": params, "opt_state": opt_state})
        with pytest.raises(RecorderError, match="Put the Recorder after the aggregation"):
            manager.save(1, args=args)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("/a/b: it is cut. Restore another step.", "it is cut"),
        ("/a/b: it is cut. The step is damaged; restore another one.", "it is cut"),
        ("/a/b: it is cut. The file is no manifest; restore another step.", "it is cut. The file "),
        ("/a/b: it is cut. Mount the disk; it may be whole.", "it is cut. Mount the disk; it may"),
    ],
)
def test_a_row_of_damage_ends_with_a_whole_sentence(said, shown):
    message = verification.damage_of(IntegrityError(said), "/a").message
    assert message.startswith(shown)
    assert not message.endswith((";", ","))
