"""Reports of processes about saves and restores; they are threads here, and the service a dict."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    MismatchError,
    StorageError,
)
from adacheck_jax.processes import run as this_run
from adacheck_jax.processes.attempts import RestoreAgreement
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Message
from adacheck_jax.processes.run import Processes
from adacheck_jax.processes.service import Patience
from adacheck_jax.processes.waiting import WaitFacts, reason_to_end
from tests.adapter.memory_service import MemoryService

QUICK = Patience(look_s=0.05)
BOUNDED = Patience(report_s=0.6, answer_s=60.0, silence_s=60.0, beat_s=0.02, look_s=0.05)
SILENCED = Patience(silence_s=1.0, beat_s=0.02, look_s=0.05)
"""Bounds of which only the ones that a test is about can be reached in its time."""


class Run:
    """Processes that share one service."""

    def __init__(self, count: int, patience: Patience) -> None:
        self.service, self.count = MemoryService(), count
        self.processes = [Processes(i, count, self.service, patience) for i in range(count)]

    def exchanges(self, directory: str = "/run/3") -> list[Exchange]:
        return [each.exchange(directory) for each in self.processes]

    def close(self) -> None:
        for each in self.processes:
            each.close()


@pytest.fixture
def run_of():
    runs: list[Run] = []

    def make(count: int, patience: Patience = QUICK) -> Run:
        runs.append(Run(count, patience))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Runs what each process does, at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def numbers(reports: Any) -> dict[str, Any]:
    return {"numbers": [report["number"] for report in reports]}


def agreeing(exchange: Exchange, number: int, **options: Any) -> Callable[[], Any]:
    return lambda: exchange.agree("shares", {"number": number}, numbers, **options)


def messages(futures: list[Future[Any]]) -> list[str]:
    return [str(future.exception()) for future in futures]


def test_all_get_the_answer_to_the_reports_of_all(run_of):
    exchanges = run_of(3).exchanges()
    found = together(*(agreeing(each, n) for n, each in enumerate(exchanges)))
    assert [each.result() for each in found] == [{"numbers": [0, 1, 2]}] * 3
    for each in exchanges:  # whichever commits
        assert [report["number"] for report in each.reports("shares")] == [0, 1, 2]


def test_an_error_of_the_judge_is_raised_in_all(run_of):
    def judge(reports):
        raise MismatchError("not equal")

    exchanges = run_of(3).exchanges()
    found = together(*(lambda e=each: e.agree("shares", {}, judge) for each in exchanges))
    assert messages(found) == ["not equal"] * 3
    assert {type(each.exception()) for each in found} == {MismatchError}


@pytest.mark.parametrize("failing", [0, 2])
def test_nobody_waits_for_a_process_that_failed_in_what_comes_later(run_of, failing):
    exchanges = run_of(3).exchanges()
    others = [each for n, each in enumerate(exchanges) if n != failing]

    def shares_at_once(exchange):
        exchange.fail(StorageError("full"))

    calls = [lambda e=each: e.agree("samples", {"number": 0}, numbers) for each in others]
    _, *found = together(lambda: shares_at_once(exchanges[failing]), *calls)
    for each in found:
        with pytest.raises(
            StorageError, match=f"process {failing} could not write its share.*full"
        ):
            each.result()


def test_an_answer_is_read_though_its_process_fails_later(run_of):
    first, second = run_of(2).exchanges()
    second.tell("shares", {"number": 1})
    agreeing(first, 0)()
    first.fail(OSError("disk full"))
    assert second.hear("shares") == {"numbers": [0, 1]}


def test_who_did_not_wait_for_the_answer_keeps_the_others_from_going_on(run_of):
    first, second = run_of(2).exchanges()
    second.tell("shares", {"number": 1})
    second.fail(AdaCheckError("it took too long"), "wait any longer")
    with pytest.raises(AdaCheckError, match="process 1 could not wait any longer"):
        agreeing(first, 0)()


def test_the_first_error_is_that_of_all(run_of):
    exchanges = run_of(3).exchanges()
    for n in (2, 0):
        exchanges[n].fail(OSError("disk full"))
    assert {str(each.error()) for each in exchanges} == {
        "process 2 could not write its share (OSError: disk full). The step is not saved."
    }


def test_what_storage_refuses_one_process_is_a_refusal_to_all(run_of):
    first, second = run_of(2).exchanges()
    assert first.error() is None
    second.fail(OSError(5, "Input/output error"))
    with pytest.raises(StorageError, match="process 1 could not write its share"):
        first.agree("shares", {"number": 0}, numbers)
    assert isinstance(second.error(), StorageError)
    with pytest.raises(StorageError, match="Input/output error"):
        second.hear("shares")


def test_a_failure_is_told_while_another_process_is_still_writing(run_of):
    """The report of process 1 is waited for first."""
    first, _, last, slow = run_of(4).exchanges()
    last.fail(OSError("disk full"))
    for each in together(agreeing(first, 0), agreeing(slow, 3)):
        with pytest.raises(AdaCheckError, match=r"process 2 could not write.*disk full"):
            each.result()


@pytest.mark.parametrize(
    ("dead", "told"), [((1, 3), r"/run/3: .* of processes 1, 3"), ((0,), "of process 0")]
)
def test_a_process_that_is_gone_is_named_in_all_others(run_of, dead, told):
    """Process 0 need not be the one that holds the service."""
    run = run_of(4, SILENCED)
    exchanges = run.exchanges()
    for gone in dead:
        run.processes[gone].close()
    found = together(*(agreeing(exchanges[n], n) for n in {0, 1, 2, 3} - {*dead}))
    for each in found:
        with pytest.raises(AdaCheckError, match=rf"{told}, found no sign of life"):
            each.result()


def test_who_was_silent_in_one_wait_is_gone_in_the_next(run_of):
    """Or a save that several waits make up would take the time of each."""
    run = run_of(2, SILENCED)
    run.exchanges()
    first, gone = run.processes
    gone.close()
    with pytest.raises(AdaCheckError, match="no sign of life"):
        first.barrier("one", 60.0)
    assert first.silent([1]) == [1]
    gone.post("adacheck/beat/1", Message({"number": "back"}))
    assert first.silent([1]) == []


def test_a_process_that_lives_but_does_not_report_is_waited_for_longer(run_of):
    run = run_of(3, BOUNDED)
    first, second, _ = run.exchanges()
    for each in together(agreeing(first, 0), agreeing(second, 1)):
        with pytest.raises(AdaCheckError, match=r"hear of process 2, found nothing in time"):
            each.result()


def test_a_step_that_is_saved_again_is_another_exchange(run_of):
    run = run_of(2)
    one, other = run.exchanges(), run.exchanges("/run/4")
    again = run.exchanges()
    one[1].fail(OSError("disk full"))
    for pair in (again, other):
        found = together(*(agreeing(each, n) for n, each in enumerate(pair)))
        assert [each.result() for each in found] == [{"numbers": [0, 1]}] * 2


def test_a_save_that_was_given_up_stops_waiting(run_of):
    first, second = run_of(2).exchanges()
    is_over = threading.Event()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(agreeing(first, 0, is_over=is_over.is_set))]
        is_over.set()
        assert "being saved again" in messages(waiting)[0]
    with pytest.raises(AdaCheckError, match="being saved again"):
        second.agree("shares", {}, numbers, is_over.is_set)


def test_what_was_told_is_deleted(run_of):
    run = run_of(2)
    for step in (3, 4):
        exchanges = run.exchanges(f"/run/{step}")
        together(*(agreeing(each, n) for n, each in enumerate(exchanges)))
        for each in exchanges:
            each.forget()
    run.close()
    assert {key.split("/")[1] for key in run.service.values} == {"beat"}


def test_the_end_of_the_service_is_an_error_that_says_so(run_of):
    run = run_of(2)
    first, second = run.exchanges()
    run.service.error = jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed\nand more")
    for each in (first, second):
        with pytest.raises(AdaCheckError, match=r"coordination service .* UNAVAILABLE: Socket"):
            agreeing(each, 0)()
        each.fail(OSError("disk full"))  # nobody can be told


def test_a_barrier_may_be_used_again_and_leaves_little(run_of):
    run = run_of(2)
    for _ in range(100):
        calls = [lambda p=each: p.barrier("same", 60.0) for each in run.processes]
        assert [each.result() for each in together(*calls)] == [None, None]
    run.close()
    assert len(run.service.values) < 300


def test_a_barrier_names_who_is_gone(run_of):
    run = run_of(2, SILENCED)
    run.exchanges()
    run.processes[1].close()
    with pytest.raises(AdaCheckError, match=r"barrier same: .* process 1, found no sign") as found:
        run.processes[0].barrier("same", 60.0)
    assert "is not saved" not in str(found.value), "the step may be committed by then"


@given(
    st.lists(st.integers(0, 20), min_size=1, unique=True),
    st.sets(st.integers(0, 20)),
    st.booleans(),
    st.booleans(),
)
def test_a_wait_ends_by_the_dead_or_in_time_and_names_whom_it_is_for(awaited, dead, over, late):
    silent = [each for each in awaited if each in dead]
    bounds = {"silence_s": 12.0, "is_over": over, "is_late": late}
    why = reason_to_end(
        WaitFacts(where="/run/3", loss="", awaited=awaited, silent=silent, **bounds)
    )
    assert bool(why) == bool(silent or over or late)
    if why and not over:
        named = (silent or awaited)[:10]
        assert re.search(rf"of process(es)? {', '.join(map(str, named))}\b", why)
        assert ("no sign of life for 12 s" in why) == bool(silent)


def test_several_processes_without_a_service_are_refused(monkeypatch):
    assert this_run.exchange("/run/3").is_alone, "one process needs none"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(AdaCheckError, match=r"2 processes .* call jax.distributed.initialize"):
        this_run.exchange("/run/3")


def restoring(run: Run, restore: Callable[[RestoreAgreement, int], str]) -> list[str]:
    """What each process returns that restores, or the error that it raises."""

    def one(index: int) -> str:
        exchange = run.processes[index].exchange("a step", is_save=False)
        agreement = RestoreAgreement(exchange)
        try:
            return restore(agreement, index)
        except AdaCheckError as error:
            agreement.leave(error)
            return f"{type(error).__name__}: {error}"

    found = together(*(functools.partial(one, n) for n in range(run.count)))
    return [each.result() for each in found]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "within", "between", "after"])
def test_where_one_fails_all_try_the_next_attempt_alike(run_of, failing, place):
    def restore(agreement: RestoreAgreement, index: int) -> str:
        def fail_at(here: str) -> None:
            if index == failing and here == place:
                raise IntegrityError("damaged")

        try:
            with agreement.agreed():
                fail_at("before")
                with agreement.agreed():
                    fail_at("within")
                fail_at("between")
                with agreement.agreed():
                    pass
                fail_at("after")
        except IntegrityError as error:
            with agreement.agreed():
                return str(error)
        return "went on"

    told = restoring(run_of(3), restore)
    assert told.pop(failing) == "damaged"
    assert {*told} == {f"process {failing} could not restore (IntegrityError: damaged)."}


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_tries_again_is_told_by_who_does_not(run_of, leaving):
    def restore(agreement: RestoreAgreement, index: int) -> str:
        try:
            with agreement.agreed():
                raise IntegrityError("damaged")
        except IntegrityError:
            if index == leaving:
                raise
            with agreement.agreed():
                return "went on"

    told = restoring(run_of(2), restore)
    assert told[leaving] == "IntegrityError: damaged"
    other = f"AdaCheckError: process {leaving} could not restore (IntegrityError: damaged)."
    assert told[1 - leaving] == other
