import dataclasses
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
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

from adacheck_jax import FormatError, IntegrityError, Recorder, RecorderError, replay, trees
from adacheck_jax.manifest import Update
from tests.support import assert_same_bits, host_copy, mesh_of, place

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


def shapes_of(state):
    return {path: np.shape(leaf) for path, leaf in trees.flatten(state)[0].items()}


def bind(recorder, state, params_path=None):
    return replay.bind(recorder, shapes_of(state), params_path)


def gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), PARAMS)


def dict_state():
    recorder = Recorder(optax.adamw(1e-2))
    tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    return recorder, {"params": PARAMS, "opt_state": tx.init(PARAMS), "step": 0}


def test_the_params_of_a_dictionary_are_found():
    binding = bind(*dict_state())
    assert binding.params == ("params/dense/bias", "params/dense/kernel", "params/scale")
    node = "opt_state/1/adacheck"
    assert binding.record == tuple(f"{node}_record/{p[7:]}" for p in binding.params)
    assert binding.count == f"{node}_count"
    assert f"{node}_inner/0/mu/scale" in binding.inner
    assert binding.extra == ()


def test_the_params_of_a_train_state_are_found():
    recorder = Recorder(optax.adamw(1e-2))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=recorder)
    assert bind(recorder, state).params[0] == "params/dense/bias"


def test_the_params_of_a_plain_tuple_are_found():
    recorder = Recorder(optax.adamw(1e-2))
    assert bind(recorder, (recorder.init(PARAMS), PARAMS)).params[0] == "1/dense/bias"


def test_params_at_the_root_of_the_state_are_found():
    recorder = Recorder(optax.sgd(0.1))
    state = {**PARAMS, "optimizer": recorder.init(PARAMS)}
    assert bind(recorder, state).params == ("dense/bias", "dense/kernel", "scale")


def test_params_that_are_one_bare_array_are_found():
    recorder = Recorder(optax.sgd(0.1, momentum=0.9))
    params = jnp.ones((3, 2))
    binding = bind(recorder, {"w": params, "opt": recorder.init(params), "step": 0})
    assert binding.params == ("w",)
    assert binding.record == ("opt/adacheck_record",)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_params_of_an_nnx_state_are_found(in_order):
    recorder = Recorder(optax.adamw(1e-2))
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.identity(), recorder), wrt=nnx.Param)
    state = nnx.state((model, optimizer) if in_order else {"o": optimizer, "z": model})
    binding = bind(recorder, state)
    root = "0" if in_order else "z"
    assert all(path.startswith(f"{root}/") for path in binding.params)
    assert f"{root}/layers/0/kernel/value" in binding.params
    assert len(binding.params) == len(binding.record) == 6
    assert not any("/norm/mean" in path for path in binding.params)


def test_only_the_recorded_part_of_the_params_is_bound_under_a_mask():
    recorder = Recorder(optax.adamw(1e-2))
    mask = {"dense": {"kernel": True, "bias": False}, "scale": False}
    tx = optax.masked(recorder, mask)
    assert bind(recorder, {"params": PARAMS, "opt": tx.init(PARAMS)}).params == (
        "params/dense/kernel",
    )


def test_a_copy_of_the_params_is_ambiguous_and_the_error_names_both_and_the_remedy():
    recorder, state = dict_state()
    with pytest.raises(RecorderError, match=r"found 'ema', 'params'.*params_path="):
        bind(recorder, {**state, "ema": PARAMS})


@pytest.mark.parametrize("path", ["ema", "params"])
def test_a_params_path_resolves_the_ambiguity(path):
    recorder, state = dict_state()
    binding = bind(recorder, {**state, "ema": PARAMS}, path)
    assert binding.params[0] == f"{path}/dense/bias"


def test_an_empty_params_path_is_the_root_of_the_state():
    recorder = Recorder(optax.sgd(0.1))
    state = {**PARAMS, "optimizer": recorder.init(PARAMS), "ema": PARAMS}
    assert bind(recorder, state, "").params == ("dense/bias", "dense/kernel", "scale")


@pytest.mark.parametrize("path", ["nowhere", "opt_state", "params/dense"])
def test_a_wrong_params_path_is_an_error_that_names_what_is_missing(path):
    with pytest.raises(RecorderError, match="dense/bias"):
        bind(*dict_state(), path)


