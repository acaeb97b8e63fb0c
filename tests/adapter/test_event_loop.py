"""Saves where an event loop is running already, as in a notebook."""

import asyncio

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from tests.support import abstract, assert_same_bits, dict_run, host_copy, manager_of, mesh_of

STATE = {"a": jnp.arange(5.0), "b": np.ones(3), "n": 3}


def test_a_checkpointer_saves_and_restores(tmp_path):
    async def cell():
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            checkpointer.save(tmp_path / "1", args=adacheck.SaveArgs(STATE))
            return checkpointer.restore(tmp_path / "1")

    assert_same_bits(asyncio.run(cell()), host_copy(STATE))


@pytest.mark.parametrize("is_async", [True, False])
def test_a_manager_saves_deltas(tmp_path, is_async):
    run = dict_run(mesh_of((1,)))
    handler = adacheck.AdaCheckHandler(run.recorder)

    async def cell():
        with manager_of(tmp_path, handler, enable_async_checkpointing=is_async) as manager:
            for _ in range(2):
                run.advance()
                manager.save(run.count, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            return manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state)))

    assert_same_bits(asyncio.run(cell()), host_copy(run.state))
    assert handler.restored.replayed_count == 1


def test_a_refused_save_leaves_nothing_behind(tmp_path):
    async def cell():
        with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
            args = adacheck.SaveArgs(STATE, custom_metadata={"a": jnp.ones(3)})
            with pytest.raises(MismatchError, match="custom_metadata: expected JSON"):
                checkpointer.save(tmp_path / "1", args=args)

    asyncio.run(cell())
    assert not (tmp_path / "1").exists()
