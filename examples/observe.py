"""Trains a small network and shows its saves in TensorBoard and to Prometheus.

A callback gets a report of each committed save; it writes TensorBoard's files, and the numbers that
Prometheus reads over HTTP on 127.0.0.1. The events of ``jax.monitoring`` are counted beside them::

    python examples/observe.py --root /tmp/observe --steps 20
    tensorboard --logdir /tmp/observe/tensorboard

In the end the example reads its own page as Prometheus would, and compares it with the reports.
"""

from __future__ import annotations

import argparse
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from tensorboardX import SummaryWriter

import adacheck_jax as adacheck

recorder = adacheck.Recorder(optax.adamw(1e-2))

metrics = CollectorRegistry()
saved_bytes = Counter("adacheck_saved_bytes", "Bytes of all saves", ["kind"], registry=metrics)
last_step = Gauge("adacheck_last_step", "Newest committed step", registry=metrics)
blocking = Histogram("adacheck_blocking_seconds", "Seconds a save blocks", registry=metrics)
durable = Histogram("adacheck_durable_seconds", "Seconds of a save", registry=metrics)
restore = Gauge("adacheck_restore_seconds", "Seconds of the last restore", registry=metrics)


def listen(event: str, seconds: float, **labels: str | int) -> None:
    """A listener of jax.monitoring, which also hears events of JAX and Orbax."""
    if event == "/adacheck/restore/duration_secs":
        restore.set(seconds)


def show(board: SummaryWriter, report: adacheck.SaveReport) -> None:
    """Writes one save's report; called in the background."""
    saved_bytes.labels(report.kind).inc(report.new_bytes or 0)
    last_step.set(report.step)
    blocking.observe(report.blocking_s)
    durable.observe(report.durable_s)
    board.add_scalar(f"save/{report.kind}_bytes", report.new_bytes or 0, report.step)
    board.add_scalar("save/blocking_ms", 1e3 * report.blocking_s, report.step)
    board.add_scalar("save/durable_ms", 1e3 * report.durable_s, report.step)


@jax.jit(donate_argnums=0)
def train_step(state: dict, inputs: jax.Array) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        return jnp.mean((jnp.tanh(inputs @ params["w"]) - inputs) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Show saves in TensorBoard and to Prometheus.")
    parser.add_argument("--root", type=Path, required=True, help="directory for steps and metrics")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=metrics)  # 0: a free port
    jax.monitoring.register_event_duration_secs_listener(listen)
    board = SummaryWriter(str(args.root / "tensorboard"))
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64)) / 8}
    state, first = {"params": params, "opt_state": recorder.init(params)}, 1
    manager = adacheck.checkpoint_manager(
        args.root / "steps", recorder, on_save=lambda report: show(board, report)
    )
    with manager:
        if (newest := manager.latest_step()) is not None:
            state, first = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest + 1
        for step in range(first, args.steps + 1):
            state, loss = train_step(state, jax.random.normal(jax.random.key(step), (32, 64)))
            manager.save(step, args=adacheck.SaveArgs(state))
            board.add_scalar("train/loss", float(loss), step)
    board.close()
    page = f"http://127.0.0.1:{server.server_port}/metrics"
    lines = urllib.request.urlopen(page).read().decode().splitlines()
    print("\n".join(line for line in lines if not line.startswith("#") and "bucket" not in line))
    server.shutdown()
    thread.join()
    if (report := manager.handler.last_save) is None:
        raise SystemExit(f"nothing to train: step {args.steps} is saved already")
    assert f"adacheck_last_step {float(report.step)}" in lines
    print(f"last save: {report}")


if __name__ == "__main__":
    main()
