"""Measures what a process keeps of each call: Python objects, memory, open files and threads.

    python -m tests.campaigns.growth
    python -m tests.campaigns.growth --size small --only save "restore with deltas"

Each verb is called again and again in a process of its own. The first tenth of the calls fills
caches; the others must leave nothing behind, or a process that goes on for weeks dies of them. The
exit status is 1 if a verb grows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orbax.checkpoint.checkpoint_managers import LatestN

import adacheck_jax as adacheck
from adacheck_jax.device.loops import xla_call
from adacheck_jax.format import byte_loops
from adacheck_jax.publish import Follower, Publisher
from adacheck_jax.tools import listing, verification
from tests import support
from tests.campaigns import children, command

DELTAS = 50
"""Deltas behind the base of the lineages that are restored."""
MOST_OBJECTS = 0.5
"""Growth of Python objects a call that is no growth: caches of Python and JAX come and go."""
_LATE_THREADS = 4
"""Threads that pools of XLA and tensorstore may start late."""
_WARM = 0.1
_LIMIT_S = 3600.0

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that this process holds.

    Attributes:
        objects: Python objects that the garbage collector knows.
        blocks: blocks of memory of Python objects, also of those that it does not know.
        memory_kb: resident memory, without what the allocator keeps for later.
        files: open file descriptors.
        threads: threads of the system.
    """

    objects: int
    blocks: int
    memory_kb: int
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Resources before and after the calls of a verb.

    Attributes:
        verb: name of the verb.
        calls: number of calls between the two.
        before: resources after the first calls.
        after: resources after all calls.
    """

    verb: str
    calls: int
    before: Held
    after: Held

    @property
    def objects(self) -> float:
        """Python objects that a call leaves behind."""
        return (self.after.objects - self.before.objects) / self.calls

    @property
    def memory_kb(self) -> float:
        """Resident memory that a call leaves behind."""
        return (self.after.memory_kb - self.before.memory_kb) / self.calls

    @property
    def is_flat(self) -> bool:
        """True if there are no more objects, files and threads than before."""
        before, after = self.before, self.after
        return (
            self.objects <= MOST_OBJECTS
            and after.files <= before.files
            and after.threads <= before.threads + _LATE_THREADS
        )


def held() -> Held:
    """Resources of this process, without garbage."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        len(gc.get_objects()),
        sys.getallocatedblocks(),
        pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        len(os.listdir("/proc/self/fd")) - 1,  # that of the listing
        len(os.listdir("/proc/self/task")),
    )


def measure(verb: str, call: Call, calls: int, settle: Call = lambda: None) -> Growth:
    """Calls a verb, and tells what is left of it.

    Args:
        verb: name of the verb.
        call: function that calls it once.
        calls: number of calls.
        settle: function that waits for what calls do in the background.
    """
    warm = max(2, int(calls * _WARM))
    for _ in range(warm):
        call()
    settle()
    before = held()
    for _ in range(calls - warm):
        call()
    settle()
    return Growth(verb, calls - warm, before, held())


def _run() -> support.Run:
    """A training run, with all compiled that is compiled in the background."""
    run = support.dict_run(support.mesh_of((1, 1)))
    xla_call.wait()
    byte_loops.wait_until_compiled()
    return run


def _saves(directory: Path, calls: int) -> Growth:
    run = _run()
    keep = adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=10, keep_lineage=keep)
    with support.manager_of(directory, handler, preservation_policy=keep) as manager:

        def save() -> None:
            run.advance()
            manager.save(run.count, args=adacheck.SaveArgs(run.state))

        return measure("save", save, calls, manager.wait_until_finished)


def _recorded(directory: Path, calls: int) -> Growth:
    run = _run()
    keep = adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=40, keep_lineage=keep)
    with support.manager_of(directory, handler, preservation_policy=keep) as manager:

        def save() -> None:
            manager.save(run.count, args=adacheck.SaveArgs(run.state))

        def record() -> None:
            run.advance()
            if run.count % 5 == 0 or not handler.record_step(run.state, run.count):
                save()

        def settle() -> None:
            save()
            manager.wait_until_finished()

        return measure("record_step, 4 a save", record, calls, settle)


def _steps(root: Path, deltas: int) -> support.Run:
    """Saves a base and deltas; returns the run."""
    run = _run()
    handler = adacheck.AdaCheckHandler(
        run.recorder, max_deltas=deltas, shadow=adacheck.Shadow(background_bases=False)
    )
    with support.manager_of(root, handler) as manager:
        for step in range(deltas + 1):
            run.advance()
            manager.save(step, args=adacheck.SaveArgs(run.state))
    return run


def _restores(directory: Path, calls: int, deltas: int) -> Growth:
    run = _steps(directory, deltas)
    args = adacheck.RestoreArgs(support.abstract(run.state))
    handler = adacheck.AdaCheckHandler(run.recorder)
    with support.manager_of(directory, handler) as manager:
        found = measure(
            f"restore, {deltas} deltas", lambda: manager.restore(deltas, args=args), calls
        )
        assert handler.restored is not None
        assert handler.restored.replayed_count == deltas
        return found


