"""What a restore makes of damaged files: refused, harmless, or silently wrong.

    python -m tests.campaigns.corruption --count 2000

Roots of several kinds (replayed deltas, bit-pattern deltas, recorded steps, volumes kept from
earlier bases beside aliases, steps with two items) are damaged one file at a time; then every step
that the damage touches, or of recorded ones any in it, is restored by a new handler and compared
with what was saved, leaf by leaf and bit by bit:

* refused: one of this library's errors, which names a file or a leaf; or Orbax's that the step,
  which it names, is not committed.
* harmless: every leaf has the saved bits, in the saved tree.
* silently wrong: a state was returned, and it is not the one that was saved.
* unclear: any other exception, or one that names neither a file nor a leaf.
* crash, hang: of the process that restores; there is a time limit a restore.

Stock Orbax saves the same states into roots of its own, which are damaged alike; there any
exception counts as refused. ``--store gcs`` (or ``s3``) has all of it in an object store on this
machine, whose values are damaged as files would be.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from tests import object_stores
from tests.campaigns import command
from tests.campaigns.damage import KINDS, Patient

DEVICE_COUNT = 4
SAVES = 4
LIMIT_S = 60.0
OUTCOMES = ("refused", "harmless", "silently wrong", "unclear", "crash", "hang")
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Case:
    """One kind of root.

    Attributes:
        name: for the table.
        max_deltas: after which a base follows.
        delta: as the handler takes it.
        items: of each step; None for the default one.
        still: whether the state has large leaves that never change, and equal ones.
        stock: whether stock Orbax saves it.
        every: steps from one save to the next; those between are recorded.
    """

    name: str
    max_deltas: int = 20
    delta: Any = "auto"
    items: tuple[str, ...] = ()
    still: bool = False
    stock: bool = False
    every: int = 1

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """The steps in a root."""
        return tuple(range(1, 1 + SAVES * self.every, self.every))

    def steps_in(self, saved: int) -> range:
        """The steps that lie in that of a save: it, and those recorded before it."""
        return range(max(1, saved - self.every + 1), saved + 1)

    def saved_with(self, step: int) -> int:
        """The save that a step lies in."""
        return min(saved for saved in self.saved_steps if saved >= step)


CASES = (
    Case("replayed deltas"),
    Case("bit-pattern deltas", delta="bits"),
    Case("recorded steps", every=3),
    Case("kept volumes, aliases", max_deltas=1, still=True),
    Case("two items a step", items=("left", "right")),
    Case("stock Orbax", stock=True),
    Case("stock Orbax, large leaves", still=True, stock=True),
)


def mesh(case: Case) -> jax.sharding.Mesh:
    """Of all devices; of one where steps are recorded, for there AdamW is replayed exactly."""
    length = 1 if case.every > 1 else 2
    devices = jax.devices()[: length**2]
    return jax.make_mesh((length, length), ("data", "model"), devices=devices)


def placed(case: Case, tree: Any) -> Any:
    spec = PartitionSpec("data", "model")

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh(case), spec if getattr(leaf, "ndim", 0) == 2 else PartitionSpec())

    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)


def states(case: Case, *, arrays_only: bool) -> Iterator[tuple[adacheck.Recorder, Any]]:
    """The states of a small run after each of its updates, and the recorder that they hold.

    Args:
        case: the kind of root.
        arrays_only: True for no key and no number, which Orbax cannot save to ``s3://``.
    """
    key, number = ({}, {}) if arrays_only else ({"key": jax.random.key(5)}, {"epoch": 3})
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "layers": [{"kernel": jax.random.normal(k, (32, 64))} for k in keys[:2]],
        "half": jax.random.normal(keys[2], (64, 32)).astype(jnp.bfloat16),
        "bias": jnp.linspace(0.0, 1.0, 64),
    }
    state = {
        "params": params,
        "opt_state": recorder.init(params),
        "mean": jnp.zeros(48),
        "step": jnp.int32(0),
    }
    if case.still:
        state["frozen"] = jax.random.normal(keys[2], (256, 96))
        state["target"] = jax.tree.map(jnp.copy, params)
    state = placed(case, state | key) | number

    def gradients(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.sin(p * 10), params)

    def updated(state: Any, grads: Any) -> Any:
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        more = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state | more | {"mean": state["mean"] + 0.25}

    if case.every > 1:  # two programs: in one these gradients are fused into the update
        gradients_of, update = jax.jit(gradients), jax.jit(updated)

        def train_step(state: Any) -> Any:
            return update(state, gradients_of(state["params"]))
    else:
        train_step = jax.jit(lambda state: updated(state, gradients(state["params"])))

    for _ in range(case.saved_steps[-1]):
        state = train_step(state) | number
        if case.still:
            state["target"] = jax.tree.map(jnp.copy, state["params"])
        yield recorder, state


def manager_of(
    case: Case, root: AnyPath, recorder: adacheck.Recorder | None = None
) -> tuple[ocp.CheckpointManager, Any]:
    """A stock manager, and what handles its items."""
    # A policy that no manager asks keeps nothing, so that a handler saves bases alone.
    keep = adacheck.KeepLineage(preservation_policy.LatestN(100))
    handler = handlers(case, recorder, keep)
    options = ocp.CheckpointManagerOptions(preservation_policy=keep)
    if not at(root).on_file_system:
        mode = ocp.options.AtomicityMode.COMMIT_FILE
        options.atomicity_options = ocp.options.AtomicityOptions(mode=mode)
    place = epath.Path(str(root))
    return ocp.CheckpointManager(place, item_handlers=handler, options=options), handler


def handlers(case: Case, recorder: adacheck.Recorder | None, keep: adacheck.KeepLineage) -> Any:
    if case.stock:
        return ocp.StandardCheckpointHandler()
    new = functools.partial(
        adacheck.AdaCheckHandler,
        recorder,
        max_deltas=case.max_deltas,
        delta=case.delta,
        params_path="params",
        keep_lineage=keep,
    )
    return {item: new() for item in case.items} if case.items else new()


def as_args(case: Case, args: Any) -> Any:
    return ocp.args.Composite(**dict.fromkeys(case.items, args)) if case.items else args


def host(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def kind_of(leaf: Any) -> str:
    """What a leaf is, besides its bits."""
    return f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}"


def build(case: Case, root: AnyPath) -> list[Any]:
    """Saves a run of a kind; returns its states."""
    manager, handler, kept = None, None, []
    in_s3 = str(root).startswith("s3://")
    for step, (recorder, state) in enumerate(states(case, arrays_only=in_s3), start=1):
        if manager is None:
            manager, handler = manager_of(case, root, recorder)
        kept.append(jax.tree.map(lambda x: x, state))
        if step not in case.saved_steps:
            if not handler.record_step(state, step):
                raise RuntimeError(f"{case.name}: step {step} was not recorded")
            continue
        save: Callable[..., Any] = ocp.args.StandardSave if case.stock else adacheck.SaveArgs
        args = save(state, custom_metadata={"run": "of the campaign", "lr": 0.125})
        manager.save(step, args=as_args(case, args))
        manager.wait_until_finished()
    assert manager is not None
    manager.close()
    return kept


class Judge:
    """Restores the steps of a root, and compares them with what was saved.

    Args:
        case: the kind of root.
        root: as :func:`build` made it, or a copy.
        saved: what :func:`build` gave.
    """

    def __init__(self, case: Case, root: AnyPath, saved: Sequence[Any]) -> None:
        self._case, self._root = case, root
        self._saved = dict(enumerate(saved, start=1))
        self._leaves = {
            step: {path: host(leaf) for path, leaf in trees.flatten(state)[0].items()}
            for step, state in self._saved.items()
        }
        self._trees: dict[tuple[int, int], Any] = {}
        self._kinds: dict[tuple[int, int], dict[str, str]] = {}
        for step in self._saved:
            for form in range(3):
                for tree in self._restore(step, form):
                    leaves, self._trees[step, form] = trees.flatten(tree)
                    self._kinds[step, form] = {p: kind_of(leaf) for p, leaf in leaves.items()}
            self._custom = self._custom_metadata(step)

    def _abstract(self, step: int, form: int) -> Any:
        """What is asked for: nothing, the saved shardings, or one device for everything."""
        if form == 0:
            return None
        one = jax.sharding.SingleDeviceSharding(jax.devices()[-1])

        def leaf(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if form == 1 else one)

        return jax.tree.map(leaf, self._saved[step])

    def _manager(self) -> ocp.CheckpointManager:
        return manager_of(self._case, self._root)[0]

    def _restore(self, step: int, form: int) -> list[Any]:
        """The items of a step, as a new handler restores them."""
        wanted = self._abstract(step, form)
        args: Any = ocp.args.StandardRestore(wanted)
        if not self._case.stock:
            args = adacheck.RestoreArgs(wanted, step=None if self._case.every == 1 else step)
        with self._manager() as manager:
            saved = self._case.saved_with(step)
            found = manager.restore(saved, args=as_args(self._case, args))
        return [found[item] for item in self._case.items] or [found]

    def _custom_metadata(self, step: int) -> Any:
        with self._manager() as manager:
            found: Any = manager.item_metadata(self._case.saved_with(step))
        each = [found[item] for item in self._case.items] or [found]
        return [getattr(item, "custom_metadata", None) for item in each]

    def judge(self, step: int, form: int) -> tuple[str, str]:
        """Restores one step; gives the outcome, and what there is to say of it."""
        try:
            found = self._restore(step, form)
        except Exception as error:
            return self._refused(error)
        for tree in found:
            wrong = self._wrong(step, form, tree)
            if wrong:
                return "silently wrong", wrong
        try:
            custom = self._custom_metadata(step)
        except Exception as error:
            return self._refused(error)
        if custom != self._custom and not (self._case.stock and custom == [None]):
            return "silently wrong", f"custom metadata: {custom}"
        return "harmless", ""

    def _refused(self, error: Exception) -> tuple[str, str]:
        text = f"{type(error).__name__}: {error}"[:600]
        if self._case.stock:
            return "refused", text
        names_something = str(self._root) in text or any(path in text for path in self._leaves[1])
        # The manager does not ask a handler about a step that has lost Orbax's own mark.
        is_clear = isinstance(error, adacheck.AdaCheckError) or "incomplete checkpoint at" in text
        return ("refused" if is_clear and names_something else "unclear"), text

    def _wrong(self, step: int, form: int, tree: Any) -> str:
        if jax.tree.structure(tree) != self._trees[step, form]:
            return f"the tree: {jax.tree.structure(tree)}"
        leaves, _ = trees.flatten(tree)
        expected = self._leaves[step]
        if leaves.keys() != expected.keys():
            return f"leaves: {sorted(leaves.keys() ^ expected.keys())}"
        for path, leaf in leaves.items():
            a, b = host(leaf), expected[path]
            if (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes()):
                return f"{path}: {a.dtype}{a.shape}"
            kinds = self._kinds[step, form]
            if kind_of(leaf) != kinds[path]:
                return f"{path}: {kind_of(leaf)} for {kinds[path]}"
        return ""


class Mirror:
    """A local copy of a root in a store, and what was changed in it since.

    Args:
        root: the root.
        copy: local directory for its values.
    """

    def __init__(self, root: Location, copy: Path) -> None:
        self._root, self._copy = root, copy
        self._known = {each.below(root): each.read() for each in root.list()}
        for name, data in self._known.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)

    def push(self) -> None:
        """Does to the root what was done to the copy."""
        files = (path for path in self._copy.rglob("*") if path.is_file())
        now = {path.relative_to(self._copy).as_posix(): path.read_bytes() for path in files}
        for name in self._known.keys() | now.keys():
            if name not in now:
                (self._root / name).delete()
            elif now[name] != self._known.get(name):
                (self._root / name).write(now[name])
        self._known = now
        object_stores.forget_listings()


def work(case: Case, root: Path, url: str, seed: int, numbers: Sequence[int]) -> None:
    """In a child process: does what each number says, and tells of it line by line."""
    place = located(url) if url else root
    saved = build(case, place)
    judge = Judge(case, place, saved)
    mirror = Mirror(at(place), root) if url else None
    for number in numbers:
        rng = random.Random(f"{seed} {case.name} {number}")
        patient = Patient(root, case.saved_steps)
        damage = patient.damage(rng)
        if mirror is not None:
            mirror.push()
        tell({"number": number, **asdict(damage)})
        for saved_step in damage.steps:
            step = rng.choice(case.steps_in(saved_step)) if case.every > 1 else saved_step
            form = rng.randrange(3)
            outcome, detail = judge.judge(step, form)
            tell({"number": number, "step": step, "form": form, "outcome": outcome, "why": detail})
        patient.heal()
        if mirror is not None:
            mirror.push()
    tell({"number": None})


def tell(line: dict[str, Any]) -> None:
    print(f"@{json.dumps(line)}", flush=True)


@dataclass
class Child:
    """A process that restores, from one number on."""

    case: Case
    numbers: list[int]
    seed: int
    root: Path
    log: Any
    bucket: str = ""
    process: Any = None
    heard_s: float = 0.0
    doing: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Begins with the numbers that are left, on a root of its own."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        flags = f"{_DEVICES_FLAG}={DEVICE_COUNT}"
        command = [sys.executable, "-m", "tests.campaigns.corruption", "--work", self.case.name]
        command += ["--root", str(self.root / "root"), "--seed", str(self.seed)]
        command += ["--numbers", ",".join(map(str, self.numbers))]
        if self.bucket:
            command += ["--url", f"{self.bucket}/{uuid.uuid4().hex}"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        self.heard_s, self.doing = time.monotonic(), {}


def watch(child: Child, found: list[dict[str, Any]]) -> None:
    """Runs a child to its end, and starts another where one crashes or hangs."""
    while child.numbers:
        child.start()
        lines = read_lines(child)
        for line in lines:
            if line["number"] is None:
                child.numbers = []
            elif "outcome" in line:
                found.append({"case": child.case.name, **child.doing, **line})
            else:
                child.doing = line
                child.numbers = [n for n in child.numbers if n > line["number"]]
        ended = child.process.poll()
        if child.numbers or ended != 0:
            if not child.doing or ended == 1:  # an exception of the campaign's own
                child.log.seek(0)
                raise SystemExit(f"{child.case.name}: no work was done: {child.log.read()[-2000:]}")
            outcome = "hang" if ended is None else "crash"
            child.process.kill()
            found.append(
                {"case": child.case.name, **child.doing, "outcome": outcome, "why": str(ended)}
            )
        child.process.wait()


def read_lines(child: Child) -> Iterator[dict[str, Any]]:
    """What a child tells, until it ends or is silent for too long."""
    with selectors.DefaultSelector() as selector:
        selector.register(child.process.stdout, selectors.EVENT_READ)
        rest = b""
        while selector.select(LIMIT_S if child.doing else 5 * LIMIT_S):
            data = os.read(child.process.stdout.fileno(), 1 << 16)
            if not data:
                child.process.wait()
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"@"):
                    yield json.loads(line[1:])


def run(
    count: int, stock_count: int, seed: int, root: Path, cases: Sequence[Case], bucket: str = ""
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    shares = []
    for total, is_stock in ((count, False), (stock_count, True)):
        group = [case for case in cases if case.stock == is_stock]
        shares += [(case, total // len(group)) for case in group if total]
    started_s = time.monotonic()
    with open(root / "log", "w+") as log:
        for case, share in shares:
            place = root / str(CASES.index(case))
            child = Child(case, list(range(share)), seed, place, log, bucket)
            watch(child, found)
            print(f"{case.name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    return {"seed": seed, "seconds": round(time.monotonic() - started_s), "restores": found}


def table(restores: Sequence[dict[str, Any]], key: str, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        counts = collections.Counter(r["outcome"] for r in restores if r[key] == name)
        rows.append([name, f"{counts.total():,}", *(f"{counts[o]:,}" for o in OUTCOMES)])
    return command.table([key, "restores", *OUTCOMES], rows)


def main() -> int:
    """Reads the command line, and prints what was found."""
    parser = command.parser(__doc__, count=2000, seed=0, json=False, store=None)
    parser.add_argument("--stock-count", type=int, help="to stock Orbax's; as many by default")
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], metavar="NAME")
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        case = next(case for case in CASES if case.name == arguments.work)
        numbers = list(map(int, arguments.numbers.split(",")))
        work(case, arguments.root, arguments.url, arguments.seed, numbers)
        return 0
    stock_count = arguments.count if arguments.stock_count is None else arguments.stock_count
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        cases = [c for c in CASES if c.name in (arguments.cases or [c.name for c in CASES])]
        kind = arguments.store
        bucket = stack.enter_context(object_stores.served(kind)) if kind else ""
        result = run(arguments.count, stock_count, arguments.seed, Path(root), cases, bucket)
    restores = result["restores"]
    stock = {case.name for case in CASES if case.stock}
    ours = [each for each in restores if each["case"] not in stock]
    theirs = [each for each in restores if each["case"] in stock]
    tables = [table(restores, "case", [c.name for c in CASES])]
    tables += ["adacheck_jax", table(ours, "kind", list(KINDS))]
    tables += ["stock Orbax", table(theirs, "kind", list(KINDS))]
    bad = [each for each in ours if each["outcome"] not in ("refused", "harmless")]
    return command.finish(result, bad, "" if arguments.json else "\n\n".join(tables))


if __name__ == "__main__":
    sys.exit(main())
