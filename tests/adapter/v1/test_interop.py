"""Steps that one Orbax API wrote, read and continued by the other."""

from __future__ import annotations

import orbax.checkpoint as ocp_v0
import pytest

import adacheck_jax as adacheck
from adacheck_jax import AdaCheckHandler
from tests import support
from tests.adapter.v1.common import assert_same_leaves, checkpointer_of, kinds_of, save_steps
from tests.support import abstract, assert_same_bits, dict_run, mesh_of


def save_with_v0(root, handler, run, steps, item):
    """Saves steps with a manager; the item is given its name if it is not the default one."""
    saved = {}
    with manager_of(root, handler, item) as manager:
        for _ in range(steps):
            run.advance()
            saved[run.count] = support.host_copy(run.state)
            args = adacheck.SaveArgs(run.state)
            manager.save(run.count, args=args if item == "default" else composite(item, args))
    return saved


def manager_of(root, handler, item):
    handlers = handler if item == "default" else {item: handler}
    return ocp_v0.CheckpointManager(root, item_handlers=handlers)


def composite(item, args):
    return ocp_v0.args.Composite(**{item: args})


def restored_with_v0(manager, step, run, item):
    args = adacheck.RestoreArgs(abstract(run.state))
    if item == "default":
        return manager.restore(step, args=args)
    return manager.restore(step, args=composite(item, args))[item]


@pytest.mark.parametrize("item", ["state", "default"])
def test_v1_reads_and_continues_what_v0_wrote(tmp_path, item):
    run = dict_run(mesh_of((2, 2)))
    saved = save_with_v0(tmp_path, AdaCheckHandler(run.recorder), run, 3, item)
    target = abstract(run.state)
    with (
        adacheck.v1.context(adacheck.AdaCheckHandler(run.recorder), checkpointable_name=item),
        checkpointer_of(tmp_path) as checkpointer,
    ):
        for step in saved:
            restored = checkpointer.load(step, target, checkpointable_name=item)
            assert_same_bits(restored, saved[step])
        run.state = restored
        run.advance()
        saved[4] = support.host_copy(run.state)
        checkpointer.save(4, run.state, checkpointable_name=item)
    assert kinds_of(tmp_path, item) == "BDDD"
    with manager_of(tmp_path, AdaCheckHandler(), item) as manager:
        assert_same_bits(restored_with_v0(manager, 4, run, item), saved[4])


def test_v1_finds_what_v0_wrote_by_its_handlers_name(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    saved = save_with_v0(tmp_path, AdaCheckHandler(run.recorder), run, 2, "default")
    with adacheck.v1.context(), checkpointer_of(tmp_path) as checkpointer:
        found = checkpointer.load(2, abstract(run.state), checkpointable_name="default")
        assert_same_bits(found, saved[2])
        assert_same_leaves(checkpointer.load_checkpointables(2)["default"], saved[2])


def test_v0_reads_and_continues_what_v1_wrote(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 3)
    handler = AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler, "state") as manager:
        for step in saved:
            restored = restored_with_v0(manager, step, run, "state")
            assert_same_bits(restored, saved[step])
        assert manager.item_metadata(3)["state"].tree["step"].shape == ()
        run.state = restored
        saved |= save_with_v0(tmp_path, handler, run, 1, "state")
    assert kinds_of(tmp_path) == "BDDD"
    with adacheck.v1.context(), checkpointer_of(tmp_path) as checkpointer:
        assert_same_bits(checkpointer.load(4, abstract(run.state)), saved[4])


def test_v0_finds_what_v1_wrote_by_its_handlers_name(tmp_path):
    run = dict_run(mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), checkpointer_of(tmp_path) as checkpointer:
        saved = save_steps(checkpointer, run, 2)
    with ocp_v0.CheckpointManager(tmp_path) as manager:
        assert_same_leaves(manager.restore(2)["state"], saved[2])
