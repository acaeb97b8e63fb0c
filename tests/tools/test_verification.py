"""Damage is found wherever it is, nothing else is called damage, and repair destroys nothing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
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
from adacheck_jax.tools import audit, inspection, listing, recompute, repair, verification
from adacheck_jax.tools import steps as tools_steps
from tests import support
from tests.support import (
    abstract,
    assert_same_bits,
    host_copy,
    manager_of,
    mesh_of,
    other_record,
    save_steps,
)

DATA = {"read_data": True}
REPLAY = {"replay": True}
ALL = {**DATA, **REPLAY}
STRUCTURE: dict[str, bool] = {}


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


def save_mixed(root, handler, steps):
    saved = {}
    with manager_of(root, handler) as manager:
        for step in steps:
            state = mixed_state(step)
            saved[step] = host_copy(state)
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
    return saved


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Steps 1 (base), 2 and 3 (deltas) of a run, and what they were."""
    root = tmp_path_factory.mktemp("replayed")
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    return root, saved, abstract(run.state)


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    """Step 1 a base, steps 2 and 3 bit-pattern deltas, 4 a base that keeps files of the first."""
    root = tmp_path_factory.mktemp("bits")
    handler = adacheck.AdaCheckHandler(delta="bits", max_deltas=2)
    return root, save_mixed(root, handler, range(1, 5)), None


def copied(root: Path, target: Path) -> Path:
    """A copy in which what was hard-linked is so again."""
    subprocess.run(["cp", "-a", root, target], check=True)
    return target


@pytest.fixture
def copy(replayed, tmp_path):
    return copied(replayed[0], tmp_path / "copy")


def restore(root: Path, step: int, target=None):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(target))


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


def flipped(data: bytes, part: float) -> bytes:
    changed = bytearray(data)
    changed[int(len(data) * part)] ^= 16
    return bytes(changed)


def damaged(root: Path, wanted=DATA, **options) -> dict[int, list[str]]:
    report = audit.verify_root(root, **wanted, **options)
    return {s.step: [f"{d.file} {d.leaf} {d.message}" for d in s.damage] for s in report.steps}


def files_of(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def item(root: Path, step: int) -> Path:
    return root / str(step) / "default"


class TestClean:
    def test_a_root_is_told_by_any_path(self, copy, monkeypatch):
        monkeypatch.chdir(copy.parent)
        for command in (
            ["verify", copy.name, "--replay"],
            ["verify", f"./{copy.name}/../{copy.name}"],
        ):
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
            assert "3 steps verified" in done.output
        assert adacheck.latest_restorable(copy.name) == 3

    @pytest.mark.parametrize("kind", ["replayed", "bits"])
    def test_whatever_was_saved_verifies(self, kind, request):
        root, saved, _ = request.getfixturevalue(kind)
        report = audit.verify_root(root, **ALL)
        assert [step.step for step in report.steps] == sorted(saved)
        for step in report.steps:
            assert step.damage == ()
            assert (step.rounded, step.not_checked) == ((), None)
            assert step.checked == ("structure", "data", "replay")
        assert report.leftovers == ()
        for step in saved:
            verification.check(item(root, step), read_data=True)

    def test_the_bits_root_has_what_it_is_meant_to_have(self, bits):
        kinds = [inspection.describe_step(bits[0], step).kind for step in range(1, 5)]
        assert kinds == ["base", "delta", "delta", "base"]
        assert manifest_file.read(item(bits[0], 4)).kept

    @pytest.mark.slow
    def test_a_reducing_update_is_right_to_rounding_or_exact_and_no_damage(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)), optax.lamb(1e-2))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 3)
        assert not any(damaged(tmp_path, ALL).values())

    def test_leaves_of_sums_that_differ_are_to_rounding_and_others_are_damage(
        self, copy, monkeypatch
    ):
        other_record(lookup.resolve(item(copy, 2)))
        base = manifest_file.read(item(copy, 1))
        paths = {leaf.path for leaf in base.leaves if leaf.path.startswith("params")}
        bound = frozenset(i for i, leaf in enumerate(base.leaves) if leaf.path in paths)
        monkeypatch.setattr(
            recompute.check, "bound_to_mesh", lambda of: bound if of.deltas else frozenset()
        )
        report = audit.verify_root(copy, 2, **REPLAY)
        assert set(report.steps[0].rounded) <= paths
        assert report.steps[0].rounded
        assert report.steps[0].damage
        assert paths.isdisjoint(each.leaf for each in report.steps[0].damage)

    def test_shared_files_are_read_once_and_updates_replayed_once(self, replayed, monkeypatch):
        read, folded = [], []
        opened, apply = verification.volume_reader._opened, recompute.replay.replay_onto
        monkeypatch.setattr(
            verification.volume_reader, "_opened", lambda *a: read.append(a[1]) or opened(*a)
        )
        monkeypatch.setattr(
            recompute.replay, "replay_onto", lambda *a, **k: folded.append(1) or apply(*a, **k)
        )
        assert not any(damaged(replayed[0], ALL).values())
        leaves = manifest_file.read(item(replayed[0], 1)).leaves
        # A step looks for chunks by one name, and reads by it: twice for one base, not for three.
        packs = {arrays.RAW.name, arrays.COMPRESSED.name}
        assert len([name for name in read if name not in packs]) == 2 * len(leaves)
        assert len(folded) == 2

    def test_a_step_whose_ancestors_are_gone_verifies(self, copy):
        shutil.rmtree(copy / "1")
        shutil.rmtree(copy / "2")
        assert damaged(copy, ALL) == {3: []}

    def test_another_devices_program_is_no_reason_to_call_a_step_damaged(self, copy, monkeypatch):
        monkeypatch.setattr(verification.update_program, "platform", lambda: "metal")
        report = audit.verify_root(copy, **ALL)
        assert [step.damage for step in report.steps] == [()] * 3
        assert [step.not_checked is None for step in report.steps] == [True, False, False]
        assert CliRunner().invoke(app, ["verify", str(copy), "--replay"]).exit_code == 2


