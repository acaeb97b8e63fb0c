"""Options of Orbax contexts and handlers: honoured, or refused by name."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck
from adacheck_jax.adapter.v1 import options
from adacheck_jax.errors import MismatchError
from tests.adapter.v1.common import checkpointer_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, kinds_of, mesh_of


def context_with(recorder=None, **settings):
    """A context with options, such as ``pytree_loading_partial_load=True``."""
    parent = ocp.Context()
    for path, value in settings.items():
        group, part, name = path.split("__")
        setattr(getattr(getattr(parent, group), part), name, value)
    return adacheck.v1.context(adacheck.AdaCheckHandler(recorder), parent=parent)


@pytest.mark.parametrize("step", [1, 2])
def test_partial_load(tmp_path, step):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 2)
    params = jax.tree.unflatten(jax.tree.structure(run.state), saved[step])["params"]
    target = {"params": abstract(run.state["params"])}
    partial = context_with(pytree__loading__partial_load=True)
    with partial, checkpointer_of(tmp_path) as checkpointer:
        found = checkpointer.load(step, target)
    assert found.keys() == {"params"}
    assert_same_bits(found["params"], jax.tree.leaves(params))
    with adacheck.v1.context(), checkpointer_of(tmp_path) as checkpointer:
        with pytest.raises(MismatchError, match="partial_restore=True"):
            checkpointer.load(step, target)
        found = checkpointer.load(step, {**abstract(run.state), "opt_state": ...})
    assert found["opt_state"] is ...


def test_padding_and_truncation(tmp_path):
    ocp_state = {"a": jnp.arange(4.0)}
    with adacheck.v1.context():
        ocp.save(tmp_path / "1", ocp_state)
    with context_with(array__loading__enable_padding_and_truncation=True):
        found = ocp.load(tmp_path / "1", {"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    np.testing.assert_array_equal(found["a"], [0.0, 1.0])


def test_chunks_and_casts(tmp_path):
    def chosen(key_path, leaf):
        small = ocp.options.ArrayOptions.Saving.StorageOptions(dtype=jnp.bfloat16)
        return small if "b" in jax.tree_util.keystr(key_path) else None

    state = {"a": jnp.arange(64.0), "b": jnp.arange(8.0)}
    context = context_with(array__saving__scoped_storage_options_creator=chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.array.saving.storage_options, "chunk_byte_size", 64)
        with context:
            ocp.save(tmp_path / "1", state)
            found = ocp.load(tmp_path / "1")
    assert (found["a"].dtype, found["b"].dtype) == (jnp.float32, jnp.bfloat16)
    described = json.loads((tmp_path / "1/state/array_metadatas/process_0").read_text())
    chunks = {
        each["array_metadata"]["param_name"]: each["array_metadata"]["chunk_shape"]
        for each in described["array_metadatas"]
    }
    assert chunks == {"a": [16], "b": [8]}


def test_the_size_of_data_files(tmp_path):
    limit, chunk_bytes = 1 << 14, 3000 * 8
    state = {str(i): np.random.default_rng(i).integers(0, 99, 3000) for i in range(8)}
    context = context_with(array__saving__ocdbt_target_data_file_size=limit)
    for name, given in (("plain", state), ("args", adacheck.SaveArgs(state))):
        with context:
            ocp.save_checkpointables(tmp_path / name / "1", {"state": given})
        sizes = [each.stat().st_size for each in (tmp_path / name).rglob("d/*")]
        assert 8 * chunk_bytes > max(sizes) > chunk_bytes
        assert max(sizes) < limit + chunk_bytes + 1000
    whole = adacheck.SaveArgs(state, ocdbt_target_data_file_size=0)
    with context:
        ocp.save_checkpointables(tmp_path / "other/1", {"state": whole})
    sizes = [each.stat().st_size for each in (tmp_path / "other").rglob("d/*")]
    assert max(sizes) > limit + chunk_bytes + 1000  # how many arrays are in one is a matter of time


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_ocdbt", False),
        ("use_zarr3", False),
        ("enable_write_sharding_file", False),
    ],
)
def test_a_form_of_storage_that_is_not_written(tmp_path, option, value):
    run = dict_run(mesh_of((2, 2)))
    refused = context_with(run.recorder, **{f"array__saving__{option}": value})
    named = pytest.raises(ValueError, match=rf"array\.saving\.{option}={value}")
    with refused, checkpointer_of(tmp_path) as checkpointer, named:
        checkpointer.save(1, run.advance())
    done_anyway = context_with(run.recorder, array__saving__use_replica_parallel=True)
    with done_anyway, checkpointer_of(tmp_path) as checkpointer:
        checkpointer.save(1, run.state)
    assert kinds_of(tmp_path) == "B"


def test_limits_of_memory_are_named(tmp_path, caplog):
    parent = ocp.Context()
    parent.memory.write_concurrent_bytes = 1 << 30
    with adacheck.v1.context(parent=parent):
        ocp.save(tmp_path / "1", {"a": jnp.arange(4.0)})
    assert "Not kept for the state: memory.write_concurrent_bytes" in caplog.text


def test_load_and_broadcast_reads_once():
    with context_with(array__loading__use_load_and_broadcast=True):
        assert options.loading(adacheck.RestoreArgs()).read_once is True
    with adacheck.v1.context():
        assert options.loading(adacheck.RestoreArgs(read_once=False)).read_once is False
