"""Arguments of stock ``PyTreeSave`` and ``PyTreeRestore``, given to this library's arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from tests import support
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps

LIMIT = 1 << 14


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A base and a delta; its root, the run and what each saved state was."""
    root = tmp_path_factory.mktemp("run")
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        states = save_steps(manager, run, 2)
    return root, run, states


def restored(root, step, **arguments):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(**arguments))


def file_sizes(base):
    return sorted(each.stat().st_size for each in base.rglob("d/*"))


@pytest.mark.parametrize("item", [True, False])
def test_data_files_of_a_base_have_the_wanted_size(tmp_path, item):
    leaves = {str(i): np.random.default_rng(i).integers(0, 99, 3000) for i in range(8)}
    state = {"a": leaves, "b": jnp.arange(5.0)}
    saved = {"item": state} if item else {"state": state}
    for name, size_bytes in (("free", None), ("full", LIMIT), ("whole", 0)):
        args = adacheck.SaveArgs(**saved, ocdbt_target_data_file_size=size_bytes)
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            checkpointer.save(tmp_path / name, args=args)
            assert_same_bits(checkpointer.restore(tmp_path / name), jax.tree.leaves(state))
        stock = ocp.PyTreeCheckpointHandler().restore(tmp_path / name)
        assert_same_bits(stock, jax.tree.leaves(state))
    most_bytes = LIMIT + 3000 * 8 + 1000
    assert max(file_sizes(tmp_path / "full")) < most_bytes
    for name in ("free", "whole"):  # on a busy machine tensorstore may write two files
        assert max(file_sizes(tmp_path / name)) > 2 * most_bytes


@pytest.mark.parametrize("size_bytes", [-1, 1.5, True, 1 << 63])
def test_a_size_that_is_none_is_refused(tmp_path, size_bytes):
    args = adacheck.SaveArgs({"a": jnp.ones(3)}, ocdbt_target_data_file_size=size_bytes)
    refused = pytest.raises(ValueError, match="ocdbt_target_data_file_size, an integer")
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer, refused:
        checkpointer.save(tmp_path / "1", args=args)


def test_a_state_is_given_once():
    with pytest.raises(ValueError, match="state or item, which are the same"):
        adacheck.SaveArgs({"a": 1}, item={"a": 1})


@pytest.mark.parametrize("step", [1, 2])
def test_restore_args_place_and_cast_leaves(saved_run, step):
    """They come before what the abstract state says, which has no shardings here."""
    root, run, states = saved_run
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.state)
    wanted = NamedSharding(mesh_of((2,)), PartitionSpec())
    args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=wanted), target)
    args["params"]["scale"] = ocp.RestoreArgs(restore_type=np.ndarray)
    args["params"]["in"]["bias"] = None
    kernel = args["params"]["in"]["kernel"]
    kernel.mesh, kernel.mesh_axes, kernel.sharding = wanted.mesh, PartitionSpec("data"), None
    args["step"] = ocp.RestoreArgs(restore_type=int)
    found = restored(root, step, item=target, restore_args=args)
    assert type(found["step"]) is int
    assert_same_bits({**found, "step": np.int32(found["step"])}, states[step])
    assert isinstance(found["params"]["scale"], np.ndarray)
    assert found["params"]["in"]["kernel"].sharding.spec == PartitionSpec("data")
    assert found["params"]["in"]["bias"].sharding == run.state["params"]["in"]["bias"].sharding
    assert found["params"]["out"]["kernel"].sharding == wanted

    args["params"]["out"]["kernel"] = ocp.ArrayRestoreArgs(dtype=jnp.bfloat16)
    found = restored(root, step, item=target, restore_args=args)
    whole = jax.tree.unflatten(jax.tree.structure(run.state), states[step])
    cast = whole["params"]["out"]["kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["params"]["out"]["kernel"], cast)


def test_restore_args_of_stock_helpers(saved_run):
    root, run, states = saved_run
    target = abstract(run.state, mesh_of((2,)))
    args = ocp.checkpoint_utils.construct_restore_args(target)
    found = restored(root, 2, item=target, restore_args=args)
    assert_same_bits(found, states[2])
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, target)


