"""Contexts and registries that know the handler, and what is said of wrong ones."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from adacheck_jax import v1 as adacheck
from adacheck_jax.errors import RecorderError
from tests.adapter.v1.common import checkpointer_of, kinds_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, mesh_of


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
    run = dict_run(mesh_of((2,)))
    with adacheck.context(run.recorder, parent=parent) as context:
        assert context.asynchronous.timeout_secs == 77
        with checkpointer_of(tmp_path) as checkpointer:
            run.advance()
            checkpointer.save_checkpointables(1, {"state": run.state, "note": Note()})
            target = {"state": abstract(run.state), "note": None}
            assert isinstance(checkpointer.load_checkpointables(1, target)["note"], Note)
    assert kinds_of(tmp_path) == "B"


def test_a_state_of_another_name(tmp_path):
    run = dict_run(mesh_of((2,)))
    context = adacheck.context(run.recorder, checkpointable_name="train")
    with context, checkpointer_of(tmp_path) as checkpointer:
        for _ in range(2):
            run.advance()
            weights = {"ema": jnp.full(3, run.count)}
            checkpointer.save_checkpointables(run.count, {"train": run.state, "state": weights})
        assert_same_bits(checkpointer.load(2), [jnp.full(3, 2)])
        found = checkpointer.load(2, abstract(run.state), checkpointable_name="train")
        assert int(found["step"]) == 2
    assert kinds_of(tmp_path, "train") == "BD"
    assert adacheck.run_of(context, "train").restored.step == 2


def test_a_registry_of_ones_own(tmp_path):
    run = dict_run(mesh_of((2,)))
    registry = ocp.handlers.local_registry(include_global_registry=False)
    followed = adacheck.register(registry, run.recorder, max_deltas=1)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context, checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 3)
        assert_same_bits(checkpointer.load(2, abstract(run.state)), saved[2])
    assert kinds_of(tmp_path) == "BDB"
    assert followed.restored.step == 2
    assert adacheck.run_of(context) is followed


def test_two_runs_do_not_mix(tmp_path):
    contexts, runs = [], [dict_run(mesh_of((2,))) for _ in range(2)]
    for run in runs:
        contexts.append(adacheck.context(run.recorder))
    for _ in range(2):
        for name, run, context in zip("ab", runs, contexts, strict=True):
            with context, checkpointer_of(tmp_path / name) as checkpointer:
                save_steps(checkpointer, run, 1)
    assert [kinds_of(tmp_path / name) for name in "ab"] == ["BD", "BD"]


def test_a_name_that_is_taken_is_refused():
    for registry in (ocp.handlers.local_registry(), ocp.handlers.global_registry()):
        before = [*registry.get_all_entries()]
        with pytest.raises(ValueError, match=r"PyTreeHandler.*include_global_registry=False"):
            adacheck.register(registry, adacheck.Recorder(optax.sgd(0.1)))
        assert [*registry.get_all_entries()] == before


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="max_deltas"):
        adacheck.context(max_deltas=-1)
    with pytest.raises(TypeError, match="max_delta"):
        adacheck.context(max_delta=1)
    with pytest.raises(RecorderError):
        adacheck.context(optax.sgd(0.1))
    with pytest.raises(ValueError, match="found PyTreeHandler"):
        adacheck.run_of(ocp.Context())
    with pytest.raises(ValueError, match="found no handler"):
        adacheck.run_of(ocp.Context(), "train")


def test_the_run_of_a_context_reports_its_saves(tmp_path):
    told = []
    run = dict_run(mesh_of((2, 2)))
    context = adacheck.context(run.recorder, on_save=told.append)
    with context, checkpointer_of(tmp_path) as checkpointer:
        assert adacheck.run_of(context).last_save is None
        save_steps(checkpointer, run, 2)
    assert [(each.step, each.kind) for each in told] == [(1, "base"), (2, "delta")]
    assert adacheck.run_of(context).last_save == told[-1]
