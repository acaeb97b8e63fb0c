"""``adacheck compact``: which steps it takes, what it says, and what it leaves as it was."""

from __future__ import annotations

import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.adapter.wanted import targets
from adacheck_jax.cli.main import app
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps import folders, identity, lookup, manifest_file
from adacheck_jax.tools import compaction
from adacheck_jax.tools.steps import InputError
from tests import support
from tests.end_to_end.test_compaction import check_steps, item, saved_run
from tests.end_to_end.test_state_kinds import REDUCING, recorded_run
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def is_base(root: Any, step: int) -> bool:
    return isinstance(manifest_file.read(item(root, step)), BaseManifest)


@pytest.mark.slow
@pytest.mark.first(1, slow=2)
@pytest.mark.parametrize(("name", "step"), [("2", 2), ("latest", 4)])
def test_a_step_is_compacted_and_it_is_said_what_that_gave(tmp_path, name, step):
    trained, saved = saved_run(tmp_path, 4)
    before = identity.of_directory(tmp_path)
    dry = json.loads(run("compact", tmp_path, name, "--dry-run", "--json").output)
    assert identity.of_directory(tmp_path) == before
    found = json.loads(run("compact", tmp_path, name, "--json").output)
    state_bytes = sum(leaf.nbytes for leaf in manifest_file.read(item(tmp_path, step)).leaves)
    assert found == {
        "root": str(tmp_path),
        "step": step,
        "item": f"{step}/default",
        "is_dry_run": False,
        "base": 1,
        "delta_count": step - 1,
        "replayed_count": step - 1,
        "state_bytes": state_bytes,
        "lost_steps": [],
    }
    assert dry == {**found, "is_dry_run": True}
    assert is_base(tmp_path, step)
    check_steps(tmp_path, abstract(trained.state), saved)
    again = run("compact", tmp_path, step)
    assert again.exit_code == 2
    assert f"step {step} is a base already: nothing is left to be done." in again.stderr


def test_steps_that_its_directory_alone_held_are_named(tmp_path):
    trained, states = support.dict_run(mesh_of((1, 1))), {}
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(tmp_path, handler) as manager:
        for step in range(1, 8):
            state = jax.block_until_ready(trained.advance())
            states[step] = host_copy(state)
            if step in (1, 4, 7):
                manager.save(step, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
            else:
                assert handler.record_step(state, step)
    shutil.rmtree(tmp_path / "4")
    for number, saved in ((6, 7), (2, 7)):
        refused = run("compact", tmp_path, number)
        assert refused.exit_code == 2
        if number == 6:
            assert f"was recorded and lies in step {saved}" in refused.stderr
            assert "Only saved steps can be compacted" in refused.stderr
    found = run("compact", tmp_path, 7, "--dry-run").output
    assert "Gone with it, since it alone holds them: steps 2 to 6." in found
    assert not is_base(tmp_path, 7)
    assert "since it alone held them: steps 2 to 6." in run("compact", tmp_path, 7).output
    check_steps(tmp_path, abstract(trained.state), {1: states[1], 7: states[7]})


def test_wrong_inputs_are_refused(tmp_path, gcs):
    trained, _ = saved_run(tmp_path / "run", 3)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(4, args=ocp.args.StandardSave(trained.state))
    root = tmp_path / "run"
    before = identity.of_directory(root)
    for arguments, told in (
        ((root, 1), "step 1 is a base already"),
        ((root, 4), "stock Orbax saved step 4"),
        ((root, 9), "expected step 9, found 1, 2, 3"),
        (
            (root, "newest"),
            "expected a step number, latest, or -1 for the newest step, found 'newest'",
        ),
        ((root, 2, "--item", "other"), "expected an item 'other', found default"),
        ((tmp_path / "none",), "found nothing there"),
        ((f"{gcs.url}/run", 3), "nothing can be renamed"),
    ):
        found = run("compact", *arguments)
        assert (found.exit_code, told in found.stderr) == (2, True), found.stderr
    assert identity.of_directory(root) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_damaged_step_stays_as_it_was(tmp_path, dry_run):
    saved_run(tmp_path, 3)
    if dry_run:
        support.pack_index(item(tmp_path, 3)).unlink()
    else:
        support.other_record(lookup.resolve(item(tmp_path, 3)))
    before = identity.of_directory(tmp_path)
    found = run("compact", tmp_path, 3, *(["--dry-run"] if dry_run else []))
    assert found.exit_code == 1
    assert "estore another" in found.stderr
    assert identity.of_directory(tmp_path) == before


def not_here(_: Any, fallback: Any) -> Any:
    """The sharding of an array that was saved on devices that do not exist here."""
    if fallback is None:
        raise ValueError("no such devices")
    return fallback


@pytest.mark.slow
def test_an_update_that_adds_up_elements_needs_the_devices_it_ran_on(tmp_path, monkeypatch):
    trained = recorded_run(REDUCING["lamb"](), separate=True)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(trained.recorder)) as manager:
        saved = support.save_steps(manager, trained, 3)
    before = identity.of_directory(tmp_path)
    monkeypatch.setattr(targets, "_saved_sharding", not_here)
    found = run("compact", tmp_path, 3)
    assert found.exit_code == 1
    assert "the devices that they were saved from do not exist here" in found.stderr
    assert identity.of_directory(tmp_path) == before
    monkeypatch.undo()
    assert run("compact", tmp_path, 3).exit_code == 0
    check_steps(tmp_path, abstract(trained.state), saved)