def test_restore_args_of_stock_helpers_describe_the_words_of_keys(tmp_path):
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 8)}
    for name in ("arrays", "abstract"):
        target = state if name == "arrays" else abstract(state)
        args = ocp.checkpoint_utils.construct_restore_args(state)
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            checkpointer.save(tmp_path / name, args=adacheck.SaveArgs(state))
            wanted = adacheck.RestoreArgs(target, restore_args=args)
            found = checkpointer.restore(tmp_path / name, args=wanted)
        assert [x.dtype for x in found.values()] == [x.dtype for x in state.values()]
        assert_same_bits(found, support.host_copy(state))


@pytest.mark.parametrize("step", [1, 2])
def test_params_alone_through_the_arguments_of_transforms(saved_run, step):
    """As frameworks write it who load params for an evaluation."""
    root, run, _ = saved_run
    target = {"params": abstract(run.state["params"], mesh_of((2,)))}
    args = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        found = checkpointer.restore(
            root / f"{step}/default", item=target, transforms={}, restore_args=args
        )
    whole = restored(root, step, item=abstract(run.state))
    assert_same_bits(found, jax.tree.leaves({"params": whole["params"]}))


def test_a_layout_in_restore_args(saved_run):
    root, run, states = saved_run
    target = abstract(run.state)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=device), target)
    turned = Format(Layout((1, 0)), device)
    args["params"]["in"]["kernel"] = ocp.ArrayRestoreArgs(sharding=turned)
    found = restored(root, 2, item=target, restore_args=args)
    assert_same_bits(found, states[2])
    assert found["params"]["in"]["kernel"].format.layout.major_to_minor == (1, 0)


def test_a_single_replica_is_read_once(saved_run):
    root, run, states = saved_run
    target = abstract(run.state)
    single = ocp.type_handlers.SingleReplicaArrayRestoreArgs
    args = jax.tree.map(lambda x: single(sharding=x.sharding, global_shape=x.shape), target)
    assert adacheck.RestoreArgs(target, restore_args=args).read_once is True
    assert adacheck.RestoreArgs(target, restore_args=args, read_once=False).read_once is False
    assert_same_bits(restored(root, 2, item=target, restore_args=args), states[2])


def test_placeholders_need_no_restore_args(saved_run):
    root, run, _ = saved_run
    target = {**abstract(run.state), "opt_state": ocp.PLACEHOLDER}
    args = jax.tree.map(lambda x: ocp.RestoreArgs(), run.state)
    found = restored(root, 2, item=target, restore_args=args)
    assert found["opt_state"] is ocp.PLACEHOLDER


def test_a_description_of_the_step_is_an_abstract_state(saved_run):
    root, _, states = saved_run
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        described = manager.item_metadata(2)
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described.tree)
    found = restored(root, 2, item=described, restore_args=args)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
    assert sorted(x.tobytes() for x in jax.tree.leaves(found)) == sorted(
        x.tobytes() for x in states[2]
    )


def test_what_has_no_meaning_here_is_refused_by_name():
    target = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    loose = {"a": ocp.ArrayRestoreArgs(strict=False)}
    with pytest.raises(ValueError, match="ArrayRestoreArgs\\(strict=False\\)"):
        adacheck.RestoreArgs(target, restore_args=loose)
    with pytest.raises(ValueError, match="abstract state beside restore_args"):
        adacheck.RestoreArgs(restore_args=loose)
    with pytest.raises(ValueError, match=r"transforms: expected \{\} or None"):
        adacheck.RestoreArgs(target, transforms={"a": ocp.Transform(original_key="b")})
    with pytest.raises(ValueError, match="b"):
        adacheck.RestoreArgs(target, restore_args={"b": ocp.RestoreArgs()})
    with pytest.raises(TypeError, match="legacy_transform_fn"):
        adacheck.RestoreArgs(target, legacy_transform_fn=print)
