"""A saved delta becomes a base in its place; it and all other steps keep their bits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
from adacheck_jax.errors import IntegrityError, LineageError, MismatchError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.save import share
from adacheck_jax.store.compaction import in_place, new_base
from adacheck_jax.store.steps import folders, identity, lineage, lookup, manifest_file, roots
from tests import support
from tests.data.make_golden import GOLDEN, bits_of, initial_state, unpack
from tests.save.loop import Loop
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of

MESH = (4, 2)


def item(root: Path, step: int) -> Path:
    return root / str(step) / "default"


def saved_run(root: Path, steps: int = 6, **options: Any) -> tuple[support.Run, dict[int, Any]]:
    return support.saved_run(root, steps, MESH, **options)


def loop_of(root: Path, **options: Any) -> Loop:
    return Loop(root, support.dict_run(mesh_of(MESH)), **options)


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


def assert_whole(loop: Loop, *left: int) -> str:
    """Every step restores, or those alone that are left, of the rest of which nothing is there."""
    for step in [*loop.states] if left else ():
        if step not in left:
            shutil.rmtree(loop.root / str(step), ignore_errors=True)
            del loop.states[step]
    found = loop.check()
    check_clean(loop.root)
    return found


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


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("step", [4, 2, 6], ids=["middle", "first", "last"])
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
    elsewhere = abstract(run.state, mesh_of((8, 1)))
    assert_same_bits(support.restored(tmp_path, step, elsewhere), saved[step])
    for option in ("--read-data", "--replay"):
        found = CliRunner().invoke(app, ["verify", str(tmp_path), option])
        assert found.exit_code == 0, found.output
    assert adacheck.latest_restorable(tmp_path) == 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"delta": "bits", "compression": "small"}], ids=str)
def test_every_step_of_a_lineage_may_be_compacted_in_any_order(tmp_path, options):
    with loop_of(tmp_path, **options) as loop:
        loop.save(6)
    for step in (4, 6, 2, 3, 5):
        support.compact(tmp_path, step)
        assert_whole(loop)
        assert "delta" not in json.dumps([x.stem for x in item(tmp_path, step).rglob("*")])
    assert support.kinds_of(tmp_path) == "BBBBBB"
    assert_whole(loop, 4)


@pytest.mark.slow
def test_compacted_lineages_need_no_further_base(tmp_path):
    with loop_of(tmp_path, max_deltas=4, manager={"max_to_keep": 3}) as loop:
        for _ in range(6):
            loop.save(2)
            support.compact(tmp_path, loop.number)
        loop.forget(*range(1, 10))
        assert_whole(loop)
        last = manifest_file.read(item(tmp_path, 12))
        assert isinstance(last, BaseManifest)
        assert last.depth == 11, "the only base that was saved was the first"
        loop.manager_options = {}
        loop.reopen()
        loop.save(6)
    assert assert_whole(loop) == "BRBRRRRBR"


def test_deferred_steps_go_with_the_delta_and_can_follow_the_base(tmp_path):
    with Loop(tmp_path) as loop:
        loop.save()
        assert loop.keep(3) == "rrr"
        loop.save()
        assert loop.keep() == "r"
        support.compact(tmp_path, 5)
        assert loop.keep(2) == "rr"
        loop.save()
    assert lineage_of(tmp_path, 9) == [5, 9]
    target = abstract(loop.run.state)
    with pytest.raises(LineageError, match="found the steps 5"):
        support.restored(tmp_path, 5, target, step=4)
    loop.forget(2, 3, 4)
    assert assert_whole(loop) == "BBR"
    for step in (1, 5):  # which step 9 links
        shutil.rmtree(tmp_path / str(step))
    loop.forget(1, 5)
    assert assert_whole(loop) == "R"


@pytest.mark.slow
def test_metadata_and_frozen_files_survive(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    more = {"a/b": {"number": 3}, "frozen": jnp.arange(2.0**15)}
    run, saved = support.program_of(mesh_of((1, 1)), recorder, more=more).run(), {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for step in range(1, 4):
            state = run.advance()
            manager.save(step, args=adacheck.SaveArgs(state, custom_metadata={"step": step}))
            saved[step] = host_copy(state)
    made = support.compact(tmp_path, 3)
    frozen = next(i for i, leaf in enumerate(made.leaves) if leaf.path == "frozen")
    assert (frozen, 1) in made.kept
    check_steps(tmp_path, abstract(run.state), saved)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        found = [manager.item_metadata(step).custom_metadata for step in saved]
    assert found == [{"step": step} for step in saved]
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step))
    found = ocp.PyTreeCheckpointer().restore(item(tmp_path, 3))
    np.testing.assert_array_equal(found["frozen"], more["frozen"])
    assert found["a/b"]["number"] == 3


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
    target = {path.name: abstract(run.state)}
    for step, context in ((3, adacheck.v1.context()), (3, ocp_v1.Context()), (2, None)):
        with context or adacheck.v1.context():
            found = ocp_v1.load_checkpointables(tmp_path / f"{step}", target)
        assert_same_bits(found[path.name], saved[step])


@pytest.mark.covering(1, quick=3)
@pytest.mark.parametrize("golden", GOLDEN[::-1], ids=str)
def test_steps_of_earlier_releases_are_compacted(tmp_path, golden):
    support.skip_unpinned(golden.version)
    unpack(golden.directory, tmp_path)
    root = tmp_path / golden.name
    target = abstract(initial_state(golden.recorder(), golden.width))
    for step in {*golden.saved[:0:-1]} - {golden.compacted}:
        support.compact(root, step)
        for each in golden.saved:
            found = bits_of(support.restored(root, each, target), golden.version)
            np.testing.assert_array_equal(found, golden.bits()[each])
    check_clean(root)


@pytest.mark.slow
def test_without_hard_links_steps_that_follow_refer_to_the_base(tmp_path):
    def kept(newest: int) -> dict[str, Any]:
        keep = adacheck.KeepLineage(LatestN(newest))
        return {"keep_lineage": keep, "manager": {"preservation_policy": keep}}

    with support.without_links(), loop_of(tmp_path, max_deltas=4, **kept(3)) as loop:
        loop.save(4)
        support.compact(tmp_path, 3)
        loop.save()
        assert lineage_of(tmp_path, 5) == [3, 4, 5]
        loop.manager_options = (again := kept(2)).pop("manager")
        loop.options |= again
        loop.reopen()
        loop.save(2)
    assert lineage_of(tmp_path, 7) == [3, 4, 5, 6, 7]
    loop.forget(1, 2)
    assert_whole(loop)


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
    link = share.links.link_ancestors

    def compacting(known: Any, *args: Any) -> None:
        if known.manifest.step in (4, 6):
            support.compact(tmp_path, known.manifest.step)
        link(known, *args)

    with loop_of(tmp_path) as loop:
        loop.save(3)
        monkeypatch.setattr(share.links, "link_ancestors", compacting)
        loop.save(5)
    assert [lineage_of(tmp_path, step) for step in (5, 6, 7, 8)] == [[4, 5], [6], [6, 7], [6, 7, 8]]
    assert_whole(loop)


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

    def run(verb: str, *options: str) -> str:
        return CliRunner().invoke(app, [verb, str(tmp_path), *options]).output

    reported = json.loads(run("verify", "--json"))
    told = [(each["path"], each["is_temporary"]) for each in reported["leftovers"]]
    assert (told, reported["damaged_count"]) == ([("3/default", False)], 0)
    assert json.loads(run("repair", "--dry-run", "--json"))["cleared"] == ["3/default"]
    assert {str(path) for path in in_place.leftovers(directory)} == left
    assert "3/default has lost what an interrupted compaction left in it" in run("repair")
    assert (directory / "_METADATA").exists() is is_base_already
    check_steps(tmp_path, abstract(trained.state), saved)
