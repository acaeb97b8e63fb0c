"""Bytes of published weights a step, and the time until a follower has them.

    python -m benchmarks.publishing

Sizes: a language model is pretrained on the text of the standard library, in float32; then it goes
on with AdamW at learning rates at which about 1, 3 and 10 % of the weights' bfloat16 bits change a
step, and its weights are published as bfloat16 after every step. Beside them are weights of which
so many, chosen at random, move by one unit in the last place. Each delta is compared with two other
codes of the same changes: an int32 index and a bfloat16 value for each, and gaps and differences as
bytes of 7 bits (LEB128). Record and delta are counted, the base is not.

Times: from the call of ``publish`` to a follower's verified arrays, beside a full save and restore
by stock Orbax, both in one process, turn by turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp

from adacheck_jax.publish import Follower, Publisher
from benchmarks.common import LanguageModel, environment, tokens_of, width_for, words

SHARES = (0.01, 0.03, 0.10)
_BF16_BYTES = 2
_RATES = np.geomspace(1e-9, 1e-3, 61)


@dataclass(frozen=True)
class Size:
    """Sizes of one run; medians over its steps.

    Attributes:
        run: name of the run.
        changed: share of the weights whose bits changed.
        step_bytes: bytes of a version: its delta and its record.
        ratio: bytes of all weights in bfloat16, divided by these.
        pairs_ratio, varint_ratio, zlib_ratio: the same for int32 and bfloat16, for LEB128, and for
            LEB128 compressed by zlib.
        bits_a_change: bits of a version for each changed weight.
    """

    run: str
    changed: float
    step_bytes: int
    ratio: float
    pairs_ratio: float
    varint_ratio: float
    zlib_ratio: float
    bits_a_change: float


def leb128(values: np.ndarray) -> bytes:
    """Unsigned numbers in bytes of 7 bits, the lowest first."""
    columns, rest = [], values.astype(np.uint64)
    is_there = np.ones(values.size, np.bool_)
    while is_there.any():
        more = rest >= 128
        column = ((rest & 127) | (more.astype(np.uint64) << 7)).astype(np.uint8)
        columns.append(np.where(is_there, column.astype(np.int16), -1))
        is_there, rest = is_there & more, rest >> 7
    table = np.stack(columns, axis=1).reshape(-1) if columns else np.empty(0, np.int16)
    return table[table >= 0].astype(np.uint8).tobytes()


def other_codes(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[int, bytes]:
    """Bytes of int32 and bfloat16 for each change, and the LEB128 code of all changes."""
    pairs, code = 0, []
    for name, array in after.items():
        old, new = words(before[name]), words(array)
        places = np.flatnonzero(new != old)
        step = (new[places] - old[places]).view(np.int16).astype(np.int64)
        pairs += (4 + _BF16_BYTES) * places.size
        code += [leb128(np.diff(places, prepend=-1) - 1), leb128((step << 1) ^ (step >> 63))]
    return pairs, b"".join(code)


def size_of(run: str, versions: Iterator[dict[str, np.ndarray]], root: Path) -> Size:
    """Publishes versions, follows them, and measures each but the first."""
    rows: list[tuple[float, ...]] = []
    before: dict[str, np.ndarray] = {}
    follower = None
    with Publisher(root, base_every=10**6) as publisher:
        for number, after in enumerate(versions):
            publisher.publish(after, version=number)
            report = publisher.wait()
            follower = follower or Follower(root, after)
            found = follower.wait_for(number)
            assert all(np.asarray(found[k]).tobytes() == after[k].tobytes() for k in after)
            if before and report is not None:
                pairs, code = other_codes(before, after)
                total = report.delta_bytes + report.record_bytes
                sizes = (total, pairs, len(code), len(zlib.compress(code, 9)))
                full = sum(x.nbytes for x in after.values())
                bits = 8 * total / max(1, report.changed)
                rows.append(
                    (report.changed / report.words, bits, total, *(full / s for s in sizes))
                )
            before = after
    changed, bits, total, *ratios = (statistics.median(row) for row in zip(*rows, strict=True))
    return Size(run, changed, int(total), *ratios, bits)


def half(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(k): np.asarray(x.astype(jnp.bfloat16)) for k, x in leaves}


class FineTuning:
    """A pretrained model, and AdamW at any rate.

    Args:
        params_count: number of params, about.
        pretraining: steps before the weights are published.
    """

    def __init__(self, params_count: int, pretraining: int) -> None:
        self._model = LanguageModel(width=width_for(params_count))
        params = jax.jit(self._model.initial)()
        self._step = jax.jit(self._trained)
        tx = self._optimizer()
        state = (params, tx.init(params))
        for seed in range(pretraining):
            state = self._step(*state, tokens_of(10_000 + seed), 1e-3)
        self._start = state

    def _optimizer(self, rate: Any = 1.0) -> optax.GradientTransformation:
        return optax.adamw(rate, weight_decay=0.01)

    def _trained(self, params: Any, opt_state: Any, tokens: Any, rate: Any) -> tuple[Any, Any]:
        grads = jax.grad(self._model.loss)(params, tokens)
        updates, opt_state = self._optimizer(rate).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def rate_for(self, share: float) -> float:
        """The rate at which about such a share of bfloat16 bits changes in a step."""
        before = half(self._start[0])
        for rate in _RATES:
            after = half(self._step(*self._start, tokens_of(0), rate)[0])
            changed = sum(int((words(after[k]) != words(before[k])).sum()) for k in after)
            if changed >= share * sum(x.size for x in after.values()):
                return float(rate)
        raise ValueError(f"no rate changes {share:.0%} of the weights")

    def versions(self, rate: float, count: int) -> Iterator[dict[str, np.ndarray]]:
        state = self._start
        yield half(state[0])
        for seed in range(count):
            state = self._step(*state, tokens_of(seed), rate)
            yield half(state[0])


def random_choice(share: float, size: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Weights of which a share, chosen at random, moves by one unit in the last place."""
    rng = np.random.default_rng(0)
    bits = (0.02 * rng.standard_normal(size, np.float32)).astype(ml_dtypes.bfloat16).view(np.uint16)
    for _ in range(count + 1):
        yield {"w": bits.view(ml_dtypes.bfloat16)}
        moved = rng.random(size) < share
        bits = bits + np.where(moved, rng.choice(np.array([1, -1], np.int16), size), 0).astype(
            np.uint16
        )


