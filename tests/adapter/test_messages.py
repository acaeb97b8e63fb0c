"""Errors that say what to do, and are shown whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError, RecorderError
from adacheck_jax.tools import inspection, verification
from tests.support import manager_of


@pytest.mark.slow
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


def run_of(recorder, tx, width=64):
    """A state, and a train step that donates it."""
    params = {"w": jax.random.normal(jax.random.key(0), (width, width)), "b": jnp.zeros(width)}
    state = {"params": params, "opt_state": tx.init(params)}

    @jax.jit(donate_argnums=0)
    def train_step(state, inputs):
        def loss_of(params):
            return jnp.mean((jnp.tanh(inputs @ params["w"] + params["b"]) - inputs) ** 2)

        grads = jax.grad(loss_of)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return state, train_step


def save(manager, state, train_step, count=3):
    for step in range(count):
        state = train_step(state, jax.random.normal(jax.random.key(step), (8, 64)))
        manager.save(step, args=adacheck.SaveArgs(state))
    manager.wait_until_finished()
    return state


@pytest.mark.parametrize(
    ("options", "is_told"), [({}, True), ({"delta": "bits"}, False), ({"max_deltas": 0}, False)]
)
def test_who_forgets_the_recorder_is_warned_at_the_second_base(tmp_path, caplog, options, is_told):
    state, train_step = run_of(None, optax.adamw(1e-3))
    with adacheck.checkpoint_manager(tmp_path, **options) as manager:
        state = save(manager, state, train_step, 1)
        assert "full state" not in caplog.text  # one of them may be all that is wanted
        for step in (1, 2):
            manager.save(step, args=adacheck.SaveArgs(state))
    assert caplog.text.count("since the handler was given no recorder") == int(is_told)


@pytest.mark.slow
def test_saves_tell_of_leaves_kept_as_bits_and_restores_do_not(tmp_path, caplog):
    recorder = adacheck.Recorder(contrib.muon(1e-3))
    state, train_step = run_of(recorder, optax.chain(optax.clip_by_global_norm(1.0), recorder))
    told = "Saving these leaves as bit patterns: 1 leaf (params/w) come out of dot_general"
    with adacheck.checkpoint_manager(tmp_path, recorder) as manager:
        state = save(manager, state, train_step)
        assert caplog.text.count(told) == 1
    (leaf,) = (x for x in inspection.describe_step(tmp_path).leaves if x.path == "params/w")
    assert (leaf.source, leaf.exactness) == ("differences", None)
    caplog.clear()
    with adacheck.checkpoint_manager(tmp_path, recorder) as manager:
        state = manager.restore(2, args=adacheck.RestoreArgs(state))
        assert "Saving" not in caplog.text
        state = train_step(state, jnp.ones((8, 64)))
        manager.save(3, args=adacheck.SaveArgs(state))
    assert told in caplog.text


def test_the_log_says_by_what_a_delta_is_checked_where_there_is_no_host_copy(tmp_path, caplog):
    caplog.set_level("INFO", "adacheck_jax")
    recorder = adacheck.Recorder(contrib.muon(1e-3))
    state, train_step = run_of(recorder, recorder)
    with adacheck.checkpoint_manager(tmp_path, recorder) as manager:
        save(manager, state, train_step)
        assert manager.handler.last_save.checked == "full"
    assert "checked by sample" not in caplog.text
    lines = [each.getMessage() for each in caplog.records]
    (first,) = (n for n, line in enumerate(lines) if "first save of a process compiles" in line)
    assert first < next(n for n, line in enumerate(lines) if line.startswith("step 0: base"))


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
