"""Contexts and registries that know the handler, and what is said of wrong ones."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck
from tests.adapter.v1.common import checkpointer_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, kinds_of, mesh_of


class Note:
    """A checkpointable that only a user's own handler knows."""


class NoteHandler(ocp.handlers.CheckpointableHandler):
    async def save(self, directory, checkpointable):
        async def write():
            ((await directory.await_creation()) / "note").touch()

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            assert (directory / "note").exists()
            return Note()

        return read()

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Note)

    def is_abstract_handleable(self, abstract_checkpointable):
        return isinstance(abstract_checkpointable, Note)


def test_a_context_takes_options_and_handlers_of_its_parent(tmp_path):
    parent = ocp.Context()
    parent.asynchronous.timeout_secs = 77
    parent.checkpointables.registry = ocp.handlers.local_registry().add(NoteHandler)
    run = dict_run(mesh_of((2, 2)))
    with adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder), parent=parent) as context:
        assert context.asynchronous.timeout_secs == 77
        with checkpointer_of(tmp_path) as checkpointer:
            run.advance()
            checkpointer.save_checkpointables(1, {"state": run.state, "note": Note()})
            target = {"state": abstract(run.state), "note": None}
            assert isinstance(checkpointer.load_checkpointables(1, target)["note"], Note)
    assert kinds_of(tmp_path) == "B"


def test_a_state_of_another_name(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    context = adacheck.v1.context(handler, checkpointable_name="train")
    with context, checkpointer_of(tmp_path) as checkpointer:
        for _ in range(2):
            run.advance()
            weights = {"ema": jnp.full(3, run.count)}
            checkpointer.save_checkpointables(run.count, {"train": run.state, "state": weights})
        assert_same_bits(checkpointer.load(2), [jnp.full(3, 2)])
        found = checkpointer.load(2, abstract(run.state), checkpointable_name="train")
        assert int(found["step"]) == 2
    assert kinds_of(tmp_path, "train") == "BD"
    assert handler.restored.step == 2


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


def test_two_runs_do_not_mix(tmp_path):
    contexts, runs = [], [dict_run(mesh_of((2, 2))) for _ in range(2)]
    for run in runs:
        contexts.append(adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder)))
    for _ in range(2):
        for name, run, context in zip("ab", runs, contexts, strict=True):
            with context, checkpointer_of(tmp_path / name) as checkpointer:
                save_steps(checkpointer, run, 1)
    assert [kinds_of(tmp_path / name) for name in "ab"] == ["BD", "BD"]


def test_a_name_that_is_taken_is_refused():
    for registry in (ocp.handlers.local_registry(), ocp.handlers.global_registry()):
        before = [*registry.get_all_entries()]
        with pytest.raises(ValueError, match=r"PyTreeHandler.*include_global_registry=False"):
            adacheck.v1.register(registry, adacheck.AdaCheckHandler())
        assert [*registry.get_all_entries()] == before


def test_what_is_no_handler_is_refused():
    with pytest.raises(TypeError, match=r"expected an AdaCheckHandler, found Recorder.*context\("):
        adacheck.v1.context(adacheck.Recorder(optax.sgd(0.1)))
