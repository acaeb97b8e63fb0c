"""Steps that earlier releases wrote are read: ``tests/data`` holds roots of each format version."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.format import manifest
from adacheck_jax.format.manifest_json import FORMAT_VERSION, OLDEST_VERSION
from adacheck_jax.store.steps import roots
from tests import support
from tests.data.make_golden import GOLDEN, bits_of, initial_state, train_step, unpack

of_each_root = pytest.mark.parametrize("golden", GOLDEN, ids=str)
of_version_6 = pytest.mark.parametrize(
    "golden", [each for each in GOLDEN if each.version == 6], ids=str
)


@pytest.fixture
def root(golden, tmp_path):
    """A golden root as it was written."""
    support.skip_unpinned(golden.version)
    unpack(golden.directory, tmp_path)
    return tmp_path / golden.name


def test_there_is_a_root_of_each_version_that_is_read():
    versions = {each.version for each in GOLDEN}
    assert versions == {*range(OLDEST_VERSION, FORMAT_VERSION + 1)}


@pytest.mark.covering(1, quick=4)
@pytest.mark.parametrize("with_recorder", [True, False], ids=["recorder", "no recorder"])
@of_each_root
def test_every_step_is_restored(root, golden, with_recorder):
    recorder = golden.recorder()
    target = support.abstract(initial_state(recorder, golden.width))
    handler = adacheck.AdaCheckHandler(*([recorder] if with_recorder else []))
    with support.manager_of(root, handler) as manager:
        steps = manager.all_steps()
        assert steps == [*golden.saved]
        assert [*golden.bits()] == [*range(1, steps[-1] + 1)]
        for step, expected in golden.bits().items():
            holder = min(each for each in steps if each >= step)
            options = {} if holder == step else {"step": step}
            args = adacheck.RestoreArgs(target, **options)
            state = manager.restore(holder, args=args)
            np.testing.assert_array_equal(bits_of(state, golden.version), expected)
            if golden.steered:
                inner = state["opt_state"].adacheck_inner.hyperparams
                passed = state["opt_state"].adacheck_passed
                assert passed["hyperparams.learning_rate"] == inner["learning_rate"]


@pytest.mark.covering(1, quick=3)
@of_each_root
def test_every_step_verifies_and_is_shown(root, golden):
    run = CliRunner().invoke
    for options in ([], ["--read-data"], ["--replay"]):
        found = run(app, ["verify", str(root), *options])
        assert found.exit_code == 0, found.output
    listed = run(app, ["ls", str(root), "--json"])
    assert listed.exit_code == 0, listed.output
    steps = json.loads(listed.output)["steps"]
    assert [each["update_count"] for each in steps] == [each["step"] for each in steps]
    for step in steps:
        shown = run(app, ["inspect", str(root), str(step["step"])])
        assert shown.exit_code == 0, shown.output
    assert adacheck.latest_restorable(root) == steps[-1]["step"]


@of_each_root
def test_each_step_is_kept_as_it_was_made(root, golden):
    found = [step.manifest for step in roots.steps_of(root)]
    letters = ""
    for each in found:
        is_base = isinstance(each, manifest.BaseManifest)
        letters += "B" if is_base else "R" if each.has_update else "D"
    assert letters == golden.kinds
    bases = [each for each in found[1:] if isinstance(each, manifest.BaseManifest)]
    assert [each.step for each in bases] == ([golden.compacted] if golden.compacted else [])
    recut = [each.step for each in found if getattr(each, "grids", ())]
    moved = [each for each in golden.saved if golden.moved and each >= golden.moved]
    assert recut == moved[:1]
    held = [each.step for last in found for each in getattr(last, "recorded", ())]
    assert held == sorted({*golden.bits()} - {*golden.saved})


@pytest.mark.covering(1, quick=3)
@of_each_root
def test_orbax_finds_the_handler_by_the_name_in_the_step(root, golden):
    """Every step names the handler; the name outlives the module that once had it."""
    known = adacheck.AdaCheckHandler.typestr()
    assert known == "adacheck_jax.handler.AdaCheckHandler"
    with ocp.CheckpointManager(root) as manager:
        for step in manager.all_steps():
            metadata = json.loads((root / str(step) / "_CHECKPOINT_METADATA").read_text())
            assert metadata["item_handlers"] == {"default": known}
            found = np.sort(bits_of(manager.restore(step), golden.version))
            np.testing.assert_array_equal(found, np.sort(golden.bits()[step]))
            assert manager.item_metadata(step) is not None


@of_version_6
def test_deltas_of_version_6_are_not_said_to_be_checked(root, golden):
    found = [step.manifest for step in roots.steps_of(root)]
    deltas = [d for each in found[1:] for d in each.deltas]
    assert {each.checked for each in deltas} == {""}
    assert not found[0].update.pinned


@of_version_6
def test_a_run_of_version_6_goes_on_with_a_base_or_what_was_decided_there(root, golden):
    """The update is another program by now: replay does not go on with the old one."""
    recorder = golden.recorder()
    step = train_step(recorder)
    states = {}
    state = initial_state(recorder)
    with support.manager_of(root, adacheck.AdaCheckHandler(recorder)) as manager:
        last = manager.latest_step()
        state = manager.restore(last, args=adacheck.RestoreArgs(support.abstract(state)))
        for number in range(last + 1, last + 4):
            state = jax.block_until_ready(step(state))
            states[number] = bits_of(state, FORMAT_VERSION)
            manager.save(number, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        for number, expected in states.items():
            found = manager.restore(number, args=adacheck.RestoreArgs(support.abstract(state)))
            np.testing.assert_array_equal(bits_of(found, FORMAT_VERSION), expected)
    found = {each.step: each.manifest for each in roots.steps_of(root)}
    assert isinstance(found[last + 1], manifest.BaseManifest)
    assert [found[last + n].checked for n in (2, 3)] == ["full", "full"]