def test_states_with_wide_numbers_and_keys_are_compacted(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    params = {"w": jnp.ones((8, 8))}
    state = {
        "params": params,
        "opt_state": recorder.init(params),
        "number": 3,
        "host": np.arange(3.0),
        "key": jax.random.key(1),
    }
    train_step = jax.jit(recorder.update)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for step in range(1, 4):
            updates, state["opt_state"] = train_step(params, state["opt_state"], state["params"])
            state["params"] = optax.apply_updates(state["params"], updates)
            state["number"] = step
            manager.save(step, args=adacheck.SaveArgs(state))
    assert compaction.compact(tmp_path).delta_count == 2
    assert jax.config.jax_enable_x64 is False
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        found = manager.restore(3, args=adacheck.RestoreArgs(state))
    assert_same_bits(found, host_copy(state))
    assert found["number"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_base_already", [False, True], ids=["delta", "base"])
def test_repair_removes_what_an_interrupted_compaction_left(tmp_path, is_base_already):
    trained, saved = saved_run(tmp_path, 3)
    directory = item(tmp_path, 3)
    if is_base_already:
        shutil.copytree(directory / folders.LINEAGE, tmp_path / "lineage")
        compaction.compact(tmp_path, 3)
        (tmp_path / "lineage").rename(directory / folders.LINEAGE)
        (directory / "adacheck/delta.0.x").write_bytes(b"old")
        with pytest.raises(InputError, match="adacheck repair removes"):
            compaction.compact(tmp_path, 3)
    else:
        for name in ("d/x", "manifest.ocdbt", "adacheck/base/0/x", "_METADATA", "_sharding"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(b"new")
        (directory / "adacheck/tree_metadata").write_bytes(b"")
    left = {str(path) for path in in_place.leftovers(directory)}
    assert len(left) == (2 if is_base_already else 5)
    reported = json.loads(run("verify", tmp_path, "--json").output)
    assert [(each["path"], each["is_temporary"]) for each in reported["leftovers"]] == [
        ("3/default", False)
    ]
    assert reported["damaged_count"] == 0
    dry = json.loads(run("repair", tmp_path, "--dry-run", "--json").output)
    assert dry["cleared"] == ["3/default"]
    assert {str(path) for path in in_place.leftovers(directory)} == left
    shown = run("repair", tmp_path)
    assert "3/default has lost what an interrupted compaction left in it" in shown.output
    assert (directory / "_METADATA").exists() is is_base_already
    check_steps(tmp_path, abstract(trained.state), saved)
