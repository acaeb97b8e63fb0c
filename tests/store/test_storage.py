"""One suite that every storage passes."""

import contextlib
import dataclasses
import errno
import itertools
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import tensorstore as ts

from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.storage.interface import NotPlainError
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import Location, at, located
from adacheck_jax.store.storage.posix import Posix


class Conformance:
    """Promises of :class:`~adacheck_jax.store.storage.location.Location`.

    A subclass has the fixture ``top``, an empty folder in a storage.
    """

    links: bool
    renames: bool

    def test_a_listing_has_descriptions(self, top: Location):
        for each in ("a/1", "a/b/2", "c"):
            (top / each).write(each.encode())
        (top / "a").adopt({"linked": (top / "c").key})
        found = dict(top.described())
        assert found == {each.below(top): each.stat() for each in top.list()}
        assert {"a/1", "a/b/2", "c"} <= found.keys()
        assert ("a/linked" in found) == self.links
        assert dict(Location(top.storage, (top / "none").key).described()) == {}

    def test_a_value_is_read_as_it_was_written_last_and_less_where_it_ends(self, top: Location):
        value = top / "a/b/value"
        value.write(b"first", if_absent=True)
        stamps = {value.stamp}
        with pytest.raises(FileExistsError):
            value.write(b"second", if_absent=True)
        assert {value.stamp} == stamps
        for data in (b"", b"first of all", b"0123456789"):
            value.write(data)
            assert value.read() == data
            stamps.add(value.stamp)
        assert len(stamps) == 4
        for start, stop in itertools.product((0, 3, 10, 12), (None, 0, 5, 10, 20)):
            if stop is None or start <= stop:
                assert value.read(start, stop) == b"0123456789"[start:stop]

    def test_what_is_not_there_is_not_found(self, top: Location):
        (top / "value").write(b"1")
        for missing in (top / "other", top / "folder/value"):
            with pytest.raises(FileNotFoundError):
                missing.read()
            with pytest.raises(FileNotFoundError):
                missing.stat()
            assert not missing.exists
            missing.delete()
            assert [*missing.list()] == missing.folders() == []

    def test_folders_are_where_values_are_below_and_deleted_with_them(self, top: Location):
        keys = {"1", "2", "a/1", "a/b/2", "ab/3", "a.c"}
        for each in keys:
            (top / each).write(each.encode())
        assert {*top.list()} == {top / each for each in keys}
        assert {*top.list(deep=False)} == {top / each for each in ("1", "2", "a.c")}
        assert {*(top / "a").list()} == {top / "a/1", top / "a/b/2"}
        assert {*(top / "a").list(deep=False)} == {top / "a/1"}
        assert {*top.folders()} == {"a", "ab"}
        assert (top / "a").folders() == ["b"]
        assert [*(top / "1").list()] == []
        folders = [each for each in ("a", "a/b", "a/b/2", "a.c") if (top / each).is_folder]
        assert folders == ["a", "a/b"]
        assert [(top / x).exists for x in ("a/b/2", "a/b/val")] == [True, False]
        (top / "a").delete()
        assert {*top.list()} == {top / each for each in ("1", "2", "ab/3", "a.c")}
        (top / "1").delete()
        (top / "ab").delete()
        assert {*top.list()} == {top / "2", top / "a.c"}

    def test_of_many_writers_one_finds_a_value_absent(self, top: Location):
        winner = winner_of(lambda data: (top / "value").write(data, if_absent=True))
        assert (top / "value").read() == winner

    def test_an_adopted_value_outlives_its_first_key(self, top: Location):
        (top / "value").write(b"1")
        values = dict.fromkeys(("a/b/link", "a/b/other", "link"), (top / "value").key)
        assert top.adopt(values) is self.links
        assert (top / "a/b/link").exists is self.links
        (top / "value").delete()
        if self.links:
            assert [(top / name).read() for name in values] == [b"1"] * 3

    def test_a_folder_or_a_value_is_moved_whole_or_not_at_all(self, top: Location):
        for each in ("a/1", "a/b/2", "ab"):
            (top / each).write(each.encode())
        assert (top / "a").move(top / "c") is self.renames
        name = "c" if self.renames else "a"
        assert {*top.list()} == {top / f"{name}/1", top / f"{name}/b/2", top / "ab"}
        assert (top / name / "b/2").read() == b"a/b/2"
        assert (top / name / "1").move(top / "ab") is self.renames  # over another one
        assert (top / "ab").read() == (b"a/1" if self.renames else b"ab")
        assert (top / name / "1").exists is not self.renames

    def test_what_only_some_storages_do_none_refuses(self, top: Location):
        (top / "a/b/value").write(b"1")
        top.sync(top / "a/b/value", deep=True)
        (top / "a/b").sync(top / "a/b/value")
        top.check_plain()
        for place in (top / "a/b/value", top / "none", Location(top.storage, "")):
            place.check_answers()
        with (top / "a").watched() as is_same, (top / ".lock").lock():
            assert is_same()
        assert not (top / ".lock").exists

    def test_tensorstore_writes_where_keys_are_read(self, top: Location):
        for spec, key in [(top.spec(), "array"), ((top / "b").spec("."), "array")]:
            store = ts.KvStore.open(spec, context=top.context()).result()
            store.write(key, b"bytes").result()
        assert (top / "array").read() == (top / "b.array").read() == b"bytes"

    def test_a_location_has_the_arithmetic_of_paths(self, top: Location):
        value = top / "a" / "b"
        assert (value.name, value.parent.name, value.parent.parent) == ("b", "a", top)
        assert value.with_name("c") == top / "a/c"
        assert str(value) == f"{top}/a/b"
        assert value.below(top) == "a/b"
        assert value.resolve() == top.resolve() / "a/b"

    def test_a_value_is_replaced_if_it_is_still_the_same(self, top: Location):
        first = (top / "value").write(b"first")
        assert (top / "value").stamp == first
        second = (top / "value").write(b"second", replacing=first)
        assert (top / "value").stamp == second != first
        with pytest.raises(FileExistsError):
            (top / "value").write(b"third", replacing=first)
        assert (top / "value").read() == b"second"
        (top / "value").delete()
        with pytest.raises(FileExistsError):
            (top / "value").write(b"third", replacing=second)
        assert not (top / "value").exists

    def test_of_many_writers_one_replaces_a_value(self, top: Location):
        if top.on_file_system:
            pytest.skip("a file system looks before it writes")
        first = (top / "value").write(b"first")
        winner = winner_of(lambda data: (top / "value").write(data, replacing=first))
        assert (top / "value").read() == winner


