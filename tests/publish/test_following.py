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
from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.storage.location import at, located
from adacheck_jax.store.storage.posix import Posix
from tests.publish.states import Training, abstract, bits, in_memory
from tests.support import mesh_of


@pytest.fixture(params=["file", "memory", *SCHEMES])
def root(request, tmp_path):
    if request.param == "file":
        return tmp_path / "weights"
    if request.param == "memory":
        return in_memory()
    return located(f"{request.getfixturevalue(request.param).url}/{uuid.uuid4().hex}")


class Weighed:
    """A training whose params are published, and one who has followed them from the beginning.

    Attributes:
        known: bits of each version.
    """

    def __init__(self, root: Any, versions: int = 0) -> None:
        self.root, self.training = root, Training()
        self.known: dict[int, list[bytes]] = {}
        self.follower = Follower(root, abstract(), poll_s=0.01)
        if versions:
            self.publish(versions)
            self.expect(versions - 1)

    def publish(self, versions: int, **options: Any) -> None:
        """Publishes some versions, by a publisher of their own."""
        with Publisher(self.root, **options) as publisher:
            first = 0 if publisher.version is None else publisher.version + 1
            for version in range(first, first + versions):
                self.publish_by(publisher, version, wait=False)

    def publish_by(self, publisher: Publisher, version: int, *, wait: bool = True) -> None:
        """Publishes a version."""
        params = self.training.params()
        publisher.publish(params, version=version, wait=wait)
        self.known[version] = bits(params)
        self.training.step()

    def late(self) -> Follower:
        """One who follows from now on."""
        return Follower(self.root, abstract())

    def expect(self, version: int, follower: Follower | None = None) -> None:
        """Expects a version, after one look."""
        follower = follower or self.follower
        follower.update()
        assert follower.version == version, follower.problem
        assert bits(follower.params) == self.known[version]


@pytest.fixture
def weighed(tmp_path):
    return Weighed(tmp_path / "weights")


@pytest.fixture
def followed(tmp_path):
    """The same, with two versions that the follower has seen."""
    return Weighed(tmp_path / "weights", 2)


@pytest.mark.slow
def test_followers_have_the_bits_of_every_version_on_every_storage(root):
    weighed = Weighed(root)
    follower = weighed.follower
    assert not follower.update()
    with pytest.raises(LineageError, match="none"):
        follower.latest()
    with Publisher(root, base_every=3, keep_versions=2) as publisher:
        for version in range(0, 80, 10):
            params = weighed.training.params()
            assert publisher.publish(params, version=version) == version
            assert bits(follower.wait_for(version, timeout_s=60)) == bits(params)
            assert follower.version == version
            weighed.training.step()
    assert follower.bases_read == 1
    assert not follower.update()
    assert bits(weighed.late().latest()) == bits(follower.params)
    # Bases at sequence numbers 0, 3 and 6; when that of 6 was there, two versions began at 5.
    assert Root(root).numbers(BASES) == [3, 6]
    assert Root(root).numbers(VERSIONS) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("mesh", [(8,), (4, 2)])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_sharded_params_are_followed_on_other_meshes_and_types(mesh, dtype, tmp_path):
    training, asked = Training(), abstract(mesh_of((2, 4)), dtype)
    follower = Follower(tmp_path, asked)
    with Publisher(tmp_path, params_path="params") as publisher:
        for version in range(3):
            params = training.params(mesh_of(mesh))
            publisher.publish({"params": params, "step": version}, version=version, wait=True)
            found = follower.wait_for(version, timeout_s=60)
            wanted = jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), params)
            assert bits(found) == bits(wanted)
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(asked), strict=True)
            assert all(have.sharding == want.sharding for have, want in pairs)
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


def test_pairs_of_versions_and_params_come_in_order(weighed):
    thread = threading.Thread(target=weighed.publish, args=(12,))
    thread.start()
    seen = {}
    for version, params in weighed.follower:
        seen[version] = bits(params)
        if version == 11:
            break
    thread.join()
    assert [*seen] == sorted(seen)
    assert seen == {version: weighed.known[version] for version in seen}


