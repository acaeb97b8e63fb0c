"""Element-wise updates are told from those whose bits depend on the order of a sum."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import adacheck_jax as adacheck
from adacheck_jax.update import exactness
from adacheck_jax.update.exactness import Level
from tests import support
from tests.save.loop import Loop, manifest_of
from tests.support import abstract, assert_same_bits, mesh_of

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
N = jax.ShapeDtypeStruct((8, 4), jnp.int32)
S = jax.ShapeDtypeStruct((), jnp.float32)


def exactness_of_update(tx):
    params = support.initial_params()

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return exactness.of(update, (params, tx.init(params), params))


def levels_of(function, *arguments):
    return list(exactness.of(function, arguments).levels)


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
    assert set(exactness_of_update(tx).levels) == {Level.ELEMENT}


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
    found = exactness_of_update(tx)
    assert Level.ORDER in found.levels
    assert primitive in found.primitives


def test_only_the_results_that_a_sum_went_into():
    found = exactness.of(lambda x: (x * 2, x / x.sum(), x.T, jnp.max(x) * x), (X,))
    assert found.levels == (Level.ELEMENT, Level.ORDER, Level.PLACE, Level.PLACE)
    assert found.primitives == ("reduce_sum",)


def test_sums_are_found_through_calls_and_control_flow():
    inner = jax.jit(lambda x: x.mean())
    assert levels_of(lambda x: x * inner(x), X) == [Level.ORDER]
    branches = (lambda y: y + y.sum(), lambda y: y)
    assert levels_of(lambda x: jax.lax.cond(x[0, 0] > 0, *branches, x), X) == [Level.ORDER]
    loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y.T @ y, x)  # noqa: E731
    assert levels_of(loop, X) == [Level.ORDER]


@pytest.mark.parametrize("pinned", [False, True])
def test_sums_are_found_where_an_operation_takes_what_it_adds_up_by(pinned):
    """Their own jaxpr says what is done with two elements, and not in which order."""
    rows = jnp.array([0, 0])
    sums = [
        lambda x: x.at[rows].add(x[:2]),
        lambda x: x.at[rows].multiply(x[:2]),
        lambda x: jax.lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 2, (0,)),
        lambda x: jax.lax.reduce_window(
            x, jnp.float32(0), lambda a, b: a + b * 2, (2, 1), (1, 1), "SAME"
        ),
    ]
    for function in sums:
        assert exactness.of(function, (X,), pinned=pinned).levels == (Level.ORDER,)
    placed = exactness.of(lambda n: (n.at[rows].add(1), n.at[rows].set(1)), (N,), pinned=pinned)
    assert placed.levels == (Level.PLACE, Level.PLACE)


def test_a_branch_is_as_exact_as_what_is_chosen_and_the_choice():
    def chosen(x, n):
        branches = (lambda y, z: (y + 1, z), lambda y, z: (y, z * y.sum()))
        return jax.lax.cond(n > 0, *branches, x, x)

    assert levels_of(chosen, X, S) == [Level.ELEMENT, Level.ORDER]
    by_sum = lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)  # noqa: E731
    assert levels_of(by_sum, X) == [Level.ORDER]


def test_scalars_have_no_place_and_arrays_have():
    assert levels_of(lambda x, n: x * n + jnp.broadcast_to(n, x.shape), X, S) == [Level.ELEMENT]
    assert levels_of(lambda x: x * jnp.arange(4), X) == [Level.PLACE]
    mask = jnp.ones((8, 4))
    assert levels_of(lambda x: x * mask, X) == [Level.PLACE]  # a mask that is a constant has places
    assert levels_of(lambda x: jax.random.normal(jax.random.key(0), x.shape), X) == [Level.PLACE]


def test_what_is_passed_through_is_known_by_the_input_that_it_was():
    def update(x, n):
        inner = jax.jit(lambda a, b: (b, a + 1))
        y, z = inner(x, n)
        kept = jax.lax.cond(n > 0, lambda a: (a, a * 2), lambda a: (a, a), x)
        return y, z, jax.lax.optimization_barrier((x, n))[1], *kept

    assert exactness.of(update, (X, S)).origins == (1, None, 1, 0, None)


def test_integer_sums_are_exact():
    assert levels_of(lambda n: n * n.sum(), N) == [Level.PLACE]


def test_an_unknown_operation_counts_as_a_sum():
    assert levels_of(lambda x: jnp.linalg.qr(x)[0], X) == [Level.ORDER]


def added_up(updates, _):
    """Sums as large as what they add up."""
    flat, tree = jax.flatten_util.ravel_pytree(updates)
    return tree(jnp.cumsum(flat))


SUMS = optax.chain(optax.stateless(added_up), optax.adam(1e-3))


@pytest.mark.slow
def test_an_update_with_large_sums_in_the_train_steps_program_is_not_replayed(tmp_path, caplog):
    loop = Loop(tmp_path, support.dict_run(mesh_of((4, 2)), SUMS))
    loop.save(4)
    for mesh in (mesh_of((4, 2)), mesh_of((2, 4)), mesh_of((1, 1))):
        target = adacheck.RestoreArgs(abstract(loop.run.state, mesh))
        assert_same_bits(loop.manager.restore(4, args=target), loop.states[4])
        assert loop.handler.restored.exact
    assert loop.check() == "BDDD"
    (warning,) = [x.getMessage() for x in caplog.records if x.name.startswith("adacheck_jax")]
    for part in ("bit-pattern deltas", "cumsum", "before the Recorder", "separate_update"):
        assert part in warning
    update = manifest_of(tmp_path, 1).update
    paths = [manifest_of(tmp_path, 1).leaves[i].path for i in update.reducing]
    assert {"params/in/kernel", "params/scale"} <= {*paths}
    assert not any(path.endswith("count") for path in paths)


@pytest.mark.slow
def test_the_class_of_each_leaf_is_in_the_manifest(tmp_path):
    tx = optax.inject_hyperparams(optax.adam)(1e-3)
    with Loop(tmp_path, support.dict_run(mesh_of((2, 2)), tx)) as loop:
        loop.save()
    base = manifest_of(tmp_path, 1)
    assert base.update.reducing == ()
    paths = [[base.leaves[i].path for i in each] for each in (base.update.extra, base.update.inner)]
    consumed, inner = ([x for x in each if x.endswith("learning_rate")] for each in paths)
    assert [path.split("/")[2] for path in consumed] == ["adacheck_passed"]
    assert not inner
