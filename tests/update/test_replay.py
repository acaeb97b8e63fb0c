import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from adacheck_jax import Recorder
from adacheck_jax.format.manifest import Update
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from tests.support import assert_same_bits, host_copy, mesh_of, place
from tests.update.replaying import bind, lists_of

PARAMS = {
    "dense": {"kernel": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "bias": jnp.ones(64)},
    "scale": jnp.ones(()),
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
}


def copied(tree):
    """Arrays of their own, so that donating them leaves the others alone."""
    return jax.tree.map(lambda x: jnp.asarray(np.array(x)), tree)


def gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), PARAMS)


def exported(recorder, state):
    """The exported update of a state, and the manifest's note of it."""
    binding = bind(recorder, state)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lists_of(binding, state)
    )
    data = exported_program.export(
        update_program.update_function(recorder, binding.signature),
        arguments,
        update_program.switches(1),
        ["cpu"],
    )["cpu"]
    return data, note_of(data)


def note_of(data):
    return Update(
        *((), (), (), (), (0,), ((0, 0, 0, 0),), (), (), "", ""),
        *({"cpu": hashlib.sha256(data).hexdigest()}, "0.0.1", True),
    )


FRESH = """
import hashlib, jax, jax.numpy as jnp, optax
from adacheck_jax import Recorder
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
recorder = Recorder(optax.adamw(1e-2))
params = {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}
state = recorder.init(params)
leaves = [jax.tree.leaves(t) for t in (params, state.adacheck_inner, state.adacheck_record, {})]
arguments = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in each] for each in leaves]
function = update_program.update_function(recorder, recorder.signatures[0])
switches, platforms = update_program.switches(1), exported_program.PLATFORMS
programs = exported_program.export(function, arguments, switches, platforms)
print(hashlib.sha256(b"".join(programs.values())).hexdigest())
"""


