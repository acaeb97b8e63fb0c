"""Flips single bits in runs of many recorded steps, and has ``bisect`` and ``diff`` name them.

    python -m tests.campaigns.history --steps 1000 --mb 10 --faults 100 --clean 20

records a run, and for each fault goes on from a copy of its beginning, with one bit of a param, a
moment or a gradient flipped at one step. ``diff`` has to name step, leaf and element, ``bisect``
the step; pairs without a fault have to be found equal.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.tools.history import bisect as bisects
from adacheck_jax.tools.history import compare as compares
from adacheck_jax.tools.history.walk import State, Walk
from tests.campaigns import command

SAVED_EVERY, MAX_DELTAS, LEAVES = 10, 100, 8
GOES_ON = 40
"""Steps that a run goes on for after its fault."""
BYTES_A_PARAM = 14
"""Of float32 params and two moments, and a bfloat16 record."""
RECORDER = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)


@dataclass(frozen=True, slots=True)
class Fault:
    """One bit that is flipped.

    Attributes:
        step: step number.
        kind: ``params``, ``mu`` or ``gradient``.
        leaf: name of a leaf.
        index: place of the element.
        bit: number of the bit, the lowest first.
    """

    step: int
    kind: str
    leaf: str
    index: tuple[int, int]
    bit: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tools said of one pair of runs.

    Attributes:
        is_right: True if step, leaf and element were named, or a clean pair found equal.
        faded: True if the last step has no trace of the fault, so that ``bisect`` had to find none.
        restored_counts: states that ``diff`` and ``bisect`` restored.
        seconds: time that each took.
        said: what they said.
    """

    is_right: bool
    faded: bool
    restored_counts: tuple[int, int]
    seconds: tuple[float, float]
    said: str


def initial(mb: float) -> Any:
    """A state of so many MB."""
    rows = max(int(mb * 1e6 / BYTES_A_PARAM / LEAVES / 256), 1)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    params = {f"w{i}": jax.random.normal(key, (rows, 256)) for i, key in enumerate(keys)}
    return {"params": params, "opt": RECORDER.init(params)}


@jax.jit
def _gradients(params: Any, step: jax.Array) -> Any:
    return jax.tree.map(lambda p: jnp.sin(p * 3 + step).astype(jnp.bfloat16), params)


@jax.jit
def _applied(state: Any, gradients: Any) -> Any:
    updates, opt = RECORDER.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def flipped(array: jax.Array, fault: Fault) -> jax.Array:
    """The array with one bit flipped."""
    words = np.array(array)
    view = words.view(f"u{words.dtype.itemsize}")
    view[fault.index] ^= view.dtype.type(1 << fault.bit)
    return jnp.asarray(words)


def train(root: Path, state: Any, first: int, steps: int, fault: Fault | None = None) -> None:
    """Record the steps of a run from one on; the last one is saved."""
    handler = adacheck.AdaCheckHandler(
        RECORDER, max_deltas=MAX_DELTAS, shadow=adacheck.Shadow(on_devices=True)
    )
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        for step in range(first, steps):
            gradients = _gradients(state["params"], jnp.float32(step))
            now = fault if fault and fault.step == step else None
            if now and now.kind == "gradient":
                gradients = {**gradients, now.leaf: flipped(gradients[now.leaf], now)}
            state = _applied(state, gradients)
            if now and now.kind == "params":
                params = {**state["params"], now.leaf: flipped(state["params"][now.leaf], now)}
                state = {**state, "params": params}
            elif now and now.kind == "mu":
                opt, mu = state["opt"], state["opt"].adacheck_inner[0].mu
                changed = opt.adacheck_inner[0]._replace(
                    mu={**mu, now.leaf: flipped(mu[now.leaf], now)}
                )
                inner = (changed, *opt.adacheck_inner[1:])
                state = {**state, "opt": opt._replace(adacheck_inner=inner)}
            jax.block_until_ready(state)  # an edit is found before its save returns, and stored
            is_due = step % SAVED_EVERY == 0 or step == steps - 1 or now is not None
            if is_due or not handler.record_step(state, step):
                manager.save(step, args=adacheck.SaveArgs(state), force=True)


def draw(number: int, steps: int, root: Path, seed: int) -> Fault:
    """A fault that leaves a finite number."""
    chance = random.Random(f"{seed} {number}")
    kind = ("params", "mu", "gradient")[number % 3]
    walk = Walk(root)
    step = chance.randrange(2, steps - 1)
    tree = walk.at(step).tree()
    walk.close()
    trees = {"params": tree["params"], "gradient": tree["opt"]["adacheck_record"]}
    trees["mu"] = tree["opt"]["adacheck_inner"]["0"]["mu"]
    while True:
        leaf = f"w{chance.randrange(LEAVES)}"
        array = trees[kind][leaf]
        index = tuple(chance.randrange(n) for n in array.shape)
        fault = Fault(step, kind, leaf, index, chance.randrange(array.dtype.itemsize * 8))
        if math.isfinite(float(flipped(jnp.asarray(array), fault)[index])):
            return fault