def truncate_packs(root: Path, step: int) -> None:
    for path in support.pack_files(item(root, step)):
        path.write_bytes(path.read_bytes()[:-7])  # in place: links to it are damaged too


def test_what_builds_on_a_damaged_delta_is_recomputed_no_further(copy):
    truncate_packs(copy, 2)
    shutil.rmtree(copy / "1")
    shutil.rmtree(copy / "2")
    (reports,) = audit.verify_root(copy, **REPLAY).steps
    assert reports.damage
    (kept,) = repair.repair(copy, read_data=True).kept
    assert kept.why == "it alone holds steps 1: RestoreArgs(step=1)"


def test_a_file_that_many_leaves_lie_in_is_told_of_once(copy):
    truncate_packs(copy, 3)
    (report,) = audit.verify_root(copy, 3, **DATA).steps
    assert len({(each.file, each.message) for each in report.damage}) == len(report.damage)
    assert len(report.damage) < 4
    assert "tensorstore_spec" not in str(report)
    assert "another" not in str(report)


@pytest.mark.parametrize("what", ["manifest", "pack"])
def test_what_cannot_be_read_now_is_never_removed(copy, monkeypatch, what):
    """Damage was seen, and then no file could be opened any more: nothing is known of it."""
    truncate_packs(copy, 3)
    report = audit.verify_root(copy, **DATA)
    monkeypatch.setattr(repair.audit, "verify_root", lambda *_args, **_options: report)

    def refuse(*_args, **_options):
        raise StorageError("too many open files")

    if what == "manifest":
        monkeypatch.setattr(repair.lookup, "resolve", refuse)
    else:
        monkeypatch.setattr(delta_reader.DeltaReader, "read", refuse)
        monkeypatch.setattr(delta_reader.DeltaReader, "blocks", refuse)
    found = repair.repair(copy, read_data=True)
    assert found.removals == ()
    assert [each.path for each in found.kept] == ["3/default"]
    assert (copy / "3").is_dir()


HOW = ("start", "middle", "end", "truncated", "emptied", "missing")


