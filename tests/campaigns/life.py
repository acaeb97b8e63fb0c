"""One process of a run that is saved, harmed, killed and started again; :mod:`.machine` starts it.

Usage: life.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES HEARTBEAT

MODE is JSON with the options that are read below as ``given``. The process recovers or restores,
trains until it is killed or has all steps, and appends to OUT-HOST a line for each of:

    found STEP DIGEST, damaged STEP ERROR             each step that storage has at the beginning
    took SECONDS, refused REASON, read BYTES          how recovery went; what storage gave
    recovered STEP DIGEST, restored STEP DIGEST       where it begins
    state STEP DIGEST                                 a state, before it is recorded or saved
    recorded STEP, saving STEP, committed STEP        what the library was told, and told
    failed STEP ERRORS TEXT, disarmed HITS            a save that raised; the end of a fault
    unsaved STEP ERROR                                an edit that was found too late
    deleted STEP, looked STEP DIGEST                  acts of the loop
    stored STEP, passed STEP, lifted                  what lies in this host's file, when it does
    said MESSAGE                                      what the library logs
    sent                                              that copies are sent, at each step
    damage NUMBER KIND PLACE, outcome NUMBER STEP OUTCOME WHY
    over                                              all is done
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multihost

import adacheck_jax as adacheck
from adacheck_jax.adapter.recovery import _Reader
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.sending import Sender
from adacheck_jax.errors import ReplayError
from adacheck_jax.memory import shadow as host_shadow
from adacheck_jax.memory.files import record_log
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.step_file import StepFile
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.save import commit, share
from adacheck_jax.schedule import line as lines
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store import sharing
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.update.elements import host_fold
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support
from tests.campaigns import shim
from tests.campaigns.damage import Patient
from tests.save.loop import holders

given = json.loads(own.mode)
rng = random.Random(given["seed"] * 100 + given["host"])
choose = random.Random(given["seed"])  # the same in all processes
log = Path(f"{own.out}-{given['host']}").open("a", buffering=1)  # noqa: SIM115
COUNT = jax.device_count()
AXES = {"replicated": (COUNT, 1), "halves": (-(-COUNT // 2), min(2, COUNT)), "cut": (1, COUNT)}
WIDTH = 64
ABOUT = {"run": "of the machine", "rate": 0.125}
"""Metadata of each step."""


def tell(*words: object) -> None:
    """Appends a line."""
    log.write(" ".join(" ".join(map(str, words)).split()) + "\n")


def chance(name: str) -> bool:
    """True as often as the option says; equal in all processes."""
    return choose.random() < given.get(name, 0.0)


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
    lift, note, fill, send = StepFile.lift, Journal.note, record_log.fill, Sender.send

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

    def filled(*arguments: Any) -> None:
        fill(*arguments)
        time.sleep(given["chunk_s"])

    def sent(self: Sender, rows: Any) -> Any:
        tell("sent")
        return send(self, rows)

    host_fold.CHUNK_ELEMENTS = given.get("chunk_elements", host_fold.CHUNK_ELEMENTS)
    Journal.begin, RecordLog.begin = begun(Journal.begin), begun(RecordLog.begin)
    StepFile.lift, Journal.note, record_log.fill, Sender.send = lifted, noted, filled, sent


def die_in_a_base(after: int) -> None:
    """Lets this process kill itself after it took part in so many exchanges of bases."""
    share_, met = sharing.share, itertools.count(1)

    def shared(offers: Any, agree: Any) -> Any:
        def agreed(*args: Any) -> Any:
            answer = agree(*args)
            if next(met) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return share_(offers, agreed)

    sharing.share = shared


def die_in_a_save(phase: str, victim: int) -> None:
    """Puts the kill of a process into the save that begins next."""
    pids, mark, is_victim = (
        Path(f"{own.out}.pids"),
        Path(f"{own.out}.killed"),
        own.process == victim,
    )

    def die() -> None:
        with mark.open("x") as file:
            file.write(str(time.time()))
        os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

    def until_killed() -> None:
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.2)

    def patch(owner: Any, name: str, act: Callable[[], None], *, after: bool = False) -> None:
        inner = getattr(owner, name)

        def acted(*args: Any, **options: Any) -> Any:
            if not after:
                act()
            result = inner(*args, **options)
            if after:
                act()
            return result

        setattr(owner, name, acted)

    if phase == "before" and is_victim:
        patch(share, "write", die)
    if phase == "written" and is_victim:
        patch(Exchange, "agree", die)
    if phase == "waiting" and is_victim:
        patch(Exchange, "_heard", die)
    if phase == "waiting" and not is_victim:
        patch(share, "write", until_killed)
    if phase == "commit":  # by process 0
        patch(manifest_file, "write", die)
    if phase == "committed":
        patch(commit, "commit", die, after=True)


def program() -> support.Program:
    """A small model, its leaves cut along the second axis of the mesh, or along both."""
    mesh = support.mesh_of(AXES[given["layout"]])
    adafactor = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    optimizers = {"adamw": optax.adamw(1e-2), "adafactor": adafactor}
    recorder, chain = support.recorded(optimizers[given.get("optimizer", "adamw")])
    rows = mesh.axis_names[0] if given.get("both_axes") else None
    cut = NamedSharding(mesh, PartitionSpec(rows, mesh.axis_names[1]))
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

    shardings = jax.tree.map(lambda x: cut if x.ndim == 2 else whole, jax.eval_shape(begin))
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
    """Digest of a whole state: paths, data types and bits; collective."""
    leaves = trees.flatten(state)[0]
    raw = {path: transfer.raw(leaf) for path, leaf in leaves.items()}
    whole = multihost_utils.process_allgather(raw, tiled=True)
    found = hashlib.sha256()
    for path in sorted(whole):
        found.update(f"{path} {leaves[path].dtype} {whole[path].shape}".encode())
        found.update(whole[path].tobytes())
    return found.hexdigest()[:16]


def in_all(steps: list[int]) -> list[int]:
    """The steps that all processes name; collective."""
    if own.processes == 1:
        return steps
    assert len(steps) <= 512, "more steps than are told"
    padded = np.array([*steps, *[-1] * 512][:512])
    every = multihost_utils.process_allgather(padded)
    return sorted(set.intersection(*({*map(int, row)} for row in every)) - {-1})


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


class Fault:
    """What is done to storage, at one save of this life or for some seconds.

    Args:
        kind: ``once`` (an operation fails with EIO), ``full`` (one and all after it, ENOSPC),
            ``exit`` (the process ends there), ``log`` (all are written down), ``hangs`` or
            ``refuses`` (for some seconds), ``bytes``, ``inodes`` or ``read-only`` (of a tmpfs).
        at: number of the operation, or what is left free.
        seconds: length of an outage.
    """

    def __init__(self, kind: str, at: int, seconds: float = 0.0) -> None:
        self.kind, self._at, self._seconds = kind, at, seconds
        self._root = Path(own.root)
        self._ballast = self._root.parent / "ballast"

    def arm(self) -> None:
        """Begins it."""
        if self.kind in ("hangs", "refuses"):
            threading.Thread(target=self._outage).start()
        elif self.kind in shim.MODES:
            self._shim = shim.Disk()
            self._shim.arm(self._root, Path(f"{own.out}.calls"), self.kind, self._at)
        elif self.kind == "read-only":
            self._remount("ro")
        else:
            self._ballast.mkdir()
            found = os.statvfs(self._root)
            if self.kind == "bytes":
                size = found.f_bavail * found.f_bsize - self._at
                with (self._ballast / "0").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            else:
                for number in range(found.f_favail - self._at):
                    (self._ballast / str(number)).touch()

    def disarm(self) -> None:
        """Ends it, and tells what it met."""
        hits = 1
        if self.kind in shim.MODES:
            hits, operations = self._shim.hits, self._shim.disarm()
            hits = operations if self.kind == "log" else hits
        elif self.kind == "read-only":
            self._remount("rw")
        else:
            shutil.rmtree(self._ballast)
        tell("disarmed", self.kind, hits)

    def _outage(self) -> None:
        time.sleep(self._at / 1000)
        disk = shim.Disk()
        disk.arm(self._root, Path(f"{own.out}.calls"), self.kind, 1)
        time.sleep(self._seconds)
        disk.disarm()
        tell("disarmed", self.kind, 1)

    def _remount(self, mode: str) -> None:
        command = ["mount", "-o", f"remount,{mode}", str(self._root.parent)]
        subprocess.run(command, check=True)


def edited(state: Any) -> Any:
    """The state with a few elements of a leaf overwritten by hand."""
    name = choose.choice([*state["params"]])
    leaf = state["params"][name]
    first = choose.randrange(leaf.size - 3)
    new = leaf.ravel().at[first : first + choose.randint(1, 3)].add(0.01).reshape(leaf.shape)
    return {**state, "params": {**state["params"], name: jax.device_put(new, leaf.sharding)}}


class Life:
    """A training run from a beginning to its end."""

    def __init__(self) -> None:
        self.run, self.reasons = program().run(), list[str]()
        handler = logging.Handler()
        handler.emit = self._said
        logging.getLogger("adacheck_jax").addHandler(handler)
        self.abstract = support.abstract(self.run.state)
        self.target = adacheck.RestoreArgs(self.abstract)
        self.manager = self._opened()

    def _said(self, record: logging.LogRecord) -> None:
        self.reasons.append(record.getMessage())
        tell("said", self.reasons[-1])

    def _opened(self) -> Any:
        options: dict[str, Any] = {"shadow": self._shadow(), **given.get("handler", {})}
        if given.get("background"):  # bases are made of saved deltas, soon
            lines.BEGINNING = Schedule(3, 1)
            options["max_deltas"] = adacheck.AdaptivePolicy(most_deltas=3)
        chosen = ocp.CheckpointManagerOptions(max_to_keep=given.get("kept"))
        if given.get("barrier"):
            wait = adacheck.wait_for_processes
            chosen.async_options = ocp.AsyncOptions(barrier_sync_fn=wait)
        if given.get("stock") and "://" not in own.root:
            self.handler = adacheck.AdaCheckHandler(self.run.recorder, **options)
            place = epath.Path(own.root)
            return ocp.CheckpointManager(place, item_handlers=self.handler, options=chosen)
        if "kept" in given:
            options["options"] = chosen
        manager = adacheck.checkpoint_manager(own.root, self.run.recorder, **options)
        self.handler = manager.handler
        return manager

    def _shadow(self) -> adacheck.Shadow:
        if given.get("memory") is None:
            return adacheck.Shadow(background_bases=bool(given.get("background")))
        is_shared, machine = given.get("shared", False), given.get("machine", given["host"])
        return adacheck.Shadow(
            directory=given["memory"] if is_shared else f"{given['memory']}/{machine}",
            domain=None if is_shared else f"host {machine // given.get('per_domain', 1)}",
            copies=given["copies"],
            records=given.get("records"),
            bytes=1000 if given.get("without") == given["host"] else given.get("bytes"),
        )

    def begin(self) -> int:
        """Finds the state to go on from; its step."""
        if "inside" in given:
            self._restore_all()
        begin_s, before, found = time.monotonic(), bytes_read(), None
        if given.get("memory") is not None:
            found = self.handler.recover(self.manager.directory, self.abstract)
        tell("took", f"{time.monotonic() - begin_s:.2f}")
        tell("read", bytes_read() - before)
        for each in self.reasons:
            if "not recovered" in each:
                tell("refused", each)
            elif "changed since" in each:
                tell("changed", each)
        step = 0
        if found is not None:
            step, self.run.state = found
            tell("recovered", step, digest(self.run.state))
        elif (newest := self.manager.latest_step()) is not None:
            step, self.run.state = newest, self.manager.restore(newest, args=self.target)
            tell("restored", step, digest(self.run.state))
        self.run.count = step
        return step

    def _restore_all(self) -> None:
        """Restores each listed step, and what was recorded before it."""
        inside = given["inside"]
        if given.get("goes_on"):  # a manager records what it keeps while storage is away
            where = holders(own.root)
            inside = {
                str(n): sorted(x for x in where if where[x] == n != x) for n in where.values()
            }
        for saved in in_all(sorted(self.manager.all_steps())):
            for step in (*inside.get(str(saved), ()), saved):
                args = (
                    self.target if step == saved else adacheck.RestoreArgs(self.abstract, step=step)
                )
                state, why = None, "another process cannot restore it"
                try:
                    state = self.manager.restore(saved, args=args)
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                if in_all([step] if state is not None else []):
                    tell("found", step, digest(state))
                else:
                    tell("damaged", step, why)

    def train(self, step: int) -> None:
        """Trains, records and saves."""
        last = min(given["last"], step + given.get("steps", 10**6))
        fault = Fault(**given["fault"]) if given.get("fault") else None
        armed_at = step + given.get("fault_at", 0)
        while step < last:
            begin_s = time.monotonic()
            step += 1
            self.run.advance()
            if chance("edited"):
                self.run.state = edited(self.run.state)
            tell("state", step, digest(self.run.state))
            if (step, given["host"]) == (5, given.get("spoiled")):
                spoil(self.manager)
            if not (fault or given.get("dies_in")):
                with self.telling(step):
                    self._go_on(step)
                time.sleep(max(begin_s + given.get("pace_s", 0.0) - time.monotonic(), 0))
                continue
            if given.get("dies_in") and step == last:
                jax.block_until_ready(self.run.state)
                die_in_a_save(*given["dies_in"])
            if fault and step == armed_at:
                self.manager.wait_until_finished()
                fault.arm()
            self._save(step, step in range(armed_at, armed_at + given.get("span", 1)))
            if fault and step == armed_at + given.get("span", 1) - 1 and not given.get("goes_on"):
                fault.disarm()
            time.sleep(max(begin_s + given.get("pace_s", 0.0) - time.monotonic(), 0))

    @contextlib.contextmanager
    def telling(self, step: int) -> Iterator[None]:
        """Goes on where an edit was found too late to be stored: its step is not saved."""
        try:
            yield
        except ReplayError as error:
            if not given.get("edited"):
                raise
            tell("unsaved", step, error)
            self.manager.reload()

    def _go_on(self, step: int) -> None:
        """Records or saves a step, and does what else a loop may do."""
        if chance("recorded") and self.handler.record_step(self.run.state, step):
            tell("recorded", step)
            return
        tell("saving", step)
        args = adacheck.SaveArgs(self.run.state, custom_metadata=ABOUT)
        self.manager.save(step, args=args)
        if chance("waited"):
            self.manager.wait_until_finished()
            tell("committed", step)
        if chance("deleted"):
            self._delete()
        if chance("looked"):
            self._look()

    def _save(self, step: int, is_harmed: bool) -> None:
        """Saves a step, which may fail: once."""
        # A step with metadata is not kept in memory while storage is away.
        about = None if given.get("goes_on") else ABOUT
        args = adacheck.SaveArgs(self.run.state, custom_metadata=about)
        tell("saving", step)
        errors, begin_s = list[str](), time.monotonic()
        waits = [] if given.get("goes_on") else [self.manager.wait_until_finished] * 2
        for call in (lambda: self.manager.save(step, args=args), *waits):  # an error is raised once
            try:
                if call() is False:
                    errors.append("it was not saved")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        tell("call", f"{time.monotonic() - begin_s:.2f}")
        if errors:
            tell("failed", step, len(errors), int(is_harmed), time.time(), errors[0][:400])
            with contextlib.suppress(Exception):
                self.manager.reload()
        else:
            tell("committed", step)
        if errors and given.get("dies_in"):
            if own.process == 0:  # with which JAX ends the others, that may not have told theirs
                time.sleep(5)
            os._exit(0)  # JAX's own shutdown would wait for the dead

    def _delete(self) -> None:
        self.manager.wait_until_finished()
        if len(steps := sorted(self.manager.all_steps())) > 1:
            step = choose.choice(steps[:-1])
            tell("deleted", step)
            self.manager.delete(step)

    def _look(self) -> None:
        """Restores a step that is there, and goes on from the state of before."""
        self.manager.wait_until_finished()
        step = choose.choice(sorted(self.manager.all_steps()))
        tell("looked", step, digest(self.manager.restore(step, args=self.target)))


@contextlib.contextmanager
def healed(patient: Patient, number: int) -> Iterator[tuple[int, ...]]:
    """Damages a root, and undoes it."""
    damage = patient.damage(random.Random(f"{given['seed']} {number}"))
    tell("damage", number, damage.kind.replace(" ", "-"), damage.place, damage.detail)
    yield damage.steps
    patient.heal()


def examine() -> None:
    """Damages one file after another, and restores each time the steps that may be touched."""
    digests, root = json.loads(Path(given["digests"]).read_text()), Path(own.root)
    abstract = support.abstract(program().run().state)
    steps = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
    patient = Patient(root, steps)

    def judged(saved: int, step: int) -> tuple[str, str]:
        wanted = choose.choice([abstract, None])
        args = adacheck.RestoreArgs(wanted, step=None if step == saved else step)
        try:
            with support.manager_of(root, adacheck.AdaCheckHandler()) as manager:
                state = manager.restore(saved, args=args)
                about: Any = manager.item_metadata(saved)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            names = str(root) in text or any(path in text for path in trees.flatten(abstract)[0])
            is_clear = (
                isinstance(error, adacheck.AdaCheckError) or "incomplete checkpoint at" in text
            )
            return "refused" if is_clear and names else "unclear", text[:500]
        if digest(state) != digests[str(step)]:
            return "wrong", "other bits"
        is_given = str(saved) in given["inside"]  # else it was recorded, and written at the end
        if about.custom_metadata != (ABOUT if is_given else None):
            return "wrong", f"metadata {about.custom_metadata}"
        return "harmless", ""

    for number in range(*given["examines"]):
        with healed(patient, number) as touched:
            for saved in touched:
                step = choose.choice([saved, *given["inside"].get(str(saved), ())])
                tell("outcome", number, step, *judged(saved, step))
    tell("over")


def main() -> None:
    """Recovers, and trains; or examines what damage does."""
    support.compile_once(Path(given["compiled"]))
    multihost._DEFAULT_BARRIER_TIMEOUT = given.get("barrier_s", multihost._DEFAULT_BARRIER_TIMEOUT)
    if "examines" in given:
        examine()
        return
    watch()
    if given.get("dies") and given["dies"][0] == given["host"]:
        die_in_a_base(given["dies"][1])
    break_replay()
    differ()
    if given.get("dies_in"):
        Path(f"{own.out}.pids").mkdir(exist_ok=True)
        (Path(f"{own.out}.pids") / str(own.process)).write_text(str(os.getpid()))
    life = Life()
    with life.manager:
        life.train(life.begin())
        with life.telling(given["last"]):
            life.manager.wait_until_finished()
        tell("over")


main()
