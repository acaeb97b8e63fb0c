"""The end of a v1 save in several processes, which are threads here."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from adacheck_jax.adapter.v1.handler import _Rest
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.processes.run import Processes
from adacheck_jax.processes.service import Patience
from tests.adapter.memory_service import MemoryService


class Ends:
    """The rest of one save in each of some processes.

    Attributes:
        futures: what each process still writes.
        events: what happened, in order.
    """

    def __init__(self, path: Any, count: int = 2) -> None:
        service = MemoryService()
        self.processes = [Processes(i, count, service, Patience(look_s=0.05)) for i in range(count)]
        self.futures: list[Future[None]] = [Future() for _ in range(count)]
        self.events: list[str] = []
        self.commits = threading.Event()
        self.ends = [self._end(path, each) for each in self.processes]

    def _end(self, path: Any, processes: Processes) -> _Rest:
        async def created() -> Any:
            return path

        def commit(*_: Any) -> None:
            self.events.append(f"{processes.index} commits")
            self.commits.set()

        run: Any = SimpleNamespace(saves=SimpleNamespace(commit=commit))
        attempt = SimpleNamespace(exchange=processes.exchange(path))
        save = SimpleNamespace(attempt=attempt, directory=path, is_base=True)
        begun: Any = SimpleNamespace(save=save)
        directory: Any = SimpleNamespace(await_creation=created)
        return _Rest(run, directory, begun, [self.futures[processes.index]])

    def run(self, pool: ThreadPoolExecutor) -> list[Future[None]]:
        def ended(end: _Rest) -> None:
            asyncio.run(end._finish())
            self.events.append("returned")

        return [pool.submit(ended, each) for each in self.ends]


@pytest.fixture
def ends(tmp_path):
    made = Ends(tmp_path)
    yield made
    for each in made.processes:
        each.close()


def test_nobody_commits_before_all_have_written(ends):
    """Orbax's own files of a base are no part of the share on which the processes agreed."""
    with ThreadPoolExecutor() as pool:
        ended = ends.run(pool)
        ends.futures[0].set_result(None)
        assert not ends.commits.wait(0.3)
        ends.events.append("1 has written")
        ends.futures[1].set_result(None)
        for each in ended:
            each.result()
    assert ends.events == ["1 has written", "0 commits", "returned", "returned"]


def test_an_error_of_what_one_writes_or_commits_is_raised_in_all(ends):
    with ThreadPoolExecutor() as pool:
        ended = ends.run(pool)
        ends.futures[0].set_result(None)
        ends.futures[1].set_exception(OSError("disk full"))
        with pytest.raises(AdaCheckError, match=r"process 1 could not write .* disk full"):
            ended[0].result()
        with pytest.raises(OSError, match="disk full"):
            ended[1].result()
    assert ends.events == []


def test_an_error_of_the_commit_is_raised_in_all(ends):
    def commit(*_: Any) -> None:
        raise OSError("disk full")

    ends.ends[0]._run.saves.commit = commit
    with ThreadPoolExecutor() as pool:
        ended = ends.run(pool)
        for each in ends.futures:
            each.set_result(None)
        with pytest.raises(OSError, match="disk full"):
            ended[0].result()
        with pytest.raises(AdaCheckError, match="OSError: disk full"):
            ended[1].result()
