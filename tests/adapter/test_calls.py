"""Processes that do not call alike raise, in all of them; they are threads here, or real."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adacheck_jax as adacheck
from adacheck_jax.adapter import inputs
from adacheck_jax.errors import AdaCheckError, DifferingCallsError, MismatchError
from adacheck_jax.processes import run as this_run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.lockstep import Lockstep
from adacheck_jax.processes.run import Processes
from adacheck_jax.processes.service import Patience
from tests import support
from tests.adapter.memory_service import MemoryService
from tests.processes import launch, leaves

WORKER = "tests.adapter.calls_worker"
QUICK = Patience(silence_s=60.0, beat_s=0.02, look_s=0.05)


def expect_same(states: Any) -> None:
    inputs.expect_same(states, "/run")


class Loops:
    """Training loops of several processes, which are threads."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch, patience: Patience) -> None:
        service, self._here = MemoryService(), threading.local()
        self.processes = [Processes(n, count, service, patience) for n in range(count)]
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(jax, "process_index", lambda: self._here.index)
        patch.setattr(this_run, "_all", lambda: self.processes[self._here.index])
        self.managers = [Lockstep("/run") for _ in range(count)]

    def run(self, *loops: Callable[[Lockstep], Any]) -> list[Future[Any]]:
        """Runs each loop in its process; the last one in all that are left."""
        every = [*loops, *loops[-1:] * (len(self.managers) - len(loops))]

        def of(index: int) -> Any:
            self._here.index = index
            if not self.managers[index].calls.key:
                self.managers[index].introduce("a handler")
            return every[index](self.managers[index])

        with ThreadPoolExecutor(len(every)) as pool:
            return [pool.submit(of, n) for n in range(len(every))]


@pytest.fixture
def loops_of(monkeypatch):
    made: list[Loops] = []

    def make(count: int, patience: Patience = QUICK) -> Loops:
        made.append(Loops(count, monkeypatch, patience))
        return made[-1]

    yield make
    for loops in made:
        for each in loops.processes:
            each.close()


def saves(*steps: int) -> Callable[[Lockstep], Any]:
    def loop(manager: Lockstep) -> Any:
        told: dict[str, Any] = {}
        for step in steps:
            manager.begin()
            told = manager.decided(lambda n=step: {"saved": n}, f"save({step})")
        return told["saved"]

    return loop


def records(step: int, then: Callable[[Lockstep], Any]) -> Callable[[Lockstep], Any]:
    def loop(manager: Lockstep) -> Any:
        saves(2)(manager)
        with manager.calls.pending(f"record_step({step})", is_own=True) as count:
            count(True)
        return then(manager)

    return loop


def raised(loops: list[Future[Any]]) -> set[str]:
    """What all of them raise."""
    for each in loops:
        with pytest.raises(DifferingCallsError):
            each.result()
    return {str(each.exception()) for each in loops}


@pytest.mark.parametrize("count", [2, 4])
def test_all_that_call_alike_hear_what_process_0_decided(loops_of, count):
    found = loops_of(count).run(saves(1, 2, 3))
    assert [each.result() for each in found] == [3] * count


