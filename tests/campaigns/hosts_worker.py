"""One process of a run of several whose hosts are killed; see :mod:`tests.campaigns.hosts`.

Usage: hosts_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES HEARTBEAT

MODE is JSON: the host that this process is, the layout, a seed, the last step, the number of
copies, the longest pause and that after a chunk, the share of recorded steps, a directory for
compiled programs, and one for the memory of all machines: a folder for each, or one machine's. It
may have the machine, if several hosts share one, the number of hosts of a failure domain, the
optimizer, bytes of memory, and hosts that are without it or do what functions below say. The
process recovers or restores, trains until it is killed or has all steps, and appends to OUT-HOST a
line for each of:

    took SECONDS, refused REASON, read BYTES          how recovery went; what storage gave
    recovered STEP DIGEST, restored STEP DIGEST       where it begins
    state STEP DIGEST                                 a state, before it is recorded or saved
    stored STEP, passed STEP, lifted                  what lies in this host's file, when it does
    said MESSAGE                                      what the library logs
    sent                                              that copies are sent, at each step
    over                                              all steps are there
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import jax.numpy as jnp
import optax
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.adapter.in_memory.replaying import _Reader
from adacheck_jax.device import transfer
from adacheck_jax.device.sending import Sender
from adacheck_jax.memory import shadow as host_shadow
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.step_file import StepFile
from adacheck_jax.store import sharing
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support

given = json.loads(own.mode)
rng = random.Random(given["seed"] * 100 + given["host"])
log = Path(f"{own.out}-{given['host']}").open("a", buffering=1)  # noqa: SIM115
AXES = {
    "replicated": (own.processes, 1),
    "halves": (own.processes // 2, 2),
    "cut": (1, own.processes),
}
WIDTH = 64


def tell(*words: object) -> None:
    """Appends a line."""
    log.write(" ".join(map(str, words)) + "\n")


def bytes_read() -> int:
    """Bytes of arrays and records that this process has read from files: all by tensorstore."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for each in found for value in each["values"])


def pause() -> None:
    """Waits now and then, so that processes are apart."""
    if given["pause_s"] and rng.random() < 0.2:
        time.sleep(rng.random() * given["pause_s"])


def watch() -> None:
    """Tells what lies in the file as soon as it does, and pauses around it."""
    lift, note = StepFile.lift, Journal.note

    def begun(begin: Any) -> Any:
        def tells(
            self: StepFile,
            step: int,
            updates: Any,
            sums: Any,
            passed: Any = None,
            *more: Any,
            **options: Any,
        ) -> None:
            if given.get("unfolded") and more:
                return  # as where it is killed before it tells
            pause()
            begin(self, step, updates, sums, passed, *more, **options)
            tell("stored" if passed is None else "passed", step)
            pause()

        return tells

    def lifted(self: StepFile) -> None:
        tell("lifted")
        lift(self)

    def noted(self: Journal, count: int) -> None:
        note(self, count)
        time.sleep(given["chunk_s"])

    def sent(self: Sender, rows: Any) -> Any:
        tell("sent")
        return send(self, rows)

    Journal.begin, RecordLog.begin = begun(Journal.begin), begun(RecordLog.begin)
    StepFile.lift, Journal.note = lifted, noted
    send, Sender.send = Sender.send, sent


def die_in_a_base(after: int) -> None:
    """Lets this process kill itself after it took part in so many exchanges of bases."""
    share, met = sharing.share, itertools.count(1)

    def shared(offers: Any, agree: Any) -> Any:
        def agreed(*args: Any) -> Any:
            answer = agree(*args)
            if next(met) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return share(offers, agreed)

    sharing.share = shared


