"""Saving every step and loading it through stock Orbax v1."""

from __future__ import annotations

import contextlib
import gc
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.metadata import serialization  # no public name

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.store.steps import lookup, marks
from tests import support
from tests.adapter.v1.common import assert_same_leaves, checkpointer_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, host_copy, kinds_of, mesh_of


class Batches:
    """A data iterator as Orbax v1 takes it: it saves and loads itself."""

    def __init__(self, position):
        self.position = position

    async def save(self, directory):
        position = self.position

        async def write():
            path = await directory.await_creation()
            (path / "position").write_text(str(position))

        return write()

    async def load(self, directory):
        async def read():
            self.position = int((directory / "position").read_text())

        return read()


def test_other_checkpointables_go_on_beside_the_state(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    saved = {}
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        for _ in range(3):
            run.advance()
            saved[run.count] = host_copy(run.state)
            items = {"state": run.state, "batches": Batches(run.count), "run": {"name": "a"}}
            assert checkpointer.save_checkpointables(
                run.count, items, metrics={"loss": run.count}, custom_metadata={"note": "b"}
            )
    assert kinds_of(tmp_path) == "BDD"
    with adacheck.v1.context(), checkpointer_of(tmp_path) as checkpointer:
        batches = Batches(0)
        target = {"state": abstract(run.state), "batches": batches, "run": None}
        restored = checkpointer.load_checkpointables(3, target)
        assert_same_bits(restored["state"], saved[3])
        assert batches.position == 3
        assert restored["run"] == {"name": "a"}
        found = checkpointer.checkpointables_metadata(3)
        assert (found.metrics, found.custom_metadata) == ({"loss": 3}, {"note": "b"})
        assert {"state", "batches", "run"} <= found.metadata.keys()


@pytest.mark.parametrize("has_links", [True, False])
def test_retention_keeps_what_the_kept_steps_need(tmp_path, has_links):
    run, keep = dict_run(mesh_of((2, 2))), ocp.training.preservation_policies.LatestN(2)
    keep = keep if has_links else adacheck.KeepLineage(keep)
    options = {} if has_links else {"keep_lineage": keep, "max_deltas": 3}
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    with (
        contextlib.nullcontext() if has_links else support.without_links(),
        adacheck.v1.context(handler),
        checkpointer_of(tmp_path, preservation_policy=keep) as checkpointer,
    ):
        saved = save_steps(checkpointer, run, 7)
        kept = [6, 7] if has_links else [5, 6, 7]
        assert [each.step for each in checkpointer.checkpoints] == kept
        for step in kept:
            assert_same_bits(checkpointer.load(step, abstract(run.state)), saved[step])
            described = checkpointer.metadata(step).metadata
            assert_same_leaves(checkpointer.load(step, described), saved[step])
    assert kinds_of(tmp_path, "state") == ("DD" if has_links else "BDD")


def test_arguments_stand_for_the_state_and_for_the_abstract_state(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        for _ in range(3):
            run.advance()
            if run.count == 2:
                expected = host_copy(run.state)
                assert handler.record_step(run.state, 2)
            else:
                args = adacheck.SaveArgs(run.state, custom_metadata={"note": run.count})
                checkpointer.save_checkpointables(run.count, {"state": args})
        target = adacheck.RestoreArgs(abstract(run.state), step=2, require_exact=True)
        assert_same_bits(checkpointer.load_checkpointables(3, {"state": target})["state"], expected)
    assert kinds_of(tmp_path) == "BD"
    assert lookup.resolve(tmp_path / "3/state").manifest.custom_metadata == {"note": 3}


def test_a_state_is_recovered_from_memory(tmp_path):
    run, root = dict_run(mesh_of((2, 2))), tmp_path / "root"
    options = {"shadow": adacheck.Shadow(directory=tmp_path / "memory")}
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    with adacheck.v1.context(handler), checkpointer_of(root) as checkpointer:
        for _ in range(3):
            run.advance()
            checkpointer.save(run.count, run.state)
    handler.close()  # as the end of its process would
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    found = handler.recover(root, abstract(run.state))
    assert found is not None
    assert found[0] == 3
    assert_same_bits(found[1], host_copy(run.state))
    with adacheck.v1.context(handler), checkpointer_of(root) as checkpointer:
        run.state = found[1]
        run.advance()
        checkpointer.save(run.count, run.state)
    assert kinds_of(root) == "BDDD"


def test_states_of_scalars_keys_and_empty_arrays(tmp_path):
    state = {
        "epoch": 3,
        "rate": 0.5,
        "key": jax.random.key(1),
        "host": np.arange(3),
        "empty": jnp.zeros((0, 3)),
        "few": jnp.arange(4, dtype=jnp.int4),
        "none": None,
    }
    target = jax.tree.map(lambda x: x, state)
    handler = adacheck.AdaCheckHandler(delta="bits")
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state | {"host": state["host"] + step})
            restored = checkpointer.load(step, target)
            assert (restored["epoch"], restored["rate"], restored["none"]) == (3, 0.5, None)
            assert jnp.all(
                jax.random.key_data(restored["key"]) == jax.random.key_data(state["key"])
            )
            assert restored["host"].tolist() == (state["host"] + step).tolist()
            assert restored["empty"].shape == (0, 3)
            assert restored["few"].dtype == jnp.int4
    assert kinds_of(tmp_path) == "BD"


def test_stock_orbax_loads_a_base_and_says_what_loads_a_delta(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 2)
    target = abstract(run.state)
    assert_same_bits(ocp.load(tmp_path / "1", target), saved[1])
    for wanted in (target, None):
        with pytest.raises(Exception, match=r"adacheck_jax\.v1\.context"):
            ocp.load(tmp_path / "2", wanted)
    with checkpointer_of(tmp_path) as checkpointer:
        with pytest.raises(Exception, match="state") as caught:
            checkpointer.load(2, target)
        assert "adacheck_jax.v1.context" in str(caught.value.__cause__)


def test_errors_keep_their_types(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 2)
        with pytest.raises(MismatchError, match="does not fit what was saved"):
            checkpointer.load(2, {"params": jnp.zeros(3)})
        with pytest.raises(MismatchError, match="Unsupported type"):
            checkpointer.save(3, {"name": "text"})
        with pytest.raises(ValueError, match="expected a step number"):
            checkpointer.save_checkpointables(3, {"state": adacheck.SaveArgs(run.state, step=-1)})
        (tmp_path / "1").rename(tmp_path / "gone")
        (tmp_path / "2/state/adacheck/manifest.json").write_text("{}")
        with pytest.raises(adacheck.AdaCheckError, match="manifest"):
            checkpointer.load(2, abstract(run.state))
        (tmp_path / "gone").rename(tmp_path / "1")
        assert_same_bits(checkpointer.load(1, abstract(run.state)), saved[1])


def test_a_refused_save_leaves_nothing_that_hinders_the_next_one(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    with adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder)):
        run.advance()
        expected = host_copy(run.state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine '_create_paths' was never awaited")
            with pytest.raises(MismatchError):
                ocp.save_checkpointables(tmp_path / "1", {"state": jnp.zeros(3)})
            gc.collect()  # Orbax made it for a handler that then refused
        ocp.save(tmp_path / "1", run.state)
        assert_same_bits(ocp.load(tmp_path / "1", abstract(run.state)), expected)


def test_after_a_failed_save_training_goes_on(tmp_path, monkeypatch):
    from adacheck_jax.adapter.saving.saves import Saves

    run = dict_run(mesh_of((2, 2)))
    commit = Saves.commit

    def failing(self, directory, begun):
        if run.count == 2:
            raise OSError("no space")
        commit(self, directory, begun)

    monkeypatch.setattr(Saves, "commit", failing)
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 1)
        run.advance()
        with pytest.raises(OSError, match="no space"):
            checkpointer.save(2, run.state)
        with pytest.raises(OSError, match="no space"):
            checkpointer.wait()  # Orbax tells the main thread too
        checkpointer.reload()
        saved |= save_steps(checkpointer, run, 2)
        for step in (1, 3, 4):
            assert_same_bits(checkpointer.load(step, abstract(run.state)), saved[step])
        assert [each.step for each in checkpointer.checkpoints] == [1, 3, 4]


def test_a_step_that_is_marked_is_not_committed_before_its_metadata(tmp_path, monkeypatch):
    run = dict_run(mesh_of((2, 2)))
    parent = ocp.Context()
    parent.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    found, write = [], serialization.write

    async def noted(path, *args):
        found.append((path.name, marks.is_committed(tmp_path / "1/state")))
        await write(path, *args)

    monkeypatch.setattr(serialization, "write", noted)
    with adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder), parent=parent):
        ocp.save(tmp_path / "1", run.advance())
    assert found == [(marks.STEP_METADATA, False)]
    assert marks.is_committed(tmp_path / "1/state")


def test_what_is_written_beside_a_step_never_changes(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        save_steps(checkpointer, run, 2)
    for step in (1, 2):
        found = json.loads((tmp_path / str(step) / "_CHECKPOINT_METADATA").read_text())
        assert found["item_handlers"] == {"state": "adacheck_jax.handler.AdaCheckHandler"}
