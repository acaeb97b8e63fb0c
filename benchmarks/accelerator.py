"""An accelerator tried in minutes: exactness, costs of saves, slowdown of training, restores.

    python -m benchmarks.accelerator                      # on whatever devices JAX finds
    python -m benchmarks.accelerator --gigabytes 1 4 10 --minutes 8 --output accelerator.json

Needs this library and what it installs, nothing else. Prints Markdown, and writes all figures as
JSON. A part that no time is left for is named as left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.device import fingerprint
from benchmarks.common import environment, words
from benchmarks.speed import report, states, training
from benchmarks.speed.ways import Managed

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
    "lion": lambda: optax.lion(1e-4),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adamax": lambda: optax.adamax(1e-3),
    "adabelief": lambda: optax.adabelief(1e-3),
    "nadamw": lambda: optax.nadamw(1e-3),
    "yogi": lambda: optax.yogi(1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}
_STEPS, _SAVES = 5, 6


def exactness(root: Path) -> Iterator[dict[str, Any]]:
    """Exactness of replay here and on the host, a row an optimizer.

    A restore of this library raises an error for each wrong bit; what it returns is compared again.
    """
    rng = np.random.default_rng(0)
    shapes = {"kernel": (257, 384), "scale": (384,), "experts": (4, 64, 96)}
    gradients = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    for name, make in OPTIMIZERS.items():
        recorder = adacheck.Recorder(make(), dtype=jnp.bfloat16)
        params = {key: value * 0.1 for key, value in gradients.items()}
        state = {"params": params, "opt_state": recorder.init(params)}

        def step(state: Any, recorder: adacheck.Recorder = recorder) -> Any:
            params = state["params"]
            found = jax.tree.map(lambda p, g: jnp.tanh(p) + 0.1 * g, params, gradients)
            updates, inner = recorder.update(found, state["opt_state"], params)
            return {"params": optax.apply_updates(params, updates), "opt_state": inner}

        handler, kept = adacheck.AdaCheckHandler(recorder), dict[int, Any]()
        stepped = jax.jit(step)
        with ocp.CheckpointManager(root / name, item_handlers=handler) as manager:
            for number in range(_STEPS):
                state = stepped(state)
                manager.save(number, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
                kept[number] = jax.tree.map(np.asarray, state)
            last, differing, error = handler.last_save, 0, ""
            target = adacheck.RestoreArgs(states.abstract(state))
            try:
                for number in kept:
                    differing += _differing(manager.restore(number, args=target), kept[number])
            except adacheck.AdaCheckError as raised:
                error = str(raised)[:200]
        yield {
            "optimizer": name,
            "kind": last.kind if last else "none",
            "checked": last.checked if last else None,
            "elements that differ": differing,
            "on the host": ", ".join(_differing_on_host(step, kept[1])) or "exact",
            "error": error,
        }


def _differing(found: Any, expected: Any) -> int:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return sum(int(np.sum(words(a) != words(b))) for a, b in pairs)


def _differing_on_host(step: Any, before: Any) -> list[str]:
    """The leaves that one more step computes otherwise on this machine's CPU."""
    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    found = [jax.jit(step)(jax.device_put(before, device)) for device in (here, cpu)]
    named, _ = jax.tree_util.tree_flatten_with_path(found[0])
    pairs = zip(named, jax.tree.leaves(found[1]), strict=True)
    return [jax.tree_util.keystr(p) for (p, a), b in pairs if np.any(words(a) != words(b))]


