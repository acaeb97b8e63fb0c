"""What a restore does at a time: one program, compiled while the base is read."""

import contextlib
import functools
import logging
import threading
import weakref

import numpy as np
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.restore import base_reader, compiled_update
from adacheck_jax.restore.progress import Progress
from adacheck_jax.store.packs import reader
from adacheck_jax.store.steps import lookup
from adacheck_jax.store.steps.manifest_file import update_file
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.update.program import Kept, platform
from tests import support
from tests.campaigns import growth


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Roots by the most deltas of a lineage: 20 for six steps of one, 1 for four of two bases."""
    top, found = tmp_path_factory.mktemp("made"), {}
    for most, steps in ((20, 6), (1, 4)):
        run = support.dict_run(support.mesh_of((2, 2)))
        handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=most)
        with support.manager_of(top / f"{most}", handler) as manager:
            found[most] = (top / f"{most}", run, support.save_steps(manager, run, steps))
    return found


@pytest.fixture
def saved(made, tmp_path):
    root, run, states = made[20]
    return support.copied(root, tmp_path / "run"), run, states


@pytest.fixture
def two_bases(made, tmp_path):
    root, _, states = made[1]
    return support.copied(root, tmp_path / "run"), states


def restore(root, run, step):
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(support.abstract(run.state)))


@pytest.mark.parametrize(("step", "is_read"), [(1, True), (4, False)], ids=["base", "delta"])
def test_a_record_is_read_where_it_is_newest(saved, monkeypatch, step, is_read):
    """The last delta brings the record of its step; a base's is as large as the params."""
    root, run, states = saved
    read, names = base_reader.read, list[str]()

    def noted(directory, wanted, *args, **options):
        names.extend(wanted)
        return read(directory, wanted, *args, **options)

    monkeypatch.setattr(base_reader, "read", noted)
    support.assert_same_bits(restore(root, run, step), states[step])
    assert any("adacheck_record" in name for name in names) is is_read
    assert any("params" in name for name in names)


@pytest.mark.slow
def test_a_restore_leaves_no_objects_behind(saved):
    """An evaluator restores one step after another for weeks."""
    root, run, states = saved
    args = adacheck.RestoreArgs(support.abstract(run.state))
    handler = adacheck.AdaCheckHandler(run.recorder)
    settle = functools.partial(support.finish_in_background, handler)
    with support.manager_of(root, handler) as manager:
        manager.restore(6, args=args)
        settle()  # the next one finds all programs compiled
        restore = functools.partial(manager.restore, 6, args=args)
        found = [growth.measure("restore", restore, 4, settle) for _ in range(2)]
        support.assert_same_bits(manager.restore(6, args=args), states[6])
    # What tests before this one left at work makes objects once; a leak does each time.
    assert min(each.objects for each in found) < 1


def test_the_update_is_compiled_once_and_a_replay_logged_in_one_line(saved, monkeypatch, caplog):
    root, run, states = saved
    monkeypatch.setattr(compiled_update, "_kept", Kept(4))
    caplog.set_level(logging.INFO, logger="adacheck_jax.restore")
    with support.compiled_programs() as compiled:
        for step in (6, 3):
            support.assert_same_bits(restore(root, run, step), states[step])
    assert compiled.count("jit(run)") == 1
    said = [each.message for each in caplog.records if "Replaying" in each.message]
    assert said == [
        f"Replaying {n - 1} updates onto the base of step 1, for step {n}." for n in (6, 3)
    ]
    elsewhere = support.abstract(run.state, support.mesh_of((1, 1)))  # is compiled anew
    with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
        restored = manager.restore(6, args=adacheck.RestoreArgs(elsewhere))
    support.assert_same_bits(restored, states[6])


def test_a_damaged_program_is_refused_where_a_compiled_one_is_kept(saved):
    root, run, states = saved
    support.assert_same_bits(restore(root, run, 6), states[6])
    (program,) = (root / "1" / "default" / "adacheck").glob(f"update.{platform()}.*")
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(data)
    with pytest.raises(IntegrityError, match="does not match its digest"):
        restore(root, run, 6)


@pytest.mark.timeout(60)
def test_a_program_that_cannot_be_loaded_is_refused_each_time(saved):
    root, _, _ = saved
    lineage = lookup.resolve(root / "6" / "default")
    (root / "6" / "default" / "adacheck/lineage/1" / update_file(platform())).unlink()
    programs = compiled_update.CompiledUpdates()
    for _ in range(2):
        with pytest.raises(FormatError, match="expected the exported update"):
            programs.get(lineage, lineage.base.update, {}, Progress(""))


@pytest.mark.parametrize("step", [3, 6])
def test_a_damaged_record_is_named_although_its_checksum_is_not_read(saved, step):
    """A record's bytes are verified by what the update makes of them."""
    root, run, states = saved
    (pack,) = support.pack_files(root / f"{step}" / "default")
    whole = pack.read_bytes()
    for place in (0.1, 0.5, 0.9):
        data = bytearray(whole)
        data[int(place * len(data))] ^= 4
        pack.write_bytes(data)
        with pytest.raises(adacheck.AdaCheckError, match=rf"\b{step}\b.*(damaged|opened)"):
            restore(root, run, 6)
    pack.write_bytes(whole)
    support.assert_same_bits(restore(root, run, 6), states[6])


def test_records_are_let_go_of_once_they_are_on_the_devices(saved, monkeypatch):
    """Of a long lineage a replay holds what it reads ahead, not all records."""
    root, run, states = saved
    alive, most, lock = set(), [0], threading.Lock()
    read = reader.PackArray.read

    def noted(array, spans, **options):
        found = read(array, spans, **options)
        with lock:
            for each in found:
                alive.add(id(each))
                weakref.finalize(each, alive.discard, id(each))
            most[0] = max(most[0], len(alive))
        return found

    monkeypatch.setattr(reader.PackArray, "read", noted)
    support.assert_same_bits(restore(root, run, 6), states[6])
    assert 1 <= most[0] <= 8  # two arrays a pack: of two deltas that are read, two that are folded
    assert len(alive) <= 2  # the record of the newest step


def test_a_walk_compiles_one_program_for_all_bases_that_have_it(two_bases, monkeypatch):
    root, states = two_bases
    monkeypatch.setattr(compiled_update, "_kept", Kept(4))
    with support.compiled_programs() as compiled, contextlib.closing(Walk(root)) as walk:
        assert [len(walk.lineage(step).deltas) for step in walk.steps] == [0, 1, 0, 1]
        for step in walk.steps:
            found = [np.asarray(x).tobytes() for x in walk.at(step).arrays]
            assert sorted(found) == sorted(x.tobytes() for x in states[step])
    assert compiled.count("jit(run)") == 1


def test_a_walk_refuses_the_damaged_program_of_a_later_base(two_bases):
    root, _ = two_bases
    (program,) = (root / "3" / "default" / "adacheck").glob(f"update.{platform()}.*")
    program.write_bytes(program.read_bytes()[:-1] + b"?")
    with contextlib.closing(Walk(root)) as walk:
        walk.at(2)
        with pytest.raises(IntegrityError, match="does not match its digest"):
            walk.at(4)