def restores(step: int, leaf: str = "x") -> Callable[[Lockstep], Any]:
    """A loop that restores a step, which is a call too."""

    def loop(manager: Lockstep) -> Any:
        saves(2)(manager)
        manager.meet(f"restore({step})", lambda: {leaf: "float32[3]"}, expect_same)
        return manager.decided(lambda: {"saved": 3}, "save(3)")["saved"]

    return loop


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("here", "others", "first", "second"),
    [
        (saves(2, 3), records(3, saves(4)), "save(3)", "record_step(3)"),
        (records(3, saves(4)), saves(2, 3), "record_step(3)", "save(3)"),
        (saves(2, 3), saves(2, 4), "save(3)", "save(4)"),
        (records(3, saves(5)), records(4, saves(5)), "record_step(3)", "record_step(4)"),
        (restores(2), restores(1), "restore(2)", "restore(1)"),
        (saves(2, 3), restores(2), "save(3)", "restore(2)"),
        (restores(2), saves(2, 3), "restore(2)", "save(3)"),
    ],
)
def test_calls_that_differ_are_named_in_all(loops_of, here, others, first, second, count):
    (told,) = raised(loops_of(count).run(here, others))
    names = re.escape(f"found {first} in process 0"), re.escape(f" called {second}.")
    assert re.search(rf"{names[0]} where process [12]{names[1]}", told)


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_who_asks_for_another_state_is_told_with_all_others_before_any_begins(loops_of, differing):
    every = [restores(2)] * 3
    every[differing] = restores(2, "y")
    for each in loops_of(3).run(*every):
        with pytest.raises(MismatchError, match=r"the same abstract state in all .*2 leaves"):
            each.result()
    found = loops_of(3).run(restores(2))  # nothing is wrong with what comes later
    assert [each.result() for each in found] == [3] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_whose_restore_fails_before_it_begins_tells_the_others(loops_of, failing):
    def fails(manager: Lockstep) -> Any:
        saves(2)(manager)
        manager.meet("restore(2)", lambda: 1 // 0, expect_same)

    every = [restores(2)] * 2
    every[failing] = fails
    found = loops_of(2).run(*every)
    with pytest.raises(ZeroDivisionError):
        found[failing].result()
    with pytest.raises(AdaCheckError, match=rf"process {failing} could not restore \(ZeroDiv"):
        found[1 - failing].result()


def test_restores_beside_the_loop_come_in_any_order(loops_of):
    def beside(order: tuple[int, ...]) -> Callable[[Lockstep], Any]:
        def loop(manager: Lockstep) -> Any:
            index = jax.process_index()

            def look(step: int) -> None:
                loops._here.index = index
                manager.meet(f"restore({step})", lambda: {"x": "float32[3]"}, expect_same)

            saves(2)(manager)
            with ThreadPoolExecutor(2) as pool:
                looks = [pool.submit(look, step) for step in order]
            assert [each.result() for each in looks] == [None, None]
            return saves(3)(manager)

        return loop

    loops = loops_of(2)
    found = loops.run(beside((2, 1)), beside((1, 2)))
    assert [each.result() for each in found] == [3, 3]


def test_who_waits_for_long_says_for_whom(loops_of, caplog):
    def late(manager: Lockstep) -> Any:
        while "has waited for the same call of process 1 " not in caplog.text:
            time.sleep(0.01)
        return saves(2)(manager)

    found = loops_of(2, replace(QUICK, warned_s=0.0)).run(saves(2), late)
    assert [each.result() for each in found] == [2, 2]


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_who_waits_for_nobody_is_told_with_the_beats(loops_of, differing):
    def until_told(manager: Lockstep) -> None:
        while not manager.calls.error:
            time.sleep(0.01)
        manager.calls.check()

    every = [saves(2, 3)] * 3
    every[differing] = records(3, until_told)
    (told,) = raised(loops_of(3).run(*every))
    assert f"process {differing}" in told


def test_a_step_that_could_not_be_recorded_is_no_call(loops_of):
    def refused(manager: Lockstep) -> Any:
        saves(2)(manager)
        with manager.calls.pending("record_step(3)", is_own=True) as count:
            count(False)
        return saves(3)(manager)

    assert [each.result() for each in loops_of(2).run(refused, saves(2, 3))] == [3, 3]


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_call_that_waits_before_it_counts_does_not_wait_for_ever(loops_of, waiting):
    """As ``record_step`` does, where it sends copies to other processes."""

    def records_with_all(manager: Lockstep) -> Any:
        saves(2)(manager)
        with manager.calls.pending("record_step(3)", is_own=True):
            exchange = this_run.exchange("copies")
            exchange.watching(manager.calls).beside("sent").agree("send", {}, lambda _: {})

    every = [saves(2, 3)] * 2
    every[waiting] = records_with_all
    (told,) = raised(loops_of(2).run(*every))
    assert "record_step(3)" in told
    assert "save(3)" in told


def test_after_that_nothing_more_is_begun_but_the_end(loops_of):
    loops = loops_of(2)
    raised(loops.run(saves(2, 3), records(3, saves(4))))
    raised(loops.run(saves(5)))

    def end(manager: Lockstep) -> Any:
        manager.begin_anew()
        return manager.agreed({"has": 1}, lambda reports: {"all": len(reports)})["all"]

    assert [each.result() for each in loops.run(end)] == [2, 2]


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_calls_differ_where_both_told_others(one, other):
    first, second = Calls("/run"), Calls("/run")
    for calls, steps in ((first, one), (second, other)):
        for step in steps:
            calls.note(f"save({step})")
    here, there = first.difference(0, 1, second.recent()), second.difference(1, 0, first.recent())
    assert here == there, "whoever finds it says the same"
    begin = max(len(one), len(other)) - 32
    known = range(max(begin, 0), min(len(one), len(other)))
    assert bool(here) == any(one[n] != other[n] for n in known)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("save4.record4", ("save(4)", "record_step(4)")),
        ("record4.save4", ("record_step(4)", "save(4)")),
        ("save4.save5", ("save(4)", "save(5)")),
        ("record4.save4.away", ("record_step(4)", "save(4)")),
    ],
)
def test_real_processes_raise_and_lose_nothing_that_all_had(tmp_path, mode, calls):
    root, out = tmp_path / "root", tmp_path / "out"
    launch(mode, 2, root, out, 1, WORKER)
    text = f"found {calls[0]} in process 0 where process 1 called {calls[1]}. Neither was done"
    for n in range(2):
        errors = Path(f"{out}-errors{n}").read_text().splitlines()
        assert all(text in each for each in errors), errors
        assert [each.split(":")[0] for each in errors][-2:] == ["save6", "record7"]
    target = support.abstract(support.dict_run(support.mesh_of((1, 1))).state)
    with adacheck.checkpoint_manager(root, max_to_keep=None) as manager:
        assert manager.latest_step() == 3
        for step in (1, 2, 3):
            state = manager.restore(step, args=adacheck.RestoreArgs(target))
            bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
            assert bits == leaves(Path(f"{out}-saved{step}.npz")), step


