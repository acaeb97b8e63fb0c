"""Kills a training run at random moments, hundreds of times, and looks at what is left.

    python -m tests.campaigns.crashes --kills 500

trains a tiny model that saves every step through a stock ``CheckpointManager``, with retention and
lineages so short that bases, deltas, links and deletions happen all the time, and sends SIGKILL.
The next process compares every step that is listed with a run that was never interrupted, resumes,
and is killed in its turn. ``--processes 2`` does the same to two processes that save together,
killing one first, or both at once. ``--record`` records most steps and saves the others; then those
that are listed after a kill, and those in them, are all restored.

A process takes seconds to import JAX, so each is forked from one that has imported it and done
nothing else: what it knows of the run it has from disk. ``--store gcs`` (or ``s3``) saves into an
object store on this machine instead, a process of its own that nobody kills. ``--background`` has
bases made in the background, of saved deltas.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format import manifest as manifests
from adacheck_jax.schedule import line as lines
from adacheck_jax.schedule.line import MaxDeltas
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.steps import lookup, manifest_file, roots
from adacheck_jax.store.storage.location import at, located
from adacheck_jax.tools import repair as of_repair
from benchmarks.common import free_port
from tests import object_stores
from tests.campaigns import command
from tests.support import compile_once

WIDTH = 64
DEVICES = 8
KEPT_STEPS, MAX_DELTAS, MAX_RECORDING_DELTAS = 3, 3, 15
REFERENCE_STEPS = 300
"""Length of a run; then the next one begins in a new root."""
PAUSES_S = (0.02, 0.1, 0.5)
STEPS = (0, 1, 1, 2, 3, 5, 8)
"""A kill comes within one of these after a save has begun."""
REPAIRS_EVERY = 5
START_S = 120.0
"""Time that a process has to begin to train."""


class Run:
    """A training run whose every state is a function of its number of steps.

    Args:
        delta: as for the handler.
        records: whether steps are recorded; then it has one device.

    Attributes:
        max_deltas: as for the handler, where no steps are recorded.
        kept_steps: steps that the manager keeps.
    """

    max_deltas: MaxDeltas = MAX_DELTAS
    kept_steps = KEPT_STEPS

    def __init__(self, delta: str = "auto", *, records: bool = False) -> None:
        self._delta: Any = delta
        self.records = records
        self.handler = adacheck.AdaCheckHandler()
        self._recorder = adacheck.Recorder(optax.adamw(1e-2))
        self._chain = optax.chain(optax.clip_by_global_norm(1.0), self._recorder)
        shape = (1, 1) if records else (jax.device_count() // 2, 2)
        self._mesh = jax.make_mesh(
            shape,
            ("data", "model"),
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
            devices=jax.devices()[: shape[0] * shape[1]],
        )
        abstract = jax.eval_shape(self._initial)
        self.abstract = jax.tree.map(self._placed, abstract)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        self.new_state = jax.jit(self._initial, out_shardings=shardings)
        self._step = jax.jit(self._train_step, donate_argnums=0, out_shardings=shardings)

    def _placed(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = jax.P("data", "model") if leaf.ndim == 2 else jax.P()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(self._mesh, spec)
        )

    def _initial(self) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(3), 3)
        params = {
            "in": jax.random.normal(keys[0], (WIDTH, 2 * WIDTH)) * 0.2,
            "bias": jnp.zeros(2 * WIDTH),
            "out": jax.random.normal(keys[1], (2 * WIDTH, WIDTH)) * 0.2,
        }
        return {
            "params": params,
            "opt_state": self._chain.init(params),
            "frozen": jax.random.normal(keys[2], (2 * WIDTH, 2 * WIDTH)),  # bases keep its files
            "step": jnp.int32(0),
        }

    def _train_step(self, state: dict[str, Any], data: jax.Array) -> dict[str, Any]:
        def loss(params: Any) -> jax.Array:
            hidden = jnp.tanh(data @ params["in"] + params["bias"]) @ state["frozen"]
            return jnp.mean((jnp.tanh(hidden) @ params["out"] - data) ** 2)

        params = state["params"]
        updates, opt_state = self._chain.update(jax.grad(loss)(params), state["opt_state"], params)
        return state | {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }

    def advance(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        """The state after one more step, whose number is given."""
        data = np.random.default_rng(step).standard_normal((16, WIDTH)).astype(np.float32)
        return self._step(state, data)

    def open_manager(self, root: Path | str, **options: Any) -> ocp.CheckpointManager:
        """A stock manager of a new handler, as a new process would have it."""
        given = ocp.CheckpointManagerOptions(max_to_keep=self.kept_steps, **options)
        of_handler: Any = {
            "max_deltas": MAX_RECORDING_DELTAS if self.records else self.max_deltas,
            "delta": self._delta,
            "shadow": adacheck.Shadow(background_bases=not isinstance(self.max_deltas, int)),
        }
        if "://" in str(root):
            made = adacheck.checkpoint_manager(root, self._recorder, options=given, **of_handler)
            self.handler = made.handler
            return made
        self.handler = adacheck.AdaCheckHandler(self._recorder, **of_handler)
        return ocp.CheckpointManager(epath.Path(root), item_handlers=self.handler, options=given)

    def steps_in(self, root: Path | str, saved: int) -> list[int]:
        """The steps that lie in that of a save, itself included."""
        if self.records:
            with contextlib.suppress(adacheck.AdaCheckError):  # a restore will tell of it
                found = manifest_file.read(located(str(root)) / str(saved) / "default")
                if isinstance(found, manifests.DeltaManifest):
                    return [delta.step for delta in found.deltas]
        return [saved]

    def restore(
        self, manager: ocp.CheckpointManager, saved: int, step: int | None = None
    ) -> dict[str, Any]:
        """A step's state, or that of one that was recorded before it."""
        return manager.restore(saved, args=adacheck.RestoreArgs(self.abstract, step=step))