def times(params_count: int, turns: int, root: Path) -> dict[str, float]:
    """Medians of seconds, of the wall and of the CPU, and of their ratios in a turn."""
    width = 1024
    shape = (max(1, params_count // width**2), width, width)
    master = 0.02 * jax.random.normal(jax.random.key(0), shape)
    move = jax.jit(lambda w, key: w + 2e-7 * jax.random.normal(key, w.shape))
    names = [f"layer_{n}" for n in range(shape[0])]

    def params() -> dict[str, jax.Array]:
        found = {name: master[n].astype(jnp.bfloat16) for n, name in enumerate(names)}
        return jax.block_until_ready(found)

    follower = Follower(root / "published", params(), poll_s=0.002)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, params())
    rows, rounds = [], range(turns + 1)
    with (
        Publisher(root / "published") as publisher,
        ocp.StandardCheckpointer() as stock,
    ):
        publisher.publish(params(), version=0, wait=True)
        follower.wait_for(0)
        for number in rounds:
            master = move(master, jax.random.key(number + 1))
            given = params()
            start, start_cpu = time.perf_counter(), time.process_time()
            publisher.publish(given, version=number + 1)
            blocked = time.perf_counter()
            found = jax.block_until_ready(follower.wait_for(number + 1))
            followed, followed_cpu = time.perf_counter(), time.process_time()
            assert all(np.array_equal(words(found[k]), words(given[k])) for k in given)
            publisher.wait()
            again, again_cpu = time.perf_counter(), time.process_time()
            stock.save(root / f"stock_{number}", given)
            stock.wait_until_finished()
            jax.block_until_ready(stock.restore(root / f"stock_{number}", abstract))
            ours, theirs = followed - start, time.perf_counter() - again
            cpu = followed_cpu - start_cpu, time.process_time() - again_cpu
            rows.append((blocked - start, ours, theirs, theirs / ours, *cpu, cpu[1] / cpu[0]))
    columns = zip(*rows[1:], strict=True)  # the first turn compiles
    kinds = ("blocked_s", "followed_s", "orbax_s", "ratio")
    kinds += ("followed_cpu_s", "orbax_cpu_s", "cpu_ratio")
    found = {kind: statistics.median(column) for kind, column in zip(kinds, columns, strict=True)}
    return {"weights_mb": sum(x.nbytes for x in params().values()) / 1e6, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--params", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pretraining", type=int, default=60)
    parser.add_argument("--timed-params", type=int, default=50_000_000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    tuning = FineTuning(options.params, options.pretraining)
    print("| weights | changed a step | bytes a step | bits a change | smaller than bfloat16 by |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for share in SHARES:
            rate = tuning.rate_for(share)
            name = f"AdamW at {rate:.1e}"
            versions = tuning.versions(rate, options.steps)
            show(size_of(name, versions, root / f"tuned_{share}"))
            chosen = random_choice(share, options.params, options.steps)
            show(size_of(f"random, {share:.0%}", chosen, root / f"random_{share}"))
        timed = times(options.timed_params, options.turns, root)
    print("", {name: round(value, 4) for name, value in timed.items()}, environment(), sep="\n")


def show(size: Size) -> None:
    print(
        f"| {size.run} | {size.changed:.2%} | {size.step_bytes:,} | {size.bits_a_change:.2f} | "
        f"{size.ratio:.1f} (int32 + bf16 {size.pairs_ratio:.1f}, LEB128 "
        f"{size.varint_ratio:.1f}, its zlib {size.zlib_ratio:.1f}) |",
        flush=True,
    )


if __name__ == "__main__":
    main()
