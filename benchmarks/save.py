"""What one save of a train state costs: a base, a delta, and a stock Orbax save, in one run.

    python -m benchmarks.save --params 10000000 --leaves 100

float32 params under AdamW with a bfloat16 record, one CPU device. Each kind of save is repeated
and awaited before the next; the table gives medians. Bytes are those newly written: a hard link
counts once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import environment, new_bytes

WIDTH = 256


@dataclass(frozen=True)
class Cost:
    """Medians over several saves of one kind."""

    kind: str
    blocking_s: float
    durable_s: float
    cpu_s: float
    new_bytes: int


def train_state(params_count: int, leaf_count: int, recorder: adacheck.Recorder) -> Any:
    rows = max(1, params_count // leaf_count // WIDTH)
    rng = np.random.default_rng(0)
    params = {
        f"layer_{i:04}": jnp.asarray(rng.standard_normal((rows, WIDTH)), jnp.float32)
        for i in range(leaf_count)
    }
    return {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0)}


def train_step_of(recorder: adacheck.Recorder) -> Callable[[Any], Any]:
    def train_step(state: Any) -> Any:
        params = state["params"]
        grads = jax.tree.map(lambda p: jnp.sin(p * 1e3) * 1e-2, params)
        updates, opt_state = recorder.update(grads, state["opt_state"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return jax.jit(train_step, donate_argnums=0)


def measure(
    root: Path, handler: Any, args_of: Callable[[Any], Any], state: Any, step: Any, repeats: int
) -> tuple[Any, list[dict[str, float]]]:
    """Saves after each of several train steps; returns the state and one row a save."""
    rows = []
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(root, item_handlers=handler, options=options) as manager:
        for number in range(repeats):
            state = jax.block_until_ready(step(state))
            cpu, start = time.process_time(), time.perf_counter()
            manager.save(number, args=args_of(state))
            blocking = time.perf_counter() - start
            manager.wait_until_finished()
            rows.append(
                {
                    "blocking_s": blocking,
                    "durable_s": time.perf_counter() - start,
                    "cpu_s": time.process_time() - cpu,
                    "new_bytes": new_bytes(root / str(number)),
                }
            )
    return state, rows


def cost_of(kind: str, rows: list[dict[str, float]]) -> Cost:
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return Cost(
        kind, median["blocking_s"], median["durable_s"], median["cpu_s"], int(median["new_bytes"])
    )


def run(params_count: int, leaf_count: int, repeats: int, root: Path) -> dict[str, Any]:
    recorder = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)
    state = train_state(params_count, leaf_count, recorder)
    step = train_step_of(recorder)
    optimizer = [state["params"], state["opt_state"].adacheck_inner]
    optimized_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(optimizer))
    costs = []
    # The first save of each kind warms up (compilation, export, first directories).
    for kind, max_deltas in (("base", 0), ("delta", repeats + 1)):
        handler = adacheck.AdaCheckHandler(recorder, max_deltas=max_deltas)
        state, rows = measure(root / kind, handler, adacheck.SaveArgs, state, step, repeats + 1)
        costs.append(cost_of(kind, rows[1:]))
    for kind, handler, args_of in (
        ("stock Orbax", ocp.StandardCheckpointHandler(), ocp.args.StandardSave),
        ("manager's floor (JSON)", ocp.JsonCheckpointHandler(), lambda _: ocp.args.JsonSave({})),
    ):
        state, rows = measure(root / kind, handler, args_of, state, step, repeats + 1)
        costs.append(cost_of(kind, rows[1:]))
    return {
        "params": sum(leaf.size for leaf in jax.tree.leaves(state["params"])),
        "leaves": len(jax.tree.leaves(state)),
        "params_and_moments_bytes": optimized_bytes,
        "repeats": repeats,
        **environment(),
        "costs": [asdict(cost) for cost in costs],
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table, with ratios to the stock save of the same run."""
    stock = next(c for c in result["costs"] if c["kind"] == "stock Orbax")
    lines = [
        "| save | blocking ms (× stock) | durable ms | CPU ms (× stock) | new bytes "
        "(× params and moments) |",
        "|---|---|---|---|---|",
    ]
    for cost in result["costs"]:
        lines.append(
            f"| {cost['kind']} | {cost['blocking_s'] * 1e3:.1f} "
            f"({cost['blocking_s'] / stock['blocking_s']:.3f}) | {cost['durable_s'] * 1e3:.0f} | "
            f"{cost['cpu_s'] * 1e3:.0f} ({cost['cpu_s'] / stock['cpu_s']:.3f}) | "
            f"{cost['new_bytes']:,} "
            f"({cost['new_bytes'] / result['params_and_moments_bytes']:.4f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=2_000_000)
    parser.add_argument("--leaves", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = run(arguments.params, arguments.leaves, arguments.repeats, Path(root))
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        head = {key: value for key, value in result.items() if key != "costs"}
        print(json.dumps(head), table(result), sep="\n\n")


if __name__ == "__main__":
    main()