def path_of(fault: Fault) -> str:
    """Leaf path at which a fault is first seen."""
    start = {"params": "params", "gradient": "opt/adacheck_record", "mu": "opt/adacheck_inner/0/mu"}
    return f"{start[fault.kind]}/{fault.leaf}"


def with_fault(clean: Path, root: Path, mb: float, steps: int, fault: Fault) -> None:
    """A run that is equal to a clean one before a step, and goes on with a fault from there."""
    shutil.copytree(clean, root, copy_function=os.link)
    saved = sorted(int(each.name) for each in root.iterdir() if each.name.isdecimal())
    for step in saved:
        if step >= fault.step:
            shutil.rmtree(root / str(step))
    first = max(step for step in saved if step < fault.step)
    state = initial(mb)
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler(RECORDER)) as manager:
        state = manager.restore(first, args=adacheck.RestoreArgs(state))
    train(root, state, first + 1, min(fault.step + GOES_ON, steps), fault)


def judge(clean: Path, root: Path, fault: Fault | None) -> Verdict:
    """Ask both tools."""
    first, second = Walk(clean), Walk(root)
    start = time.perf_counter()
    found = compares.compare_runs(first, second)
    compared_s = time.perf_counter() - start
    compared_count = second.restored_count

    def differs(state: State) -> str | None:
        expected = first.fingerprints(state.step)
        for leaf, array in zip(state.leaves, state.arrays, strict=True):
            if fingerprint_of(array) != expected[leaf.path]:
                return leaf.path
        return None

    second.close()
    second = Walk(root)
    start = time.perf_counter()
    halved = bisects.bisect(second, differs)
    seconds = (compared_s, time.perf_counter() - start)
    counts = (compared_count, second.restored_count)
    first.close()
    second.close()
    if fault is None:
        is_right = found.is_equal and halved.step is None
        return Verdict(is_right, False, counts, seconds, f"{found.before} {halved.step}")
    told = found.differences[0] if found.differences else None
    said = f"{found.before} {halved.step} {told.path if told else ''} {told.first if told else ''}"
    last = min(first.steps[-1], second.steps[-1])
    faded = first.fingerprints(last) == second.fingerprints(last)
    is_right = (found.before[1], halved.step) == (fault.step, None if faded else fault.step)
    is_right &= told is not None and told.path == path_of(fault)
    is_right &= told is not None and told.first.index == fault.index and told.first.bits == 1
    return Verdict(is_right, faded, counts, seconds, said)


def campaign(steps: int, mb: float, faults: int, clean: int, seed: int) -> list[Verdict]:
    """Run it all, and print each verdict."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="history") as work:
        root = Path(work) / "clean"
        train(root, initial(mb), 0, steps)
        for number in range(faults + clean):
            other = Path(work) / "other"
            fault = draw(number, steps, root, seed) if number < faults else None
            if fault is None:
                train(other, initial(mb), 0, steps)
            else:
                with_fault(root, other, mb, steps, fault)
            verdicts.append(judge(root, other, fault))
            told = verdicts[-1]
            print(
                "right" if told.is_right else f"NOT RIGHT: {fault}: {told.said}", told, flush=True
            )
            shutil.rmtree(other)
    return verdicts


def main() -> int:
    """Run the campaign, and print its table."""
    parser = command.parser(__doc__, seed=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mb", type=float, default=10)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--clean", type=int, default=20)
    options = parser.parse_args()
    found = campaign(options.steps, options.mb, options.faults, options.clean, options.seed)
    groups = (("faults", found[: options.faults]), ("clean pairs", found[options.faults :]))
    rows = []
    for name, verdicts in groups:
        if verdicts:
            restores = max(max(v.restored_counts) for v in verdicts)
            longest = [f"{max(v.seconds[i] for v in verdicts):.1f}" for i in (0, 1)]
            right, faded = (
                sum(each) for each in zip(*((v.is_right, v.faded) for v in verdicts), strict=True)
            )
            rows.append([name, len(verdicts), right, faded, restores, *longest])
    head = ["pairs", "number", "right", "faded", "most restores", "diff, s", "bisect, s"]
    wrong = [each for each in found if not each.is_right]
    return command.finish({}, wrong, command.table(head, rows))


if __name__ == "__main__":
    sys.exit(main())