class TestDamage:
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
                for kind in ("replayed", "bits")
                for how in HOW
            ),
        ],
    )
    def test_damage_to_any_file_is_found_or_harmless(
        self, kind, how, files_of_root, request, tmp_path
    ):
        source, saved, target = request.getfixturevalue(kind)
        found = 0
        # Step 3 has links to those of 2.
        files = [each for each in files_of_root(source) if each.parts[0] != "2"]
        for number, file in enumerate(files):
            root = copied(source, tmp_path / str(number))
            data = (root / file).read_bytes()
            parts = {"start": 0.02, "middle": 0.5, "end": 0.97}
            if how in parts:
                new = flipped(data, parts[how]) if data else b"x"
            else:
                new = {"truncated": data[: len(data) // 2], "emptied": b"", "missing": None}[how]
            rewrite(root / file, new)
            own = int(file.parts[0])
            (report,) = audit.verify_root(root, own, **DATA).steps
            found += bool(report.damage)
            if not report.damage:
                assert_same_bits(restore(root, own, target), saved[own])
            elif how not in ("emptied", "missing"):
                assert any(str(item(root, own)) in each.file for each in report.damage), file
            shutil.rmtree(root)
        assert found > len(files) // 3

    def test_a_file_that_rots_damages_every_step_that_shares_it(self, copy):
        path = max((item(copy, 1) / folders.BASE).rglob("*"), key=lambda p: p.stat().st_size)
        data = support.with_flipped_data(path.read_bytes())
        with open(path, "r+b") as file:  # in place: all links show it
            file.write(data)
        assert not any(damaged(copy, STRUCTURE).values())
        assert all(damaged(copy).values())
        with pytest.raises(IntegrityError, match=str(item(copy, 3))):
            verification.check(item(copy, 3), read_data=True)
        verification.check(item(copy, 3), read_data=False)

    def test_a_chunk_that_a_pack_has_lost_is_found_without_reading_data(self, copy):
        store = zarr.database_at(folders.pack_in(item(copy, 3), 0))
        chunk = next(key for key in store.list().result() if b"/c/" in key)
        store.delete_range(ts.KvStore.KeyRange(chunk, chunk + b"\0")).result()
        report = audit.verify_root(copy)
        found = {step.step: [each.message for each in step.damage] for step in report.steps}
        assert not found[1]
        assert not found[2]
        assert "1 of 1 chunks are missing" in found[3][0]

    @pytest.mark.parametrize(
        "what", [manifest_file.FILE, "adacheck", "adacheck/delta.0.manifest.ocdbt", "."]
    )
    def test_files_of_two_steps_that_were_swapped_are_found(self, copy, what):
        first, second, aside = item(copy, 2) / what, item(copy, 3) / what, copy.parent / "aside"
        if what == ".":
            first, second = copy / "2", copy / "3"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
        assert [bool(each) for each in damaged(copy).values()] == [False, True, True]

    def test_manifests_of_two_bases_that_were_swapped_are_found(self, tmp_path):
        save_mixed(tmp_path, adacheck.AdaCheckHandler(), [1, 2])
        a, b = (item(tmp_path, step) / manifest_file.FILE for step in (1, 2))
        first, second = a.read_bytes(), b.read_bytes()
        rewrite(a, second)
        rewrite(b, first)
        assert all(damaged(tmp_path, STRUCTURE).values())

    def test_a_wrong_difference_with_a_right_checksum_is_found_by_replay_alone(
        self, bits, tmp_path
    ):
        root = copied(bits[0], tmp_path / "copy")
        path = other_record(lookup.resolve(item(root, 2)))
        assert not any(damaged(root).values())
        found = damaged(root, REPLAY)
        assert [bool(found[step]) for step in (1, 2, 3, 4)] == [False, True, False, False]
        assert any(f" {path} " in each for each in found[2])

    def test_a_wrong_record_with_a_right_checksum_is_found_by_reading_and_by_replay(self, copy):
        path = other_record(lookup.resolve(item(copy, 2)))
        for wanted in (DATA, REPLAY):
            found = damaged(copy, wanted)
            assert [bool(each) for each in found.values()] == [False, True, False]
            assert any(f" {path} " in each for each in found[2])
        assert not any(damaged(copy, STRUCTURE).values())

    def test_a_base_without_update_that_lost_its_manifest_does_not_vanish(self, tmp_path):
        save_mixed(tmp_path, adacheck.AdaCheckHandler(), [1, 2])
        (item(tmp_path, 1) / manifest_file.FILE).unlink()
        assert [bool(each) for each in damaged(tmp_path, STRUCTURE).values()] == [True, False]

    def test_another_platforms_program_hinders_nothing_here(self, copy):
        place = item(copy, 3) / folders.LINEAGE / "1"
        (place / manifest_file.update_file("tpu")).unlink()
        assert damaged(copy, STRUCTURE)[3]
        verification.check(item(copy, 3), read_data=False)
        (place / manifest_file.update_file("cpu")).unlink()
        with pytest.raises(IntegrityError, match=r"update\.cpu\.stablehlo"):
            verification.check(item(copy, 3), read_data=False)

    def test_a_lost_program_does_not_hinder_its_base(self, copy):
        (item(copy, 1) / manifest_file.update_file("cpu")).unlink()
        verification.check(item(copy, 1), read_data=False)


class TestChanging:
    def test_a_step_that_is_deleted_meanwhile_is_not_damaged(self, copy, monkeypatch):
        resolve = lookup.resolve

        def deleted_slowly(directory):
            if directory == item(copy, 2):
                for path in [path for path in directory.rglob("*") if path.is_file()][:3]:
                    path.unlink()
            return resolve(directory)

        def deletion_ends(_):
            shutil.rmtree(copy / "2", ignore_errors=True)

        monkeypatch.setattr(deletion.time, "sleep", deletion_ends)
        monkeypatch.setattr(audit.lookup, "resolve", deleted_slowly)
        assert damaged(copy) == {1: [], 3: []}

    def test_leftovers_are_notes(self, copy):
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


def leave(directory: Path, age_s: float = 3600) -> None:
    directory.mkdir()
    (directory / "file").write_bytes(b"0123456789")
    then = time.time() - age_s
    for path in (directory / "file", directory):
        os.utime(path, (then, then))


def spoil(root: Path, step: int) -> None:
    rewrite(support.pack_index(item(root, step)), None)


def shape_of(root: Path) -> dict[str, bytes]:
    return {str(path): (root / path).read_bytes() for path in files_of(root)}


class TestRepair:
    @pytest.mark.parametrize("kind", ["replayed", "bits"])
    def test_a_sound_root_is_left_alone(self, kind, request):
        root, _, _ = request.getfixturevalue(kind)
        before = shape_of(root)
        report = repair.repair(root, read_data=True)
        assert (report.removals, report.kept) == ((), ())
        assert shape_of(root) == before

    @pytest.mark.parametrize("step", [1, 2, 3])
    def test_only_what_cannot_be_restored_goes(self, copy, replayed, step):
        own = item(copy, step)
        files = (own / folders.BASE).rglob("*") if step == 1 else support.pack_files(own)
        path = max(files, key=lambda p: p.stat().st_size)
        rewrite(path, support.with_flipped_data(path.read_bytes()))
        leave(copy / "7.orbax-checkpoint-tmp-12")
        before = listing.summarize_root(copy).disk_bytes
        plan = repair.repair(copy, read_data=True, dry_run=True)
        assert listing.summarize_root(copy).disk_bytes == before
        assert repair.repair(copy, dry_run=True).removals == plan.removals[:1]
        report = repair.repair(copy, read_data=True)
        assert [each.path for each in report.removals] == ["7.orbax-checkpoint-tmp-12", str(step)]
        assert report.removals == plan.removals
        assert report.step_count == 2
        assert listing.summarize_root(copy).disk_bytes < before
        left = {1, 2, 3} - {step}
        assert {int(path.name) for path in copy.iterdir()} == left
        for each in left:
            assert_same_bits(restore(copy, each, replayed[2]), replayed[1][each])
        again = repair.repair(copy, read_data=True)
        assert (again.removals, again.kept) == ((), ())

    def test_a_directory_that_alone_holds_earlier_steps_stays(self, copy, replayed):
        spoil(copy, 3)
        shutil.rmtree(copy / "2")
        report = repair.repair(copy, read_data=True)
        assert report.removals == ()
        (kept,) = report.kept
        assert (kept.path, kept.why) == (
            "3/default",
            "it alone holds steps 2: RestoreArgs(step=2)",
        )

    def test_a_dry_run_changes_nothing(self, copy):
        spoil(copy, 3)
        leave(copy / "7.orbax-checkpoint-tmp-12")
        before = shape_of(copy)
        report = repair.repair(copy, dry_run=True)
        assert len(report.removals) == 2
        assert shape_of(copy) == before

    def test_what_can_be_restored_all_the_same_stays(self, copy, replayed):
        place = item(copy, 3) / folders.LINEAGE / "1"
        (place / manifest_file.update_file("tpu")).unlink()
        (place / "_sharding").unlink()
        (item(copy, 1) / manifest_file.update_file("cpu")).unlink()
        report = repair.repair(copy, read_data=True)
        assert report.removals == ()
        assert sorted(each.path for each in report.kept) == ["1/default", "3/default"]
        assert_same_bits(restore(copy, 3, replayed[2]), replayed[1][3])

    def test_what_another_platform_may_restore_stays(self, copy):
        place = item(copy, 3) / folders.LINEAGE / "1"
        (place / manifest_file.update_file("cpu")).unlink()
        report = repair.repair(copy)
        assert report.removals == ()
        assert "cuda, tpu" in report.kept[0].why
        for name in ("cuda", "tpu"):
            (place / manifest_file.update_file(name)).unlink()
        assert [each.path for each in repair.repair(copy).removals] == ["3"]

    def test_a_step_of_another_format_version_stays(self, copy):
        path = item(copy, 3) / manifest_file.FILE
        rewrite(path, json.dumps(json.loads(path.read_text()) | {"format": 99}).encode())
        report = repair.repair(copy)
        assert report.removals == ()
        assert "format version is 99" in report.kept[0].why

    def test_a_step_that_another_one_refers_to_stays(self, replayed, tmp_path, monkeypatch):
        monkeypatch.setattr(links, "can_link", lambda directory: False)
        run = support.dict_run(mesh_of((4, 2)))
        keep = adacheck.KeepLineage(_KeepAll())
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
        assert_same_bits(restore(tmp_path, 3, abstract(run.state)), saved[3])

    def test_it_refuses_where_a_save_may_be_under_way(self, copy):
        leave(copy / "7.orbax-checkpoint-tmp-12", age_s=3600)
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

    def test_links_are_not_followed(self, copy, tmp_path):
        outside = tmp_path / "outside"
        (copy / "3").rename(outside)
        (copy / "3").symlink_to(outside)
        spoil(copy, 3)
        leave(tmp_path / "elsewhere")
        (copy / "8.orbax-checkpoint-tmp-1").symlink_to(tmp_path / "elsewhere")
        inside = item(copy, 2) / manifest_file.DIRECTORY
        inside.rename(tmp_path / "pack")
        inside.symlink_to(tmp_path / "pack")
        (tmp_path / "pack" / "delta.0.manifest.ocdbt").unlink()
        before = shape_of(tmp_path / "pack"), shape_of(outside), shape_of(tmp_path / "elsewhere")
        report = repair.repair(copy, force=True)
        assert [each.path for each in report.removals] == ["2"]
        assert len(report.kept) == 2
        after = shape_of(tmp_path / "pack"), shape_of(outside), shape_of(tmp_path / "elsewhere")
        assert after == before

    def test_other_items_of_a_step_stay(self, copy):
        spoil(copy, 3)
        (copy / "3" / "dataset").mkdir()
        (copy / "3" / "dataset" / "state.json").write_text("{}")
        assert [each.path for each in repair.repair(copy).removals] == ["3/default"]
        assert (copy / "3" / "dataset" / "state.json").exists()
        assert not item(copy, 3).exists()

    def test_what_changed_since_it_was_judged_stays(self, copy, monkeypatch):
        spoil(copy, 3)
        plan = repair._plan

        def slow(*arguments):
            result = plan(*arguments)
            (item(copy, 3) / "new").touch()
            return result

        monkeypatch.setattr(repair, "_plan", slow)
        report = repair.repair(copy)
        assert report.removals == ()
        assert "changed meanwhile" in report.kept[0].why
        assert item(copy, 3).exists()

    def test_a_file_that_cannot_be_opened_proves_nothing(self, copy, monkeypatch):
        spoil(copy, 3)
        refused = PermissionError(13, "Permission denied")
        monkeypatch.setattr(repair, "unreadable_file", lambda directory: refused)
        report = repair.repair(copy)
        assert report.removals == ()
        assert "Permission denied" in report.kept[0].why


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

    def test_a_sound_root_is_left_alone(self, keys):
        before = {*keys.list()}
        report = repair.repair(keys, read_data=True)
        assert (report.removals, report.kept, report.step_count) == ((), (), 3)
        assert {*keys.list()} == before

    @pytest.mark.slow
    def test_a_lost_step_goes_and_its_mark_goes_first(self, keys, monkeypatch):
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


class _KeepAll:
    def should_preserve(self, checkpoints, *, context):
        return [True] * len(checkpoints)


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, [str(each) for each in arguments])

    def test_verify_prints_a_row_a_step_and_a_sentence(self, replayed):
        result = self.run("verify", replayed[0], "--read-data", "--replay")
        assert result.exit_code == 0
        assert result.stdout.count(" ok") == 3
        assert "3 steps verified: every stored byte was read, and 3 were recomputed." in (
            result.stdout
        )

    def test_verify_says_in_one_line_what_it_did_not_look_at(self, replayed):
        bytes_, replay = "the array bytes of 3 steps (verify --read-data)", "the replay of 2 steps"
        for options, said, not_said in (
            ((), (bytes_, replay), ()),
            (("--read-data",), (replay,), (bytes_,)),
            (("--replay",), (bytes_,), (replay,)),
            (("--read-data", "--replay"), (), ("Not looked at",)),
        ):
            result = self.run("verify", replayed[0], *options)
            lines = [each for each in result.stdout.splitlines() if each.startswith("Not looked")]
            assert len(lines) == bool(said)
            assert all(each in lines[0] for each in said)
            assert not any(each in result.stdout for each in not_said)
            report = json.loads(self.run("verify", replayed[0], *options, "--json").stdout)
            assert len(report["not_looked_at"]) == len(said)

    def test_verify_does_not_advise_what_was_asked_for_in_vain(self, replayed, tmp_path):
        root = tmp_path / "root"
        shutil.copytree(replayed[0], root)
        for path in item(root, 1).rglob("manifest*"):
            path.write_bytes(b"no manifest")
        for options, why in (
            ((), "(verify --read-data)"),
            (("--read-data",), "(asked for, and not possible: see the step)"),
        ):
            told = json.loads(self.run("verify", root, *options, "--json").stdout)["not_looked_at"]
            assert any(each.startswith("the array bytes") and why in each for each in told)

    def test_inspect_and_ls_tell_how_each_delta_was_checked(self, replayed, monkeypatch):
        support.tell_of_checks(monkeypatch, {3: ""})
        result = self.run("inspect", replayed[0], 3)
        assert "checked when saved" in result.stdout
        assert "step 2 in full, step 3 not checked" in result.stdout
        told = json.loads(self.run("inspect", replayed[0], 3, "--json").stdout)
        assert told["checks"] == {"2": "full", "3": ""}
        steps = json.loads(self.run("ls", replayed[0], "--json").stdout)["steps"]
        assert [each["checked"] for each in steps] == [None, "full", "not checked"]
        assert "not checked" in self.run("ls", replayed[0]).stdout

    def test_verify_tells_of_damage(self, copy):
        spoil(copy, 2)
        result = self.run("verify", copy)
        assert result.exit_code == 1
        assert "1 of 3 steps damaged" in result.stdout
        assert "2/default/adacheck/delta.0" in result.stdout
        result = self.run("verify", copy, "2", "--json")
        (step,) = json.loads(result.stdout)["steps"]
        assert step["damage"][0]["file"].endswith("adacheck/delta.0")
        assert self.run("verify", copy, "3").exit_code == 0

    @pytest.mark.parametrize("options", [("9",), ("--item", "none")])
    def test_wrong_input(self, replayed, options):
        assert self.run("verify", replayed[0], *options).exit_code == 2
        assert self.run("verify", replayed[0] / "nothing").exit_code == 2

    def test_repair_says_what_it_removes(self, copy):
        spoil(copy, 3)
        leave(copy / "7.orbax-checkpoint-tmp-12")
        result = self.run("repair", copy, "--dry-run")
        assert result.exit_code == 0
        assert "2 directories would be removed" in result.stdout
        result = self.run("repair", copy, "--json")
        report = json.loads(result.stdout)
        assert len(report["removals"]) == 2
        assert self.run("verify", copy).exit_code == 0
        leave(copy / "7.orbax-checkpoint-tmp-12", age_s=0)
        assert self.run("repair", copy).exit_code == 2