def test_changes_lead_whoever_has_a_copy_to_the_next_version(weighed):
    follower, training = weighed.follower, weighed.training
    weighed.publish(1)
    before = {"embedding": np.array(follower.latest()["embedding"])}
    with pytest.raises(LineageError, match="base"):
        follower.changes()
    training.step(1e-3)
    weighed.publish(2)
    after = follower.latest()
    places, words = follower.changes()["embedding"]
    assert 0 < places.size < before["embedding"].size
    before["embedding"].reshape(-1).view(np.uint16)[places] = words
    assert before["embedding"].tobytes() == np.asarray(after["embedding"]).tobytes()


def test_a_follower_that_fell_behind_begins_at_a_base_and_says_so(followed, caplog):
    followed.publish(9, base_every=2, keep_versions=1)
    followed.expect(10)
    assert followed.follower.bases_read == 2
    assert "version 10 is read from a base" in caplog.text


def test_a_restarted_publisher_goes_on_with_deltas(followed):
    given_up = followed.root / "deltas" / f"{7:012}-{0:012}"
    for path in (given_up, followed.root / "versions" / f".{7:012}.0.tmp"):
        path.write_bytes(b"never committed")
    followed.publish(2)
    followed.expect(3)
    assert followed.follower.bases_read == 1
    assert Root(followed.root).numbers(BASES) == [0]
    assert not given_up.exists()
    assert not [*(followed.root / "versions").glob(".*")]


def test_a_version_is_published_once_and_numbers_only_go_up(followed):
    params = Training().params()
    with Publisher(followed.root) as publisher:
        assert publisher.version == 1
        for version in (1, 0, -1, True, "3"):
            with pytest.raises(MismatchError, match="above 1"):
                publisher.publish(params, version=version)  # type: ignore
        publisher.publish(params, version=2, wait=True)
    with pytest.raises(StorageError, match="closed"):
        publisher.publish(params, version=3)


def test_of_two_publishers_the_later_one_has_the_root(root):
    weighed = Weighed(root)
    first = Publisher(root)
    weighed.publish_by(first, 0)
    second = Publisher(root)
    first.publish(Training(7).params(), version=100)
    for call in (first.wait, lambda: first.publish(Training().params(), version=101)):
        with pytest.raises(StorageError, match="taken it over"):
            call()
    weighed.expect(0)  # what the first wrote does not count
    weighed.publish_by(second, 1)
    weighed.expect(1)
    assert weighed.follower.bases_read == 1
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


def test_other_leaves_begin_with_a_base_and_followers_of_the_old_are_told(followed):
    more = {**followed.training.params(), "more": jnp.ones(3)}
    with Publisher(followed.root) as publisher:
        publisher.publish(more, version=2, wait=True)
    with pytest.raises(MismatchError, match="more"):
        followed.follower.latest()
    assert followed.follower.version == 1
    assert bits(Follower(followed.root, more).latest()) == bits(more)