def winner_of(write: Callable[[bytes], Any]) -> bytes:
    """The value of the only one of eight threads that was not refused."""
    barrier, won = threading.Barrier(8), []

    def run(number: int) -> None:
        barrier.wait()
        with contextlib.suppress(FileExistsError):
            write(b"%d" % number)
            won.append(b"%d" % number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (winner,) = won
    return winner


class TestPosix(Conformance):
    links = renames = True

    @pytest.fixture
    def top(self, tmp_path):
        return at(tmp_path)

    def test_a_move_makes_no_folder(self, top: Location):
        (top / "value").write(b"1")
        with pytest.raises(FileNotFoundError):
            (top / "value").move(top / "gone/value")
        assert not (top / "gone").exists

    def test_a_lock_is_let_go_though_its_file_cannot_be_removed(self, top: Location, monkeypatch):
        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", fail)
            with pytest.raises(OSError, match="Input/output"), (top / ".lock").lock():
                pass
        with (top / ".lock").lock():  # would wait for ever
            pass
        assert not (top / ".lock").exists

    def test_links_pipes_and_what_is_below_a_link_are_refused(self, top: Location):
        (top / "folder/value").write(b"1")
        os.symlink((top / "folder/value").key, (top / "folder/link").key)
        os.symlink((top / "folder").key, (top / "linked").key)
        os.mkfifo((top / "pipe").key)
        for each in ("folder/link", "linked/value", "pipe"):
            with pytest.raises(NotPlainError):
                (top / each).read()
        for each in (top, top / "folder"):
            with pytest.raises(NotPlainError):
                each.check_plain()
        assert top / "linked" in [*top.list()], "it is a value, not a folder to go down"
        (top / "linked").delete()
        assert (top / "folder/value").read() == b"1"

    def test_a_change_anywhere_in_a_folder_is_its_last(self, top: Location):
        (top / "a/b/value").write(b"1")
        (top / "elsewhere").write(b"1")
        os.symlink((top / "elsewhere").key, (top / "a/link").key)
        every = ("a/b/value", "a/link", "a/b", "a")
        for newest in every:
            for each in every:
                times = (0, 100 if each == newest else 50)
                os.utime((top / each).key, times, follow_symlinks=False)
            assert (top / "a").changed_s() == 100
        assert (top / "b").changed_s() == 0

    def test_a_directory_that_was_replaced_is_another(self, top: Location):
        (top / "a/value").write(b"1")
        with (top / "a").watched() as is_same:
            (top / "a").delete()
            assert not is_same()
            (top / "a/value").write(b"1")
            assert not is_same()

    def test_no_link_means_false_and_a_full_disk_an_error(self, top: Location, monkeypatch):
        def fail(*_: Any, **__: Any) -> None:
            raise errors.pop()

        (top / "value").write(b"1")
        errors = [OSError(errno.ENOSPC, "no space"), OSError(errno.EPERM, "no links")]
        monkeypatch.setattr(os, "link", fail)
        assert not top.adopt({"link": (top / "value").key})
        with pytest.raises(OSError, match="space"):
            top.adopt({"link": (top / "value").key})

    def test_a_write_that_fails_leaves_the_value_before(self, top: Location, monkeypatch):
        (top / "value").write(b"before")

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="space"):
                (top / "value").write(b"after")
        assert (top / "value").read() == b"before"
        (top / "value").write(b"after")
        assert (top / "value").read() == b"after"

    def test_what_vanishes_while_it_is_described_is_left_out(self, top: Location, monkeypatch):
        for each in ("1", "2", "a/3"):
            (top / each).write(b"1")
        looked = Posix.stat

        def vanished(self: Posix, key: str) -> Any:
            if not key.endswith("/2"):
                return looked(self, key)
            raise FileNotFoundError(errno.ENOENT, "gone", key)

        monkeypatch.setattr(Posix, "stat", vanished)
        assert {path for path, _ in top.described()} == {"1", "a/3"}


