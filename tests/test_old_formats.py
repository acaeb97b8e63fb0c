"""Steps that earlier releases wrote are read: ``tests/data`` holds some of each format version."""

import json
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.device import trees
from adacheck_jax.format import manifest, roots
from adacheck_jax.update.recorder_state import PASSED_FIELD
from tests import support

DATA = Path(__file__).parent / "data"
CLAMPED, REPLAYED = "clamped", "replayed"
"""Of version 6: params were clamped after each update (stored whole, then as differences); a
learning rate was set by hand at step 3, and steps 4 and 5 were recorded, not saved."""


@pytest.fixture
def v6(tmp_path):
    with tarfile.open(DATA / "v6" / "steps.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def recorder_of(name):
    if name == CLAMPED:
        return adacheck.Recorder(optax.adam(0.05))
    return adacheck.Recorder(optax.inject_hyperparams(optax.adamw)(0.05))


def initial_state(recorder):
    params = {"w": jnp.zeros((4, 6)), "b": jnp.zeros(6)}
    return {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0)}


def train_step(recorder):
    def step(state):
        def loss(params):
            x = jnp.sin(jnp.arange(8.0).reshape(2, 4) + state["step"])
            return jnp.mean((x @ params["w"] + params["b"] - 1.0) ** 2)

        grads = jax.grad(loss)(state["params"])
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return jax.jit(step)


def bits_of(state, *, of_version_6=False):
    """All bits; or without the leaves that recorders of version 6 did not have."""
    named, _ = trees.flatten(state)
    kept = [x for path, x in named.items() if not of_version_6 or PASSED_FIELD not in path]
    return np.concatenate([np.asarray(x).reshape(-1).view(np.uint32) for x in kept])


@pytest.mark.parametrize("with_recorder", [True, False], ids=["recorder", "no recorder"])
@pytest.mark.parametrize("name", [CLAMPED, REPLAYED])
def test_every_step_of_version_6_is_restored(v6, name, with_recorder):
    recorder = recorder_of(name)
    target = support.abstract(initial_state(recorder))
    handler = adacheck.AdaCheckHandler(*([recorder] if with_recorder else []))
    expected = np.load(DATA / "v6" / f"{name}.npz")
    with support.manager_of(v6 / name, handler) as manager:
        steps = manager.all_steps()
        assert steps == ([1, 2, 3, 4] if name == CLAMPED else [1, 2, 3, 6])
        for step in map(int, expected):
            holder = min(each for each in steps if each >= step)
            options = {} if holder == step else {"step": step}
            args = adacheck.RestoreArgs(target, **options)
            state = manager.restore(holder, args=args)
            np.testing.assert_array_equal(bits_of(state, of_version_6=True), expected[str(step)])
            if name == REPLAYED:
                inner = state["opt_state"].adacheck_inner.hyperparams
                passed = state["opt_state"].adacheck_passed
                assert passed["hyperparams.learning_rate"] == inner["learning_rate"]


@pytest.mark.parametrize("name", [CLAMPED, REPLAYED])
def test_steps_of_version_6_verify_and_are_shown(v6, name):
    run = CliRunner().invoke
    for options in ([], ["--read-data"], ["--replay"]):
        found = run(app, ["verify", str(v6 / name), *options])
        assert found.exit_code == 0, found.output
    listed = run(app, ["ls", str(v6 / name), "--json"])
    assert listed.exit_code == 0, listed.output
    steps = json.loads(listed.output)["steps"]
    assert [each["update_count"] for each in steps] == [each["step"] for each in steps]
    for step in steps:
        shown = run(app, ["inspect", str(v6 / name), str(step["step"])])
        assert shown.exit_code == 0, shown.output
    assert adacheck.latest_restorable(v6 / name) == steps[-1]["step"]


def test_deltas_of_version_6_are_not_said_to_be_checked(v6):
    for name in (CLAMPED, REPLAYED):
        found = [step.manifest for step in roots.steps_of(v6 / name)]
        deltas = [d for each in found[1:] for d in each.deltas]
        assert {each.checked for each in deltas} == {""}
        assert not found[0].update.pinned


@pytest.mark.parametrize("name", [CLAMPED, REPLAYED])
def test_a_run_of_version_6_goes_on_with_a_base_or_what_was_decided_there(v6, name):
    """The update is another program by now: replay does not go on with the old one."""
    recorder = recorder_of(name)
    step = train_step(recorder)
    root, states = v6 / name, {}
    state = initial_state(recorder)
    with support.manager_of(root, adacheck.AdaCheckHandler(recorder)) as manager:
        last = manager.latest_step()
        state = manager.restore(last, args=adacheck.RestoreArgs(support.abstract(state)))
        for number in range(last + 1, last + 4):
            state = jax.block_until_ready(step(state))
            states[number] = bits_of(state)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        for number, expected in states.items():
            found = manager.restore(number, args=adacheck.RestoreArgs(support.abstract(state)))
            np.testing.assert_array_equal(bits_of(found), expected)
    found = {each.step: each.manifest for each in roots.steps_of(root)}
    assert isinstance(found[last + 1], manifest.BaseManifest)
    assert [found[last + n].checked for n in (2, 3)] == ["sample", "sample"]
