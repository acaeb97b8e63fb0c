"""The files of a step, written into and read from storages that are no directory."""

import dataclasses
import errno
import uuid

import numpy as np
import pytest

from adacheck_jax.errors import AdaCheckError, FormatError, StorageError
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import NO_CAUTION, Link
from adacheck_jax.store import claims, links, volume_reader, volumes, zarr
from adacheck_jax.store.steps import folders, lookup, manifest_file, marks, roots
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import Location, at, located
from adacheck_jax.store.storage.posix import Posix
from tests.format.test_manifest import A_BASE, A_DELTA
from tests.support import write_volume


@pytest.fixture(params=["memory", "directory"])
def root(request, tmp_path):
    return in_memory() if request.param == "memory" else at(tmp_path)


def in_memory(kind=KvStore):
    return Location(kind(f"memory://{uuid.uuid4().hex}/root"), "run")


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_volumes_are_merged_and_read_as_they_were_written(root):
    item, box = root / "1", Box.full((60, 100))
    arrays = {name: noise(6000, i).reshape(60, 100) for i, name in enumerate("ab")}
    arrays["c"] = arrays["a"]
    for process, names in enumerate(("ac", "b")):
        pieces = [volumes.ArrayPiece(n, box.shape, (20, 100), {box: arrays[n]}) for n in names]
        shared = write_volume(item / folders.BASE / f"{process}", pieces)
        assert shared == ({"c": "a"} if process == 0 else {})
    volumes.merge(item, {f"{folders.BASE}/{process}": None for process in (0, 1)})
    database = zarr.database_in(item)
    for name, store in zip("abc", volume_reader.opened(database, "abc"), strict=True):
        np.testing.assert_array_equal(store.read().result(), arrays[name])
    (found,) = volume_reader.descriptions(database, "a")
    assert found == volume_reader.Description((60, 100), "uint8", (20, 100), ("bytes", "crc32c"))
    pieces = volume_reader.pieces(database, "b")
    np.testing.assert_array_equal(np.concatenate([b for _, b in pieces]), arrays["b"])


def write_steps(root):
    """A base and a delta that refers to it."""
    base, _ = manifest_file.write(root / "10", A_BASE)
    for step in ("10", "11"):
        for mark in (marks.STEP_METADATA, marks.COMMIT_MARK):
            (root / step / mark).write(b"")
    link = Link(10, lookup.reference(root / "11", root / "10"), base.checksum)
    delta = dataclasses.replace(A_DELTA, step=11, parent=link, depth=1, caution=NO_CAUTION)
    return base, manifest_file.write(root / "11", delta)[0]


def test_manifests_make_steps_and_lineages(root):
    base, delta = write_steps(root)
    found = lookup.resolve(root / "11")
    assert [each.manifest for each in found.entries] == [base, delta]
    assert [each.holder for each in found.entries] == [root.resolve() / "10", root / "11"]
    assert found.exists()
    assert [(s.step, s.directory, s.error) for s in roots.steps_of(root)] == [
        (10, root / "10", None),
        (11, root / "11", None),
    ]
    base_lineage = lookup.resolve(root / "10")
    assert lookup.follow([base_lineage], root / "11").entries[-1].manifest == delta
    assert links.can_link(root) is isinstance(root.storage, Posix)
    assert f"10/{manifest_file.FILE}" in links.files_of(base_lineage.entries[-1])
    (root / "10").delete()
    assert found.exists() is not root.on_file_system, "a store is not asked"
    with pytest.raises(AdaCheckError, match="found nothing there"):
        lookup.resolve(root / "11")


def test_of_two_writers_of_a_step_one_is_refused(tmp_path):
    root, step = at(tmp_path), tmp_path / f"3{roots.TMP_SUFFIX}"
    step.mkdir()
    lock = f"{roots.PROBE_PREFIX}3.0{roots.TMP_SUFFIX}"
    (root / lock).write(b"")  # as a killed process leaves it
    with claims.writing(step, 0, "one"):
        (at(step) / folders.BASE / "0/file").write(b"1")
    refused, entered = pytest.raises(StorageError, match=r"/3: expected one writer"), []
    with refused, claims.writing(step, 0, "two"):
        entered.append("where the other one writes")
    with claims.writing(step, 1, "two"):
        pass
    with claims.writing(step, 0, "one"):
        assert not [*(at(step) / folders.BASE).list()], "what an earlier attempt left is removed"
    with claims.committing(step, 0, "one"):
        claims.remove(step)
    assert [*root.list()] == []
    with claims.writing(step, 0, "one"):
        pass
    (tmp_path / "3").mkdir()  # another one has committed it
    with refused, claims.committing(step, 0, "one"):
        entered.append("what another one has committed")
    assert not entered


def test_in_a_store_the_manifest_replaces_its_own_claim_alone():
    step = in_memory() / "3"
    with claims.writing(step, 0, "one") as claim, claims.writing(step, 1, "one") as other:
        assert other is None
    with claims.writing(step, 0, "one") as again:
        assert again == claim, "an earlier attempt of the same handler"
    with pytest.raises(StorageError, match="expected one writer"), claims.writing(step, 0, "two"):
        pass
    claims.check(step, claim)
    manifest_file.write(step, A_BASE, claim)
    for late in (lambda: claims.check(step, claim), lambda: claims.check(step.parent, claim)):
        with pytest.raises(StorageError, match="expected one writer"):
            late()
    with pytest.raises(FileExistsError):
        manifest_file.write(step, A_DELTA, claim)
    assert manifest_file.read(step).step == A_BASE.step


class Failing(KvStore):
    """A store of which one write fails."""

    fails_at = 0

    def write(self, key, data, **conditions):
        self.fails_at -= 1
        if not self.fails_at:
            raise OSError(errno.EREMOTEIO, "the store is away", self.shown(key))
        return super().write(key, data, **conditions)


def test_a_manifest_whose_write_fails_makes_no_step():
    root = in_memory(Failing)
    root.storage.fails_at = 4
    with pytest.raises(OSError, match="away"):
        write_steps(root)
    assert [each.step for each in roots.steps_of(root)] == [10]
    with pytest.raises(FormatError, match="found none"):
        manifest_file.read(root / "11")
    write_steps(root)
    assert len(lookup.resolve(root / "11").entries) == 2


def test_a_look_at_all_steps_of_a_store_reads_each_manifest_once(monkeypatch):
    root, reads = in_memory(), list[str]()
    write_steps(root)
    read = KvStore.read

    def noted(self, key, *span):
        reads.append(key)
        return read(self, key, *span)

    monkeypatch.setattr(KvStore, "read", noted)
    assert [len(each.lineage.deltas) for each in roots.steps_of(root)] == [0, 1]
    assert len(reads) == len({*reads}) == 2


def test_the_name_of_no_bucket_is_refused():
    with pytest.raises(StorageError, match=r"s3://bk.*expected a URL of a bucket"):
        located("s3://bk/x")
