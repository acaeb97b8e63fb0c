"""A saved delta becomes a base in its place; it and all other steps keep their bits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1
from orbax.checkpoint.checkpoint_managers import LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.adapter.restoring.restorer import StepRestorer
from adacheck_jax.cli.main import app
from adacheck_jax.errors import (
    IntegrityError,
    LineageError,
    MismatchError,
)
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.save import share
from adacheck_jax.store.compaction import in_place, new_base
from adacheck_jax.store.steps import folders, identity, lineage, lookup, manifest_file, roots
from adacheck_jax.store.storage.location import at
from tests import support
from tests.data.make_golden import GOLDEN, bits_of, initial_state, unpack
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

MESH = (4, 2)


def item(root: Path, step: int) -> Path:
    return root / str(step) / "default"


def saved_run(root: Path, steps: int = 6, **options: Any) -> tuple[support.Run, dict[int, Any]]:
    return support.saved_run(root, steps, MESH, **options)


def check_steps(root: Path, target: Any, saved: dict[int, Any]) -> None:
    """Fresh handlers restore every step, and nothing of a compaction is left."""
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        assert list(manager.all_steps()) == sorted(saved)
        for step, expected in saved.items():
            args = adacheck.RestoreArgs(target)
            assert_same_bits(manager.restore(step, args=args), expected)
    check_clean(root)


def check_clean(root: Path) -> None:
    assert not [path for path in root.iterdir() if not path.name.isdecimal()]
    for step in roots.steps_of(root):
        assert in_place.leftovers(step.directory) == []


def stock_leaves(root: Path, step: int) -> list[np.ndarray]:
    """A step as stock Orbax restores it, in a manager that knows nothing of this library."""
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(step, args=ocp.args.StandardRestore())
    raw = ocp.PyTreeCheckpointer().restore(item(root, step))
    assert sorted(x.tobytes() for x in host_copy(raw)) == sorted(
        x.tobytes() for x in host_copy(found)
    )
    return host_copy(found)


def lineage_of(root: Path, step: int) -> list[int]:
    return [each.manifest.step for each in lookup.resolve(item(root, step)).entries]


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("step", [2, 4, 6], ids=["first", "middle", "last"])
def test_a_compacted_delta_is_a_stock_base_and_no_step_changes(tmp_path, step):
    run, saved = saved_run(tmp_path)
    old = manifest_file.read(item(tmp_path, step))
    made = support.compact(tmp_path, step)
    assert manifest_file.read(item(tmp_path, step)) == made
    assert (made.fingerprints, made.counts) == (old.fingerprints, old.counts)
    assert made.update == lookup.resolve(item(tmp_path, 1)).base.update
    check_steps(tmp_path, abstract(run.state), saved)
    assert lineage_of(tmp_path, step) == [step]
    expected = sorted(x.tobytes() for x in saved[step])
    assert sorted(x.tobytes() for x in stock_leaves(tmp_path, step)) == expected
    other = mesh_of((8, 1))
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        args = adacheck.RestoreArgs(abstract(run.state, other))
        assert_same_bits(manager.restore(step, args=args), saved[step])
    for option in ("--read-data", "--replay"):
        found = CliRunner().invoke(app, ["verify", str(tmp_path), option])
        assert found.exit_code == 0, found.output
    assert adacheck.latest_restorable(tmp_path) == 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"delta": "bits", "compression": "small"}], ids=str)
def test_every_step_of_a_lineage_may_be_compacted_in_any_order(tmp_path, options):
    run, saved = saved_run(tmp_path, **options)
    for step in (4, 6, 2, 3, 5):
        support.compact(tmp_path, step)
        check_steps(tmp_path, abstract(run.state), saved)
        assert "delta" not in json.dumps([x.stem for x in item(tmp_path, step).rglob("*")])
    assert support.kinds_of(tmp_path) == "BBBBBB"
    for step in (1, 2, 3, 5, 6):
        shutil.rmtree(tmp_path / str(step))
    check_steps(tmp_path, abstract(run.state), {4: saved[4]})


@pytest.mark.slow
@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("ago", [0, 2], ids=["its parent", "a step before"])
def test_a_running_training_goes_on_from_the_new_base(tmp_path, ago):
    run = support.dict_run(mesh_of(MESH))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 5)
        support.compact(tmp_path, 5 - ago)
        saved |= save_steps(manager, run, 3)
    for step in (6, 7, 8):
        assert isinstance(manifest_file.read(item(tmp_path, step)), DeltaManifest)
        assert lineage_of(tmp_path, step) == [*range(5 - ago, step + 1)]
        linked = (item(tmp_path, step) / folders.LINEAGE).iterdir()
        steps = {path.name.split(".")[0] for path in linked}
        assert steps == {str(each) for each in range(5 - ago, step)}
    check_steps(tmp_path, abstract(run.state), saved)
    listed = json.loads(CliRunner().invoke(app, ["ls", str(tmp_path), "--json"]).output)["steps"]
    assert [each["depth"] for each in listed][-3:] == [1 + ago, 2 + ago, 3 + ago]
    for step in range(1, 8):
        shutil.rmtree(tmp_path / str(step))
    check_steps(tmp_path, abstract(run.state), {8: saved[8]})


@pytest.mark.slow
def test_compacted_lineages_need_no_further_base(tmp_path):
    run = support.dict_run(mesh_of(MESH))
    saved = {}
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=4)
    with manager_of(tmp_path, handler, max_to_keep=3) as manager:
        for _ in range(6):
            saved |= save_steps(manager, run, 2)
            support.compact(tmp_path, run.count)
    listed = {step: saved[step] for step in (10, 11, 12)}
    check_steps(tmp_path, abstract(run.state), listed)
    last = manifest_file.read(item(tmp_path, 12))
    assert isinstance(last, BaseManifest)
    assert last.depth == 11, "the only base that was saved was the first"
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=4)) as manager:
        args = adacheck.RestoreArgs(abstract(run.state))
        run.state = manager.restore(12, args=args)
        later = save_steps(manager, run, 6)
    assert support.kinds_of(tmp_path) == "BDBDDDDBD"
    check_steps(tmp_path, abstract(run.state), listed | later)


def test_deferred_steps_go_with_the_delta_and_can_follow_the_base(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder)
    states = {}
    with manager_of(tmp_path, handler) as manager:
        for step in range(1, 10):
            states[step] = host_copy(run.advance())
            if step == 6:
                manager.wait_until_finished()
                support.compact(tmp_path, 5)
            if step in (1, 5, 9) or not handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state))
    assert lineage_of(tmp_path, 9) == [5, 9]
    target = abstract(run.state)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for step in (5, 6, 7, 8, 9):
            args = adacheck.RestoreArgs(target, step=None if step in (5, 9) else step)
            assert_same_bits(manager.restore(5 if step == 5 else 9, args=args), states[step])
        with pytest.raises(LineageError, match="found the steps 5"):
            manager.restore(5, args=adacheck.RestoreArgs(target, step=4))
    check_steps(tmp_path, target, {step: states[step] for step in (1, 5, 9)})


def rare_state(recorder: adacheck.Recorder) -> dict[str, Any]:
    params = {"a/b": {"w": jnp.ones((8, 8))}, "c": jnp.zeros(8)}
    return {
        "params": params,
        "opt_state": recorder.init(params),
        "number": 3,
        "rate": 0.5,
        "key": jax.random.key(0),
        "small": jnp.ones(4, jnp.uint4),
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "list": [jnp.int32(1), jnp.ones(3, jnp.bfloat16), np.arange(3)],
        "complex": jnp.ones(2, jnp.complex64),
        "frozen": jnp.arange(2.0**15),
    }


@pytest.mark.slow
def test_leaves_of_all_kinds_metadata_and_frozen_files_survive(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    state, saved = rare_state(recorder), {}

    @jax.jit
    def train_step(params: Any, opt_state: Any) -> Any:
        grads = jax.tree.map(lambda x: x * 0.1 + 1, params)
        updates, opt_state = recorder.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for step in range(1, 4):
            state["params"], state["opt_state"] = train_step(state["params"], state["opt_state"])
            state |= {"number": step, "key": jax.random.key(step)}
            manager.save(step, args=adacheck.SaveArgs(state, custom_metadata={"step": step}))
            saved[step] = host_copy(state)
    made = support.compact(tmp_path, 3)
    frozen = next(i for i, leaf in enumerate(made.leaves) if leaf.path == "frozen")
    assert (frozen, 1) in made.kept
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for step in (1, 2, 3):
            found = manager.restore(step, args=adacheck.RestoreArgs(state))
            assert_same_bits(found, saved[step])
            assert manager.item_metadata(step).custom_metadata == {"step": step}
        assert type(found["number"]) is int
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    found = ocp.PyTreeCheckpointer().restore(item(tmp_path, 3))
    assert (found["number"], found["rate"]) == (3, 0.5)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(state["key"])).all()
    np.testing.assert_array_equal(found["frozen"], state["frozen"])
    np.testing.assert_array_equal(found["params"]["a/b"]["w"], state["params"]["a/b"]["w"])


def test_v1_loads_a_compacted_step_with_and_without_this_library(tmp_path):
    run, saved = support.dict_run(mesh_of(MESH)), {}
    handler = adacheck.AdaCheckHandler(run.recorder)
    with adacheck.v1.context(handler), ocp_v1.training.Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 4):
            saved[step] = host_copy(run.advance())
            checkpointer.save_checkpointables(step, {"state": run.state})
    path = next(p for p in (tmp_path / "3").iterdir() if (p / manifest_file.FILE).exists())
    before = (path / "_METADATA").read_bytes()
    known, blocks = support.restored_boxes(path)
    with pytest.raises(IntegrityError, match="expected the bits that were saved"):
        support.put_base(known, changed(blocks))
    assert (path / "_METADATA").read_bytes() == before
    support.compact(tmp_path, 3, path.name)
    target = abstract(run.state)
    for context in (adacheck.v1.context(), ocp_v1.Context()):
        with context:
            found = ocp_v1.load_checkpointables(tmp_path / "3", {path.name: target})
        assert_same_bits(found[path.name], saved[3])
    with adacheck.v1.context():
        found = ocp_v1.load_checkpointables(tmp_path / "2", {path.name: target})
    assert_same_bits(found[path.name], saved[2])


@pytest.mark.covering(1, quick=3)
@pytest.mark.parametrize("golden", GOLDEN[::-1], ids=str)
def test_steps_of_earlier_releases_are_compacted(tmp_path, golden):
    support.skip_unpinned(golden.version)
    unpack(golden.directory, tmp_path)
    root = tmp_path / golden.name
    for step in {*golden.saved[:0:-1]} - {golden.compacted}:
        support.compact(root, step)
        target = adacheck.RestoreArgs(abstract(initial_state(golden.recorder(), golden.width)))
        with manager_of(root, adacheck.AdaCheckHandler()) as manager:
            for each in golden.saved:
                found = bits_of(manager.restore(each, args=target), golden.version)
                np.testing.assert_array_equal(found, golden.bits()[each])
    check_clean(root)


@pytest.fixture
def without_links():
    with support.without_links():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("without_links")
def test_without_hard_links_steps_that_follow_refer_to_the_base(tmp_path):
    run = support.dict_run(mesh_of(MESH))
    keep = adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=4, keep_lineage=keep)
    with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
        saved = save_steps(manager, run, 4)
        support.compact(tmp_path, 3)
        saved |= save_steps(manager, run, 1)
    assert lineage_of(tmp_path, 5) == [3, 4, 5]
    keep = adacheck.KeepLineage(LatestN(2))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=4, keep_lineage=keep)
    with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
        run.state = manager.restore(5, args=adacheck.RestoreArgs(abstract(run.state)))
        saved |= save_steps(manager, run, 2)
    assert lineage_of(tmp_path, 7) == [3, 4, 5, 6, 7]
    check_steps(tmp_path, abstract(run.state), {step: saved[step] for step in range(3, 8)})


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """A root with three steps, the run and what each saved state was."""
    root = tmp_path_factory.mktemp("saved")
    return root, *saved_run(root, 3)


@pytest.fixture
def three(saved_once, tmp_path):
    """Three steps in ``tmp_path``: the lineage of the last one, and its elements."""
    subprocess.run(["cp", "-a", f"{saved_once[0]}/.", tmp_path], check=True)  # with their links
    return support.restored_boxes(item(tmp_path, 3))


def changed(blocks: dict[int, Any]) -> dict[int, Any]:
    """Blocks of which one bit of the largest leaf is another."""
    index = max(blocks, key=lambda i: sum(b.nbytes for b in blocks[i].values()))
    box, block = next(iter(blocks[index].items()))
    other = block.copy()
    other.reshape(-1).view(np.uint8)[5] ^= 1
    return {**blocks, index: {**blocks[index], box: other}}


def without_one(blocks: dict[int, Any]) -> dict[int, Any]:
    return {i: each for i, each in blocks.items() if i != 1}


def without_a_box(blocks: dict[int, Any]) -> dict[int, Any]:
    index = max(blocks, key=lambda i: len(blocks[i]))
    return {**blocks, index: dict([*blocks[index].items()][1:])}


def of_another_shape(blocks: dict[int, Any]) -> dict[int, Any]:
    box, block = next(iter(blocks[1].items()))
    return {**blocks, 1: {box: block[..., None]}}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (changed, IntegrityError, "expected the bits that were saved, found others in the state"),
        (without_a_box, MismatchError, "that have its [0-9]+ elements, found [1-9]"),
        (without_one, MismatchError, "that have its [0-9]+ elements, found 0"),
        (of_another_shape, MismatchError, "expected blocks of .* with the shapes of their boxes"),
    ],
)
def test_other_values_than_the_saved_ones_are_refused(tmp_path, three, change, error, match):
    before = identity.of_directory(tmp_path)
    known, blocks = three
    with pytest.raises(error, match=match):
        support.put_base(known, change(blocks))
    assert identity.of_directory(tmp_path) == before


@pytest.mark.parametrize("name", ["update.cpu.stablehlo", "../_sharding", "../_METADATA"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"other")])
def test_damaged_files_of_the_old_base_are_not_made_part_of_the_new_one(
    tmp_path, three, name, damage
):
    known, blocks = three
    damage((item(tmp_path, 3) / folders.LINEAGE / "1/adacheck" / name).resolve())
    before = identity.of_directory(tmp_path)
    with pytest.raises(IntegrityError, match="Nothing was changed"):
        support.put_base(known, blocks)
    assert identity.of_directory(tmp_path) == before


def test_a_step_that_is_a_base_already_or_was_saved_again_is_refused(tmp_path, three):
    known, blocks = three
    support.put_base(known, blocks)
    with pytest.raises(LineageError, match="found that step 3 is a base already"):
        support.put_base(known, blocks)
    shutil.rmtree(tmp_path / "3")
    shutil.copytree(tmp_path / "2", tmp_path / "3")
    with pytest.raises(LineageError, match="The step was saved again"):
        support.put_base(known, blocks)
    check_clean(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(new_base, "_check_parts", 1), (in_place, "_check_there", 4)],
    ids=["made", "moved"],
)
def test_a_step_that_is_deleted_meanwhile_does_not_come_back(
    tmp_path, monkeypatch, three, module, name, number
):
    known, blocks = three
    inner, calls = getattr(module, name), []

    def deleting(*args: Any) -> None:
        inner(*args)
        calls.append(args)
        if len(calls) == number:
            shutil.rmtree(tmp_path / "3")

    monkeypatch.setattr(module, name, deleting)
    with pytest.raises(LineageError, match="is being deleted or was replaced"):
        support.put_base(known, blocks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.slow
def test_a_save_that_links_while_its_parent_becomes_a_base(tmp_path, monkeypatch):
    run = support.dict_run(mesh_of(MESH))
    link = share.links.link_ancestors

    def compacting(known: Any, *args: Any) -> None:
        if known.manifest.step in (4, 6):
            support.compact(tmp_path, known.manifest.step)
        link(known, *args)

    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        monkeypatch.setattr(share.links, "link_ancestors", compacting)
        saved |= save_steps(manager, run, 5)
    assert [lineage_of(tmp_path, step) for step in (5, 6, 7, 8)] == [[4, 5], [6], [6, 7], [6, 7, 8]]
    check_steps(tmp_path, abstract(run.state), saved)


@pytest.mark.parametrize("read", ["restore", "verify"])
def test_a_reader_whose_files_are_deleted_looks_again(
    tmp_path, monkeypatch, saved_once, three, read
):
    (known, blocks), (_, run, saved) = three, saved_once
    inner = lookup.resolve

    def compacted_afterwards(path: Any) -> lineage.Lineage:
        found = inner(path)
        if isinstance(found.manifest, DeltaManifest) and found.manifest.step == 3:
            support.put_base(known, blocks)
        return found

    monkeypatch.setattr(lookup, "resolve", compacted_afterwards)
    if read == "verify":
        assert adacheck.latest_restorable(tmp_path) == 3
        return
    restored = StepRestorer(support.StockCheckpoints(), {}, None).restore(
        item(tmp_path, 3), adacheck.RestoreArgs(abstract(run.state))
    )
    assert_same_bits(restored.state, saved[3])
    assert restored.lineage is not None
    assert isinstance(restored.lineage.manifest, BaseManifest)


def test_a_whole_leaf_is_one_box(tmp_path, saved_once, three):
    (known, blocks), (_, run, saved) = three, saved_once
    whole = {}
    for index, leaf in enumerate(known.base.leaves):
        whole[index] = {Box.full(leaf.shape): np.empty(leaf.shape, np.dtype(leaf.dtype))}
        for box, block in blocks[index].items():
            whole[index][Box.full(leaf.shape)][(*box.slices, ...)] = block
    support.put_base(known, whole)
    check_steps(tmp_path, abstract(run.state), saved)
    assert at(item(tmp_path, 3) / folders.BASE).folders() == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("is_base_already", [False, True], ids=["delta", "base"])
def test_repair_removes_what_an_interrupted_compaction_left(tmp_path, is_base_already):
    trained, saved = saved_run(tmp_path, 3)
    directory = item(tmp_path, 3)
    if is_base_already:
        shutil.copytree(directory / folders.LINEAGE, tmp_path / "lineage")
        support.compact(tmp_path, 3)
        (tmp_path / "lineage").rename(directory / folders.LINEAGE)
        (directory / "adacheck/delta.0.x").write_bytes(b"old")
    else:
        for name in ("d/x", "manifest.ocdbt", "adacheck/base/0/x", "_METADATA", "_sharding"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(b"new")
        (directory / "adacheck/tree_metadata").write_bytes(b"")
    left = {str(path) for path in in_place.leftovers(directory)}
    assert len(left) == (2 if is_base_already else 5)
    run = lambda *words: CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])  # noqa: E731
    reported = json.loads(run("verify", "--json").output)
    assert [(each["path"], each["is_temporary"]) for each in reported["leftovers"]] == [
        ("3/default", False)
    ]
    assert reported["damaged_count"] == 0
    dry = json.loads(run("repair", "--dry-run", "--json").output)
    assert dry["cleared"] == ["3/default"]
    assert {str(path) for path in in_place.leftovers(directory)} == left
    shown = run("repair")
    assert "3/default has lost what an interrupted compaction left in it" in shown.output
    assert (directory / "_METADATA").exists() is is_base_already
    check_steps(tmp_path, abstract(trained.state), saved)