def _restores_anew(directory: Path, calls: int) -> Growth:
    """Restores by a manager and a handler of their own, as an evaluator may."""
    run = _steps(directory, deltas=5)
    args = adacheck.RestoreArgs(support.abstract(run.state))

    def restore() -> None:
        with support.manager_of(directory, adacheck.AdaCheckHandler(run.recorder)) as manager:
            manager.restore(5, args=args)
        for thread in threading.enumerate():  # each handler compiles what its saves would need
            if thread.name.startswith("adacheck_compile"):
                thread.join()

    return measure("new manager and handler, restore, 5 deltas", restore, calls)


def _publishes(directory: Path, calls: int) -> Growth:
    run = _run()
    with Publisher(directory, params_path="params", keep_versions=20) as publisher:

        def publish() -> None:
            publisher.publish(run.advance(), version=run.count)

        return measure("publish", publish, calls, publisher.wait)


def _follows(directory: Path, calls: int) -> Growth:
    run = _run()
    params = support.abstract(run.state["params"])
    with Publisher(directory, params_path="params", keep_versions=20) as publisher:
        publisher.publish(run.advance(), version=run.count, wait=True)
        follower = Follower(directory, params)

        def publish_and_wait() -> None:
            publisher.publish(run.advance(), version=run.count, wait=True)
            follower.wait_for(run.count)

        return measure("publish and follow", publish_and_wait, calls)


def _listings(directory: Path, calls: int) -> Growth:
    _steps(directory, deltas=20)
    return measure("ls", lambda: listing.summarize_root(directory), calls)


def _verifications(directory: Path, calls: int) -> Growth:
    _steps(directory, deltas=20)
    item = directory / "20" / "default"
    return measure("verify", lambda: verification.check(item, read_data=True), calls)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, and how often it is called.

    Attributes:
        run: function of a directory and the number of calls.
        calls: number of calls, by size.
    """

    run: Callable[[Path, int], Growth]
    calls: dict[str, int]


def _verb(run: Callable[[Path, int], Growth], full: int, small: int = 60) -> Verb:
    return Verb(run, {"small": small, "full": full})


VERBS = {
    "save": _verb(_saves, 2000),
    "record_step": _verb(_recorded, 2000),
    "restore": _verb(lambda path, calls: _restores(path, calls, 0), 1000),
    "restore with deltas": _verb(lambda path, calls: _restores(path, calls, DELTAS), 1000, 30),
    "new manager": _verb(_restores_anew, 200),
    "publish": _verb(_publishes, 1000),
    "follow": _verb(_follows, 1000),
    "ls": _verb(_listings, 1000),
    "verify": _verb(_verifications, 1000),
}


def table(found: list[Growth]) -> str:
    """Markdown: a row a verb."""
    head = ["verb", "calls", "objects", "a call", "MB", "KB a call", "files", "threads"]
    rows = []
    for each in found:
        before, after = each.before, each.after
        sizes = [round(x.memory_kb / 1024) for x in (before, after)]
        rows.append(
            [
                *(each.verb, f"{each.calls:,}", f"{before.objects:,} → {after.objects:,}"),
                *(f"{each.objects:.2f}", f"{sizes[0]:,} → {sizes[1]:,}", f"{each.memory_kb:.2f}"),
                *(f"{before.files} → {after.files}", f"{before.threads} → {after.threads}"),
            ]
        )
    return command.table(head, rows)


def campaign(names: list[str], size: str) -> Iterator[Growth]:
    """Measures verbs, each in a process of its own.

    Raises:
        RuntimeError: a process failed.
    """
    arguments, environ = ["--size", size], children.environment(1)
    module = "tests.campaigns.growth"
    for name, told in children.results(
        module, arguments, names, environ, group=1, limit_s=_LIMIT_S
    ):
        if isinstance(told, str):
            raise RuntimeError(f"{name}: {told}")
        before, after = Held(**told.pop("before")), Held(**told.pop("after"))
        yield Growth(**told, before=before, after=after)


def main() -> int:
    """Reads the command line; prints the table."""
    parser = command.parser(__doc__, size="full")
    parser.add_argument("--only", nargs="+", choices=VERBS, default=[*VERBS], metavar="VERB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        verb = VERBS[options.child]
        with tempfile.TemporaryDirectory() as directory:
            found = verb.run(Path(directory) / "root", verb.calls[options.size])
        children.tell(asdict(found))
        return 0
    every = []
    for each in campaign(options.only, options.size):
        every.append(each)
        print(f"{each.verb}: {each.objects:.2f} objects a call", file=sys.stderr, flush=True)
    growing = [each.verb for each in every if not each.is_flat]
    return command.finish({}, growing, table(every))


if __name__ == "__main__":
    sys.exit(main())
