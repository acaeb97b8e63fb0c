"""What bit-pattern deltas cost, and how far they shrink what training writes.

    python -m benchmarks.bits --params 2000000 --steps 20

A language model is pretrained in float32 on the text of the standard library. Then (a) its weights
are cast to bfloat16 and fine-tuned in pure bfloat16 at small learning rates, the state saved being
the params alone, and (b) its float32 Adam run goes on, params and both moments being saved as trees
of their own. Every step is saved with ``AdaCheckHandler(delta="bits")`` and, beside it in the same
run, by stock Orbax. Tables give medians over the deltas.

``choose and encode``, ``write`` and ``decode`` are the library's own functions, called on the same
states in one process and timed in CPU seconds, so that they are rates of one core; MB are 10^6
bytes of leaves. ``restore`` is CPU seconds of the chain's last step less those of its base.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings import planes
from adacheck_jax.format.encodings.form import Candidate, Encoding
from adacheck_jax.format.encodings.table import ENCODINGS, choose
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.packs import arrays, writer
from adacheck_jax.store.packs.reader import PackArray, PackReader
from adacheck_jax.store.steps import manifest_file
from benchmarks.common import LanguageModel, environment, new_bytes, tokens_of, width_for, words

RATES = (1e-6, 1e-5, 1e-4)
TARGET_RATE, TARGET_RATIO = 1e-6, 25.0
"""What the project set itself: bfloat16 weights at this learning rate shrink so many times."""
_MB = 1e6
_PRETRAINING_SEEDS = 10**6  # batches that are not seen again


@dataclass(frozen=True)
class Cost:
    """Bit-pattern deltas of one tree.

    Attributes:
        run: which training run.
        kind: which tree of it.
        leaf_bytes: of the tree.
        unchanged: share of elements whose bits do not change in a step.
        delta_bytes: newly written by a delta, manifest included.
        ratio: bytes of the leaves over those of a delta.
        ratio_range: of the least and the most that a delta shrank.
        encodings: how many leaves were stored in each way, over all deltas.
        choose_encode_mb_s, write_mb_s, decode_mb_s, restore_mb_s: of one core.
        durable_s: of a delta.
        stock_durable_s, stock_bytes: of a stock save of the same tree.
    """

    run: str
    kind: str
    leaf_bytes: int
    unchanged: float
    delta_bytes: int
    ratio: float
    ratio_range: tuple[float, float]
    encodings: dict[str, int]
    choose_encode_mb_s: float
    write_mb_s: float
    decode_mb_s: float
    restore_mb_s: float
    durable_s: float
    stock_durable_s: float
    stock_bytes: int


class Saved:
    """The saves of one tree, by the library and by stock Orbax, as a run goes on."""

    def __init__(self, root: Path, steps: int) -> None:
        self._root = root
        self._managers = {
            "bits": ocp.CheckpointManager(
                root / "bits",
                item_handlers=adacheck.AdaCheckHandler(delta="bits", max_deltas=steps),
            ),
            "stock": ocp.CheckpointManager(
                root / "stock",
                item_handlers=ocp.StandardCheckpointHandler(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2),
            ),
        }
        self._former: dict[str, np.ndarray] = {}
        self._state: Any = None
        self._rows: list[dict[str, float]] = []
        self._letters: collections.Counter[str] = collections.Counter()
        self._leaf_bytes = 0

    def add(self, step: int, state: Any) -> None:
        """Saves one step in both ways, and measures what lies between it and the one before."""
        self._state = state
        durable, written = {}, {}
        for name, args in (
            ("bits", adacheck.SaveArgs(state)),
            ("stock", ocp.args.StandardSave(state)),
        ):
            manager, start = self._managers[name], time.perf_counter()
            manager.save(step, args=args)
            manager.wait_until_finished()
            durable[name] = time.perf_counter() - start
            written[name] = new_bytes(self._root / name / str(step))
        leaves = {path: np.array(leaf) for path, leaf in trees.flatten(state)[0].items()}
        self._leaf_bytes = sum(leaf.nbytes for leaf in leaves.values())
        manifest = manifest_file.read(self._root / "bits" / str(step) / "default")
        former, self._former = self._former, leaves
        if isinstance(manifest, BaseManifest):
            return
        letters = "".join(pack.encodings for pack in manifest.packs)
        self._letters.update(letters)
        self._letters[Encoding.SAME.value] += len(leaves) - len(manifest.stored)
        same = sum(int((words(leaves[p]) == words(former[p])).sum()) for p in leaves)
        self._rows.append(
            {
                "unchanged": same / sum(leaf.size for leaf in leaves.values()),
                "delta_bytes": written["bits"],
                "stock_bytes": written["stock"],
                "durable_s": durable["bits"],
                "stock_durable_s": durable["stock"],
                **self._rates(leaves, former, self._root / "timed" / str(step)),
            }
        )

    def _rates(
        self, new: dict[str, np.ndarray], old: dict[str, np.ndarray], directory: Path
    ) -> dict[str, float]:
        """CPU seconds of the library's own functions on one step."""
        start = time.process_time()
        chosen = {path: _chosen(new[path], old[path]) for path in new}
        # Of each leaf so many planes, the lowest, lie beside those that are stored as they are.
        counts: dict[str, tuple[int, int]] = {}
        for path, encoding in chosen.items():
            if encoding not in (Encoding.RAW, Encoding.SAME):
                word_bytes = planes.word_bytes(new[path].dtype)
                parts = ENCODINGS[encoding].parts(new[path].nbytes, word_bytes, None)
                counts[path] = parts.planes - parts.compressed, parts.compressed
        packs = [_pack(new, counts, place) for place in (0, 1)]
        for path in counts:
            low, high = (pack[path] for _, pack in packs)
            ENCODINGS[chosen[path]].encode(new[path], old[path], low, high)
        whole = [new[path] for path, encoding in chosen.items() if encoding is Encoding.RAW]
        raw = np.concatenate([packs[0][0], *(each.reshape(-1).view(np.uint8) for each in whole)])
        encoded = time.process_time()
        contents = [(arrays.RAW, [raw]), (arrays.COMPRESSED, [packs[1][0]])]
        zeros = writer.write_pack(directory / "pack", contents)
        written = time.process_time()
        targets = {path: np.array(old[path]) for path in counts}
        decoding = time.process_time()
        read = []
        for (kind, (pack,)), (left_out,) in zip(contents, zeros, strict=True):
            _, length_bytes = arrays.laid_out(directory / "pack", kind, [(pack.size, left_out)])
            array = PackArray(directory / "pack", kind, length_bytes)
            reader = PackReader(array, pack.size, left_out)
            read += reader.read([(0, pack.size)], what="the benchmark")
        found = [_views(data, new, counts, place) for place, data in enumerate(read)]
        for path in counts:
            ENCODINGS[chosen[path]].decode(targets[path], found[0][path], found[1][path])
        decoded = time.process_time()
        for path, target in targets.items():
            assert target.tobytes() == new[path].tobytes(), path
        return {
            "choose_encode_s": encoded - start,
            "write_s": written - encoded,
            "decode_s": decoded - decoding,
        }

    def cost(self, run: str, kind: str) -> Cost:
        """Restores, closes, and gives medians."""
        steps = sorted(self._managers["bits"].all_steps())
        restore_s = self._restore_s(steps[-1]) - self._restore_s(steps[0])
        for manager in self._managers.values():
            manager.close()
        median = {key: statistics.median(row[key] for row in self._rows) for key in self._rows[0]}
        sizes = [row["delta_bytes"] for row in self._rows]
        leaf_mb = self._leaf_bytes / _MB
        return Cost(
            run=run,
            kind=kind,
            leaf_bytes=self._leaf_bytes,
            unchanged=median["unchanged"],
            delta_bytes=int(median["delta_bytes"]),
            ratio=self._leaf_bytes / median["delta_bytes"],
            ratio_range=(self._leaf_bytes / max(sizes), self._leaf_bytes / min(sizes)),
            encodings=dict(sorted(self._letters.items())),
            choose_encode_mb_s=leaf_mb / median["choose_encode_s"],
            write_mb_s=leaf_mb / median["write_s"],
            decode_mb_s=leaf_mb / median["decode_s"] if median["decode_s"] else 0.0,
            restore_mb_s=leaf_mb * len(self._rows) / max(restore_s, 1e-3),
            durable_s=median["durable_s"],
            stock_durable_s=median["stock_durable_s"],
            stock_bytes=int(median["stock_bytes"]),
        )

    def _restore_s(self, step: int) -> float:
        """CPU seconds of one restore, the least of three; the last step must come back exactly."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
        )
        handler = adacheck.AdaCheckHandler(delta="bits")
        seconds: list[float] = []
        state: Any = None
        with ocp.CheckpointManager(self._root / "bits", item_handlers=handler) as manager:
            for _ in range(3):
                start = time.process_time()
                state = manager.restore(step, args=adacheck.RestoreArgs(abstract))
                jax.block_until_ready(state)
                seconds.append(time.process_time() - start)
        if step == self._managers["bits"].latest_step():
            for path, leaf in trees.flatten(state)[0].items():
                assert np.asarray(leaf).tobytes() == self._former[path].tobytes(), path
        return min(seconds)


Counts = dict[str, tuple[int, int]]
"""By leaf path how many planes lie in the one array, and in the other."""
Planes = dict[str, np.ndarray]


def _chosen(new: np.ndarray, old: np.ndarray) -> Encoding:
    """Encoding of a leaf of one box."""
    box = Box.full(new.shape)
    return choose(Candidate({box: new}, {box: old}, None, compresses=True))[0]


def _pack(leaves: Planes, counts: Counts, place: int) -> tuple[np.ndarray, Planes]:
    """Room for the planes of some leaves in one array, and where each leaf's lie."""
    sizes = [leaves[path].nbytes // sum(each) * each[place] for path, each in counts.items()]
    data = np.empty(sum(sizes), np.uint8)
    return data, _views(data, leaves, counts, place)


def _views(data: np.ndarray, leaves: Planes, counts: Counts, place: int) -> Planes:
    views, start = {}, 0
    for path, each in counts.items():
        length = leaves[path].nbytes // sum(each)
        stop = start + length * each[place]
        views[path], start = data[start:stop].reshape(each[place], length), stop
    return views


def trained(
    model: LanguageModel, tx: optax.GradientTransformation, params: Any, seeds: Sequence[int]
) -> Iterator[tuple[Any, Any, float]]:
    """Trains one step a seed; yields params, optimizer state and loss."""

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled: Callable[..., Any] = jax.jit(step)
    opt_state = tx.init(params)
    for seed in seeds:
        params, opt_state, loss = compiled(params, opt_state, tokens_of(seed))
        yield params, opt_state, float(loss)


def run(params_count: int, steps: int, pretraining: int, root: Path) -> dict[str, Any]:
    model = LanguageModel(width=width_for(params_count))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, pretraining // 10, pretraining, 2e-4)
    seeds = range(_PRETRAINING_SEEDS, _PRETRAINING_SEEDS + pretraining)
    params = jax.jit(model.initial)()
    losses: dict[str, list[float]] = {"pretraining": []}
    for latest, _, loss in trained(model, optax.adamw(schedule), params, seeds):
        params = latest
        losses["pretraining"].append(loss)
    costs: list[Cost] = []

    halved = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    for rate in RATES:
        name = f"bfloat16 fine-tuning at {rate:.0e}"
        saved, losses[name] = Saved(root / f"{rate:.0e}", steps), []
        saved.add(0, halved)
        tuning = trained(
            LanguageModel(model.width, jnp.bfloat16), optax.adamw(rate), halved, range(steps)
        )
        for number, (tuned, _, loss) in enumerate(tuning, 1):
            saved.add(number, tuned)
            losses[name].append(loss)
        costs.append(saved.cost(name, "params"))

    name = "bfloat16 of a float32 walk by 1e-06"  # weights that do not know a model
    saved, rng = Saved(root / "walk", steps), np.random.default_rng(0)
    draw = lambda scale: jax.tree.map(  # noqa: E731
        lambda p: scale * rng.standard_normal(p.shape, np.float32), params
    )
    walk = draw(0.02)
    for number in range(steps + 1):
        saved.add(number, jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), walk))
        walk = jax.tree.map(np.add, walk, draw(1e-6))
    costs.append(saved.cost(name, "params"))

    name = "float32 adam at 2e-04"
    kinds = ("params", "mu", "nu")
    parts, losses[name] = {kind: Saved(root / kind, steps) for kind in kinds}, []
    # Saved from some steps on, so that the moments are those of a run under way.
    warm = 10
    run_on = trained(model, optax.adam(2e-4), params, range(warm + steps + 1))
    for number, (after, opt_state, loss) in enumerate(run_on):
        losses[name].append(loss)
        if number < warm:
            continue
        adam = opt_state[0]
        for kind, tree in zip(kinds, (after, adam.mu, adam.nu), strict=True):
            parts[kind].add(number, tree)
    costs += [parts[kind].cost(name, kind) for kind in kinds]
    return {
        "params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "leaves": len(jax.tree.leaves(params)),
        "pretraining_steps": pretraining,
        "steps": steps,
        "losses": {key: (round(each[0], 4), round(each[-1], 4)) for key, each in losses.items()},
        **environment(),
        "costs": [asdict(cost) for cost in costs],
    }