@pytest.mark.slow
def test_the_exported_program_has_the_same_bytes_in_every_process(tmp_path):
    digests = set()
    for name in ("one.py", "two/deep.py"):  # nor may it matter where the source lies
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FRESH if name == "one.py" else "\n\n" + textwrap.dedent(FRESH))
        done = subprocess.run(
            [sys.executable, path],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def trained(tx, params, count):
    """Fused and jitted train steps, clipping included: states before and after, and records."""
    recorder = Recorder(tx)
    clip = optax.clip_by_global_norm(0.5)
    state = recorder.init(params)

    @jax.jit
    def step(params, state, grads):
        clipped, _ = clip.update(jax.tree.map(lambda g, p: g * p, grads, params), clip.init(params))
        updates, state = recorder.update(clipped, state, params)
        return optax.apply_updates(params, updates), state

    records, first = [], (params, state)
    for number in range(count):
        grads = jax.device_put(gradients(number), jax.tree.map(lambda p: p.sharding, params))
        params, state = step(params, state, grads)
        records.append(state.adacheck_record)
    return recorder, first, (params, state), records


def leaves_of(params, state):
    return jax.tree.leaves(params), jax.tree.leaves(state.adacheck_inner)


@pytest.mark.first(1, slow=3)
@pytest.mark.parametrize(
    ("mesh_shape", "axis_type"),
    [
        ((4, 2), AxisType.Auto),
        ((8, 1), AxisType.Auto),
        ((1, 1), AxisType.Auto),
        ((2, 4), AxisType.Explicit),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_exported_update_folded_over_records_gives_every_bit_of_training(
    name, mesh_shape, axis_type
):
    params = place(copied(PARAMS), mesh_of((4, 2)))
    recorder, first, last, records = trained(OPTIMIZERS[name](), params, 4)
    expected = host_copy(leaves_of(*last))
    data, update = exported(recorder, {"params": first[0], "opt": first[1]})
    mesh = mesh_of(mesh_shape, axis_type)
    params, inner = place(copied(leaves_of(*first)), mesh)
    shardings = [x.sharding for x in params]
    fold = update_program.jit_update_like(
        exported_program.load(data, update, "program"), params, inner
    )
    zero = update_program.switches(1)
    for record in records:
        params, inner = fold(params, inner, place(jax.tree.leaves(record), mesh), [], zero)
    assert_same_bits((params, inner), expected)
    assert [x.sharding for x in params] == shardings


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_two_nans_a_new_param_is_the_updates(dtype):
    updates = jnp.resize(jnp.array([jnp.nan, -jnp.nan, 1.0, 0.0], jnp.float32), 1000)
    params = jnp.repeat(jnp.array([jnp.nan, -jnp.nan, 2.0, -0.0], dtype), 250)
    found = np.asarray(jax.jit(update_program.apply_updates)(params, updates))
    is_nan = np.isnan(np.asarray(updates))
    expected = np.where(is_nan, updates.astype(dtype), optax.apply_updates(params, updates))
    assert_same_bits(found, [expected])


def test_the_fold_consumes_the_state_that_it_is_given():
    recorder, first, _, records = trained(optax.adamw(1e-2), PARAMS, 1)
    params, inner = copied(leaves_of(*first))
    function = update_program.update_function(recorder, recorder.signatures[0])
    fold = update_program.jit_update_like(function, params, inner)
    fold(params, inner, jax.tree.leaves(records[0]), [], update_program.switches(1))
    assert all(x.is_deleted() for x in params)


def test_recorded_extra_arguments_are_replayed():
    recorder = Recorder(optax.contrib.reduce_on_plateau(patience=1), extra_args={"value": 0.0})
    state = first = recorder.init(PARAMS)
    params = PARAMS

    @jax.jit
    def step(params, state, value):
        updates, state = recorder.update(gradients(0), state, params, value=value)
        return optax.apply_updates(params, updates), state

    inputs = []
    for value in (1.0, 2.0, 3.0):
        params, state = step(params, state, value)
        inputs.append((jax.tree.leaves(state.adacheck_record), [state.adacheck_extra["value"]]))
    data, update = exported(recorder, {"params": PARAMS, "opt": first})
    leaves = copied(leaves_of(PARAMS, first))
    fold = update_program.jit_update_like(exported_program.load(data, update, "program"), *leaves)
    for record, extra in inputs:
        leaves = fold(*leaves, record, extra, update_program.switches(1))
    assert_same_bits(leaves, host_copy(leaves_of(params, state)))


@pytest.mark.first(1, slow=2)
@pytest.mark.parametrize("name", ["adam", "adamw", "nadamw", "adabelief", "amsgrad", "radam"])
def test_several_equal_leaves_on_one_device_replay_to_every_bit(name):
    """A program exported for several platforms divides by the bias correction in another way."""
    params = {
        key: jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64) * i for i, key in enumerate("abcd")
    }
    recorder = Recorder(getattr(optax, name)(1e-3))
    clip = optax.clip_by_global_norm(1.0)
    state = recorder.init(params)

    @jax.jit
    def step(params, state, number):
        grads = jax.tree.map(lambda p: jnp.sin(p * 100 + number), params)
        clipped, _ = clip.update(grads, clip.init(params))
        updates, state = recorder.update(clipped, state, params)
        return optax.apply_updates(params, updates), state

    tree = {"params": params, "opt_state": state}
    data, note = exported(recorder, tree)
    run = jax.jit(exported_program.load(data, note, "update"))
    replayed = (jax.tree.leaves(params), jax.tree.leaves(state.adacheck_inner))
    for number in range(4):
        params, state = step(params, state, number)
        replayed = run(
            *replayed, jax.tree.leaves(state.adacheck_record), [], update_program.switches(1)
        )
    expected = [*jax.tree.leaves(params), *jax.tree.leaves(state.adacheck_inner)]
    for a, b in zip([*replayed[0], *replayed[1]], expected, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
