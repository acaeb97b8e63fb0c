"""Whoever follows published weights has the bits of one version, and the newest that is whole."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from adacheck_jax.errors import LineageError, MismatchError, StorageError
from adacheck_jax.publish import Follower, Publisher, records
from adacheck_jax.publish.reading import VersionReader
from adacheck_jax.publish.records import Stored, Version
from adacheck_jax.publish.root import BASES, VERSIONS, Root
from adacheck_jax.publish.weights import Weights
from adacheck_jax.store.storage.location import at, located
from adacheck_jax.store.storage.posix import Posix
from tests.publish.states import Training, abstract, bits, in_memory
from tests.support import mesh_of


@pytest.fixture(params=["file", "memory", "gcs", "s3"])
def root(request, tmp_path):
    if request.param == "file":
        return tmp_path / "weights"
    if request.param == "memory":
        return in_memory()
    return located(f"{request.getfixturevalue(request.param).url}/{uuid.uuid4().hex}")


def published(root: Any, versions: int, training: Training | None = None, **options: Any) -> Any:
    """Publishes some versions; gives the bits of each."""
    training, found = training or Training(), {}
    with Publisher(root, **options) as publisher:
        first = 0 if publisher.version is None else publisher.version + 1
        for version in range(first, first + versions):
            params = training.params()
            publisher.publish(params, version=version)
            found[version] = bits(params)
            training.step()
    return found


@pytest.mark.slow
def test_followers_have_the_bits_of_every_version_on_every_storage(root):
    training, follower = Training(), Follower(root, abstract(), poll_s=0.01)
    assert not follower.update()
    with pytest.raises(LineageError, match="none"):
        follower.latest()
    with Publisher(root, base_every=3, keep_versions=2) as publisher:
        for version in range(0, 80, 10):
            params = training.params()
            assert publisher.publish(params, version=version) == version
            assert bits(follower.wait_for(version, timeout_s=60)) == bits(params)
            assert follower.version == version
            training.step()
    assert follower.bases_read == 1
    assert not follower.update()
    late = Follower(root, abstract())
    assert bits(late.latest()) == bits(follower.params)
    # Bases at sequence numbers 0, 3 and 6; when that of 6 was there, two versions began at 5.
    assert Root(root).numbers(BASES) == [3, 6]
    assert Root(root).numbers(VERSIONS) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("mesh", [(8,), (4, 2)])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_sharded_params_are_followed_on_other_meshes_and_types(mesh, dtype, tmp_path):
    training = Training()
    follower = Follower(tmp_path, abstract(mesh_of((2, 4)), dtype))
    with Publisher(tmp_path, params_path="params") as publisher:
        for version in range(3):
            params = training.params(mesh_of(mesh))
            publisher.publish({"params": params, "step": version}, version=version, wait=True)
            found = follower.wait_for(version, timeout_s=60)
            wanted = jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), params)
            assert bits(found) == bits(wanted)
            for have, want in zip(
                jax.tree.leaves(found), jax.tree.leaves(abstract(mesh_of((2, 4)))), strict=True
            ):
                assert have.sharding == want.sharding
            training.step()


def test_params_may_be_donated_at_once_on_both_sides(tmp_path):
    scaled = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    follower = Follower(tmp_path, abstract())
    training = Training()
    with Publisher(tmp_path) as publisher:
        for version in range(4):
            params, expected = training.params(), bits(training.params())
            publisher.publish(params, version=version)
            jax.block_until_ready(scaled(params))
            publisher.wait()
            given = follower.wait_for(version, timeout_s=60)
            assert bits(given) == expected
            jax.block_until_ready(scaled(given))
            assert bits(follower.params) == expected, "donated arrays are placed anew"
            if version % 2:  # else the same weights again
                training.step()


def aligned(shape: Any, dtype: Any = float, *rest: Any, **options: Any) -> np.ndarray:
    """Memory that arrays on CPU devices take over as it is."""
    if np.dtype(dtype).hasobject:
        return np.zeros(shape, dtype)
    memory = np.zeros(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : memory.size - 64 + start].view(dtype).reshape(shape)


def test_params_that_were_given_stay_as_they_were_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "empty", aligned)
    wide = {"w": np.zeros((64, 1024), np.float32)}
    follower, given = Follower(tmp_path, wide), []
    with Publisher(tmp_path) as publisher:
        for version in range(4):
            wide["w"][version] += 1
            expected = wide["w"].copy()
            publisher.publish(wide, version=version)
            wide["w"] -= 7  # in place, at once
            publisher.wait()
            given.append((follower.latest(), expected))
    for params, expected in given:
        assert np.array_equal(np.asarray(params["w"]), expected)


def test_pairs_of_versions_and_params_come_in_order(tmp_path):
    expected: dict[int, list[bytes]] = {}

    def publish() -> None:
        expected.update(published(tmp_path, 12))

    thread = threading.Thread(target=publish)
    thread.start()
    seen = {}
    for version, params in Follower(tmp_path, abstract(), poll_s=0.01):
        seen[version] = bits(params)
        if version == 11:
            break
    thread.join()
    assert [*seen] == sorted(seen)
    assert seen == {version: expected[version] for version in seen}


def test_changes_lead_whoever_has_a_copy_to_the_next_version(tmp_path):
    training, follower = Training(), Follower(tmp_path, abstract())
    with Publisher(tmp_path) as publisher:
        publisher.publish(training.params(), version=0, wait=True)
        before = {"embedding": np.array(follower.latest()["embedding"])}
        with pytest.raises(LineageError, match="base"):
            follower.changes()
        for version in (1, 2):
            training.step(1e-3)
            publisher.publish(training.params(), version=version, wait=True)
    after = follower.latest()
    places, words = follower.changes()["embedding"]
    assert 0 < places.size < before["embedding"].size
    before["embedding"].reshape(-1).view(np.uint16)[places] = words
    assert before["embedding"].tobytes() == np.asarray(after["embedding"]).tobytes()


def test_a_follower_that_fell_behind_begins_at_a_base_and_says_so(tmp_path, caplog):
    follower = Follower(tmp_path, abstract())
    training = Training()
    published(tmp_path, 1, training)
    follower.latest()
    expected = published(tmp_path, 10, training, base_every=2, keep_versions=1)
    assert bits(follower.latest()) == expected[10]
    assert follower.bases_read == 2
    assert "version 10 is read from a base" in caplog.text


def test_a_restarted_publisher_goes_on_with_deltas(tmp_path):
    training, follower = Training(), Follower(tmp_path, abstract())
    published(tmp_path, 3, training)
    follower.latest()
    (tmp_path / "deltas" / f"{7:012}-{0:012}").write_bytes(b"never committed")
    (tmp_path / "versions" / f".{7:012}.0.tmp").write_bytes(b"never committed")
    expected = published(tmp_path, 2, training)
    assert bits(follower.latest()) == expected[4]
    assert follower.bases_read == 1
    assert Root(tmp_path).numbers(BASES) == [0]
    assert not (tmp_path / "deltas" / f"{7:012}-{0:012}").exists()
    assert not [*(tmp_path / "versions").glob(".*")]


def test_a_version_is_published_once_and_numbers_only_go_up(tmp_path):
    published(tmp_path, 3)
    with Publisher(tmp_path) as publisher:
        assert publisher.version == 2
        for version in (2, 0, -1, True, "3"):
            with pytest.raises(MismatchError, match="above 2"):
                publisher.publish(Training().params(), version=version)  # type: ignore
        publisher.publish(Training().params(), version=3, wait=True)
    with pytest.raises(StorageError, match="closed"):
        publisher.publish(Training().params(), version=4)


def test_of_two_publishers_the_later_one_has_the_root(root):
    training = Training()
    first = Publisher(root)
    first.publish(training.params(), version=0, wait=True)
    second = Publisher(root)
    training.step()
    first.publish(Training(7).params(), version=100)
    with pytest.raises(StorageError, match="taken it over"):
        first.wait()
    with pytest.raises(StorageError, match="taken it over"):
        first.publish(training.params(), version=101)
    follower = Follower(root, abstract())
    follower.latest()
    assert follower.version == 0, "what the first wrote does not count"
    second.publish(training.params(), version=1, wait=True)
    assert bits(follower.latest()) == bits(training.params())
    assert (follower.version, follower.bases_read) == (1, 1)
    first.close()
    second.close()


def test_a_publisher_whose_files_a_newer_one_clears_is_told_who_has_the_root(tmp_path, monkeypatch):
    first = Publisher(tmp_path, base_every=1)
    write, others = Root.write, []

    def cleared(self: Root, folder: str, record: Any) -> str:
        if folder == BASES and not others:
            others.append(Publisher(tmp_path))
            raise FileNotFoundError(2, "No such file or directory")
        return write(self, folder, record)

    monkeypatch.setattr(Root, "write", cleared)
    first.publish(Training().params(), version=0)
    with pytest.raises(StorageError, match="taken it over"):
        first.wait()
    first.close()
    others[0].close()


def test_other_leaves_begin_with_a_base_and_followers_of_the_old_are_told(tmp_path):
    training = Training()
    published(tmp_path, 1, training)
    follower = Follower(tmp_path, abstract())
    follower.latest()
    with Publisher(tmp_path) as publisher:
        publisher.publish({**training.params(), "more": jnp.ones(3)}, version=1, wait=True)
    with pytest.raises(MismatchError, match="more"):
        follower.latest()
    assert follower.version == 0
    wanted = {**abstract(), "more": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert (np.asarray(Follower(tmp_path, wanted).latest()["more"]) == 1).all()


@pytest.mark.parametrize("where", ["deltas", "versions", "parts", "bases"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_is_not_served_and_a_later_base_heals(where, how, tmp_path):
    training = Training()
    known = published(tmp_path, 3, training, base_every=2)  # bases at 0 and 2
    running = Follower(tmp_path, abstract())
    running.latest()
    known |= published(tmp_path, 1, training, base_every=50)
    sequence = 3 if where in ("deltas", "versions") else 2
    for each in (tmp_path / where).rglob(f"*{sequence:012}*"):
        path = each if each.is_file() else next(each.iterdir())
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    late = Follower(tmp_path, abstract())
    for follower in (running, late):
        follower.update()
        assert bits(follower.params) == known[follower.version]
    if sequence == 3:
        assert running.version == late.version == 2
        assert running.problem or how == "gone"
        with pytest.raises(LineageError, match="expected version 3 within"):
            running.wait_for(3, timeout_s=0.0)
    else:
        assert running.version == late.version == 3
    known |= published(tmp_path, 3, training, base_every=1)
    for follower in (running, late):
        assert bits(follower.latest()) == known[follower.version]
        assert follower.version == max(known)


def test_weights_that_do_not_have_their_fingerprints_are_neither_served_nor_built_on(
    tmp_path, monkeypatch
):
    training, apply = Training(), Weights.apply
    known = published(tmp_path, 2, training)
    follower = Follower(tmp_path, abstract())
    follower.latest()

    def wrong(self: Any, changes: Any) -> None:
        apply(self, changes)
        self.words[0, 2][3] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(Weights, "apply", wrong)
        known |= published(tmp_path, 1, training)  # with a base: what it read back is wrong
        late = Follower(tmp_path, abstract())
        assert bits(late.latest()) == known[2]
        known |= published(tmp_path, 1, training, base_every=9)
        for each in (follower, late):
            each.update()
            assert bits(each.params) == known[each.version]
    known |= published(tmp_path, 1, training, base_every=1)
    for each in (follower, late):
        assert bits(each.latest()) == known[4]


def test_what_vanishes_under_a_follower_makes_it_begin_at_a_base(tmp_path, monkeypatch):
    training, follower = Training(), Follower(tmp_path, abstract())
    published(tmp_path, 1, training)
    follower.latest()
    published(tmp_path, 2, training)
    load, expected = VersionReader.load, {}

    def pruned(self: VersionReader, *arguments: Any) -> Any:
        if self is follower._reader and not expected:
            expected.update(published(tmp_path, 3, training, base_every=1, keep_versions=1))
        return load(self, *arguments)

    monkeypatch.setattr(VersionReader, "load", pruned)
    assert bits(follower.latest()) == expected[5]
    assert follower.bases_read == 2


def test_a_storage_that_fails_for_a_while_costs_a_version_and_no_more(tmp_path, monkeypatch):
    training, follower = Training(), Follower(tmp_path, abstract())
    write = Root.store
    with Publisher(tmp_path) as publisher:
        publisher.publish(training.params(), version=0, wait=True)

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Root, "store", full)
        training.step()
        publisher.publish(training.params(), version=1)
        with pytest.raises(StorageError, match="No space"):
            publisher.wait()
        monkeypatch.setattr(Root, "store", write)
        training.step()
        publisher.publish(training.params(), version=1, wait=True)
    assert bits(follower.latest()) == bits(training.params())


def test_an_unreadable_root_is_waited_for(tmp_path, monkeypatch):
    expected = published(tmp_path, 1)
    follower, listed = Follower(tmp_path, abstract(), poll_s=0.01), []
    listing = Posix.list

    def failing(self: Posix, prefix: str, *, deep: bool = True) -> Any:
        listed.append(prefix)
        if len(listed) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return listing(self, prefix, deep=deep)

    monkeypatch.setattr(Posix, "list", failing)
    with pytest.raises(StorageError, match="cannot be read now"):
        follower.latest()
    assert bits(follower.wait_for(0, timeout_s=60)) == expected[0]


@pytest.mark.parametrize(
    ("params", "options", "match"),
    [
        ({}, {}, "without leaves"),
        ({"a": 1.0}, {}, "array of numbers"),
        ({"k": None, "a": "text"}, {}, "array of numbers"),
        ({"params": {"a": np.ones(2)}}, {"params_path": "weights"}, "weights/"),
        ({}, {"base_every": 0}, "positive"),
        ({}, {"keep_versions": 0}, "positive"),
    ],
)
def test_what_cannot_be_published_is_named(params, options, match, tmp_path):
    with pytest.raises(MismatchError, match=match):  # noqa: SIM117
        with Publisher(tmp_path, **options) as publisher:
            publisher.publish(params, version=0)
    with pytest.raises(MismatchError, match="abstract array"):
        Follower(tmp_path, {"a": 3})
    with pytest.raises(StorageError, match="URL"):
        Follower("ftp://somewhere/else", {})


def test_numbers_that_the_wanted_type_does_not_hold_are_refused(tmp_path):
    params = {"codes": jnp.array([-5, 100], jnp.int32), "w": jnp.ones(2)}
    with Publisher(tmp_path) as publisher:
        publisher.publish(params, version=0)
    for asked, told in (
        ({"codes": jnp.uint8}, r"codes: -5 \(int32 as uint8\)"),
        ({"codes": jnp.float32}, r"codes: published int32\[2\], asked for float32\[2\]"),
        ({"w": jnp.int32}, r"w: published float32\[2\], asked for int32\[2\]"),
    ):
        kinds = {path: asked.get(path, array.dtype) for path, array in params.items()}
        follower = Follower(tmp_path, {x: jax.ShapeDtypeStruct((2,), y) for x, y in kinds.items()})
        with pytest.raises(MismatchError, match=told):
            follower.latest()
    wanted = {"codes": jnp.zeros(2, jnp.int8), "w": jnp.zeros(2, jnp.bfloat16)}
    found = Follower(tmp_path, wanted).latest()
    assert [found["codes"].tolist(), found["w"].tolist()] == [[-5, 100], [1, 1]]


def refused(root: Any, told: str) -> None:
    """Expects that a root is refused on both sides, and left as it is."""
    before = sorted(str(each) for each in at(root).list())
    follower = Follower(root, abstract(), poll_s=0.01)
    for call in (lambda: Publisher(root), follower.latest, lambda: follower.wait_for(0)):
        with pytest.raises(MismatchError, match=told):
            call()
    assert sorted(str(each) for each in at(root).list()) == before


def test_the_root_of_a_checkpoint_manager_is_refused_on_both_sides(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave({"w": np.arange(1 + step)}))
    refused(tmp_path, r"the root of a checkpoint manager \(0, 1, 2 and 2 more\)")


def test_other_content_is_refused_on_every_storage_and_does_no_harm_beside_weights(root):
    (at(root) / "notes.txt").write(b"1")
    (at(root) / "logs" / "events").write(b"2")
    refused(root, r"other content \(logs, notes.txt\)")
    at(root).delete()
    (at(root) / ".snapshot" / "of the file system").write(b"3")
    published(root, 1)
    (at(root) / "notes.txt").write(b"by hand")
    expected = published(root, 2)
    assert bits(Follower(root, abstract()).latest()) == expected[2]


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_versions_never_go_down_where_records_were_lost(how, tmp_path):
    training = Training()
    known = published(tmp_path, 5, training)
    follower = Follower(tmp_path, abstract())
    follower.latest()
    for sequence in (3, 4):
        path = tmp_path / "versions" / f"{sequence:012}"
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:9])
    published(tmp_path, 2, training)  # 3 and 4 again
    assert bits(follower.latest()) == known[4]
    assert follower.version == 4
    if how == "cut":  # else the sequence numbers, too, are those of before
        assert "records between were lost" in follower.problem
    known |= published(tmp_path, 1, training)
    assert bits(follower.latest()) == known[5]
    assert follower.version == 5
    assert "records between were lost" not in follower.problem


def with_deltas(root: Path, change: Callable[[Any], Any]) -> None:
    """Gives the record of version 1 other deltas."""
    record = Root(root).read(VERSIONS, 1, Version)
    made = dataclasses.replace(record, deltas=change(record.deltas))
    Root(root).record_at(VERSIONS, 1).write(records.encode(made))


def moved_away(root: Path) -> None:
    """Puts a link in the place of a part of the only base."""
    part = next((root / "parts").rglob(f"*/0-{0:012}"))
    part.symlink_to(part.rename(root.parent / "elsewhere"))


CRAFTED = {
    "a delta larger than its leaves can have": (
        lambda root: with_deltas(root, lambda _: (Stored(2**50, "0" * 32),)),
        *(0, "found one of 1125899906842624 bytes"),  # which are not read
    ),
    "deltas of more shares than there are": (
        lambda root: with_deltas(root, lambda deltas: (*deltas, None)),
        *(0, "expected a delta of each of 1 shares, found 2"),
    ),
    "a record in the place of another": (
        lambda root: shutil.copy(root / f"versions/{1:012}", root / f"versions/{5:012}"),
        *(1, "expected the record of 5, found that of 1"),
    ),
    "a link": (moved_away, None, "link"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_what_somebody_put_there_is_not_read(name, tmp_path):
    root = tmp_path / "weights"
    craft, version, problem = CRAFTED[name]
    known = published(root, 2)
    craft(root)
    follower = Follower(root, abstract())
    assert follower.update() == (version is not None)
    assert follower.version == version
    assert version is None or bits(follower.params) == known[version]
    assert problem in follower.problem


@pytest.mark.parametrize("first", [0, 7])
def test_a_root_that_was_deleted_and_begun_anew_is_followed(first, tmp_path):
    """Its records have lower numbers than the one that the follower has."""
    root, training = tmp_path / "weights", Training()
    known = published(root, 6, training)
    follower = Follower(root, abstract(), poll_s=0.01)
    follower.latest()
    shutil.rmtree(root)
    with Publisher(root) as publisher:
        for version in range(first, first + 3):
            training.step()
            known[version] = bits(training.params())
            publisher.publish(training.params(), version=version, wait=True)
            if first:
                follower.wait_for(version, timeout_s=60)
            else:
                for _ in range(2):
                    assert not follower.update()
                    assert "expected versions above 5" in follower.problem
            assert follower.version == (version if first else 5)
    assert first == 0 or bits(follower.params) == known[follower.version]
    assert first == 0 or not follower.problem


def test_a_publisher_whose_root_was_deleted_is_told_so(tmp_path):
    root, training = tmp_path / "weights", Training()
    publisher = Publisher(root)
    publisher.publish(training.params(), version=0, wait=True)
    shutil.rmtree(root)
    with pytest.raises(StorageError, match="the root was deleted"):
        publisher.publish(training.params(), version=1, wait=True)
    publisher.close()
