"""An update that is a program of its own replays exactly, whatever it adds up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError, RecorderError
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from tests import support
from tests.save.loop import Loop, kinds
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

REDUCING = {
    "clip inside": optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-3)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "muon": optax.contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
}


def separate_run(mesh, tx, dtype=None, **extra_args):
    """Two programs a step: the gradients, and the update."""
    recorder = adacheck.Recorder(tx, dtype=dtype, extra_args=extra_args)
    chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    update = adacheck.separate_update(chain)
    params = support.place(support.initial_params(), mesh)
    # As users make it: counters stay on one device, uncommitted.
    state = TrainState.create(apply_fn=support.forward, params=params, tx=chain)
    state = state.replace(step=jnp.int32(0))

    @jax.jit
    def gradients(params, x, y):
        return jax.grad(lambda p: jnp.mean((support.forward(p, x) - y) ** 2))(params)

    def train_step(state, data):
        grads = gradients(state.params, *data)
        params, opt_state = update(grads, state.opt_state, state.params, **extra_args)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    return support.Run(recorder, state, train_step)


def loop_of(root, run, **options):
    """A loop behind the first update: counters are on all devices from there on."""
    run.advance()
    return Loop(root, run, **options)


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["f32", "bf16"])
def test_reducing_updates_replay_exactly_on_every_mesh_of_the_same_devices(tmp_path, name, dtype):
    loop = loop_of(tmp_path, separate_run(mesh_of((4, 2)), REDUCING[name], dtype))
    loop.save(5)
    for mesh in (mesh_of((4, 2)), mesh_of((8, 1)), mesh_of((1, 1))):
        for step in (3, 5):
            target = adacheck.RestoreArgs(abstract(loop.run.state, mesh), require_exact=True)
            found = loop.manager.restore(step, args=target)
            assert_same_bits(found, loop.states[step])
            assert loop.handler.restored.exact
            wanted = jax.tree.map(lambda x: x.sharding, target.abstract_state)
            assert jax.tree.map(lambda x: x.sharding, found) == wanted
    assert loop.check() == "BRRRR"


class Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(32, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize("form", ["state", "optimizer"])
def test_an_nnx_optimizer_and_an_nnx_state_are_taken(tmp_path, form):
    recorder = adacheck.Recorder(REDUCING["clip inside"])
    update = adacheck.separate_update(optax.chain(optax.clip_by_global_norm(1.0), recorder))
    model, data = Model(), jax.random.normal(jax.random.key(0), (8, 16))
    tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    opt_state, graph = tx.init(params), nnx.graphdef(model)

    @jax.jit  # nnx.jit would give the model other arrays than were saved
    def gradients(params):
        return jax.grad(lambda p: jnp.mean((nnx.merge(graph, p)(data) - data) ** 2))(params)

    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for step in range(5):
            if form == "optimizer":
                update(gradients(nnx.state(model, nnx.Param)), optimizer, model)
                state = nnx.state((model, optimizer))
            else:
                params, opt_state = update(gradients(params), opt_state, params)
                state = {"params": params, "opt_state": opt_state}
            saved = host_copy(state)
            if step > 0:  # counters are on all devices from here on
                manager.save(step, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
        args = adacheck.RestoreArgs(abstract(state), require_exact=True)
        assert_same_bits(manager.restore(4, args=args), saved)
    assert kinds(tmp_path) == [*"BRRR"]
    if form == "optimizer":
        assert int(optimizer.step[...]) == 5


@pytest.mark.slow
def test_extra_arguments_reach_the_update_and_are_recorded(tmp_path):
    tx = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    loop = loop_of(tmp_path, separate_run(mesh_of((2, 2)), tx, value=jnp.float32(1.0)))
    loop.save(4)
    assert loop.check(mesh_of((4, 2))) == "BRRR"


def test_the_update_is_the_one_that_optax_applies_and_donates_what_it_takes():
    separate, fused = (
        separate_run(mesh_of((1, 1)), optax.adamw(1e-2)),
        support.dict_run(mesh_of((1, 1))),
    )
    for _ in range(4):
        before = separate.state
        separate.advance()
        fused.advance()
    assert before.params["in"]["kernel"].is_deleted()
    assert before.opt_state[1].adacheck_inner[0].mu["in"]["kernel"].is_deleted()
    found, expected = host_copy(separate.state.params), host_copy(fused.state["params"])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_state_saved_before_the_first_update_is_no_surprise(tmp_path, caplog):
    loop = Loop(tmp_path, separate_run(mesh_of((1, 1)), REDUCING["clip inside"]))
    loop.put()
    loop.save(2)
    assert loop.check() == "BRR"
    assert not [x for x in caplog.records if x.name.startswith("adacheck_jax")]


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["clip inside", "adafactor", "lamb"])
def test_explicit_axes_replay_exactly_too(tmp_path, name):
    run = separate_run(mesh_of((1, 1)), REDUCING[name])
    state = jax.tree.map(np.asarray, run.state)  # optax cannot make every state on such a mesh
    run.state = support.place(state, mesh_of((4, 2), AxisType.Explicit))
    loop = loop_of(tmp_path, run)
    loop.save(4)
    assert loop.check() == "BRRR"


@pytest.mark.slow
def test_another_mesh_that_cuts_alike_starts_a_new_lineage(tmp_path):
    """Equal boxes, but sums are added up in another order."""

    def columns(tree, mesh):
        spec = lambda x: PartitionSpec(None, "model") if x.ndim == 2 else PartitionSpec()  # noqa: E731
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))),
            tree,
        )

    run = separate_run(mesh_of((4, 2)), REDUCING["muon"])
    placed = columns(run.state, mesh_of((4, 2)))
    run.state = jax.device_put(run.state, jax.tree.map(lambda x: x.sharding, placed))
    loop = loop_of(tmp_path, run)
    loop.save(2)
    loop.manager.close()
    loop.open()
    target = columns(run.state, mesh_of((1, 2)))
    run.state = loop.manager.restore(2, args=adacheck.RestoreArgs(target))
    loop.save(3)
    for step, expected in loop.states.items():
        args = adacheck.RestoreArgs(target, require_exact=True)
        assert_same_bits(loop.manager.restore(step, args=args), expected)
    assert kinds(tmp_path) == [*"BRBRR"]


def noisy(scale=lambda: 0.1):
    """Adam's updates with noise: drawn again in a replay, from a key of the usual kind."""

    def update(updates, params):
        del params
        noise = jax.random.normal(jax.random.key(3), (8,))
        return jax.tree.map(lambda u: u + scale() * noise * noise.sum(), updates)

    return optax.chain(optax.adam(1e-2), optax.stateless(update))


