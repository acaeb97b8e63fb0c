"""What the memory of several hosts costs saves, and what each tier takes to give a state back."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import adacheck_jax as adacheck
from adacheck_jax.device.sending import Sender
from benchmarks.speed import states

MEMORY, STORAGE, STOCK = "memory", "storage", "stock Orbax"


@dataclass(frozen=True)
class Kept:
    """A way to keep states in memory.

    Attributes:
        name: told in the table.
        in_files: whether other processes can take a state from there.
        copies: of each box in the memory of other hosts.
        records: whether the last base and the records since it are kept, in place of a state.
        tiers: a name, what a state is then taken from, and the host whose memory is wiped before.
    """

    name: str
    in_files: bool = True
    copies: int = 0
    records: bool = False
    tiers: tuple[tuple[str, str, int | None], ...] = ()


WAYS = (
    Kept("in this process alone", in_files=False),
    Kept("in files", tiers=(("memory", MEMORY, None),)),
    Kept("records in files", records=True, tiers=(("memory, by replay", MEMORY, None),)),
    Kept(
        "in files, copied",
        copies=1,
        tiers=(
            ("memory, a host's wiped", MEMORY, 1),
            (STORAGE, STORAGE, None),
            (STOCK, STOCK, None),
        ),
    ),
)


def run(
    root: str,
    memory: str,
    do: str,
    parts: int,
    params: int,
    leaves: int,
    steps: int,
    copies: int = 0,
    records: bool = False,
) -> Any:
    """Trains with every step kept, or takes the last one; each process is a host.

    Args:
        root: storage.
        memory: folder with a directory for each host; empty to save without.
        do: ``"save"``, or the tier to take the state from.
        parts: in which the state is cut; each lies on all hosts divided by their number.
        params: about so many.
        leaves: arrays of params.
        steps: number of the last one, even.
        copies: of each box in the memory of other hosts.
        records: whether memory keeps records.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder, parts)
    host = f"host {jax.process_index()}"
    directory = f"{memory}/{host}" if memory else None
    shadow = adacheck.Shadow(
        directory=directory, domain=host, copies=copies, records=records or None
    )
    with (
        adacheck.checkpoint_manager(
            f"{root}/own", recorder, shadow=shadow, max_deltas=1000
        ) as manager,
        ocp.CheckpointManager(f"{root}/stock") as stock,
    ):
        if do == "save":
            return _saved(manager, stock, recorder, state, steps)
        wanted = states.abstract(state)
        del state
        acts: dict[str, Callable[[], Any]] = {
            MEMORY: lambda: manager.handler.recover(manager.directory, wanted),
            STORAGE: lambda: manager.restore(steps, args=adacheck.RestoreArgs(wanted)),
            STOCK: lambda: stock.restore(
                steps, args=ocp.args.StandardRestore(states.without_record(wanted))
            ),
        }
        multihost_utils.sync_global_devices("taken")
        start_s = time.perf_counter()
        found = jax.block_until_ready(acts[do]())
        seconds = _of_all([time.perf_counter() - start_s])
        if found is None:
            raise RuntimeError("memory gave no state back")
        return {"seconds": float(seconds.max())}


def _saved(
    manager: adacheck.AdaCheckManager,
    stock: ocp.CheckpointManager,
    recorder: adacheck.Recorder,
    state: Any,
    steps: int,
) -> Any:
    """Records every other step, and saves the others; tells of the second half of them.

    Returns:
        Blocking of the slowest process, CPU seconds of all processes until a step is durable, and
        the bytes that all send at a step, divided by the bytes of its record.
    """
    step, sent_bytes = states.train_step_of(recorder), _counted()
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(1, steps + 1):
        state = jax.block_until_ready(step(state))
        is_saved = number < 8 or number % 2 == 0  # the first steps compile
        multihost_utils.sync_global_devices("together")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        if is_saved:
            manager.save(number, args=adacheck.SaveArgs(state))
        elif not manager.handler.record_step(state, number):
            raise RuntimeError("a step was not recorded")
        blocking_s = time.perf_counter() - start_s
        manager.wait_until_finished()
        taken[is_saved].append((blocking_s, time.process_time() - start_cpu_s))
    stock.save(steps, args=ocp.args.StandardSave(states.without_record(state)))
    stock.wait_until_finished()
    values = [
        statistics.median(each[len(each) // 2 :])
        for is_saved in (True, False)
        for each in zip(*taken[is_saved], strict=True)
    ]
    found = _of_all([*values, sent_bytes[-1] if sent_bytes else 0])
    state_bytes = states.size_bytes(states.without_record(state))
    return {
        "state_bytes": state_bytes,
        "blocking_s": float(found[:, 0].max()),
        "cpu_s": float(found[:, 1].sum()),
        "record_blocking_s": float(found[:, 2].max()),
        "record_cpu_s": float(found[:, 3].sum()),
        "sent": float(found[:, 4].sum()) / (states.size_bytes(state) - state_bytes),
    }


def _counted() -> list[int]:
    """A list that grows by the bytes which this process sends, at each step that sends some."""
    sent_bytes, send = list[int](), Sender.send

    def counted(self: Sender, rows: Any) -> Any:
        sent_bytes.append(sum(x.nbytes for each in rows for lane in each for x in lane))
        return send(self, rows)

    Sender.send = counted
    return sent_bytes


def _of_all(values: list[float]) -> np.ndarray:
    """The values of all processes, of shape (processes, values)."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


@contextlib.contextmanager
def memory() -> Iterator[str]:
    """A folder that lies in memory where the system has one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as found:
        yield found


def wipe(memory: str, host: int) -> None:
    """Deletes what lies in a host's memory."""
    for path in Path(memory, f"host {host}").iterdir():
        path.unlink()
