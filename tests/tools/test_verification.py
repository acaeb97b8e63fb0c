"""Damage is found wherever it is, nothing else is called damage, and repair destroys nothing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint.checkpoint_managers import LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.errors import IntegrityError, StorageError
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store import links, zarr
from adacheck_jax.store.packs import arrays
from adacheck_jax.store.steps import deletion, folders, lookup, manifest_file, marks
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import Location, at
from adacheck_jax.tools import audit, listing, recompute, repair, verification
from adacheck_jax.tools import steps as tools_steps
from tests import support
from tests.data.make_golden import unpack
from tests.support import (
    abstract,
    assert_same_bits,
    copied,
    host_copy,
    manager_of,
    mesh_of,
    other_record,
    restored,
    save_steps,
    saved_run,
)

DATA = {"read_data": True}
REPLAY = {"replay": True}
ALL = {**DATA, **REPLAY}
STRUCTURE: dict[str, bool] = {}
KINDS = ("replayed", "bits")


_first_deleted = deletion.first_deleted


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(deletion, "first_deleted", functools.partial(_first_deleted, still_s=0.01))


def mixed_state(step):
    """Leaves of many kinds, some of which never change."""
    return {
        "bf16": jnp.arange(600, dtype=jnp.float32).astype(jnp.bfloat16) * (1 + step / 128),
        "frozen": jnp.arange(3000, dtype=jnp.float32),
        "twin": jnp.arange(3000, dtype=jnp.float32),
        "key": jax.random.key(step),
        "u4": jnp.full(9, step, jnp.uint4),
        "flags": np.array([True, step % 2 == 0]),
        "complex": jnp.full(5, 1 + step * 1j, jnp.complex64),
        "empty": jnp.zeros((0, 3)),
        "number": step,
        "rate": 0.5 * step,
        "scalar": np.float32(step),
    }


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Steps 1 (base), 2 and 3 (deltas) of a run, and what they were."""
    root = tmp_path_factory.mktemp("replayed")
    run, saved = saved_run(root, 3)
    return root, saved, abstract(run.state)


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    """Step 1 a base, steps 2 and 3 bit-pattern deltas, 4 a base that keeps files of the first."""
    root = tmp_path_factory.mktemp("bits")
    saved = {step: host_copy(mixed_state(step)) for step in range(1, 5)}
    with manager_of(root, adacheck.AdaCheckHandler(delta="bits", max_deltas=2)) as manager:
        for step in saved:
            manager.save(step, args=adacheck.SaveArgs(mixed_state(step)))
    assert manifest_file.read(item(root, 4)).kept
    return root, saved, None


@pytest.fixture
def copy(replayed, tmp_path):
    return copied(replayed[0], tmp_path / "copy")


def largest_of_each_folder(root: Path) -> list[Path]:
    """A few of the files; their names are random, so that the first would be another each time."""
    largest = {}
    for file in sorted(files_of(root), key=lambda each: (root / each).stat().st_size):
        largest[file.parent] = file
    return sorted(largest.values())


def rewrite(path: Path, data: bytes | None) -> None:
    """Other content for one link of a file; None for none."""
    path.unlink()
    if data is not None:
        path.write_bytes(data)