def program() -> support.Program:
    """A small model, its leaves cut along the second axis of the mesh alone."""
    mesh = support.mesh_of(AXES[given["layout"]])
    adafactor = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    optimizers = {"adamw": optax.adamw(1e-2), "adafactor": adafactor}
    recorder, chain = support.recorded(optimizers[given.get("optimizer", "adamw")])
    column = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names[1]))
    whole = NamedSharding(mesh, PartitionSpec())

    def begin() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        params = {f"layer{n}": jax.random.normal(keys[n], (WIDTH, 4 * WIDTH)) for n in range(3)}
        params["bias"] = jnp.zeros(4 * WIDTH)
        return {
            "params": params,
            "opt_state": chain.init(params),
            "step": jnp.int32(0),
            "noise": jax.random.key_data(jax.random.key(7)),
            "equal": jnp.tile(params["layer0"][:, :WIDTH], 4),  # in all boxes, wherever it is cut
            "key": jax.random.key(7),
        }

    shardings = jax.tree.map(lambda x: column if x.ndim == 2 else whole, jax.eval_shape(begin))
    begun = jax.jit(begin, out_shardings=shardings)  # one program: others compile one an array

    def train_step(state: Any, data: Any) -> Any:
        x, y = (each.repeat(WIDTH // each.shape[1], 1) for each in data)

        def loss_of(params: Any) -> Any:
            hidden = sum(jnp.tanh(x @ params[f"layer{n}"]) for n in range(3)) + params["bias"]
            return jnp.mean((hidden[:, :WIDTH] - y) ** 2)

        grads = jax.grad(loss_of)(state["params"])
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
        noise = state["noise"] * jnp.uint32(1664525) + jnp.uint32(1013904223)
        params = optax.apply_updates(state["params"], updates)
        step, key = state["step"] + 1, jax.random.fold_in(state["key"], state["step"])
        moved = {"params": params, "opt_state": opt_state, "step": step, "noise": noise, "key": key}
        return {**state, **moved}

    return support.Program.of(recorder, begun, train_step)


def digest(state: Any) -> str:
    """Digest of a whole state; collective."""
    whole = multihost_utils.process_allgather(jax.tree.map(transfer.raw, state), tiled=True)
    data = b"".join(each.tobytes() for each in jax.tree.leaves(whole))
    return hashlib.sha256(data).hexdigest()[:16]


def spoil(manager: Any) -> None:
    """Flips a bit of a copy in this host's memory, as a bad module would."""
    shadow = manager.handler.run.lines.only[1]._shadow

    def flip() -> None:
        copy = shadow._state
        (boxes,) = copy.held.copies.values()
        leaf = next(i for i in copy._arrays if i in boxes)
        block = copy._fold.blocks(leaf)[boxes[leaf][0]]
        block.reshape(-1).view("u4")[3] ^= 1 << 22  # which no rounding takes back

    shadow._thread.submit(flip).result()


def break_replay() -> None:
    """Has one host's replay of what is in memory fail at some record."""
    read = _Reader.read

    def fails(self: _Reader, index: int, box: Any) -> Any:
        if self._number == given["fails_at"]:
            raise RuntimeError("on purpose")
        return read(self, index, box)

    if given.get("fails") == given["host"]:
        _Reader.read = fails


def differ() -> None:
    """Has one host compute other bits, where that may be its arithmetic."""
    advance = HostFold.advance

    def differs(self: HostFold, *args: Any, **options: Any) -> None:
        advance(self, *args, **options)
        vector = next(each for each in self._vectors if each.slides)
        vector.part(0, 1).view("u4")[0] ^= 1

    if "differs" in given:
        host_shadow.is_host = lambda: False
        if given["differs"] == given["host"]:
            HostFold.advance = differs


def main() -> None:
    """Recovers, and trains."""
    run, reasons = program().run(), list[str]()
    handler = logging.Handler()

    def said(record: logging.LogRecord) -> None:
        reasons.append(record.getMessage())
        tell("said", reasons[-1].replace("\n", " "))

    handler.emit = said
    logging.getLogger("adacheck_jax").addHandler(handler)
    is_shared, machine = given.get("shared", False), given.get("machine", given["host"])
    shadow = adacheck.Shadow(
        directory=given["memory"] if is_shared else f"{given['memory']}/{machine}",
        domain=None if is_shared else f"host {machine // given.get('per_domain', 1)}",
        copies=given["copies"],
        records=given.get("records"),
        bytes=1000 if given.get("without") == given["host"] else given.get("bytes"),
    )
    support.compile_once(Path(given["compiled"]))
    watch()
    if given.get("dies") and given["dies"][0] == given["host"]:
        die_in_a_base(given["dies"][1])
    break_replay()
    differ()
    with adacheck.checkpoint_manager(own.root, run.recorder, shadow=shadow) as manager:
        begin_s, before = time.monotonic(), bytes_read()
        abstract = support.abstract(run.state)
        found = manager.handler.recover(manager.directory, abstract)
        tell("took", f"{time.monotonic() - begin_s:.2f}")
        tell("read", bytes_read() - before)
        step = 0
        for each in reasons:
            if "not recovered" in each:
                tell("refused", each)
            elif "changed since" in each:
                tell("changed", each)
        if found is not None:
            step, run.state = found
            tell("recovered", step, digest(run.state))
        elif (newest := manager.latest_step()) is not None:
            step, run.state = newest, manager.restore(newest, args=adacheck.RestoreArgs(abstract))
            tell("restored", step, digest(run.state))
        run.count = step
        choose = random.Random(given["seed"])  # the same in all processes
        while step < given["last"]:
            step += 1
            run.advance()
            tell("state", step, digest(run.state))
            if (step, given["host"]) == (5, given.get("spoiled")):
                spoil(manager)
            if choose.random() < given["recorded"] and manager.handler.record_step(run.state, step):
                continue
            manager.save(step, args=adacheck.SaveArgs(run.state))
            if choose.random() < 0.3:
                manager.wait_until_finished()
        manager.wait_until_finished()
        tell("over")


main()
