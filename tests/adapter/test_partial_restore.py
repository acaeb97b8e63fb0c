"""Parts of a state restored: params alone, a placeholder for a subtree, and nothing else read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.restore import base_reader
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps


@pytest.fixture(scope="module", params=["auto", "bits"])
def saved_run(request, tmp_path_factory):
    """Three steps: a base and two deltas, which replay updates or hold differences."""
    root = tmp_path_factory.mktemp(request.param)
    run = support.dict_run(mesh_of((4, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, delta=request.param)
    with manager_of(root, handler) as manager:
        states = save_steps(manager, run, 3)
    assert [type(s.manifest).__name__[0] for s in roots.steps_of(root)] == ["B", "D", "D"]
    structure = jax.tree.structure(run.state)
    params = {
        step: jax.tree.leaves(jax.tree.unflatten(structure, each)["params"])
        for step, each in states.items()
    }
    return root, run, params, request.param


@pytest.fixture
def read_names(monkeypatch):
    """Names of the arrays that are read from bases."""
    names: list[str] = []
    read = base_reader.read

    def noted(directory, requests, *options):
        names.extend(each.name for each in requests)
        return read(directory, requests, *options)

    monkeypatch.setattr(base_reader, "read", noted)
    return names


def restored(root, step, target, **options):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(target, **options))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("shape", [(4, 2), (1, 1)])
def test_params_alone(saved_run, read_names, step, shape):
    root, run, params, delta = saved_run
    target = {"params": abstract(run.state["params"], mesh_of(shape))}
    found = restored(root, step, target, partial_restore=True)
    assert found.keys() == {"params"}
    assert_same_bits(found["params"], params[step])
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
    if step == 1 or delta == "bits":
        assert all(name.startswith("params.") for name in read_names)
    else:  # a replay needs the optimizer's state, but takes the records from the deltas
        assert any("nu" in name for name in read_names)
        assert not any("record" in name or name == "step" for name in read_names)


@pytest.mark.parametrize("step", [1, 3])
def test_a_part_of_a_subtree(saved_run, step):
    root, run, params, _ = saved_run
    target = {"params": {"in": abstract(run.state["params"]["in"])}}
    found = restored(root, step, target, partial_restore=True)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert_same_bits(found, params[step][:2])


@pytest.mark.parametrize("step", [1, 3])
def test_a_placeholder_leaves_out_a_subtree(saved_run, step):
    root, run, params, _ = saved_run
    target = {**abstract(run.state), "opt_state": ocp.PLACEHOLDER}
    found = restored(root, step, target)
    assert found["opt_state"] is ocp.PLACEHOLDER
    assert int(found["step"]) == step
    assert_same_bits(found["params"], params[step])


def test_what_is_left_out_has_to_be_meant(saved_run):
    root, run, _, _ = saved_run
    params = abstract(run.state["params"])
    with pytest.raises(
        MismatchError, match=r"saved, not asked for[^\n]*step[^$]*partial_restore=True"
    ):
        restored(root, 1, {"params": params})
    with pytest.raises(MismatchError, match=r"asked for, not saved \(1\): parms"):
        restored(root, 1, {"params": params, "parms": ocp.PLACEHOLDER}, partial_restore=True)
    extra = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(MismatchError, match=r"asked for, not saved \(1\): head"):
        restored(root, 1, {"params": params, "head": extra}, partial_restore=True)


@pytest.mark.parametrize("empty", [None, {}, ()])
def test_a_placeholder_for_an_empty_node(tmp_path, empty):
    state = {"a": jnp.arange(3.0), "b": empty}
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        checkpointer.save(tmp_path / "1", args=adacheck.SaveArgs(state))
        target = {"a": abstract(state["a"]), "b": ocp.PLACEHOLDER}
        found = checkpointer.restore(tmp_path / "1", args=adacheck.RestoreArgs(target))
    assert found["b"] is ocp.PLACEHOLDER
    np.testing.assert_array_equal(found["a"], state["a"])


@pytest.mark.parametrize("delta", ["auto", "bits"])
def test_after_params_alone_the_next_save_restores_exactly(tmp_path, delta):
    """An evaluation reads params with the handler of the run, and the run goes on."""
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, delta=delta)) as manager:
        save_steps(manager, run, 2)
        target = {"params": abstract(run.state["params"])}
        manager.restore(1, args=adacheck.RestoreArgs(target, partial_restore=True))
        saved = save_steps(manager, run, 2)
    for step in (3, 4):
        assert_same_bits(restored(tmp_path, step, abstract(run.state)), saved[step])


@pytest.mark.parametrize("delta", ["auto", "bits"])
def test_params_to_begin_a_new_run_from(tmp_path, delta):
    """The new run has the old one's params and an optimizer state of its own."""
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 2)
    tuned = support.dict_run(mesh_of((2, 2)))
    tuned.count = 2
    with manager_of(tmp_path, adacheck.AdaCheckHandler(tuned.recorder, delta=delta)) as manager:
        target = {"params": abstract(tuned.state["params"])}
        found = manager.restore(2, args=adacheck.RestoreArgs(target, partial_restore=True))
        tuned.state = {**tuned.state, **found}
        saved = save_steps(manager, tuned, 2)
    for step in (3, 4):
        assert_same_bits(restored(tmp_path, step, abstract(tuned.state)), saved[step])


def test_a_bad_step_falls_back_to_the_params_of_an_older_one(tmp_path):
    run = support.dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        states = save_steps(manager, run, 3)
    params = jax.tree.unflatten(jax.tree.structure(run.state), states[2])["params"]
    for path in (tmp_path / "3" / "default" / "adacheck").glob("delta.*"):
        path.unlink()
    target = {"params": abstract(run.state["params"])}
    found = restored(tmp_path, 3, target, partial_restore=True, skip_damaged=True)
    assert_same_bits(found["params"], jax.tree.leaves(params))
