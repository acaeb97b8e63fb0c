"""Equal chunks of the volumes of several processes are stored in one of them, and proved equal."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.store import base_writer, sharing, volumes
from adacheck_jax.store.base_writer import ArrayLayout, BaseWriter, EarlierBase, Name
from adacheck_jax.store.steps import folders
from tests.store.test_volumes import keys_of, stock

ROWS, WIDTH = 4, 1024
CHUNK = (1, WIDTH)


def content(number):
    """A row of elements; 0 is all zeros."""
    return np.random.default_rng(number).standard_normal(WIDTH).astype(np.float32) * (number > 0)


class Processes:
    """Threads that agree with each other as processes do."""

    def __init__(self, count):
        self.count, self._barrier = count, threading.Barrier(count, timeout=20)
        self._reports, self._answer = [{}] * count, {}

    def agree(self, process):
        def agree(topic, own, judge):
            self._reports[process] = own
            if self._barrier.wait() == 0:
                self._answer = judge(self._reports)
            self._barrier.wait()
            return self._answer

        return agree

    def together(self, call):
        """What each process's call returned, or the first error."""

        def one(process):
            try:
                return call(process)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(one, process) for process in range(self.count)]
        errors = [e for each in futures if (e := each.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in futures]


def leaves_of(owners):
    cuts = (tuple(range(ROWS + 1)), (0, WIDTH))
    return tuple(
        Leaf(f"leaf{n}", (ROWS, WIDTH), "float32", 4, None, cuts, tuple(own))
        for n, own in enumerate(owners)
    )


def write_base(item, leaves, rows, count, earlier=None, compression="none", still=frozenset()):
    """Writes a base of some processes; gives their reports."""
    arrays = [np.stack([content(each) for each in own]) for own in rows]
    layout = ArrayLayout({each.path: Name(f"{each.path}.x", "float32", CHUNK) for each in leaves})
    processes = Processes(count)

    def write(process):
        blocks = {
            i: {box: arrays[i][box.slices] for box in leaf.boxes_of(process)}
            for i, leaf in enumerate(leaves)
        }
        writer = BaseWriter(leaves, blocks, earlier, still, compression)
        return writer.write(item, process, sums_of(rows), layout, processes.agree(process))

    reports = processes.together(write)
    base_writer.merge(item, reports)
    return reports


def earlier_of(item, leaves, rows):
    """A base that was written, as what the next one of these processes may keep."""
    base = SimpleNamespace(leaves=leaves, step=int(item.name))
    return EarlierBase(SimpleNamespace(base=base, base_directory=item), sums_of(rows))


def sums_of(rows):
    return {i: hash(tuple(each)) for i, each in enumerate(rows)}


def check(item, rows):
    for n, own in enumerate(rows):
        found = np.asarray(stock(item, f"leaf{n}.x").read().result())
        assert found.tobytes() == b"".join(content(each).tobytes() for each in own), n
    assert len(keys_of(item)) == len(rows) * (1 + ROWS)


rows_of_leaf = st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS)


@pytest.fixture(autouse=True)
def every_chunk_counts(monkeypatch):
    monkeypatch.setattr(sharing, "_MIN_BYTES", 1)
    monkeypatch.setattr(volumes, "_MIN_SHARED_BYTES", 1)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 3), compression=st.sampled_from(["none", "small"]))
def test_bases_of_several_processes_are_read_by_stock_readers(
    data, count, compression, tmp_path_factory
):
    """Two bases, of which the second may use files of the first; rows are equal at random."""
    root = tmp_path_factory.mktemp("run")
    rows = data.draw(st.lists(rows_of_leaf, min_size=1, max_size=4))
    each = st.lists(st.integers(0, count - 1), min_size=ROWS, max_size=ROWS)
    leaves = leaves_of([data.draw(each) for _ in rows])
    still = data.draw(st.frozensets(st.integers(0, len(rows) - 1)))
    reports = write_base(root / "0", leaves, rows, count, None, compression, still)
    check(root / "0", rows)
    places = [tuple(place) for report in reports for place in report["lent"]]
    assert len({*places}) == len(places)

    earlier = earlier_of(root / "0", leaves, rows)
    after = [data.draw(st.just(own) | rows_of_leaf) for own in rows]
    write_base(root / "1", leaves, after, count, earlier, compression, still)
    check(root / "1", after)


def data_bytes(item):
    return sum(path.stat().st_size for path in item.rglob("*") if "/d/" in str(path))


def test_equal_leaves_of_different_owners_are_written_once(tmp_path):
    leaves = leaves_of([[0] * ROWS, [1] * ROWS, [2] * ROWS])
    one = [1, 2, 3, 0]
    reports = write_base(tmp_path / "equal", leaves, [one] * 3, 3)
    check(tmp_path / "equal", [one] * 3)
    write_base(tmp_path / "other", leaves, [one, [5, 6, 7, 8], [9, 10, 11, 12]], 3)
    assert data_bytes(tmp_path / "equal") < data_bytes(tmp_path / "other") / 3 + 8192
    assert sum(len(report["borrowed"]) for report in reports) == 2 * ROWS
    # One of them is whole, so that a later base can use its volume again.
    assert [len(report["lent"]) for report in reports].count(ROWS) == 1
    aliases = [pair for report in reports for pair in report["aliases"]]
    assert len({target for _, target in aliases}) == 1
    assert {i for pair in aliases for i in pair} == {0, 1, 2}
    with pytest.raises(IntegrityError, match="no process has written them for it"):
        sharing.borrowed([{**report, "lent": []} for report in reports])