def digest(state: Any) -> str:
    """A digest of all bits of a state that this process holds, equal for equal states."""
    found = hashlib.sha256()
    for path, leaf in trees.flatten(state)[0].items():
        found.update(path.encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


# What a process of the run does. It tells how it gets on by one line a step:
#   checked STEPS DAMAGED KIND  every step in those listed, restored and compared; those that
#                           cannot be read; what the newest is
#   wrong STEP              it was restored, with other bits than the reference's
#   made STEPS              bases among them that were made in the background
#   began STEP              its save is under way
#   committed STEP          the manager has reported it


def train(
    root: Path | str, reference: Path, seed: int, records: bool, tell: Callable[[str], None]
) -> None:
    """Checks all that is listed, resumes and trains until it is killed or the run is over.

    Args:
        root: of the checkpoints.
        reference: JSON of each step's digest in this process.
        seed: of when it waits for a save.
        records: whether it records steps.
        tell: takes lines for the one who kills.
    """
    digests = json.loads(reference.read_text())[str(jax.process_index())]
    rng = random.Random(seed)
    run = Run(records=records)
    with run.open_manager(root) as manager:
        listed, damaged, state = sorted(manager.all_steps()), [], None
        steps = [(saved, step) for saved in listed for step in run.steps_in(root, saved)]
        for saved, step in steps:
            try:
                state = run.restore(manager, saved, step if records else None)
            except Exception as error:
                damaged.append(f"{step}:{type(error).__name__}")
                if step == listed[-1]:
                    raise
            else:
                if digest(state) != digests[step]:
                    tell(f"wrong {step}")
        step = listed[-1] if listed else 0
        newest = located(str(root)) / str(step) / "default"
        kind = type(manifest_file.read(newest)).__name__ if step else "nothing"
        numbers = ",".join(str(number) for _, number in steps) or "0"
        tell(f"checked {numbers} {','.join(damaged) or '-'} {kind}")
        tell(f"made {','.join(map(str, made_in_background(root, listed))) or '-'}")
        state = run.new_state() if state is None else state
        while step < len(digests) - 1:
            step += 1
            state = run.advance(state, step)
            if records and run.handler.record_step(state, step) and rng.random() < 0.7:
                continue
            manager.save(step, args=adacheck.SaveArgs(state))
            tell(f"began {step}")
            if rng.random() < 0.5:  # else the next step is computed while this one is written
                manager.wait_until_finished()
                tell(f"committed {step}")
        manager.wait_until_finished()
        steps = sorted(manager.all_steps())
    place = located(str(root))
    newest = [lookup.resolve(place / str(x) / "default") for x in steps[-run.kept_steps :]]
    needed = {step for lineage in newest for step in lineage.steps}
    tell(f"left {','.join(str(x) for x in steps if x not in needed) or '-'}")
    tell("over")


def repair(root: Path | str, tell: Callable[[str], None]) -> None:
    """Repairs what a kill has left, and tells what belongs to no step."""
    top = at(located(str(root)))
    if top.folders():
        of_repair.repair(top, force=True)
        steps = {str(each.step) for each in roots.steps_of(top) if each.error is None}
        left = {each.below(top).partition("/")[0] for each in top.list()} - steps
        tell(f"left {','.join(sorted(left)) or '-'}")


def made_in_background(root: Path | str, listed: Sequence[int]) -> list[int]:
    """The steps that became bases after they had been saved as deltas."""
    made = []
    for step in listed:
        with contextlib.suppress(adacheck.AdaCheckError):  # a restore has told of it
            found = manifest_file.read(located(str(root)) / str(step) / "default")
            if isinstance(found, manifests.BaseManifest) and found.replaces is not None:
                made.append(step)
    return made


def write_reference(path: Path, process_count: int, records: bool) -> None:
    """Trains without saving anything, and writes every step's digest, as each process has it."""
    run = Run(records=records)
    state, digests = run.new_state(), [""]
    for step in range(1, REFERENCE_STEPS + 1):
        state = run.advance(state, step)
        digests.append(digest(state))
    part = path.with_name(f"{path.name}.{jax.process_index()}")
    part.write_text(json.dumps(digests))
    multihost_barrier(process_count)
    if jax.process_index() == 0:
        parts = [
            json.loads(path.with_name(f"{path.name}.{i}").read_text()) for i in range(process_count)
        ]
        path.write_text(json.dumps(dict(enumerate(parts))))


def multihost_barrier(process_count: int) -> None:
    """Waits for all processes."""
    if process_count > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("crashes")


@dataclass
class Child:
    """A process that was forked, and what it tells.

    Attributes:
        pid: of the process.
        pipe: its lines.
        lines: those that were read.
    """

    pid: int
    pipe: int
    rest: bytes = b""
    lines: list[str] = field(default_factory=list)
    is_over: bool = False

    def read(self, timeout_s: float) -> bool:
        """Reads what it tells within some time; whether it is still there."""
        ready, _, _ = select.select([self.pipe], [], [], max(timeout_s, 0.0))
        if ready:
            data = os.read(self.pipe, 1 << 16)
            self.is_over = not data
            *whole, self.rest = (self.rest + data).split(b"\n")
            self.lines += [line.decode() for line in whole]
        return not self.is_over

    def end(self, kill: bool) -> int:
        """Kills it, or waits; returns its status."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        while self.read(1.0):
            pass
        os.close(self.pipe)
        return os.waitpid(self.pid, 0)[1]


def fork(task: Callable[[Callable[[str], None]], None], log: Path) -> Child:
    """Runs a task in a process of its own, which has what this one has imported."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Child(pid, ours)
    code = 1
    try:
        os.close(ours)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

        def tell(line: str) -> None:
            os.write(theirs, f"{line}\n".encode())

        task(tell)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def forked(
    task: Callable[[Callable[[str], None]], None], process_count: int, directory: Path
) -> list[Child]:
    """As many processes as are wanted, which together have all devices."""
    port = free_port()

    def begin(index: int, tell: Callable[[str], None]) -> None:
        compile_once(directory / "compiled")
        jax.config.update("jax_num_cpu_devices", DEVICES // process_count)
        if process_count > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(f"127.0.0.1:{port}", process_count, index)
        task(tell)

    return [
        fork(lambda tell, i=i: begin(i, tell), directory / f"log.{i}") for i in range(process_count)
    ]


@dataclass
class Tally:
    """What was found.

    Attributes:
        kills: SIGKILLs sent.
        moments: what was on disk at a kill.
        checked: restores that were compared.
        committed: steps that the manager reported.
        lost: committed steps that were not listed afterwards, though no retention deletes them.
        wrong: restored steps with other bits than the reference's.
        crashed: processes that ended by another signal, or did not begin in time.
        half_deleted: listed steps that retention was deleting at a kill, and that are refused.
        made: bases that were made in the background, each as its root and its step.
        left: what belongs to no step after a repair, or is needed by none that is kept.
        repairs: looks at what is left.
        failures: anything else.
    """

    kills: int = 0
    moments: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    checked: int = 0
    committed: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    half_deleted: int = 0
    made: set[tuple[str, str]] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    repairs: int = 0
    failures: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """All that must not be."""
        return [*self.lost, *self.wrong, *self.crashed, *self.left, *self.failures]


class Killer:
    """Kills one line of processes after the other.

    Args:
        directory: to work in.
        process_count: processes that save together.
        seed: of the moments.
        records: whether they record steps.
        bucket: URL to save under; None for the directory.
    """

    def __init__(
        self, directory: Path, process_count: int, seed: int, records: bool, bucket: str | None
    ) -> None:
        self._directory, self._count, self._records = directory, process_count, records
        self._rng = random.Random(seed)
        self._reference = directory / "reference.json"
        self._top = bucket or str(directory)
        self._root, self._newest = f"{self._top}/root-0", 0
        self.tally = Tally()

    def prepare(self) -> None:
        """Makes the reference."""
        self._directory.mkdir(parents=True, exist_ok=True)
        children = forked(
            lambda _: write_reference(self._reference, self._count, self._records),
            self._count,
            self._directory,
        )
        for child in children:
            if child.end(kill=False):
                raise RuntimeError(f"no reference; see {self._directory}/log.0")

    def kill_once(self) -> None:
        """Starts the processes, and kills one or all of them somewhen."""
        seed, tally = self._rng.random(), self.tally
        children = forked(
            lambda tell: train(self._root, self._reference, int(seed * 1e9), self._records, tell),
            self._count,
            self._directory,
        )
        first = children[0]
        deadline_s = time.monotonic() + START_S
        steps = self._rng.choice(STEPS)
        while all(child.read(0.02) for child in children) and time.monotonic() < deadline_s:
            if sum("began" in line for line in first.lines) >= steps and first.lines:
                break
        if not first.lines:
            tally.crashed.append(f"{self._root}: did not begin; see {self._directory}/log.0")
        stop_s = time.monotonic() + self._rng.choice(PAUSES_S) * self._rng.random()
        while (left_s := stop_s - time.monotonic()) > 0 and children[0].read(left_s):
            pass
        victims = [*children]
        if self._count > 1 and self._rng.random() < 0.5:
            victims = [self._rng.choice(children)]
            os.kill(victims[0].pid, signal.SIGKILL)
            time.sleep(self._rng.random() * 0.5)  # the others go on, and wait for it
        self._note_moment()
        tally.kills += 1
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        statuses = [child.end(kill=False) for child in children]
        self._judge(children, statuses)

    def _note_moment(self) -> None:
        if "://" in self._root:  # a process that uses tensorstore cannot be forked
            return
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        saving = any(roots.TMP_SUFFIX in name for name in names)
        steps = [name for name in names if name.isdecimal()]
        moment = (
            "deleting" if len(steps) > Run.kept_steps else "saving" if saving else "between saves"
        )
        if any(".compaction" in name for name in names):
            moment = "making a base"
        self.tally.moments[moment] += 1

    def _judge(self, children: list[Child], statuses: list[int]) -> None:
        tally = self.tally
        for index, child in enumerate(children):
            for line in child.lines:
                word, *values = line.split()
                if word == "wrong":
                    tally.wrong.append(f"{self._root}: step {values[0]}")
                elif word == "checked" and index == 0:
                    self._judge_start(*values)
                elif word == "left" and index == 0:
                    self._judge_left(values[0])
                elif word == "made" and index == 0 and values[0] != "-":
                    tally.made |= {(self._root, step) for step in values[0].split(",")}
                elif word == "committed" and index == 0:
                    tally.committed += 1
                    self._newest = max(self._newest, int(values[0]))
        if self._count == 1:  # of several, those that are left may end as they like
            where = f"{self._root}: see {self._directory}/log.0"
            if os.WIFSIGNALED(statuses[0]) and os.WTERMSIG(statuses[0]) != signal.SIGKILL:
                tally.crashed.append(f"{where}: signal {os.WTERMSIG(statuses[0])}")
            if os.WIFEXITED(statuses[0]) and os.WEXITSTATUS(statuses[0]):
                tally.failures.append(f"{where}: a process failed")
        if any("over" in child.lines for child in children):
            tally.runs += 1
            shutil.rmtree(self._root, ignore_errors="://" in self._root)
            self._root, self._newest = f"{self._top}/root-{tally.runs}", 0

    def repair(self) -> None:
        """Has what the last kill left repaired, and looked at."""
        root = self._root
        (child,) = forked(lambda tell: repair(root, tell), 1, self._directory)
        if child.end(kill=False):
            self.tally.failures.append(f"{root}: no repair; see {self._directory}/log.0")
        for line in child.lines:
            self._judge_left(line.split()[1])

    def _judge_left(self, names: str) -> None:
        self.tally.repairs += 1
        if names != "-":
            self.tally.left.append(f"{self._root}: {names} left")

    def _judge_start(self, listed: str, damaged: str, kind: str) -> None:
        steps = {int(step) for step in listed.split(",")}
        newest = max(steps)
        kept = range(max(1, newest - Run.kept_steps + 1), newest + 1)
        for step in range(max(1, self._newest - Run.kept_steps + 1), self._newest + 1):
            if step > newest - Run.kept_steps and step not in steps:
                self.tally.lost.append(f"{self._root}: step {step} of {listed}")
        self.tally.checked += len(steps - {0})
        for each in damaged.split(",") if damaged != "-" else []:
            step = int(each.split(":")[0])
            if step in kept:
                self.tally.lost.append(f"{self._root}: {each} of {listed}")
            self.tally.half_deleted += 1
            self.tally.checked -= 1
        self.tally.kinds[kind] += 1


def table(tally: Tally, process_count: int) -> str:
    """What was found."""
    moments = ", ".join(f"{count} {name}" for name, count in sorted(tally.moments.items()))
    rows = [
        ("processes that save together", process_count),
        ("SIGKILLs", tally.kills),
        ("at the kill", moments),
        ("newest step after a kill", ", ".join(f"{n} {kind}" for kind, n in tally.kinds.items())),
        ("steps that the manager reported as saved", tally.committed),
        ("restores compared with the reference", tally.checked),
        ("bases made in the background", len(tally.made)),
        ("committed steps lost", len(tally.lost)),
        ("restored steps with wrong bits", len(tally.wrong)),
        ("half-deleted old steps, refused", tally.half_deleted),
        ("looks at what repairs and retention leave", tally.repairs),
        ("steps and files that were left", len(tally.left)),
        ("crashed or hanging processes", len(tally.crashed)),
        ("other failures", len(tally.failures)),
        ("whole runs of " + str(REFERENCE_STEPS) + " steps", tally.runs),
    ]
    return command.table(("what", "number"), rows)


def main() -> int:
    """Reads the command line, kills, and prints a table."""
    shared = {"seed": 0, "minutes": math.inf, "directory": None, "json": False, "store": None}
    parser = command.parser(__doc__, **shared)
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs (default 500)")
    parser.add_argument("--processes", type=int, default=1, help="that save together (default 1)")
    parser.add_argument("--record", action="store_true", help="record most steps")
    parser.add_argument("--background", action="store_true", help="make bases in the background")
    args = parser.parse_args()
    problems: list[str] = []
    if args.record and args.processes > 1:
        parser.error("--record: expected one process")
    with contextlib.ExitStack() as stack:
        if args.background:  # processes are forked from this one
            policy = adacheck.AdaptivePolicy(most_deltas=MAX_DELTAS)
            stack.enter_context(mock.patch.object(Run, "max_deltas", policy))
            stack.enter_context(mock.patch.object(Run, "kept_steps", 2 * KEPT_STEPS))
            stack.enter_context(mock.patch.object(lines, "BEGINNING", Schedule(MAX_DELTAS, 1)))
            longer = {"PAUSES_S": (0.1, 1.0, 3.0), "STEPS": (0, 3, 5, 8, 13, 21)}
            stack.enter_context(mock.patch.dict(globals(), longer))
        served = stack.enter_context(object_stores.served(args.store)) if args.store else None
        directory = stack.enter_context(command.workplace(args.directory, problems))
        killer = Killer(directory, args.processes, args.seed, args.record, served)
        killer.prepare()
        for _ in command.trials(args.kills, args.minutes):
            killer.kill_once()
            if args.store and killer.tally.kills % REPAIRS_EVERY == 0:
                killer.repair()
        problems += killer.tally.problems()
    tally = killer.tally
    found = {"processes": args.processes, "seed": args.seed, "store": args.store, **vars(tally)}
    text = "" if args.json else table(tally, args.processes)
    return command.finish({**found, "made": len(tally.made)}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
