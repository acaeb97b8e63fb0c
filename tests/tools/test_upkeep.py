"""Keeping a root small: pruning by rules, pins that outlive retention, and where the bytes go."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint.checkpoint_managers import LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.store.storage.location import Location, located
from adacheck_jax.tools import listing, statistics
from adacheck_jax.tools.handover import copying
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.listing import StepSummary
from adacheck_jax.tools.steps import InputError, pinned
from adacheck_jax.tools.upkeep import pins, pruning
from adacheck_jax.tools.upkeep.pruning import Retention
from tests import support
from tests.tools.small_run import RECORDER, STEPS, initial, train

SAVED = [step for step in range(STEPS) if step not in (3, 4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("upkeep") / "run"
    return root, train(root)


@pytest.fixture
def copy(run, tmp_path):
    root = tmp_path / "run"
    copying.copy([str(run[0])], str(root))
    return root


def numbers(root: Path) -> list[int | None]:
    return [row.step for row in listing.summarize_root(root).steps]


def assert_restores(root: Path, step: int, states: dict[int, Any]) -> None:
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler(RECORDER)) as manager:
        state = manager.restore(step, args=adacheck.RestoreArgs(initial()))
    jax.tree.map(np.testing.assert_array_equal, state, states[step])


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


dates = st.integers(0, 100).map(lambda h: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=h))
kinds = st.sampled_from(["base", "delta", "stock", "foreign"])


@st.composite
def rows(draw):
    steps = draw(st.lists(st.integers(0, 40), unique=True, max_size=12).map(sorted))
    return [
        StepSummary(
            step,
            f"{step}/default",
            draw(kinds),
            draw(st.none() | dates.map(datetime.isoformat)),
            error=draw(st.sampled_from([None, None, None, "gone"])),
        )
        for step in steps
    ]


optional = st.none() | st.integers(1, 5)


@given(rows(), optional, optional, st.none() | st.integers(0, 50))
def test_a_step_stays_if_a_rule_keeps_it_and_goes_if_none_does(steps, last, every, hours):
    within = None if hours is None else timedelta(hours=hours)
    kept = {steps[n].step for n in pruning.kept_by(steps, Retention(last, every, within))}
    sound = [row for row in steps if row.error is None and row.kind != "foreign"]
    known = [datetime.fromisoformat(row.saved_at) for row in sound if row.saved_at]
    for place, row in enumerate(sound):
        by_last = place >= len(sound) - max(last or 0, 1)  # the newest stays in any case
        by_number = every is not None and row.step % every == 0
        date = datetime.fromisoformat(row.saved_at) if row.saved_at else None
        by_date = within is not None and (date is None or max(known) - date <= within)
        assert (row.step in kept) == (by_last or by_number or by_date)
    assert {row.step for row in steps if row not in sound} <= kept


def test_all_steps_stay_where_more_are_to_be_kept_than_there_are():
    two = [StepSummary(step, f"{step}/default", "base") for step in (0, 1)]
    assert {*pruning.kept_by(two, Retention(last=3))} == {0, 1}


def test_what_is_pruned_is_gone_and_the_rest_restores(copy, run):
    before = tree_of(copy)
    plan = pruning.prune(copy, Retention(last=2, every=5), dry_run=True)
    assert tree_of(copy) == before
    report = pruning.prune(copy, Retention(last=2, every=5))
    assert report.removals == plan.removals
    assert [each.step for each in report.kept] == [0, 5, 10, 12, 13] == numbers(copy)
    assert report.kept[-1].why == "newest, one of the last 2"
    for step in (0, 5, 10, 12, 13):
        assert_restores(copy, step, run[1])
    assert report.freed_bytes == plan.freed_bytes > 0
    left = listing.summarize_root(copy).disk_bytes
    assert listing.summarize_root(run[0]).disk_bytes - left == report.freed_bytes


def test_deferred_steps_that_nobody_else_holds_are_named(copy):
    # 5 holds 3 and 4; the steps of its lineage link them, those of the next one do not.
    report = pruning.prune(copy, Retention(last=1), dry_run=True)
    walked = Walk(copy).steps
    pruning.prune(copy, Retention(last=1))
    assert {*walked} & {3, 4} == {3, 4}
    assert {*report.lost_steps} == {3, 4} - {*Walk(copy).steps}


def test_damaged_steps_are_left_to_repair_and_do_not_count(copy):
    path = copy / "12/default/adacheck/manifest.json"
    path.unlink()  # later steps link the sound one
    path.write_text("{}")
    report = pruning.prune(copy, Retention(last=2))
    assert {each.step: each.why for each in report.kept} == {
        11: "one of the last 2",
        12: "damaged: see adacheck repair",
        13: "newest, one of the last 2",
    }


def test_wrong_rules_are_refused_and_nothing_goes(copy, tmp_path):
    before = tree_of(copy)
    for words, expected in (
        ((copy,), "expected a rule of what to keep, found none"),
        ((copy, "--keep-within", "7"), "expected a time such as 3h, 45min or 2d, found '7'"),
        ((copy, "--keep-last", "0"), "greater than or equal to 1"),
        ((copy, "--keep-last", "1", "--item", "other"), "expected steps with an item 'other'"),
        ((tmp_path / "none", "--keep-last", "1"), "found nothing there"),
    ):
        shown = CliRunner().invoke(app, ["prune", *map(str, words)])
        assert shown.exit_code == 2
        assert expected in " ".join(shown.output.replace("|", "").split())
    assert tree_of(copy) == before


def test_without_hard_links_what_kept_steps_refer_to_stays(tmp_path, monkeypatch):
    def refuse(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    keep = adacheck.KeepLineage(LatestN(STEPS))
    states = train(
        tmp_path, options=ocp.CheckpointManagerOptions(preservation_policy=keep), keep_lineage=keep
    )
    kept = pruning.prune(tmp_path, Retention(last=1)).kept
    assert kept[-1].step == STEPS - 1
    assert {each.why for each in kept[:-1]} == {f"step {STEPS - 1} builds on it"}
    assert numbers(tmp_path) == [each.step for each in kept]
    assert_restores(tmp_path, STEPS - 1, states)
    with pytest.raises(InputError, match="complete in itself"):
        pins.pin(tmp_path, None)
    with pytest.raises(InputError, match="found that none can be made"):
        pins.pin(tmp_path, kept[0].step)
    with pytest.raises(InputError, match="in a bucket nothing is linked"):
        pins.pin(located("gs://bucket/run"), None)


def test_a_pin_outlives_a_manager_that_keeps_one_step(tmp_path):
    root = tmp_path / "run"
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    states = train(root, options=options, after=lambda step: step == 6 and pins.pin(root, 6))
    assert numbers(root) == [STEPS - 1]
    assert listing.summarize_root(root).pinned == (6,)
    assert_restores(root / "pinned", 6, states)
    assert_restores(root, STEPS - 1, states)
    shown = CliRunner().invoke(app, ["ls", str(root)])
    assert "1 step is pinned" in shown.output


def test_pins_take_no_bytes_and_can_be_let_go(copy, run):
    before = listing.summarize_root(copy).disk_bytes
    assert pins.pin(copy, -2).pinned == (12,)
    assert pins.pin(copy, 12).was_pinned
    assert listing.summarize_root(copy).disk_bytes == before
    assert listing.summarize_root(copy / "pinned").step_count == 1
    assert numbers(copy) == SAVED
    shown = CliRunner().invoke(app, ["pin", str(copy), "12", "--remove", "--json"])
    assert json.loads(shown.output)["pinned"] == []
    assert not (copy / "pinned").exists()
    assert_restores(copy, 12, run[1])
    with pytest.raises(InputError, match="expected pinned steps, found none"):
        pins.unpin(copy, 12)


def test_a_step_that_cannot_be_restored_is_not_pinned(copy):
    shutil.rmtree(copy / "13/default/adacheck/lineage")
    for step in SAVED[:-1]:
        shutil.rmtree(copy / str(step))
    assert CliRunner().invoke(app, ["pin", str(copy)]).exit_code == 1
    assert not (copy / "pinned").exists()


@pytest.mark.parametrize("half", ["before it is listed", "while it is linked", "all"])
def test_a_step_that_a_manager_is_deleting_is_not_pinned(copy, monkeypatch, half):
    plain = Location.list

    def deleting(self: Location, **options: Any) -> Iterator[Location]:
        if self.key != str(copy / "11"):
            yield from plain(self, **options)
            return
        monkeypatch.setattr(Location, "list", plain)
        found = [*plain(self, **options)]
        if half == "all":
            shutil.rmtree(copy / "11")
        else:
            for path in (copy / "11/default/adacheck").glob("delta.*"):
                path.unlink()
        yield from plain(self) if half == "before it is listed" else found

    monkeypatch.setattr(Location, "list", deleting)
    error = adacheck.AdaCheckError if half == "before it is listed" else InputError
    with pytest.raises(error, match=r"changed while they were linked|delta\.0: expected"):
        pins.pin(copy, 11)
    assert not pinned(copy)
    assert not [*(copy / "pinned").glob("*")]


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_a_step_that_a_manager_deletes_meanwhile_ends_no_pruning(copy, monkeypatch, moment):
    name = "rename" if moment == "before" else "delete"
    plain = getattr(Location, name)

    def racing(self: Location, *args: Any) -> Any:
        if self.name.startswith("1") and self.parent.name == copy.name:
            monkeypatch.setattr(Location, name, plain)
            shutil.rmtree(self.key)
            if moment == "midway":
                raise FileNotFoundError(self.key)
        return plain(self, *args)

    monkeypatch.setattr(Location, name, racing)
    report = pruning.prune(copy, Retention(last=2))
    assert numbers(copy) == SAVED[-2:] == [each.step for each in report.kept]
    assert len(report.removals) == len(SAVED) - (3 if moment == "before" else 2)
    assert sorted(path.name for path in copy.iterdir()) == sorted(map(str, SAVED[-2:]))


def test_statistics_add_up(run):
    root, states = run
    report = statistics.statistics_of(root)
    full = sum(np.asarray(x).nbytes for x in jax.tree.leaves(states[0]))
    assert report.recorded_count == STEPS
    assert report.full_bytes == STEPS * full == sum(report.redundancy.values())
    paths = [Path(folder) / f for folder, _, files in os.walk(root) for f in files]
    inodes = {path.stat().st_ino: path.stat().st_size for path in paths}
    assert sum(each.name_count for each in report.files) == len(paths)
    assert sum(each.file_count for each in report.files) == len(inodes)
    assert sum(each.file_bytes for each in report.files) == sum(inodes.values())
    assert sum(each.named_bytes for each in report.files) == sum(p.stat().st_size for p in paths)
    record = {each.path: each for each in report.leaves}["opt/adacheck_record/a/kernel"]
    assert record.delta_bytes == report.delta_count * record.state_bytes
    shown = CliRunner().invoke(app, ["stats", str(root), "--leaves", "2"])
    assert "replayed" in shown.output
    assert "more leaves, which --json lists" in shown.output


def test_one_flipped_bit_is_one_cause(copy):
    path = max((copy / "13/default/adacheck").glob("delta.*"), key=lambda p: p.stat().st_size)
    path.write_bytes(support.with_flipped_data(path.read_bytes()))
    shown = CliRunner().invoke(app, ["verify", str(copy), "--read-data", "--json"])
    causes = json.loads(shown.output)["causes"]
    assert [(each["steps"], bool(each["leaves"])) for each in causes] == [([13], True)]