class TestKvStore(Conformance):
    links = renames = False

    @pytest.fixture
    def top(self):
        return Location(KvStore(f"memory://{uuid.uuid4().hex}/root"), "run")

    def test_a_listed_view_does_not_change(self, top: Location):
        for each in ("a/1", "a/b/2", "c"):
            (top / each).write(each.encode())
        listed = top.listed()
        (top / "a/b/3").write(b"3")
        (top / "c").delete()
        assert {*listed.list()} == {top / each for each in ("a/1", "a/b/2", "c")}
        assert {*listed.list(deep=False)} == {top / "c"}
        assert listed.folders() == ["a"]
        assert [(listed / n).exists for n in ("a", "a/b/3", "c", "d")] == [True, False, True, False]
        assert (listed / "a").is_folder
        assert not (listed / "c").is_folder
        assert (listed / "a/1").read() == b"a/1"
        with pytest.raises(FileNotFoundError):
            (listed / "a/b/3").read()
        some = top.listed(("b", "d"))
        assert [(some / n).exists for n in ("c", "a/b/3", "d")] == [False, True, False]
        assert listed == top
        assert top == listed
        assert hash(listed) == hash(top)
        assert (listed / "a").listed().storage is listed.storage
        assert (listed.parent / "other").exists is False

    def test_absence_is_a_condition_in_other_drivers_too(self, tmp_path):
        value = Location(KvStore(f"file://{tmp_path}"), "value")
        value.write(b"first", if_absent=True)
        with pytest.raises(FileExistsError):
            value.write(b"second", if_absent=True)
        assert value.read() == b"first"

    def test_the_top_of_a_store_lists_and_shows_all_and_tells_no_time(self, top: Location):
        (top / "value").write(b"1")
        everything = Location(top.storage, "")
        assert [*everything.list()] == [top / "value"]
        assert everything.folders() == ["run"]
        assert str(top / "value").endswith("/root/run/value")
        assert top.changed_s() is None

    def test_an_error_of_the_store_is_an_error_of_a_system(self, top: Location):
        broken = dataclasses.replace(top, key="\0" * 3)
        broken.storage._store = ts.KvStore.open("file:///dev/null/").result()
        for operation in (broken.read, broken.stat, lambda: broken.write(b"1")):
            with pytest.raises(OSError, match="://"):
                operation()


FAULTS = ("", "fails once", "slow")


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        pytest.param(
            *(each, fault),
            marks=[pytest.mark.slow if (n + k) % 2 else pytest.mark.campaign] if k else [],
        )
        for n, each in enumerate(SCHEMES)
        for k, fault in enumerate(FAULTS)
    ],
)
class TestServed(Conformance):
    """Every kind of object store, behind a proxy with a fault."""

    links = renames = False

    @pytest.fixture
    def top(self, request, server, fault):
        store = request.getfixturevalue(server)
        seen: set[str] = set()

        def refuse(method: str, path: str) -> int:
            request = f"{method} {path.split('tensorstore=', maxsplit=1)[0]}"
            is_first, _ = request not in seen, seen.add(request)
            return 503 if is_first and len(seen) % 3 == 0 else 0

        if fault == "fails once":
            store.proxy.refuse = refuse
        store.proxy.delay_s = 0.02 if fault == "slow" else 0.0
        yield located(f"{store.url}/{uuid.uuid4().hex}")
        store.proxy.reset()

    def test_tensorstore_writes_where_keys_are_read(self, top: Location):
        super().test_tensorstore_writes_where_keys_are_read(top)
        assert not top.on_file_system


@pytest.mark.slow
@pytest.mark.parametrize("server", SCHEMES)
def test_a_bucket_that_does_not_exist_is_told_in_a_line(server, request):
    request.getfixturevalue(server)
    url = f"{server}://nowhere/run"
    place = located(url)
    with pytest.raises(OSError, match=f"NOT_FOUND.*: '{url}") as refused:
        (place / "file").write(b"")
    assert "http" not in str(refused.value)