def saves(root: Path, gigabytes: float, leaves: int) -> dict[str, Any]:
    """Medians of a few saves of one state, ours and stock's in turns, and one restore of each."""
    recorder = states.recorder()
    params_count = int(gigabytes * 1e9) // states.BYTES_A_PARAM
    state = states.train_state(params_count, leaves, recorder)
    step = states.train_step_of(recorder)
    ways = {
        "delta": Managed(root / "ours", adacheck.AdaCheckHandler(recorder), adacheck.SaveArgs),
        "stock Orbax": Managed(
            root / "stock",
            ocp.StandardCheckpointHandler(),
            lambda state: ocp.args.StandardSave(states.without_record(state)),
        ),
    }
    blocked: dict[str, list[float]] = {name: [] for name in ways}
    durable: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_SAVES):
        for name, way in ways.items():
            state = jax.block_until_ready(step(state))
            begin_s = time.perf_counter()
            way.save(number, state)
            blocked[name].append(time.perf_counter() - begin_s)
            way.wait()
            durable[name].append(time.perf_counter() - begin_s)
    arrays = dict(enumerate(jax.tree.leaves(state)))
    fingerprint.of_leaves(arrays)  # compiles
    begin_s = time.perf_counter()
    fingerprint.of_leaves(arrays)
    row = {
        "gigabytes": states.size_bytes(state) / 1e9,
        "arrays": len(arrays),
        "record_gigabytes": states.size_bytes(state["opt_state"].adacheck_record) / 1e9,
        "fingerprints_ms": 1e3 * (time.perf_counter() - begin_s),
    }
    for name in ways:
        row[f"{name}: blocking_ms"] = 1e3 * float(np.median(blocked[name][2:]))
        row[f"{name}: durable_ms"] = 1e3 * float(np.median(durable[name][2:]))
    targets = {"delta": adacheck.RestoreArgs(states.abstract(state))}
    targets["stock Orbax"] = ocp.args.StandardRestore(states.abstract(states.without_record(state)))
    for name, way in ways.items():
        begin_s = time.perf_counter()
        jax.block_until_ready(way.manager.restore(_SAVES - 1, args=targets[name]))
        row[f"{name}: restore_ms"] = 1e3 * (time.perf_counter() - begin_s)
        way.close()
    return row


def measured(gigabytes: list[float], minutes: float, leaves: int, params: int) -> dict[str, Any]:
    """All parts, each while there is time."""
    device, end_s = jax.devices()[0], time.monotonic() + 60 * minutes
    left_out: list[str] = []
    result: dict[str, Any] = {
        "about": {**environment(), "device": device.device_kind, "platform": device.platform},
        "left_out": left_out,
    }

    def part(name: str, run: Callable[[Path], Any]) -> None:
        if time.monotonic() > end_s:
            left_out.append(name)
            return
        root = Path(tempfile.mkdtemp(prefix="accelerator"))
        try:
            result[name] = run(root)
        finally:
            shutil.rmtree(root)

    part("exactness", lambda root: [*exactness(root)])
    part(
        "training",
        lambda root: training.run(str(root), params, batch=16, steps=10, rounds=2, max_deltas=20),
    )
    for size in gigabytes:
        part(f"saves of {size:g} GB", lambda root, size=size: saves(root, size, leaves))
    return result


def markdown(result: dict[str, Any]) -> str:
    """One table a part, with the device and the versions that it holds for."""
    about = result["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [f"`python -m benchmarks.accelerator`: {about['device']}, {versions}."]
    if "exactness" in result:
        parts.append(_table(result["exactness"]))
    if "training" in result:
        found = result["training"]["rows"]
        free = found[training.NOTHING]
        rows = [
            {
                "training": name,
                "step ms": 1e3 * row["step_s"],
                "longest step ms": 1e3 * row["longest_s"],
                "slower by %": 100 * (row["step_s"] / free["step_s"] - 1),
            }
            for name, row in found.items()
        ]
        parts.append(_table(rows))
    if rows := [row for name, row in result.items() if name.startswith("saves of")]:
        parts.append(_table(rows))
    if result["left_out"]:
        parts.append(f"No time was left for: {', '.join(result['left_out'])}.")
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    head = [*rows[0]]
    return report.table(head, [[_shown(row[name]) for name in head] for row in rows])


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measures, prints tables, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[1.0, 4.0, 10.0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins after these")
    parser.add_argument("--leaves", type=int, default=100, help="arrays of params")
    parser.add_argument("--params", type=int, default=20_000_000, help="of the trained model")
    parser.add_argument("--output", type=Path, default=Path("accelerator.json"))
    args = parser.parse_args()
    result = measured(args.gigabytes, args.minutes, args.leaves, args.params)
    args.output.write_text(json.dumps(result, indent=1))
    print(markdown(result))


if __name__ == "__main__":
    main()
