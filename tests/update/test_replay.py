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
from adacheck_jax.update import exported_program
from adacheck_jax.update import program as update_program
from tests.support import assert_same_bits, host_copy, mesh_of, place
from tests.update.replaying import bind, lists_of, note_of

PARAMS = {
    "dense": {"kernel": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "bias": jnp.ones(64)},
    "scale": jnp.ones(()),
}
EQUAL = {key: jnp.linspace(-1.0, 1.0, 4096).reshape(64, 64) * i for i, key in enumerate("abcd")}
ZERO = update_program.switches(1)


def copied(tree):
    """Arrays of their own, so that donating them leaves the others alone."""
    return jax.tree.map(lambda x: jnp.asarray(np.array(x)), tree)


def loaded(recorder, state):
    """The update of a state, exported and loaded again."""
    binding = bind(recorder, state)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lists_of(binding, state)
    )
    function = update_program.update_function(recorder, binding.signature)
    data = exported_program.export(function, arguments, ZERO, ["cpu"])["cpu"]
    return exported_program.function_of(
        exported_program.vetted(data, note_of(data), "program"), "program"
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


def trained(recorder, params, values=range(4), **extra):
    """Fused and jitted train steps: states before and after, and what the updates consumed."""
    clip = optax.clip_by_global_norm(0.5)
    state = recorder.init(params)

    @jax.jit
    def step(params, state, value):
        grads = jax.tree.map(lambda p: jnp.sin(p * 100 + value) * (p - 0.3), params)
        clipped, _ = clip.update(grads, clip.init(params))
        own = dict.fromkeys(extra, value)
        updates, state = recorder.update(clipped, state, params, **own)
        return optax.apply_updates(params, updates), state

    consumed, first = [], (params, state)
    for value in values:
        params, state = step(params, state, jnp.float32(value))
        lists = state.adacheck_record, state.adacheck_extra
        consumed.append([*map(jax.tree.leaves, lists)])
    return first, (params, state), consumed


def leaves_of(params, state):
    return jax.tree.leaves(params), jax.tree.leaves(state.adacheck_inner)


def assert_folded(recorder, first, last, consumed, mesh):
    """The exported update, folded over records on a mesh, gives every bit of training."""
    run = loaded(recorder, {"params": first[0], "opt": first[1]})
    params, inner = place(copied(leaves_of(*first)), mesh)
    begun, shardings = params, [x.sharding for x in params]
    fold = update_program.jit_update_like(run, params, inner)
    for record, extra in consumed:
        params, inner = fold(params, inner, place(record, mesh), place(extra, mesh), ZERO)
    assert_same_bits((params, inner), host_copy(leaves_of(*last)))
    assert [x.sharding for x in params] == shardings
    assert all(x.is_deleted() for x in begun)


MESHES = [
    ((4, 2), AxisType.Auto),
    ((8, 1), AxisType.Auto),
    ((1, 1), AxisType.Auto),
    ((2, 4), AxisType.Explicit),
]


@pytest.mark.first(1, slow=6)
@pytest.mark.parametrize("params", [PARAMS, EQUAL], ids=["several shapes", "equal leaves"])
@pytest.mark.parametrize(("shape", "axis_type"), MESHES, ids=str)
@pytest.mark.parametrize("name", ["adamw", "lion", "adam", "nadamw", "adabelief", "radam"])
def test_the_exported_update_folded_over_records_gives_every_bit_of_training(
    params, name, shape, axis_type
):
    """Of equal leaves too, which a program for several platforms would divide otherwise."""
    recorder = Recorder(getattr(optax, name)(1e-2))
    run = trained(recorder, place(copied(params), mesh_of((4, 2))))
    assert_folded(recorder, *run, mesh_of(shape, axis_type))


def test_recorded_extra_arguments_are_replayed_over_equal_leaves():
    tx = optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    recorder = Recorder(tx, extra_args={"value": 0.0})
    run = trained(recorder, EQUAL, (1.0, 2.0, 3.0), value=True)
    assert_folded(recorder, *run, mesh_of((1, 1)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_two_nans_a_new_param_is_the_updates(dtype):
    updates = jnp.resize(jnp.array([jnp.nan, -jnp.nan, 1.0, 0.0], jnp.float32), 1000)
    params = jnp.repeat(jnp.array([jnp.nan, -jnp.nan, 2.0, -0.0], dtype), 250)
    found = np.asarray(jax.jit(update_program.apply_updates)(params, updates))
    is_nan = np.isnan(np.asarray(updates))
    expected = np.where(is_nan, updates.astype(dtype), optax.apply_updates(params, updates))
    assert_same_bits(found, [expected])
