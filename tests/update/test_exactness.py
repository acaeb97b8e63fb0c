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


ELEMENT_WISE = [
    optax.adamw(1e-3, weight_decay=0.1),
    optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 100)),
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    optax.sgd(1e-2, momentum=0.9, nesterov=True),
    optax.chain(optax.clip(1.0), optax.rmsprop(1e-3)),
    optax.inject_hyperparams(optax.adamw)(1e-3),
    contrib.schedule_free_adamw(1e-3),
]
REDUCING = {
    "reduce_sum": [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.adafactor(1e-3, min_dim_size_to_factor=4),
        optax.lamb(1e-3),
    ],
    "dot_general": [contrib.muon(1e-3)],
}


@pytest.mark.parametrize(
    ("tx", "primitive"),
    [*((tx, None) for tx in ELEMENT_WISE), *((x, k) for k, txs in REDUCING.items() for x in txs)],
)
def test_optimizers(tx, primitive):
    params = support.initial_params()

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = exactness.of(update, (params, tx.init(params), params))
    if primitive is None:
        assert {*found.levels} == {Level.ELEMENT}
    else:
        assert Level.ORDER in found.levels
        assert primitive in found.primitives


def chosen(x, n):
    branches = (lambda y, z: (y + 1, z), lambda y, z: (y, z * y.sum()))
    return jax.lax.cond(n > 0, *branches, x, x)


ROWS = jnp.array([0, 0])
MASK = jnp.ones((8, 4))
E, P, O = Level  # noqa: E741
FUNCTIONS = {
    "those that a sum went into": (
        lambda x: (x * 2, x / x.sum(), x.T, jnp.max(x) * x), (X,), [E, O, P, P],
    ),
    "a sum in a call": (lambda x: x * jax.jit(jnp.mean)(x), (X,), [O]),
    "in a branch": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y + y.sum(), lambda y: y, x), (X,), [O],
    ),
    "in a loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y.T @ y, x), (X,), [O],
    ),
    "a branch of several results": (chosen, (X, S), [E, O]),
    "a choice by a sum": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), (X,), [O]),
    "scalars have no place": (
        lambda x, n: x * n + jnp.broadcast_to(n, x.shape), (X, S), [E],
    ),
    "an array has": (lambda x: x * jnp.arange(4), (X,), [P]),
    "a constant mask has": (lambda x: x * MASK, (X,), [P]),
    "noise": (lambda x: jax.random.normal(jax.random.key(0), x.shape), (X,), [P]),
    "integer sums are exact": (lambda n: n * n.sum(), (N,), [P]),
    "an unknown operation counts as a sum": (lambda x: jnp.linalg.qr(x)[0], (X,), [O]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, arguments, levels = FUNCTIONS[name]
    assert [*exactness.of(function, arguments).levels] == levels


@pytest.mark.parametrize("pinned", [False, True])
def test_sums_are_found_where_an_operation_takes_what_it_adds_up_by(pinned):
    """Their own jaxpr says what is done with two elements, and not in which order."""
    add, zero = lambda a, b: a + b * 2, jnp.float32(0)
    sums = [
        lambda x: x.at[ROWS].add(x[:2]),
        lambda x: x.at[ROWS].multiply(x[:2]),
        lambda x: jax.lax.reduce(x, zero, add, (0,)),
        lambda x: jax.lax.reduce_window(x, zero, add, (2, 1), (1, 1), "SAME"),
    ]
    for function in sums:
        assert exactness.of(function, (X,), pinned=pinned).levels == (O,)
    placed = exactness.of(lambda n: (n.at[ROWS].add(1), n.at[ROWS].set(1)), (N,), pinned=pinned)
    assert placed.levels == (P, P)


def test_what_is_passed_through_is_known_by_the_input_that_it_was():
    def update(x, n):
        inner = jax.jit(lambda a, b: (b, a + 1))
        y, z = inner(x, n)
        kept = jax.lax.cond(n > 0, lambda a: (a, a * 2), lambda a: (a, a), x)
        return y, z, jax.lax.optimization_barrier((x, n))[1], *kept

    assert exactness.of(update, (X, S)).origins == (1, None, 1, 0, None)


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
