"""Operations of an update on rows: those of the whole update, or of one that is traced on rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update import program
from adacheck_jax.update.binding import recorders_of
from adacheck_jax.update.elements import row_program
from adacheck_jax.update.pinning.flat_jaxpr import flatten


def scaled(rate_of):
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: rate_of(u) * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


RATE = 1e-2
TAKEN_OVER = {
    "adamw": optax.adamw(RATE),
    "masked": optax.adamw(RATE, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "bfloat16 momentum": optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "warmup": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 3, 40)),
    "spread numbers": scaled(lambda u: jnp.full(u.shape, -RATE)),
    "lion": optax.lion(RATE),
    "nesterov": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(RATE, centered=True, momentum=0.9),
    "clipped by value": optax.chain(optax.clip(0.05), optax.zero_nans(), optax.adam(RATE)),
    "clipped by norm": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(RATE)),
    "accumulated": optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
}


def whole_update(tx):
    """The update of a small state as a function of flat leaves, and what it takes."""
    recorder = adacheck.Recorder(tx)
    shapes = {"w": (24, 40), "v": (700,), "t": (2, 3, 130), "s": (), "none": (4, 0)}
    params = {name: jnp.full(shape, 0.5) for name, shape in shapes.items()}
    state = {"params": params, "opt": recorder.init(params)}

    @jax.jit
    def step(state):
        gradients = jax.tree.map(jnp.sin, state["params"])
        updates, opt = recorder.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    structure = Snapshots(recorders_of(recorder), None).take(step(state)).structure
    specs = [
        [jax.ShapeDtypeStruct(structure.leaves[i].shape, structure.leaves[i].dtype) for i in each]
        for each in structure.arguments
    ]
    return program.joint_function(structure.bindings), specs, program.switches(1)


def described(flat):
    return [
        (
            op.name,
            [ref if isinstance(ref, int) else np.asarray(ref.val).tobytes() for ref in op.inputs],
        )
        + (op.outputs, [*op.shapes.values()], [(x.shape, x.dtype) for x in op.avals])
        + (op.eqn.params.get("shape"),)
        for op in flat.ops
    ], flat.outputs


@pytest.mark.parametrize("name", TAKEN_OVER)
def test_operations_with_other_shapes_are_those_that_a_trace_on_rows_gives(name, monkeypatch):
    function, specs, switches = whole_update(TAKEN_OVER[name])
    whole = flatten(jax.make_jaxpr(function)(*specs, switches).jaxpr)
    assert row_program._on_rows(whole) is not None
    found = row_program.row_program(function, specs, switches)
    monkeypatch.setattr(row_program, "_on_rows", lambda flat: None)
    traced = row_program.row_program(function, specs, switches)
    assert described(found.flat) == described(traced.flat)
    shapes = [{i: (x.shape, x.dtype) for i, x in each.avals.items()} for each in (found, traced)]
    assert shapes[0] == shapes[1]
    assert found.words == traced.words


def test_numbers_that_depend_on_a_shape_are_those_of_the_whole_update():
    function, specs, switches = whole_update(scaled(lambda u: -1.0 / (1 + u.size)))
    flat = row_program.row_program(function, specs, switches).flat
    numbers = {float(ref.val) for op in flat.ops for ref in op.inputs if not isinstance(ref, int)}
    assert numbers.issuperset({np.float32(-1.0 / (1 + n)).item() for n in (960, 700, 780)})


def test_an_operation_that_tells_more_of_a_shape_is_traced():
    turned = scaled(lambda u: -0.1 * jnp.flip(u) if u.ndim == 1 else -0.1)
    function, specs, switches = whole_update(turned)
    assert row_program._on_rows(flatten(jax.make_jaxpr(function)(*specs, switches).jaxpr)) is None
    names = [op.name for op in row_program.row_program(function, specs, switches).flat.ops]
    assert "rev" in names