KEEPING = "with Shadow(directory=..., copies={}, records=None)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "here", "other"),
    [
        ("apart", KEEPING.format(0), KEEPING.format(1)),
        ("alone", KEEPING.format(adacheck.Shadow().copies), "without Shadow(directory=...)"),
    ],
)
def test_real_processes_raise_where_they_keep_memory_in_different_ways(tmp_path, mode, here, other):
    out = tmp_path / "out"
    launch(f"save4.save4.{mode}", 2, tmp_path / "root", out, 1, WORKER)
    for n in range(2):
        (error,) = Path(f"{out}-errors{n}").read_text().splitlines()
        assert error.startswith("open: ")
        assert f"found a handler {here}, items=[], " in error
        assert f"where process 1 called a handler {other}, items=[], " in error


@pytest.mark.slow
@pytest.mark.first(1)
def test_real_processes_restore_alike_or_raise_and_say_what_is_cut_off(tmp_path):
    root, out, worker = tmp_path / "root", tmp_path / "out", "tests.adapter.restores_worker"
    launch("train", 2, root, out, 1, worker)
    (cut,) = Path(f"{out}-memory1").iterdir()
    os.truncate(cut, cut.stat().st_size - 4096)
    launch("restore", 2, root, out, 1, worker)
    assert leaves(Path(f"{out}-recovered.npz")) == leaves(Path(f"{out}-trained.npz"))
    told = [json.loads(Path(f"{out}-told{n}").read_text()) for n in range(2)]
    for n, each in enumerate(told):
        differing, source, unsigned, other_step = each["results"]
        assert "MismatchError" in differing
        assert "in process 1, not in process 0 (1): more." in differing
        assert source == ("memory", "memory of others")[n]
        assert unsigned.startswith("MismatchError: ")
        assert "signs: -5 (int32 as uint8)" in unsigned
        assert ("process 1" in unsigned) == (n == 0)
        assert "found restore(3) in process 0 where process 1 called restore(2)." in other_step
    assert [x for x in told[1]["said"] if str(cut) in x and "it was cut off" in x]
