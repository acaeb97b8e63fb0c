"""Steps that stock Orbax saved, under a root on which this library goes on."""

from __future__ import annotations

import json
import logging

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli import main
from adacheck_jax.errors import IntegrityError
from tests import support
from tests.support import (
    abstract,
    assert_same_bits,
    host_copy,
    manager_of,
    mesh_of,
)


def save_stock(root, step, state):
    """Saves a step as a run without this library does."""
    with ocp.CheckpointManager(root) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def listed(root):
    """The steps as ``adacheck ls`` gives them to programs."""
    return json.loads(CliRunner().invoke(main.app, ["ls", str(root), "--json"]).stdout)


def test_a_checkpointer_without_a_manager(tmp_path):
    state = {"a": jnp.arange(4.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", state)
    handler = adacheck.AdaCheckHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        args = adacheck.RestoreArgs(abstract(state))
        assert_same_bits(checkpointer.restore(tmp_path / "weights", args=args), host_copy(state))
    assert handler.restored == adacheck.RestoreInfo(-1, 0, (), 0.0, verified=False)


@pytest.mark.slow
def test_fallback_takes_a_verified_step(tmp_path, caplog):
    """Steps 3 and 5 are of stock Orbax, and 1, 2 and 4 of this library."""
    root, run, states = tmp_path, support.dict_run(mesh_of((2, 2))), {}
    for step in range(1, 6):
        run.advance()
        states[step] = host_copy(run.state)
        if step in (3, 5):
            save_stock(root, step, run.state)
            continue
        with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
            manager.save(step, args=adacheck.SaveArgs(run.state))
    assert adacheck.latest_restorable(root) == 4
    assert "Skipping step 5" in caplog.text
    (root / "4" / "default" / "adacheck" / "manifest.json").write_text("{}")
    found = [adacheck.latest_restorable(root, *item) for item in ((), ("default",), ("absent",))]
    assert found == [2, 2, None]
    handler = adacheck.AdaCheckHandler()
    args = adacheck.RestoreArgs(abstract(run.state), skip_damaged=True)
    with manager_of(root, handler) as manager:
        assert_same_bits(manager.restore(4, args=args), states[2])
        assert handler.restored == adacheck.RestoreInfo(2, handler.restored.replayed_count, (), 0.0)
        assert "Passed over steps 3, which stock Orbax saved" in caplog.text
        for path in (root / "5" / "default").glob("d/*"):
            path.write_bytes(b"")
        assert_same_bits(manager.restore(5, args=args), states[2])
        assert handler.restored.verified


def test_stock_steps_alone_are_no_reason_to_begin_anew(tmp_path):
    save_stock(tmp_path, 7, {"a": jnp.arange(3.0)})
    with pytest.raises(IntegrityError, match=r"7.*which nothing can verify"):
        adacheck.latest_restorable(tmp_path)
    told = CliRunner().invoke(main.app, ["ls", str(tmp_path)]).stdout
    assert "what stock Orbax saved cannot be verified" in told
    assert listed(tmp_path)["stock_steps"] == [7]


def test_a_stock_item_beside_ours_is_no_stock_step(tmp_path):
    handlers = {"state": adacheck.AdaCheckHandler(), "data": ocp.StandardCheckpointHandler()}
    with manager_of(tmp_path, handlers) as manager:
        args = {
            "state": adacheck.SaveArgs({"a": jnp.arange(3.0)}),
            "data": ocp.args.StandardSave({"b": jnp.arange(3.0)}),
        }
        manager.save(1, args=ocp.args.Composite(**args))
    assert adacheck.latest_restorable(tmp_path) == 1
    assert listed(tmp_path)["stock_steps"] == []


def test_v1_says_that_a_stock_step_was_not_verified(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    weights = {"a": jnp.arange(8.0), "b": jnp.ones(2)}
    v1.save(tmp_path / "step_3", weights)
    handler = adacheck.AdaCheckHandler()
    with adacheck.v1.context(handler):
        assert_same_bits(v1.load(tmp_path / "step_3", weights), host_copy(weights))
        assert handler.restored == adacheck.RestoreInfo(3, 0, (), 0.0, verified=False)
        assert "not verified" in caplog.text
        wanted = adacheck.RestoreArgs({"a": abstract(weights["a"])}, partial_restore=True)
        found = v1.load_checkpointables(tmp_path / "step_3", {"state": wanted})["state"]
        assert_same_bits(found, host_copy(weights["a"]))
