"""Processes of one restore, which are threads here, agree before each collective."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from adacheck_jax.errors import AdaCheckError, IntegrityError
from adacheck_jax.processes.attempts import RestoreAgreement
from adacheck_jax.processes.run import Processes
from adacheck_jax.processes.service import Patience
from tests.adapter.memory_service import MemoryService

QUICK = Patience(restore_s=20.0, beat_s=0.02, look_s=0.05)


def run(count: int, restore: Callable[[RestoreAgreement, int], str]) -> list[str]:
    """What each process returns, or the error that it raises."""
    service = MemoryService()
    every = [Processes(n, count, service, QUICK) for n in range(count)]

    def one(index: int) -> str:
        agreement = RestoreAgreement(every[index].exchange("a step", is_save=False))
        try:
            return restore(agreement, index)
        except AdaCheckError as error:
            agreement.leave(error)
            return f"{type(error).__name__}: {error}"

    try:
        with ThreadPoolExecutor(count) as pool:
            return [*pool.map(one, range(count))]
    finally:
        for each in every:
            each.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "within", "between", "after"])
def test_where_one_fails_all_try_the_next_attempt_alike(failing, place):
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

    told = run(3, restore)
    assert told.pop(failing) == "damaged"
    assert {*told} == {f"process {failing} could not restore (IntegrityError: damaged)."}


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_tries_again_is_told_by_who_does_not(leaving):
    def restore(agreement: RestoreAgreement, index: int) -> str:
        try:
            with agreement.agreed():
                raise IntegrityError("damaged")
        except IntegrityError:
            if index == leaving:
                raise
            with agreement.agreed():
                return "went on"

    told = run(2, restore)
    assert told[leaving] == "IntegrityError: damaged"
    other = f"AdaCheckError: process {leaving} could not restore (IntegrityError: damaged)."
    assert told[1 - leaving] == other