def noisy_run(tx):
    """Two programs a step, of which the second draws noise."""
    recorder = adacheck.Recorder(tx)
    update = adacheck.separate_update(recorder)
    params = {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)}

    def step(state, _):
        grads = jax.tree.map(lambda p: jnp.sin(3 * p), state["params"])
        params, opt_state = update(grads, state["opt_state"], state["params"])
        return {"params": params, "opt_state": opt_state}

    return support.Run(recorder, {"params": params, "opt_state": recorder.init(params)}, step)


ARITHMETIC = {
    "prng_impl": lambda: jax.default_prng_impl("rbg"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("where", ["train", "save"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_an_update_replays_as_it_was_traced_whatever_a_save_is_called_with(tmp_path, name, where):
    loop = Loop(tmp_path, noisy_run(noisy()))
    for _ in range(3):
        with ARITHMETIC[name]() if where == "train" else contextlib.nullcontext():
            loop.train()
        loop.note()
        with ARITHMETIC[name]() if where == "save" else contextlib.nullcontext():
            loop.manager.save(loop.number, args=adacheck.SaveArgs(loop.run.state))
            loop.manager.wait_until_finished()
    assert loop.check() == "BRR"


@pytest.mark.parametrize("is_traced_again", [False, True])
def test_a_program_that_is_not_the_one_that_ran_is_noticed(
    tmp_path, caplog, monkeypatch, is_traced_again
):
    trace = PinnedFunction._trace
    if is_traced_again:  # else the first save takes the trace of what ran

        def traced_again(self, trees, **_):
            return trace(self, trees)

        monkeypatch.setattr(PinnedFunction, "_trace", traced_again)
    scale = [0.1]
    loop = Loop(tmp_path, noisy_run(noisy(lambda: scale[0])))
    loop.run.advance()
    scale[0] = 0.2  # the compiled update keeps 0.1
    loop.save(3)
    loop.check()
    told = "replaying the update does not give the state that was trained" in caplog.text
    assert told == is_traced_again


def test_a_separate_update_has_its_own_bits_inside_disable_jit():
    runs = [noisy_run(noisy()), noisy_run(noisy())]
    for _ in range(2):
        runs[0].advance()
        with jax.disable_jit():
            runs[1].advance()
    assert_same_bits(runs[1].state, host_copy(runs[0].state))


def test_a_buffer_that_occurs_twice_is_donated_once():
    recorder = adacheck.Recorder(optax.trace(0.9))
    update = adacheck.separate_update(recorder)
    shared = jnp.ones((4, 4))
    params = {"a": shared, "b": shared}
    state = recorder.init(params)
    params, state = update({"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, state, params)
    assert params["a"].sum() == params["b"].sum() == 32


PARAMS = {"w": jnp.ones(8), "v": jnp.ones(4)}


def test_inside_a_compiled_function_it_is_an_error():
    recorder = adacheck.Recorder(optax.adam(1e-2))
    update = adacheck.separate_update(recorder)
    with pytest.raises(RecorderError, match=r"inside a compiled function.*outside"):
        jax.jit(update)(PARAMS, recorder.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda r: optax.chain(r, optax.scale(0.5)), "something behind it"),
        (lambda r: optax.chain(r, r), "one Recorder's state in it, found 2"),
        (lambda _: optax.adam(1e-2), "one Recorder's state in it, found 0"),
        (lambda r: optax.MultiSteps(r, 2), "a transformation around it"),
        (lambda r: optax.masked(r, {"w": True, "v": False}), "ends in its one Recorder"),
    ],
    ids=["not last", "two", "none", "wrapped", "masked"],
)
def test_an_optimizer_that_does_not_end_in_its_recorder_is_an_error(wrap, message):
    tx = wrap(adacheck.Recorder(optax.adam(1e-2)))
    with pytest.raises(RecorderError, match=message):
        adacheck.separate_update(tx)(PARAMS, tx.init(PARAMS), PARAMS)


CHILD = """
    import json, sys
    import numpy as np
    import adacheck_jax as adacheck
    from adacheck_jax.errors import IntegrityError
    from tests import support
    from tests.update import test_separate

    root, mesh = sys.argv[1], support.mesh_of(tuple(json.loads(sys.argv[2])))
    run = test_separate.separate_run(mesh, test_separate.REDUCING["muon"])
    handler, target = adacheck.AdaCheckHandler(run.recorder), support.abstract(run.state, mesh)
    with support.manager_of(root, handler) as manager:
        try:
            manager.restore(4, args=adacheck.RestoreArgs(target, require_exact=True))
        except IntegrityError as error:
            refused = str(error)
        state = manager.restore(4, args=adacheck.RestoreArgs(target))
    saved = np.load(f"{root}/saved.npz")
    worst = 0.0
    for leaf, name in zip(support.host_copy(state), saved.files, strict=True):
        if leaf.tobytes() != saved[name].tobytes():
            worst = max(worst, np.abs(leaf - saved[name]).max() / np.abs(saved[name]).max())
    info = handler.restored
    told = [info.exact, info.rounded, info.tolerance, info.replayed_count, float(worst)]
    print(json.dumps([refused, *told]))
"""


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("devices", "shape"), [(4, (2, 2)), (1, (1, 1))])
def test_exact_refuses_what_is_within_rounding_only(tmp_path, devices, shape):
    """Where the devices do not exist; without it the restore says what is rounded."""
    run = separate_run(mesh_of((4, 2)), REDUCING["muon"])
    run.advance()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    np.savez(tmp_path / "saved.npz", *host_copy(run.state))
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), tmp_path, json.dumps(shape)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    refused, exact, rounded, tolerance, replayed_count, worst = told
    assert "within rounding" in refused
    assert "Nothing was returned" in refused
    assert not exact
    assert {"params/in/kernel", "params/out/kernel"} & set(rounded)
    assert not any("ns_coeffs" in path or "record" in path for path in rounded)
    assert replayed_count == 2
    assert 0 < worst <= tolerance
    assert "within rounding" in done.stderr


@pytest.mark.slow
def test_a_damaged_record_of_a_reducing_update_is_never_taken_for_rounding(tmp_path, caplog):
    with loop_of(tmp_path, separate_run(mesh_of((2, 2)), REDUCING["muon"])) as loop:
        loop.save(3)
    packs = support.pack_files(tmp_path / "3" / "default")
    pack = max(packs, key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))
    with (
        caplog.at_level(logging.WARNING),
        manager_of(tmp_path, adacheck.AdaCheckHandler(loop.run.recorder)) as manager,
        pytest.raises(IntegrityError),
    ):
        manager.restore(3, args=adacheck.RestoreArgs(abstract(loop.run.state)))