def test_a_params_path_to_leaves_of_other_shapes_is_an_error():
    recorder, state = dict_state()
    other = jax.tree.map(lambda p: jnp.zeros((*p.shape, 2)), PARAMS)
    with pytest.raises(RecorderError, match="other"):
        bind(recorder, {**state, "other": other}, "other")


def test_a_state_without_params_is_an_error():
    recorder, state = dict_state()
    with pytest.raises(RecorderError, match="found none"):
        bind(recorder, {"opt_state": state["opt_state"]})


def test_a_state_without_a_recorder_is_an_error():
    with pytest.raises(RecorderError, match="no Recorder's state"):
        bind(Recorder(optax.sgd(0.1)), {"params": PARAMS})


def test_a_recorder_that_never_saw_these_params_is_an_error():
    _, state = dict_state()
    with pytest.raises(RecorderError, match="has not seen the 3 params"):
        bind(Recorder(optax.adamw(1e-2)), state)


def exported(recorder, state):
    """The exported update of a state, and the manifest's note of it."""
    binding = bind(recorder, state)
    leaves, _ = trees.flatten(state)
    arguments = [
        [jax.ShapeDtypeStruct(leaves[p].shape, leaves[p].dtype) for p in paths]
        for paths in (binding.params, binding.inner, binding.record, binding.extra)
    ]
    data = replay.export(replay.update_function(recorder, binding.signature), arguments)["cpu"]
    return data, note_of(data)


def note_of(data):
    return Update(
        (), (), (), (), 0, (), (), "", "", {"cpu": hashlib.sha256(data).hexdigest()}, "0.0.1"
    )


FRESH = """
import hashlib, jax, jax.numpy as jnp, optax
from adacheck_jax import Recorder, replay
recorder = Recorder(optax.adamw(1e-2))
params = {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}
state = recorder.init(params)
leaves = [jax.tree.leaves(t) for t in (params, state.adacheck_inner, state.adacheck_record, {})]
arguments = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in each] for each in leaves]
function = replay.update_function(recorder, recorder.signatures[0])
print(hashlib.sha256(b"".join(replay.export(function, arguments).values())).hexdigest())
"""


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
            cwd=Path(__file__).parent.parent,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_an_exported_program_with_changed_bytes_is_not_loaded():
    data, update = exported(*dict_state())
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    with pytest.raises(IntegrityError, match=r"update\.stablehlo.*digest"):
        replay.load(bytes(changed), update, "update.stablehlo")


def test_bytes_that_this_jax_cannot_read_are_an_error_that_names_the_jax_to_install():
    data = b"no program"
    update = note_of(data)
    with pytest.raises(FormatError, match=rf"jax 0\.0\.1.*{jax.__version__}"):
        replay.load(data, update, "update.stablehlo")


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
    fold = replay.compile_fold(replay.load(data, update, "program"), params, inner)
    for record in records:
        params, inner = fold(params, inner, place(jax.tree.leaves(record), mesh), [])
    assert_same_bits((params, inner), expected)
    assert [x.sharding for x in params] == shardings


def test_the_fold_consumes_the_state_that_it_is_given():
    recorder, first, _, records = trained(optax.adamw(1e-2), PARAMS, 1)
    params, inner = copied(leaves_of(*first))
    function = replay.update_function(recorder, recorder.signatures[0])
    replay.compile_fold(function, params, inner)(params, inner, jax.tree.leaves(records[0]), [])
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
    fold = replay.compile_fold(replay.load(data, update, "program"), *leaves)
    for record, extra in inputs:
        leaves = fold(*leaves, record, extra)
    assert_same_bits(leaves, host_copy(leaves_of(params, state)))


def test_a_binding_says_what_replay_computes_and_what_it_consumes():
    binding = bind(*dict_state())
    assert binding.explained == {*binding.params, *binding.inner}
    assert binding.consumed == binding.record
    with_extra = dataclasses.replace(binding, extra=("value",))
    assert with_extra.consumed == (*binding.record, "value")


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
    run = jax.jit(replay.load(data, note, "update"))
    replayed = (jax.tree.leaves(params), jax.tree.leaves(state.adacheck_inner))
    for number in range(4):
        params, state = step(params, state, number)
        replayed = run(*replayed, jax.tree.leaves(state.adacheck_record), [])
    expected = [*jax.tree.leaves(params), *jax.tree.leaves(state.adacheck_inner)]
    for a, b in zip([*replayed[0], *replayed[1]], expected, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