def tables(result: dict[str, Any]) -> str:
    """Markdown: what is saved, then what it takes."""
    sizes = [
        "| run | tree | unchanged a step | bytes of leaves | bytes a delta | "
        "shrinks (least–most) | stock bytes | leaves stored as |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speeds = [
        "| run | tree | choose and encode MB/s | write MB/s | decode MB/s | restore MB/s | "
        "durable ms | stock durable ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cost in result["costs"]:
        name = f"| {cost['run']} | {cost['kind']} "
        letters = ", ".join(f"{letter} {count}" for letter, count in cost["encodings"].items())
        least, most = cost["ratio_range"]
        sizes.append(
            f"{name}| {cost['unchanged']:.2%} | {cost['leaf_bytes']:,} | {cost['delta_bytes']:,} "
            f"| {cost['ratio']:.2f}x ({least:.2f}–{most:.2f}) | {cost['stock_bytes']:,} "
            f"| {letters} |"
        )
        speeds.append(
            f"{name}| {cost['choose_encode_mb_s']:.0f} | {cost['write_mb_s']:.0f} "
            f"| {cost['decode_mb_s']:.0f} | {cost['restore_mb_s']:.0f} "
            f"| {cost['durable_s'] * 1e3:.0f} | {cost['stock_durable_s'] * 1e3:.0f} |"
        )
    legend = (
        "Stored as: `=` unchanged, `r` raw, `e` with compressed exponents, `p` in compressed "
        "planes, `s` subtracted, `x` xored; leaves of all deltas."
    )
    return "\n\n".join(["\n".join(sizes), legend, "\n".join(speeds), target_line(result)])


def target_line(result: dict[str, Any]) -> str:
    """What was reached of what the project set itself."""
    cost = next(c for c in result["costs"] if f"{TARGET_RATE:.0e}" in c["run"])
    reached = "reached" if cost["ratio"] >= TARGET_RATIO else "not reached"
    return (
        f"Target, bfloat16 at {TARGET_RATE:.0e} shrinks at least {TARGET_RATIO:.0f}x: "
        f"{cost['ratio']:.1f}x, {reached}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pretraining", type=int, default=150, help="steps before what is saved")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = run(arguments.params, arguments.steps, arguments.pretraining, Path(root))
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        head = {key: value for key, value in result.items() if key != "costs"}
        print(json.dumps(head), tables(result), sep="\n\n")


if __name__ == "__main__":
    main()
