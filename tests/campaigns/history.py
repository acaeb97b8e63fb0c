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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.tools.history import bisect as bisects
from adacheck_jax.tools.history import compare as compares
from adacheck_jax.tools.history.walk import State, Walk
from tests import support
from tests.campaigns import command

SAVED_EVERY, MAX_DELTAS, LEAVES = 10, 100, 8
GOES_ON = 40
"""Steps that a run goes on for after its fault."""
BYTES_A_PARAM = 14
"""Of float32 params and two moments, and a bfloat16 record."""
RECORDER = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)
PATHS = {"params": "params", "gradient": "opt/adacheck_record", "mu": "opt/adacheck_inner/0/mu"}
"""Paths of the trees in which a bit may be flipped."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One bit that is flipped: step, tree of :data:`PATHS`, leaf, element and number of the bit."""

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
        restored_counts: states that ``diff`` and ``bisect`` restored.
        said: what they said, and that the last step has no trace of the fault, if it has faded.
    """

    is_right: bool
    restored_counts: tuple[int, int]
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


def flipped(tree: Any, fault: Fault) -> Any:
    """The tree with one bit of a leaf flipped."""
    words = np.array(tree[fault.leaf])
    view = words.view(f"u{words.dtype.itemsize}")
    view[fault.index] ^= view.dtype.type(1 << fault.bit)
    return {**tree, fault.leaf: jnp.asarray(words)}


def train(root: Path, state: Any, first: int, steps: int, fault: Fault | None = None) -> None:
    """Records the steps of a run from one on; the last one is saved."""
    shadow = adacheck.Shadow(on_devices=True)
    handler = adacheck.AdaCheckHandler(RECORDER, max_deltas=MAX_DELTAS, shadow=shadow)
    with support.manager_of(root, handler) as manager:
        for step in range(first, steps):
            now = fault if fault and fault.step == step else None
            gradients = _gradients(state["params"], jnp.float32(step))
            if now and now.kind == "gradient":
                gradients = flipped(gradients, now)
            state = _applied(state, gradients)
            if now and now.kind == "params":
                state = {**state, "params": flipped(state["params"], now)}
            elif now and now.kind == "mu":
                moments, *rest = state["opt"].adacheck_inner
                inner = (moments._replace(mu=flipped(moments.mu, now)), *rest)
                state = {**state, "opt": state["opt"]._replace(adacheck_inner=inner)}
            jax.block_until_ready(state)  # an edit is found before its save returns, and stored
            is_due = step % SAVED_EVERY == 0 or step == steps - 1 or now is not None
            if is_due or not handler.record_step(state, step):
                manager.save(step, args=adacheck.SaveArgs(state), force=True)


def draw(number: int, steps: int, root: Path, seed: int) -> Fault:
    """A fault that leaves a finite number."""
    chance, kind = random.Random(f"{seed} {number}"), [*PATHS][number % 3]
    walk, step = Walk(root), chance.randrange(2, steps - 1)
    tree = walk.at(step).tree()
    walk.close()
    for name in PATHS[kind].split("/"):
        tree = tree[name]
    while True:
        leaf = f"w{chance.randrange(LEAVES)}"
        index = tuple(chance.randrange(n) for n in tree[leaf].shape)
        bit = chance.randrange(tree[leaf].dtype.itemsize * 8)
        fault = Fault(step, kind, leaf, index, bit)
        if math.isfinite(float(flipped(tree, fault)[leaf][index])):
            return fault


def with_fault(clean: Path, root: Path, mb: float, steps: int, fault: Fault) -> None:
    """A run that is equal to a clean one before a step, and goes on with a fault from there."""
    shutil.copytree(clean, root, copy_function=os.link)
    saved = sorted(int(each.name) for each in root.iterdir() if each.name.isdecimal())
    for step in saved:
        if step >= fault.step:
            shutil.rmtree(root / str(step))
    first = max(step for step in saved if step < fault.step)
    with support.manager_of(root, adacheck.AdaCheckHandler(RECORDER)) as manager:
        state = manager.restore(first, args=adacheck.RestoreArgs(initial(mb)))
    train(root, state, first + 1, min(fault.step + GOES_ON, steps), fault)


def judge(clean: Path, root: Path, fault: Fault | None) -> Verdict:
    """Asks both tools."""
    first, second = Walk(clean), Walk(root)
    found = compares.compare_runs(first, second)
    compared_count = second.restored_count
    second.close()
    second = Walk(root)

    def differs(state: State) -> str | None:
        expected = first.fingerprints(state.step)
        pairs = zip(state.leaves, state.arrays, strict=True)
        return next((x.path for x, a in pairs if fingerprint_of(a) != expected[x.path]), None)

    halved = bisects.bisect(second, differs).step
    counts = (compared_count, second.restored_count)
    last = min(first.steps[-1], second.steps[-1])
    faded = first.fingerprints(last) == second.fingerprints(last)
    first.close()
    second.close()
    if fault is None:
        return Verdict(found.is_equal and halved is None, counts, f"{found.before} {halved}")
    told = found.differences[0] if found.differences else None
    said = f"{found.before} {halved} {told and (told.path, told.first)} {'faded' * faded}"
    is_right = (found.before[1], halved) == (fault.step, None if faded else fault.step)
    is_right &= told is not None and told.path == f"{PATHS[fault.kind]}/{fault.leaf}"
    is_right &= told is not None and (told.first.index, told.first.bits) == (fault.index, 1)
    return Verdict(is_right, counts, said)


def campaign(steps: int, mb: float, faults: int, clean: int, seed: int) -> Iterator[Verdict]:
    """Verdicts on runs with faults, and then on clean ones."""
    with tempfile.TemporaryDirectory(prefix="history") as work:
        root, other = Path(work) / "clean", Path(work) / "other"
        train(root, initial(mb), 0, steps)
        for number in range(faults + clean):
            fault = draw(number, steps, root, seed) if number < faults else None
            if fault is None:
                train(other, initial(mb), 0, steps)
            else:
                with_fault(root, other, mb, steps, fault)
            yield judge(root, other, fault)
            shutil.rmtree(other)


def main() -> int:
    """Runs the campaign, and prints each verdict."""
    parser = command.parser(__doc__, seed=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mb", type=float, default=10)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--clean", type=int, default=20)
    verdicts = list[Verdict]()
    for each in campaign(**vars(parser.parse_args())):
        verdicts.append(each)
        print(each, flush=True)
    wrong = [each for each in verdicts if not each.is_right]
    most = max(max(each.restored_counts) for each in verdicts)
    return command.finish({"pairs": len(verdicts), "most restores": most}, wrong)


if __name__ == "__main__":
    sys.exit(main())
