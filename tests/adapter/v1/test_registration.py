"""Contexts and registries that know the handler, and what is said of wrong ones."""

from __future__ import annotations

import optax
import pytest
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck
from tests.adapter.v1.common import checkpointer_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, kinds_of, mesh_of


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
