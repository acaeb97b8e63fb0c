"""Boxes that several processes need are read by one, and exchanged bit by bit."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adacheck_jax as adacheck
from adacheck_jax.device import exchange
from adacheck_jax.device.sharding import Holder
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.restore import shared_reads
from adacheck_jax.restore.shared_reads import SharedPart
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import Location
from tests.processes import outputs, start
from tests.restore.read_once_state import advance, saved_run
from tests.support import host_copy, kinds_of

WORKER = "tests.restore.read_once_worker"


@st.composite
def shared_parts(draw):
    """Shared parts of a few arrays, with any cut points and any holders."""
    found = []
    for array in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        for box in grid(tuple(lines(draw, length, 3) for length in shape)):
            holders = draw(st.sets(st.integers(0, 5), min_size=2, max_size=4))
            found.append(SharedPart(array, box, tuple(sorted(holders)), box.size * itemsize))
    return found


def lines(draw, length, most):
    return tuple(sorted({0, length, *draw(st.sets(st.integers(0, length), max_size=most))}))


@given(shared_parts())
def test_every_part_is_read_once_by_a_holder_and_bytes_are_shared_out_evenly(parts):
    exchanges = shared_reads.plan(parts)
    assert [each.holders for each in exchanges] == sorted({part.holders for part in parts})
    read = [piece.part for each in exchanges for piece in each.pieces]
    assert len(read) == len(parts)
    assert {*read} == {*parts}
    for each in exchanges:
        rows, loads = {}, [0] * len(each.holders)
        for piece in each.pieces:
            stop = piece.start + piece.part.nbytes
            assert piece.part.holders == each.holders
            assert 0 <= piece.reader < len(each.holders)
            assert piece.start % 64 == 0
            assert stop <= each.row_bytes
            rows.setdefault(piece.reader, []).append((piece.start, stop))
            loads[piece.reader] += piece.part.nbytes
        for spans in rows.values():
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
        largest = max(piece.part.nbytes for piece in each.pieces)
        assert max(loads) <= sum(loads) / len(loads) + largest


@given(st.data())
def test_a_stored_part_is_read_by_one_process(data):
    """A process reads its share, and of what nobody else needs what its boxes have."""
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    needed = {
        box: data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))
        for box in grid(tuple(lines(data.draw, length, 3) for length in shape))
    }
    stored = tuple(lines(data.draw, length, 4) for length in shape)
    users = shared_reads.users_of(needed, shape, stored)
    assert [*users] == grid(stored)
    for part, found in users.items():
        assert found == tuple(
            sorted({p for b, e in needed.items() if b.intersect(part) for p in e})
        )
    shared = [SharedPart(0, box, each, box.size) for box, each in users.items() if len(each) > 1]
    whole = np.arange(np.prod(shape)).reshape(shape)
    for process in range(4):
        boxes = [box for box, each in needed.items() if process in each]
        own = shared_reads.own_boxes(boxes, stored, shared)
        for part in own:
            assert {p for b, e in users.items() if b.intersect(part) for p in e} == {process}
        given = [part.box for part in shared if process in part.holders]
        parts = [(box, whole[box.slices]) for box in [*given, *own]]
        for box in boxes:
            assert (shared_reads.put_together(box, parts) == whole[box.slices]).all()


@pytest.mark.parametrize("nbytes", [1, 33, 64, 65, 4095, 4097, 1 << 20, (1 << 20) + 1, 67_000_000])
def test_rows_have_few_lengths(nbytes):
    length = exchange.padded_length(nbytes)
    assert nbytes <= length <= max(nbytes + 64, nbytes * 1.25)
    assert len({exchange.padded_length(n) for n in range(1 << 16, 1 << 17, 97)}) <= 17


def test_who_reads_together(tmp_path, monkeypatch):
    """Two processes read what both hold; a third one, which has an array for itself, does not."""
    remote = Location(KvStore("memory://root"), "run")
    both, other = (
        SimpleNamespace(device_set=[SimpleNamespace(process_index=n) for n in each])
        for each in ((0, 1), (2,))
    )
    boxes = {Box((0,), (8,)): [Holder(0, 0, "cpu"), Holder(1, 0, "cpu")]}
    monkeypatch.setattr(shared_reads, "holders_of", lambda sharding, shape: boxes)
    members = shared_reads.members

    def target(itemsize: int, sharding: Any) -> Any:
        dtype = SimpleNamespace(itemsize=itemsize)
        return SimpleNamespace(shape=(8,), dtype=dtype, sharding=sharding)

    few = [target(1, each) for each in (both, other, None)]
    large = [target(shared_reads.WORTHWHILE_BYTES, both)]
    assert members(large, None, remote) == (0, 1)
    assert members(few, None, remote) == ()
    assert members(few, None, remote, times=shared_reads.WORTHWHILE_BYTES) == (0, 1)
    assert members(large, None, tmp_path) == ()
    for where in (remote, tmp_path):
        assert members(large, False, where) == ()
        assert members(few, True, where) == (0, 1)
        assert members([], True, where) == ()
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert members(few, True, remote) == ()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base and two deltas, saved by one process, and the bits of the last step."""
    root = tmp_path_factory.mktemp("read_once")
    recorder, state = saved_run()
    with ocp.CheckpointManager(
        root / "run", item_handlers=adacheck.AdaCheckHandler(recorder)
    ) as manager:
        for step in range(3):
            manager.save(step, args=adacheck.SaveArgs(state))
            state = advance(recorder, state, step) if step < 2 else state
    assert kinds_of(root / "run") == "BDD"
    # As unsigned integers, which a file keeps bit by bit.
    words = [x if x.dtype.kind == "c" else x.view(f"u{x.dtype.itemsize}") for x in host_copy(state)]
    np.savez(root / "bits.npz", *words)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.campaign),
        pytest.param(3, 2, marks=pytest.mark.campaign),
    ],
)
def test_processes_read_each_box_once_and_one_that_cannot_stops_all(saved, processes, devices):
    children = start("restore", processes, saved / "run", saved / "bits.npz", devices, WORKER)
    told = [[json.loads(line) for line in said.splitlines()[-2:]] for said in outputs(children)]
    found, errors = zip(*told, strict=True)
    for layout in found[0]:
        alone, together = (sum(e[layout][way] for e in found) for way in ("alone", "together"))
        assert together < 1.1 * alone
        stored = sum(e["replicated"]["alone"] for e in found) / processes
        assert together < 1.3 * stored, layout
    assert "a bad chunk" in errors[0]
    assert all("process 0 found its share damaged" in each for each in errors[1:])