def harmed(data: bytes, how: str) -> bytes | None:
    """Other content: with a bit flipped at a place, less of it, or none."""
    parts = {"start": 0.02, "middle": 0.5, "end": 0.97}
    if how not in parts:
        return {"truncated": data[: len(data) // 2], "emptied": b"", "missing": None}[how]
    changed = bytearray(data or b"x")
    changed[int(len(data) * parts[how])] ^= 16
    return bytes(changed)


def damaged(root: Path, wanted=DATA) -> dict[int, list[str]]:
    report = audit.verify_root(root, **wanted)
    assert not report.leftovers
    return {s.step: [f"{d.file} {d.leaf} {d.message}" for d in s.damage] for s in report.steps}


def files_of(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def item(root: Path, step: int) -> Path:
    return root / str(step) / "default"


def test_leaves_of_sums_that_differ_are_to_rounding_and_others_are_damage(copy, monkeypatch):
    other_record(lookup.resolve(item(copy, 2)))
    base = manifest_file.read(item(copy, 1))
    paths = {leaf.path for leaf in base.leaves if leaf.path.startswith("params")}
    bound = frozenset(i for i, leaf in enumerate(base.leaves) if leaf.path in paths)
    monkeypatch.setattr(
        recompute.check, "bound_to_mesh", lambda of: bound if of.deltas else frozenset()
    )
    (report,) = audit.verify_root(copy, 2, **REPLAY).steps
    assert report.rounded
    assert set(report.rounded) <= paths
    assert report.damage
    assert paths.isdisjoint(each.leaf for each in report.damage)


def test_shared_files_are_read_once_and_updates_replayed_once(replayed, monkeypatch):
    read, folded = [], []
    opened, apply = verification.volume_reader.opened, recompute.replay.replay_onto
    monkeypatch.setattr(
        verification.volume_reader, "opened", lambda *a: read.extend(a[1]) or opened(*a)
    )
    monkeypatch.setattr(
        recompute.replay, "replay_onto", lambda *a, **k: folded.append(1) or apply(*a, **k)
    )
    assert not any(damaged(replayed[0], ALL).values())
    leaves = manifest_file.read(item(replayed[0], 1)).leaves
    # One base is opened to look for chunks, to read them, and to replay: not that of each step.
    packs = {arrays.RAW.name, arrays.COMPRESSED.name}
    assert len([name for name in read if name not in packs]) == 3 * len(leaves)
    assert len(folded) == 2


def test_another_devices_program_is_no_reason_to_call_a_step_damaged(copy, monkeypatch):
    monkeypatch.setattr(verification.update_program, "platform", lambda: "metal")
    report = audit.verify_root(copy, **ALL)
    assert [step.damage for step in report.steps] == [()] * 3
    assert [step.not_checked is None for step in report.steps] == [True, False, False]
    assert invoked("verify", copy, "--replay").exit_code == 2


HOW = ("start", "middle", "end", "truncated", "emptied", "missing")


@pytest.mark.slow
@pytest.mark.first(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "how", "files_of_root"),
    [
        *(("replayed", how, largest_of_each_folder) for how in ("start", "missing")),
        *(("bits", how, largest_of_each_folder) for how in ("middle", "truncated")),
        *(
            pytest.param(kind, how, files_of, marks=pytest.mark.campaign)
            for kind in KINDS
            for how in HOW
        ),
    ],
)
def test_damage_to_any_file_is_found_or_harmless(kind, how, files_of_root, request, tmp_path):
    source, saved, target = request.getfixturevalue(kind)
    found = 0
    # Step 3 has links to those of 2.
    files = [each for each in files_of_root(source) if each.parts[0] != "2"]
    for number, file in enumerate(files):
        root = copied(source, tmp_path / str(number))
        rewrite(root / file, harmed((root / file).read_bytes(), how))
        own = int(file.parts[0])
        (report,) = audit.verify_root(root, own, **DATA).steps
        found += bool(report.damage)
        if not report.damage:
            assert_same_bits(restored(root, own, target), saved[own])
        elif how not in ("emptied", "missing"):
            assert any(str(item(root, own)) in each.file for each in report.damage), file
        shutil.rmtree(root)
    assert found > len(files) // 3


# Damages, and what finds them.


def gone(*steps: int) -> Callable[[Path], object]:
    return lambda root: [shutil.rmtree(root / str(step)) for step in steps]


def lost(step: int, *names: str) -> Callable[[Path], object]:
    return lambda root: [(item(root, step) / name).unlink() for name in names]


def flip(step: int, *, in_place: bool = False) -> Callable[[Path], object]:
    """Changes a bit of a step's data: of one link, or of all."""

    def change(root: Path) -> None:
        own = item(root, step)
        files = (own / folders.BASE).rglob("*") if step == 1 else support.pack_files(own)
        path = max(files, key=lambda p: p.stat().st_size)
        data = support.with_flipped_data(path.read_bytes())
        if not in_place:
            path.unlink()
        path.write_bytes(data)

    return change


def truncate_packs(step: int) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        for path in support.pack_files(item(root, step)):
            path.write_bytes(path.read_bytes()[:-7])  # in place: links to it are damaged too

    return change


def swap(first: str, second: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        (root / first).rename(root.parent / "aside")
        (root / second).rename(root / first)
        (root.parent / "aside").rename(root / second)

    return change


def lose_chunk(root: Path) -> None:
    store = zarr.database_at(folders.pack_in(item(root, 3), 0))
    chunk = next(key for key in store.list().result() if b"/c/" in key)
    store.delete_range(ts.KvStore.KeyRange(chunk, chunk + b"\0")).result()


def of_a_link(platform: str) -> str:
    return f"{folders.LINEAGE}/1/{manifest_file.update_file(platform)}"


def spoil(root: Path, step: int) -> None:
    rewrite(support.pack_index(item(root, step)), None)


FINDS: dict[str, tuple[str, Callable[[Path], object], dict[str, set[int]]]] = {
    **{f"nothing of {kind}": (kind, lambda root: None, {"all": set()}) for kind in KINDS},
    "ancestors gone": ("replayed", gone(1, 2), {"all": set()}),
    "rot": ("replayed", flip(1, in_place=True), {"structure": set(), "data": {1, 2, 3}}),
    "chunk": ("replayed", lose_chunk, {"structure": {3}}),
    **{
        f"swapped {what}": ("replayed", swap(f"2/{what}", f"3/{what}"), {"data": {2, 3}})
        for what in (
            ".",
            f"default/{manifest_file.FILE}",
            "default/adacheck",
            "default/adacheck/delta.0.manifest.ocdbt",
        )
    },
    "record": (
        "replayed",
        lambda root: other_record(lookup.resolve(item(root, 2))),
        {"structure": set(), "data": {2}, "replay": {2}},
    ),
    "difference": (  # with a right checksum
        "bits",
        lambda root: other_record(lookup.resolve(item(root, 2))),
        {"data": set(), "replay": {2}},
    ),
    "base": ("bits", lost(1, manifest_file.FILE), {"structure": {1}}),
    "bases": (
        "bits",
        swap(*(f"{n}/default/{manifest_file.FILE}" for n in (1, 4))),
        {"structure": {1, 4}},
    ),
    "program of another platform": ("replayed", lost(3, of_a_link("tpu")), {"structure": {3}}),
}
WANTED = {"structure": STRUCTURE, "data": DATA, "replay": REPLAY, "all": ALL}


@pytest.mark.parametrize("name", FINDS)
def test_damage_is_found_by_what_looks_at_it(name, request, tmp_path):
    kind, damage, finds = FINDS[name]
    root = copied(request.getfixturevalue(kind)[0], tmp_path / "copy")
    leaf = damage(root)
    for wanted, steps in finds.items():
        found = damaged(root, WANTED[wanted])
        assert {step for step, messages in found.items() if messages} == steps, wanted
        if isinstance(leaf, str) and steps:
            assert any(f" {leaf} " in each for each in found[2])


def test_damage_is_told_once_and_by_its_place(copy):
    flip(1, in_place=True)(copy)
    with pytest.raises(IntegrityError, match=str(item(copy, 3))):
        verification.check(item(copy, 3), read_data=True)
    verification.check(item(copy, 3), read_data=False)
    lose_chunk(copy)
    assert any("1 of 1 chunks are missing" in each for each in damaged(copy, STRUCTURE)[3])
    truncate_packs(2)(copy)
    (report,) = audit.verify_root(copy, 2, **DATA).steps
    of_packs = [each for each in report.damage if "adacheck/delta" in each.file]
    assert len({(each.file, each.message) for each in of_packs}) == len(of_packs) < 4
    assert "tensorstore_spec" not in str(report)
    assert "another" not in str(report)


def test_programs_are_needed_where_they_run(copy):
    lost(1, manifest_file.update_file("cpu"))(copy)
    verification.check(item(copy, 1), read_data=False)
    lost(3, of_a_link("tpu"))(copy)
    verification.check(item(copy, 3), read_data=False)
    lost(3, of_a_link("cpu"))(copy)
    with pytest.raises(IntegrityError, match=r"update\.cpu\.stablehlo"):
        verification.check(item(copy, 3), read_data=False)


def test_leftovers_are_notes(copy):
    leave(copy / "7.orbax-checkpoint-tmp-12")
    leave(item(copy, 3).with_name("other.orbax-checkpoint-tmp-3"))
    (copy / "9").mkdir()
    report = audit.verify_root(copy)
    assert report.damaged_count == 0
    assert {each.path: each.is_temporary for each in report.leftovers} == {
        "7.orbax-checkpoint-tmp-12": True,
        "3/other.orbax-checkpoint-tmp-3": True,
        "9": False,
    }


def test_steps_whose_copy_was_cut_off_are_told_from_directories_of_others(copy):
    for name in ("5/_CHECKPOINT_METADATA", "6/default/commit_success.txt"):
        (copy / name).parent.mkdir(parents=True)
        (copy / name).touch()
    (copy / "7").mkdir()
    leave(copy / "8")
    for command in ("ls", "verify"):
        result = invoked(command, copy)
        told = " ".join(result.stdout.split())
        assert result.exit_code == 0
        assert told.count(": lacks its state: a deletion or a copy") == 3
        assert told.count("8: holds no step saved by AdaCheckHandler") == 1
    for step in (1, 2, 3):
        shutil.rmtree(copy / f"{step}")
    shutil.rmtree(copy / "8")
    told = " ".join(invoked("verify", copy).output.split())
    assert "found 5, 6, 7. Step 7 lacks its state" in told


def leave(directory: Path, age_s: float = 3600) -> None:
    directory.mkdir()
    (directory / "file").write_bytes(b"0123456789")
    then = time.time() - age_s
    for path in (directory / "file", directory):
        os.utime(path, (then, then))


def shape_of(root: Path) -> dict[str, bytes]:
    return {str(path): (root / path).read_bytes() for path in files_of(root)}


# Repair.


def of_version_99(root: Path) -> None:
    path = item(root, 3) / manifest_file.FILE
    rewrite(path, json.dumps(json.loads(path.read_text()) | {"format": 99}).encode())


def beside_another_item(root: Path) -> None:
    spoil(root, 3)
    (root / "3/dataset").mkdir()
    (root / "3/dataset/state.json").write_text("{}")


def many(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: [each(root) for each in damages]


REPAIRS: dict[str, tuple[Callable[[Path], object], list[str], dict[str, str]]] = {
    "nothing": (lambda root: None, [], {}),
    **{f"flip of {step}": (flip(step), [str(step)], {}) for step in (1, 2, 3)},
    "pack": (lambda root: spoil(root, 3), ["3"], {}),
    "it alone holds another": (
        many(lambda root: spoil(root, 3), gone(2)),
        [],
        {"3/default": "it alone holds steps 2: RestoreArgs(step=2)"},
    ),
    "on a damaged delta": (
        many(truncate_packs(2), gone(1, 2)),
        [],
        {"3/default": "it alone holds steps 1: RestoreArgs(step=1)"},
    ),
    "restorable all the same": (
        many(
            lost(3, of_a_link("tpu"), f"{folders.LINEAGE}/1/_sharding"),
            lost(1, manifest_file.update_file("cpu")),
        ),
        [],
        {"1/default": "", "3/default": ""},
    ),
    "another platform": (lost(3, of_a_link("cpu")), [], {"3/default": "cuda, tpu"}),
    "no platform": (lost(3, *map(of_a_link, ("cpu", "cuda", "tpu"))), ["3"], {}),
    "another version": (of_version_99, [], {"3/default": "format version is 99"}),
    "another item": (beside_another_item, ["3/default"], {}),
}


@pytest.mark.first(6, slow=len(REPAIRS))
@pytest.mark.parametrize("name", REPAIRS)
def test_only_what_cannot_be_restored_goes(name, copy, replayed):
    damage, removed, kept = REPAIRS[name]
    damage(copy)
    leftover = "7.orbax-checkpoint-tmp-12"
    leave(copy / leftover)
    before, size = shape_of(copy), listing.summarize_root(copy).disk_bytes
    plan = repair.repair(copy, read_data=True, dry_run=True)
    assert shape_of(copy) == before
    if name.startswith("flip"):  # which nobody finds who does not read
        assert repair.repair(copy, dry_run=True).removals == plan.removals[:1]
    report = repair.repair(copy, read_data=True)
    assert report.removals == plan.removals
    assert [each.path for each in report.removals] == [leftover, *removed]
    assert sorted(each.path for each in report.kept) == sorted(kept)
    for each in report.kept:
        assert kept[each.path] in each.why
        assert not kept[each.path].startswith("it alone") or kept[each.path] == each.why
    assert listing.summarize_root(copy).disk_bytes < size
    removed_below = tuple(f"{path}/" for path in (leftover, *removed))
    assert shape_of(copy) == {p: x for p, x in before.items() if not p.startswith(removed_below)}
    for step in audit.verify_root(copy, **DATA).steps:
        if not step.damage or name == "restorable all the same":
            assert_same_bits(restored(copy, step.step, replayed[2]), replayed[1][step.step])
    again = repair.repair(copy, read_data=True)
    assert again.removals == ()
    assert sorted(each.path for each in again.kept) == sorted(kept)


def test_an_exact_step_behind_a_wrong_one_stays_where_it_alone_is_held(tmp_path):
    draws = np.random.default_rng(0)
    states = {n: {"w": draws.integers(0, 2**32, 3000, np.uint32)} for n in range(1, 5)}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step, state in states.items():
            manager.save(step, args=adacheck.SaveArgs(state))
    other_record(lookup.resolve(item(tmp_path, 4)).to(2))
    many(lambda root: spoil(root, 4), gone(2, 3))(tmp_path)
    (kept,) = repair.repair(tmp_path, read_data=True).kept
    assert kept.why.endswith("RestoreArgs(step=3)")
    assert_same_bits(restored(tmp_path, 4, step=3), [states[3]["w"]])


def changed_meanwhile(copy: Path, patch: Any) -> None:
    plan = repair._plan
    patch.setattr(
        repair, "_plan", lambda *given: (plan(*given), (item(copy, 3) / "new").touch())[0]
    )


def unreadable(_copy: Path, patch: Any) -> None:
    refused = PermissionError(13, "Permission denied")
    patch.setattr(repair, "unreadable_file", lambda directory: refused)


def refusing(*places: tuple[Any, str]) -> Callable[[Path, Any], None]:
    """Damage was seen, and then no file could be opened any more: nothing is known of it."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise StorageError("too many open files")

    def patched(copy: Path, patch: Any) -> None:
        report = audit.verify_root(copy, **DATA)
        patch.setattr(repair.audit, "verify_root", lambda *_args, **_options: report)
        for owner, name in places:
            patch.setattr(owner, name, refuse)

    return patched


PACK = [(delta_reader.DeltaReader, name) for name in ("read", "blocks")]


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        (changed_meanwhile, "changed meanwhile"),
        (unreadable, "Permission denied"),
        (refusing((repair.lookup, "resolve")), ""),
        (refusing(*PACK), ""),
    ],
    ids=["changed", "not opened", "manifest", "pack"],
)
def test_what_cannot_be_judged_now_stays(copy, monkeypatch, meanwhile, why):
    truncate_packs(3)(copy)
    meanwhile(copy, monkeypatch)
    report = repair.repair(copy, read_data=True)
    assert report.removals == ()
    (kept,) = report.kept
    assert kept.path.startswith("3")
    assert why in kept.why
    assert item(copy, 3).is_dir()


def test_a_step_that_another_one_refers_to_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "can_link", lambda directory: False)
    run = support.dict_run(mesh_of((4, 2)))
    keep = adacheck.KeepLineage(LatestN(9))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=keep)
    with manager_of(tmp_path, handler, preservation_policy=keep) as manager:
        saved = save_steps(manager, run, 3)
    assert manifest_file.read(item(tmp_path, 3)).parent.reference == "../../2/default"
    # Nothing but the recorded step's own leaf is wrong: the next one stores that leaf anew.
    judge = repair._judge
    monkeypatch.setattr(
        repair, "_judge", lambda r, s: (True, "test") if s.step == 2 else judge(r, s)
    )
    (item(tmp_path, 1) / "_sharding").unlink()
    report = repair.repair(tmp_path)
    assert report.removals == ()
    assert any(each.path == "2/default" and "step 3 builds" in each.why for each in report.kept)
    assert_same_bits(restored(tmp_path, 3, abstract(run.state)), saved[3])


def test_it_refuses_where_a_save_may_be_under_way(copy):
    leave(copy / "7.orbax-checkpoint-tmp-12")
    deep = copy / "7.orbax-checkpoint-tmp-12" / "default"
    deep.mkdir()
    for path in (deep, deep.parent):
        os.utime(path, (0, 0))
    repair.repair(copy, dry_run=True)
    (deep / "new").touch()
    os.utime(deep, (0, 0))
    with pytest.raises(tools_steps.InputError, match="--force"):
        repair.repair(copy)
    assert deep.exists()
    assert len(repair.repair(copy, force=True).removals) == 1
    assert not deep.exists()


def test_links_are_not_followed(copy, tmp_path):
    outside, pack, elsewhere = (tmp_path / name for name in ("outside", "pack", "elsewhere"))
    (copy / "3").rename(outside)
    (copy / "3").symlink_to(outside)
    spoil(copy, 3)
    leave(elsewhere)
    (copy / "8.orbax-checkpoint-tmp-1").symlink_to(elsewhere)
    inside = item(copy, 2) / manifest_file.DIRECTORY
    inside.rename(pack)
    inside.symlink_to(pack)
    (pack / "delta.0.manifest.ocdbt").unlink()
    before = [shape_of(each) for each in (outside, pack, elsewhere)]
    report = repair.repair(copy, force=True)
    assert [each.path for each in report.removals] == ["2"]
    assert len(report.kept) == 2
    assert [shape_of(each) for each in (outside, pack, elsewhere)] == before


def in_memory(root: Location) -> Location:
    """A copy in a key-value store."""
    top = Location(KvStore(f"memory://{uuid.uuid4().hex}"), root.name)
    for each in root.list():
        (top / each.below(root)).write(each.read())
    return top


class TestRepairOfKeys:
    """Nothing is renamed: steps count by Orbax's marks, and neither ages nor sizes are told."""

    @pytest.fixture
    def keys(self, tmp_path):
        """Steps in a store; Orbax reads them by the paths that they were copied from."""
        run = support.dict_run(mesh_of((4, 2)))
        atomicity = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler, atomicity_options=atomicity) as manager:
            save_steps(manager, run, 3)
        top = in_memory(at(tmp_path))
        top.storage.shown = lambda key: f"{tmp_path.parent}/{key}"
        return top

    @pytest.mark.slow
    def test_a_lost_step_goes_and_its_mark_goes_first(self, keys, monkeypatch):
        assert repair.repair(keys, read_data=True).removals == ()
        (keys / "3/default/adacheck/delta.0.manifest.ocdbt").delete()
        deleted, delete = [], KvStore.delete

        def told(store, key):
            deleted.append(key)
            delete(store, key)

        monkeypatch.setattr(KvStore, "delete", told)
        report = repair.repair(keys, read_data=True)
        assert [each.path for each in report.removals] == ["3"]
        assert report.step_count == 2
        assert deleted == [f"{keys.key}/3/{marks.COMMIT_MARK}", f"{keys.key}/3"]
        assert sorted(keys.folders()) == ["1", "2"]
        assert not audit.verify_root(keys, **DATA).damaged_count

    def test_an_uncommitted_step_goes_if_the_caller_says_that_nothing_is_saved(self, keys):
        (keys / "3" / marks.COMMIT_MARK).delete()
        before = {*keys.list()}
        with pytest.raises(tools_steps.InputError, match=r"does not tell the age.*--force"):
            repair.repair(keys)
        assert {*keys.list()} == before
        report = repair.repair(keys, force=True)
        assert [each.path for each in report.removals] == ["3"]
        assert sorted(keys.folders()) == ["1", "2"]

    def test_nothing_goes_where_orbax_reads_nothing(self, keys):
        """Every base looks lost there."""
        top = in_memory(keys)
        before = {*top.list()}
        with pytest.raises(tools_steps.InputError, match="a checkpoint root that Orbax can read"):
            repair.repair(top, force=True)
        assert {*top.list()} == before


# The commands.


def invoked(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_verify_says_in_one_line_what_it_did_not_look_at(replayed, tmp_path, monkeypatch):
    monkeypatch.chdir(replayed[0].parent)  # any path tells a root
    name, bytes_ = replayed[0].name, "the array bytes of 3 steps (verify --read-data)"
    replay = "the replay of 2 steps"
    for options, said in (
        ((), (bytes_, replay)),
        (("--read-data",), (replay,)),
        (("--replay",), (bytes_,)),
        (("--read-data", "--replay"), ()),
    ):
        result = invoked("verify", f"./{name}/../{name}", *options)
        assert result.exit_code == 0
        assert result.stdout.count(" ok") == 3
        lines = [each for each in result.stdout.splitlines() if each.startswith("Not looked")]
        assert len(lines) == bool(said)
        assert {each for each in (bytes_, replay) if each in result.stdout} == {*said}
    assert "3 steps verified: every stored byte was read, and 3 were recomputed." in result.stdout
    assert adacheck.latest_restorable(name) == 3
    root = copied(replayed[0], tmp_path / "root")
    for path in item(root, 1).rglob("manifest*"):
        rewrite(path, b"no manifest")
    for options, why in (
        ((), "(verify --read-data)"),
        (("--read-data",), "(asked for, and not possible: see the step)"),
    ):
        told = json.loads(invoked("verify", root, *options, "--json").stdout)["not_looked_at"]
        assert any(each.startswith("the array bytes") and why in each for each in told)


def test_inspect_and_ls_tell_how_each_delta_was_checked_and_sizes(replayed, bits, tmp_path):
    unpack(Path(support.__file__).with_name("data") / "v6", tmp_path)  # whose deltas nobody checked
    for root, told, kind in (
        (replayed[0], "steps 2 to 3 in full", "full"),
        (bits[0], "steps 2 to 3 all stored", "stored"),
        (tmp_path / "replayed", "steps 2 to 3 not checked", "not checked"),
    ):
        assert told in invoked("inspect", root, 3).stdout
        steps = json.loads(invoked("ls", root, "--json").stdout)["steps"]
        assert [each["checked"] for each in steps[:3]] == [None, kind, kind]
        assert kind in invoked("ls", root).stdout
    for step in json.loads(invoked("ls", replayed[0], "--json").stdout)["steps"]:
        files = [path for path in (replayed[0] / step["item"]).rglob("*") if path.is_file()]
        sizes = {path.stat().st_ino: path.stat().st_size for path in files}
        own = [path.stat().st_size for path in files if folders.LINEAGE not in str(path)]
        assert (step["size_bytes"], step["new_bytes"]) == (sum(sizes.values()), sum(own))
        assert step["saved_at"]


def test_verify_and_repair_tell_of_damage(copy):
    spoil(copy, 2)
    result = invoked("verify", copy)
    assert result.exit_code == 1
    assert "1 of 3 steps damaged" in result.stdout
    assert "2/default/adacheck/delta.0" in result.stdout
    (step,) = json.loads(invoked("verify", copy, "2", "--json").stdout)["steps"]
    assert step["damage"][0]["file"].endswith("adacheck/delta.0")
    assert invoked("verify", copy, "3").exit_code == 0
    flip(3)(copy)
    causes = json.loads(invoked("verify", copy, 3, "--read-data", "--json").output)["causes"]
    assert [(each["steps"], bool(each["leaves"])) for each in causes] == [([3], True)]
    leave(copy / "7.orbax-checkpoint-tmp-12")
    result = invoked("repair", copy, "--dry-run")
    assert result.exit_code == 0
    assert "2 directories would be removed" in result.stdout
    report = json.loads(invoked("repair", copy, "--json").stdout)
    assert len(report["removals"]) == 2
    assert invoked("verify", copy).exit_code == 0
    leave(copy / "7.orbax-checkpoint-tmp-12", age_s=0)
    assert invoked("repair", copy).exit_code == 2
