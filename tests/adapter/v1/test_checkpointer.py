"""Saving every step and loading it through stock Orbax v1, by contexts and registries."""

from __future__ import annotations

import gc
import warnings

import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.metadata import serialization  # no public name

import adacheck_jax as adacheck
from adacheck_jax.errors import MismatchError
from adacheck_jax.store.steps import lookup, marks
from tests.adapter.v1.common import checkpointer_of, save_steps
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


def test_a_registry_of_ones_own(tmp_path):
    run, told = dict_run(mesh_of((2, 2))), []
    registry = ocp.handlers.local_registry(include_global_registry=False)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=1, on_save=told.append)
    adacheck.v1.register(registry, handler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context, checkpointer_of(tmp_path) as checkpointer:
        assert handler.last_save is None
        saved = save_steps(checkpointer, run, 3)
        assert_same_bits(checkpointer.load(2, abstract(run.state)), saved[2])
    assert kinds_of(tmp_path) == "BDB"
    assert [(each.step, each.kind) for each in told] == [(1, "base"), (2, "delta"), (3, "base")]
    assert handler.last_save == told[-1]
    assert handler.restored.step == 2


def test_a_name_that_is_taken_is_refused():
    for registry in (ocp.handlers.local_registry(), ocp.handlers.global_registry()):
        before = [*registry.get_all_entries()]
        with pytest.raises(ValueError, match=r"PyTreeHandler.*include_global_registry=False"):
            adacheck.v1.register(registry, adacheck.AdaCheckHandler())
        assert [*registry.get_all_entries()] == before


def test_what_is_no_handler_is_refused():
    with pytest.raises(TypeError, match=r"expected an AdaCheckHandler, found Recorder.*context\("):
        adacheck.v1.context(adacheck.Recorder(optax.sgd(0.1)))
