"""Where the host cannot compute what devices do, memory keeps a base and the records since it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adacheck_jax as adacheck
from adacheck_jax.format.boxes import Box
from adacheck_jax.memory import holdings, making, shadow
from adacheck_jax.memory.files import step_file
from adacheck_jax.memory.files.record_log import LEAST_RECORDS, RecordLog
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import FilePlace, kind_at
from adacheck_jax.save import validation
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update.binding import recorders_of
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support
from tests.memory.test_recovery import Memory, file_of
from tests.save.loop import checked
from tests.support import mesh_of


def in_use(run: support.Run, memory: Path) -> RecordLog:
    """A file of a run, as it would be without any room for records."""
    structure = Snapshots(recorders_of(run.recorder), None).take(run.state).structure
    update = ExportedUpdates("auto").of(structure)
    place = FilePlace(str(memory), "", "")
    return RecordLog(place, structure, update, holdings.whole(structure), 0)


@pytest.mark.slow
@pytest.mark.parametrize("records", [True, False], ids=["record_step", "save"])
def test_the_memory_that_is_used_up_makes_the_next_save_a_base(tmp_path, caplog, records):
    """Behind recorded steps it is a delta of the whole state."""
    run = support.dict_run(mesh_of((1, 1)))
    least_bytes = in_use(run, tmp_path / "memory").least_bytes
    loop = Memory(tmp_path, run, records=True, bytes=least_bytes)
    for _ in range(3 * LEAST_RECORDS):
        if records:
            loop.keep()
        else:
            loop.save()
        loop.settle()
    if records:
        loop.put()
    found = loop.check()
    assert not [x for x in caplog.records if "No later step" in x.getMessage()]
    assert file_of(loop.memory).stat().st_size <= least_bytes
    whole = [kind for kind in found if kind != "R"]
    assert records or {*whole} == {"B"}
    assert 3 <= len(whole) <= 8, found
    assert loop.recovered() == loop.number


def test_a_record_without_room_leaves_the_steps_before_it(tmp_path, monkeypatch, caplog):
    run = support.dict_run(mesh_of((1, 1)))
    least_bytes = in_use(run, tmp_path / "memory").least_bytes
    monkeypatch.setattr(RecordLog, "is_filled", lambda *_: False)
    with Memory(tmp_path, run, records=True, bytes=least_bytes) as loop:
        loop.save(2 * LEAST_RECORDS)
    (record,) = [x for x in caplog.records if "No later step" in x.getMessage()]
    assert "no room is left for the record" in record.getMessage()
    assert checked(loop.root) == ["sample"] * (2 * LEAST_RECORDS - 1)
    for step in range(LEAST_RECORDS + 2, 2 * LEAST_RECORDS + 1):
        shutil.rmtree(loop.root / str(step), ignore_errors=True)
    assert loop.recovered() in (LEAST_RECORDS + 1, LEAST_RECORDS + 2)


def test_with_too_little_memory_for_some_records_there_is_none(tmp_path, caplog):
    run = support.dict_run(mesh_of((1, 1)))
    most_bytes = in_use(run, tmp_path / "memory").least_bytes - 1
    with Memory(tmp_path, run, records=True, bytes=most_bytes) as loop:
        loop.save(2)
    assert "a state and the records of some steps take" in caplog.text
    assert not loop.memory.exists()


@pytest.mark.parametrize("is_first", [True, False], ids=["from the start", "later"])
def test_a_host_that_computes_other_bits_keeps_records_from_the_next_base_on(
    tmp_path, monkeypatch, caplog, is_first
):
    """On a platform that is no CPU; on one, the same difference refuses the step."""
    loop, advance, calls = Memory(tmp_path), HostFold.advance, [0]

    def differs(self: HostFold, *args: Any, **options: Any) -> None:
        advance(self, *args, **options)
        calls[0] += 1
        if is_first or calls[0] > 3:
            vector = next(each for each in self._vectors if each.slides)
            vector.part(0, 1).view("u4")[0] ^= 1

    monkeypatch.setattr(HostFold, "advance", differs)
    with monkeypatch.context() as patch, loop:
        patch.setattr(shadow, "is_host", lambda: False)
        for _ in range(8):
            loop.save()
            loop.settle()
    assert "the host computes other bits than the devices" in caplog.text
    first = 3 if is_first else 6
    assert [n for n, kind in enumerate(loop.check(), 1) if kind == "B"] == [1, first]
    assert checked(loop.root)[-2:] == ["sample"] * 2
    assert kind_at(file_of(loop.memory)) == "records"
    assert loop.recovered() == 8


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_update_that_the_host_cannot_compute_is_recovered(tmp_path, name):
    tx = {"adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4), "muon": None}[name]
    run = support.dict_run(mesh_of((1, 1)), tx or optax.contrib.muon(1e-2))
    with Memory(tmp_path, run) as loop:
        loop.save(4)
    assert kind_at(file_of(loop.memory)) == "records"
    assert loop.recovered() == 4


def test_a_file_of_another_kind_is_refused(tmp_path):
    memory, run = tmp_path / "memory", support.dict_run(mesh_of((1, 1)))
    with Memory(tmp_path, run, records=True) as loop:
        loop.save(2)
    (found,) = step_file.files_in(str(memory))
    structure = in_use(run, memory)._structure
    update = ExportedUpdates("auto").of(structure)
    with pytest.raises(ShadowFileError, match="what lies in it is of another kind"):
        making.opened(dataclasses.replace(found, kind="state"), structure, update)
    with pytest.raises(ShadowFileError, match="expected a file of a kind that is known"):
        making.opened(dataclasses.replace(found, kind="other"), structure, update)


@dataclasses.dataclass(frozen=True)
class Change:
    """A step, as a plan tells of it."""

    updates: tuple[int, ...]
    stored: tuple[int, ...]
    unreplayed: frozenset[int] = frozenset()
    unchanged: tuple[int, ...] = ()


def blocks_of(leaves: Any, indices: Any, rng: np.random.Generator) -> Any:
    """Random elements of some leaves."""

    def block(i: int) -> Any:
        value = rng.integers(0, 255, leaves[i].nbytes, np.uint8).view(jnp.dtype(leaves[i].dtype))
        return {Box.full(leaves[i].shape): value.reshape(leaves[i].shape)}

    return {i: block(i) for i in indices if leaves[i].nbytes}


def store(log: RecordLog, change: Change, blocks: Any, step: int, stop: str) -> bool:
    """Stores a step, until it is killed; False if it was, with no step left in the file."""
    if log.stores_all(change):
        log.lift()
        if stop != "before":
            log.put_state(blocks)
    elif stop != "before":
        log.append(change, blocks)
    if not stop:
        log.begin(step, (), {0: step})
    return not stop


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["", "", "", "before", "stored"])), min_size=1
    ),
    seed=st.integers(0, 99),
)
def test_whoever_is_killed_when_the_file_holds_the_step_of_its_last_header(steps, seed):
    """Against a model: a state and a list of records."""
    run, rng = support.dict_run(mesh_of((1, 1))), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as directory:
        template = in_use(run, Path(directory))
        structure, place = template._structure, template.place
        update, held = ExportedUpdates("auto").of(structure), holdings.whole(structure)
        log = RecordLog(place, structure, update, held, 3 * template.least_bytes)
        log.create()
        every, consumed = tuple(range(len(structure.leaves))), tuple(sorted(structure.consumed))
        state: Any = None
        for step, (is_whole, stop) in enumerate(steps):
            whole = is_whole or state is None
            change = Change((0,), every if whole else consumed)
            assert log.stores_all(change) == whole
            blocks = blocks_of(structure.leaves, change.stored, rng)
            if not store(log, change, blocks, step, stop):
                state = None if whole else state
                break
            state = (step, blocks, []) if whole else (step, state[1], [*state[2], blocks])
        log.file.close()
        other = RecordLog(place, structure, update, held, place.found_bytes[0])
        other.open()
        if state is None:
            with pytest.raises(ShadowFileError):
                other.resume()
        else:
            found = other.resume()
            assert (found.step, len(found.records)) == (state[0], len(state[2]))
            assert_blocks(found.blocks, state[1])
            for each, expected in zip(found.records, state[2], strict=True):
                assert_blocks(each.blocks, expected)
        other.file.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(0, 3))
def test_of_several_processes_a_bit_that_changes_is_found_in_its_box(data, count):
    run, rng = support.dict_run(mesh_of((1, 1))), np.random.default_rng(count)
    with tempfile.TemporaryDirectory() as directory:
        template = in_use(run, Path(directory))
        structure = template._structure
        place = dataclasses.replace(template.place, run="run", count=2)
        update, held = ExportedUpdates("auto").of(structure), holdings.whole(structure)
        log = RecordLog(place, structure, update, held, 3 * template.least_bytes)
        log.create()
        every, consumed = tuple(range(len(structure.leaves))), tuple(sorted(structure.consumed))
        for step in range(1 + count):
            change = Change((0,), consumed if step else every)
            assert store(log, change, blocks_of(structure.leaves, change.stored, rng), step, "")
        assert log.resume().changed == frozenset()
        found = log.resume()
        number = data.draw(st.integers(0, count))
        blocks = found.records[number - 1].blocks if number else found.blocks
        i = data.draw(st.sampled_from(sorted(blocks)))
        ((box, block),) = blocks[i].items()
        memory = block.reshape(-1).view(np.uint8)
        memory[data.draw(st.integers(0, memory.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert log.resume().changed == {(i, box)}
        log.file.close()


@pytest.mark.parametrize(
    ("kinds", "whys", "differing", "expected"),
    [
        (("records", "records"), ("", ""), False, (False, "")),
        (("records", "records"), ("", "full"), False, (False, "full")),
        (("state", "state"), ("", ""), True, (True, shadow.OTHER_BITS)),
        (("", "records"), ("", "full"), False, (False, "full")),
        (("state", "records"), ("", ""), False, (True, None)),
    ],
)
def test_processes_agree_on_records_and_on_bases(kinds, whys, differing, expected):
    reports = [{"memory": each} for each in zip(kinds, whys, strict=True)]
    keeps_records, why = validation._memory(reports, differing=differing)
    assert keeps_records == expected[0]
    assert why == expected[1] or (expected[1] is None and "process 1" in why)


def assert_blocks(found, expected):
    assert found.keys() == expected.keys()
    for i, own in expected.items():
        for box, block in own.items():
            assert found[i][box].tobytes() == block.tobytes()


@pytest.mark.parametrize("options", [{"records": True}, {"records": 5, "directory": "/dev/shm/x"}])
def test_records_need_a_directory(options):
    with pytest.raises(ValueError, match=r"Shadow\(records=...\) to be None, or True with"):
        adacheck.Shadow(**options)