def test_what_an_earlier_base_holds_is_stored_for_other_processes_too(tmp_path):
    """A frozen leaf, and one of another process that was made a copy of it."""
    leaves = leaves_of([[0] * ROWS, [1] * ROWS])
    before, after = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4]] * 2
    write_base(tmp_path / "0", leaves, before, 2)
    earlier = earlier_of(tmp_path / "0", leaves, before)
    first, second = write_base(tmp_path / "1", leaves, after, 2, earlier)
    check(tmp_path / "1", after)
    again = [[1, 2, 3, 4], [1, 2, 0, 4]]  # what was equal once is compared
    write_base(tmp_path / "2", leaves, again, 2, earlier_of(tmp_path / "1", leaves, after))
    check(tmp_path / "2", again)
    assert first["kept"]
    assert {place[0] for _, place in second["borrowed"]} == {f"{folders.KEPT}/0.0"}


def test_of_equal_chunks_that_is_stored_which_the_next_base_can_use_again(tmp_path):
    """A policy that starts as its frozen reference model, in one process."""
    leaves = leaves_of([[0] * ROWS, [0] * ROWS])
    still = frozenset({1})
    (report,) = write_base(tmp_path, leaves, [[1, 2, 3, 4]] * 2, 1, None, "none", still)
    assert {place[0] for _, place in report["borrowed"]} == {f"{folders.BASE}/0{folders.STILL}"}
    check(tmp_path, [[1, 2, 3, 4]] * 2)


def test_equal_samples_make_nothing_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "_sample", lambda _: "the same")
    leaves = leaves_of([[0] * ROWS, [1] * ROWS])
    rows = [[1, 2, 3, 4], [5, 6, 7, 4]]
    reports = write_base(tmp_path, leaves, rows, 2)
    check(tmp_path, rows)
    assert sum(len(report["borrowed"]) for report in reports) == 1


def test_a_digest_that_is_wrong_costs_bytes_alone(tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(sharing, "_digest", lambda *_: f"{next(numbers):064x}")
    monkeypatch.setattr(sharing, "_sample", lambda _: "the same")
    leaves = leaves_of([[0] * ROWS, [1] * ROWS])
    reports = write_base(tmp_path, leaves, [[1, 2, 3, 4]] * 2, 2)
    assert not any(report["borrowed"] for report in reports)
    check(tmp_path, [[1, 2, 3, 4]] * 2)


def test_bytes_that_change_after_they_were_compared_fail_the_save(tmp_path, monkeypatch):
    """A bit flips in the memory of the process that writes them for both."""
    share = sharing.share

    def flipped(*arguments):
        lent = share(*arguments)
        for chunk, _ in lent.values():
            chunk.data.reshape(-1).view(np.uint8)[5] ^= 1
        return lent

    monkeypatch.setattr(sharing, "share", flipped)
    leaves = leaves_of([[0] * ROWS, [1] * ROWS])
    with pytest.raises(IntegrityError, match=r"expected the bytes of chunk .* found, read back"):
        write_base(tmp_path, leaves, [[1, 2, 3, 4]] * 2, 2)


def test_a_wrong_digest_of_the_process_that_writes_fails_the_save(tmp_path, monkeypatch):
    """It takes two unequal chunks for equal, and would write the wrong one for both."""
    share, digest, state = sharing.share, sharing._digest, threading.local()

    def told_wrong(*arguments):
        state.is_wrong = True
        lent = share(*arguments)
        state.is_wrong = False
        return lent

    monkeypatch.setattr(sharing, "share", told_wrong)
    monkeypatch.setattr(sharing, "_digest", lambda *x: "0" * 64 if state.is_wrong else digest(*x))
    leaves = leaves_of([[0] * ROWS, [1] * ROWS])
    with pytest.raises(IntegrityError, match="found, read back"):
        write_base(tmp_path, leaves, [[1] * ROWS, [2] * ROWS], 2)


def test_all_chunks_of_an_array_are_in_one_codec_whoever_writes_them(tmp_path):
    """Of three chunks one process has two, which together are large enough for a codec."""
    array = np.random.default_rng(0).integers(0, 4, (3, 600)).astype(np.float32)
    cuts = ((0, 1, 2, 3), (0, 600))
    leaf = Leaf("a", (3, 600), "float32", 4, None, cuts, (0, 1, 0))
    layout, processes = ArrayLayout({"a": Name("a", "float32", (1, 600))}), Processes(2)

    def write(process):
        blocks = {0: {box: array[box.slices] for box in leaf.boxes_of(process)}}
        writer = BaseWriter((leaf,), blocks, None, frozenset(), "small")
        return writer.write(tmp_path, process, {0: 1}, layout, processes.agree(process))

    base_writer.merge(tmp_path, processes.together(write))
    np.testing.assert_array_equal(stock(tmp_path, "a").read().result(), array)