@pytest.mark.parametrize("where", ["deltas", "versions", "parts", "bases"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_is_not_served_and_a_later_base_heals(where, how, weighed):
    weighed.publish(3, base_every=2)  # bases at 0 and 2
    weighed.expect(2)
    weighed.publish(1, base_every=50)
    sequence = 3 if where in ("deltas", "versions") else 2
    for each in (weighed.root / where).rglob(f"*{sequence:012}*"):
        path = each if each.is_file() else next(each.iterdir())
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    running, late = weighed.follower, weighed.late()
    for follower in (running, late):
        weighed.expect(2 if sequence == 3 else 3, follower)
    if sequence == 3:
        assert running.problem or how == "gone"
        with pytest.raises(LineageError, match="expected version 3 within"):
            running.wait_for(3, timeout_s=0.0)
    weighed.publish(3, base_every=1)
    for follower in (running, late):
        weighed.expect(max(weighed.known), follower)


def test_weights_that_do_not_have_their_fingerprints_are_neither_served_nor_built_on(
    followed, monkeypatch
):
    apply = Weights.apply

    def wrong(self: Any, changes: Any) -> None:
        apply(self, changes)
        self.words[0, 2][3] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(Weights, "apply", wrong)
        followed.publish(1)  # with a base: what it read back is wrong
        late = followed.late()
        followed.expect(2, late)
        followed.publish(1)
        for each, version in ((followed.follower, 2), (late, 2)):
            followed.expect(version, each)
            assert "expected the bits that were published" in each.problem
    followed.publish(1, base_every=1)
    for each in (followed.follower, late):
        followed.expect(4, each)


def test_what_vanishes_under_a_follower_makes_it_begin_at_a_base(followed, monkeypatch):
    followed.publish(2)
    load = VersionReader.load

    def pruned(self: VersionReader, *arguments: Any) -> Any:
        if self is followed.follower._reader and len(followed.known) == 4:
            followed.publish(3, base_every=1, keep_versions=1)
        return load(self, *arguments)

    monkeypatch.setattr(VersionReader, "load", pruned)
    followed.expect(6)
    assert followed.follower.bases_read == 2


def test_a_storage_that_fails_for_a_while_costs_a_version_and_no_more(weighed, monkeypatch):
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with Publisher(weighed.root) as publisher:
        weighed.publish_by(publisher, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Root, "store", full)
            publisher.publish(weighed.training.params(), version=1)
            with pytest.raises(StorageError, match="No space"):
                publisher.wait()
        weighed.training.step()
        weighed.publish_by(publisher, 1)
    weighed.expect(1)


def test_an_unreadable_root_is_waited_for(weighed, monkeypatch):
    weighed.publish(1)
    follower, listed = weighed.follower, []
    listing = Posix.list

    def failing(self: Posix, prefix: str, *, deep: bool = True) -> Any:
        listed.append(prefix)
        if len(listed) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return listing(self, prefix, deep=deep)

    monkeypatch.setattr(Posix, "list", failing)
    with pytest.raises(StorageError, match="cannot be read now"):
        follower.latest()
    assert bits(follower.wait_for(0, timeout_s=60)) == weighed.known[0]


@pytest.mark.parametrize(
    ("params", "options", "match"),
    [
        ({}, {}, "without leaves"),
        ({"a": 1.0}, {}, "array of numbers"),
        ({"k": None, "a": "text"}, {}, "array of numbers"),
        ({"params": {"a": np.ones(2)}}, {"params_path": "weights"}, r"'weights'.* There: params\."),
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
    refused(tmp_path, r"the root of a checkpoint manager \(0, 1, 2, and 2 more\)")


def test_other_content_is_refused_on_every_storage_and_does_no_harm_beside_weights(root):
    (at(root) / "notes.txt").write(b"1")
    (at(root) / "logs" / "events").write(b"2")
    refused(root, r"other content \(logs, notes.txt\)")
    at(root).delete()
    (at(root) / ".snapshot" / "of the file system").write(b"3")
    weighed = Weighed(root, 1)
    (at(root) / "notes.txt").write(b"by hand")
    weighed.publish(2)
    weighed.expect(2)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_versions_never_go_down_where_records_were_lost(how, followed):
    follower = followed.follower
    followed.publish(3)
    followed.expect(4)
    held = followed.known[4]
    for sequence in (3, 4):
        path = followed.root / "versions" / f"{sequence:012}"
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:9])
    followed.publish(2)  # 3 and 4 again
    assert bits(follower.latest()) == held
    assert follower.version == 4
    if how == "cut":  # else the sequence numbers, too, are those of before
        assert "records between were lost" in follower.problem
    followed.publish(1)
    followed.expect(5)
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
def test_what_somebody_put_there_is_not_read(name, weighed):
    craft, version, problem = CRAFTED[name]
    weighed.publish(2)
    craft(weighed.root)
    if version is None:
        assert not weighed.follower.update()
    else:
        weighed.expect(version)
    assert problem in weighed.follower.problem


@pytest.mark.parametrize("first", [0, 7])
def test_a_root_that_was_deleted_and_begun_anew_is_followed(first, tmp_path):
    """Its records have lower numbers than the one that the follower has."""
    weighed = Weighed(tmp_path / "weights", 6)
    follower, held = weighed.follower, weighed.known[5]
    shutil.rmtree(weighed.root)
    with Publisher(weighed.root) as publisher:
        for version in range(first, first + 3):
            weighed.publish_by(publisher, version)
            if first:
                weighed.expect(version)
                continue
            for _ in range(2):
                assert not follower.update()
                assert "expected versions above 5" in follower.problem
    assert bits(follower.params) == (weighed.known[9] if first else held)
    assert first == 0 or not follower.problem


def test_a_publisher_whose_root_was_deleted_is_told_so(weighed):
    publisher = Publisher(weighed.root)
    weighed.publish_by(publisher, 0)
    shutil.rmtree(weighed.root)
    with pytest.raises(StorageError, match="the root was deleted"):
        weighed.publish_by(publisher, 1)
    publisher.close()
