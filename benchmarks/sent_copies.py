"""Blocking of saves that send copies to other hosts, and bytes that go between processes.

    python -m benchmarks.sent_copies
    python -m benchmarks.sent_copies --mb 400 --processes 4

Each process counts as a host. A state of adamw, cut over all processes or held by each, is saved at
every step by two managers in turns: one keeps copies in the memory of other processes, one does
not. So is a recorded step. Prints medians over the steps of the slowest process's milliseconds, and
bytes that one process sends at a step, divided by the bytes of its part of the record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import environment, in_processes

_LEAVES, _WIDTH = 24, 512


def main() -> None:
    """Saves in both layouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="megabytes of the state")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layouts", nargs="*", default=["cut", "replicated"])
    arguments = parser.parse_args()
    print(json.dumps(environment()))
    print("| layout | call | without copies, ms | with copies, ms | ratio | sent / record |")
    print("|---|---|---|---|---|---|")
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            given = layout, root, arguments.mb, arguments.steps
            found = in_processes("benchmarks.sent_copies", "child", arguments.processes, *given)
        sent = f"{found[0]['sent']:.3f}"
        for call in ("save", "record_step"):
            alone, copied = (
                statistics.median(
                    max(each) for each in zip(*(x[f"{call} {n}"] for x in found), strict=True)
                )
                for n in (0, 1)
            )
            print(
                f"| {layout} | {call} | {1000 * alone:.1f} | {1000 * copied:.1f} "
                f"| {copied / alone:.2f} | {sent} |",
                flush=True,
            )


def _begun(processes: int, layout: str, mb: int) -> tuple[Any, Any, Any, int]:
    """A recorder, a state, the train step, and the bytes of a process's part of the record."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import adacheck_jax as adacheck

    mesh = jax.make_mesh((processes,), ("hosts",))
    axes = ("hosts",) if layout == "cut" else ()
    own, everywhere = (NamedSharding(mesh, PartitionSpec(*each)) for each in (axes, ()))
    recorder = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)
    chain = optax.chain(recorder)
    rows = max(64, mb * 10**6 // (14 * _LEAVES * _WIDTH) // 64 * 64)

    def begin() -> Any:
        keys = jax.random.split(jax.random.key(0), _LEAVES)
        params = {str(n): jax.random.normal(key, (rows, _WIDTH)) for n, key in enumerate(keys)}
        return {"params": params, "opt_state": chain.init(params)}

    shardings = jax.tree.map(lambda x: own if x.ndim else everywhere, jax.eval_shape(begin))

    def train_step(state: Any, step: Any) -> Any:
        gradient = jax.tree.map(lambda x: jnp.sin(x + step), state["params"])
        updates, opt_state = chain.update(gradient, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    state = jax.jit(begin, out_shardings=shardings)()
    train_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
    return recorder, state, train_step, 2 * _LEAVES * rows * _WIDTH // processes


def _child(
    index: int, processes: int, port: str, layout: str, root: str, mb: int, steps: int
) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    import jax
    import jax.numpy as jnp

    import adacheck_jax as adacheck
    from adacheck_jax.device.sending import Sender

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    sent_bytes, send = list[int](), Sender.send

    def counted(self: Sender, rows: Any) -> Any:
        sent_bytes.append(sum(x.nbytes for each in rows for lane in each for x in lane))
        return send(self, rows)

    Sender.send = counted
    recorder, state, train_step, record_bytes = _begun(processes, layout, mb)
    managers = []
    for copies in (0, 1):
        memory = str(Path(root) / f"memory-{copies}-{index}")
        shadow = adacheck.Shadow(directory=memory, domain=f"host {index}", copies=copies)
        path = Path(root) / str(copies)
        managers.append(adacheck.checkpoint_manager(path, recorder, shadow=shadow, max_deltas=1000))
    took_s: dict[str, list[float]] = {}
    for step in range(2 * steps + 8):
        state = jax.block_until_ready(train_step(state, jnp.float32(step)))
        call = "record_step" if step > 6 and step % 2 else "save"
        for copies in (step // 2 % 2, 1 - step // 2 % 2):
            manager = managers[copies]
            manager.wait_until_finished()
            jax.experimental.multihost_utils.sync_global_devices("together")
            begin_s = time.perf_counter()
            if call == "save":
                manager.save(step, args=adacheck.SaveArgs(state))
            else:
                assert manager.handler.record_step(state, step)
            took = time.perf_counter() - begin_s
            manager.wait_until_finished()
            if step >= 8:
                took_s.setdefault(f"{call} {copies}", []).append(took)
            time.sleep(0.1)
    for manager in managers:
        manager.close()
    sent = sent_bytes[-1] / record_bytes if sent_bytes else 0.0
    print(json.dumps({**took_s, "sent": sent}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        index, processes, port, layout, root, mb, steps = sys.argv[2:]
        _child(int(index), int(processes), port, layout, root, int(mb), int(steps))
    else:
        main()
