"""How fast arrays are fingerprinted: on the host, one core, and on the device where there is one.

    python -m benchmarks.fingerprints

The fastest of several passes over one array; the rate at which one core copies the same bytes, and
on a device the rate at which it reads them for a plain sum, stand beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import shard_sums
from adacheck_jax.format.byte_loops import fingerprint_of, wait_until_compiled
from benchmarks.common import environment

DTYPES = ("float32", "bfloat16", "uint8", "float64")


def rate_of(run: Callable[[], Any], size_bytes: int, repeats: int) -> float:
    """GB/s of the fastest of several calls, once all loops are compiled."""
    run()
    wait_until_compiled()
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return size_bytes / min(times_s) / 1e9


def host_rates(size_bytes: int, repeats: int) -> dict[str, float]:
    """Fingerprints on the host: GB/s of one core, by data type."""
    noise = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    rates = {"copy": rate_of(noise.copy, size_bytes, repeats)}
    for name in DTYPES:
        array = noise.view(jnp.dtype(name)).reshape(-1, 1024)
        rates[name] = rate_of(lambda array=array: fingerprint_of(array), size_bytes, repeats)
    return rates


def device_rates(size_bytes: int, repeats: int) -> dict[str, float]:
    """Fingerprints where the array lies: GB/s of one device, by data type."""
    rates = {}
    for name in DTYPES[:3]:
        dtype = jnp.dtype(name)
        array = jnp.ones((size_bytes // dtype.itemsize // 1024, 1024), dtype)
        total = jax.jit(lambda x: x.astype(jnp.float32).sum())
        rates[f"sum of {name}"] = rate_of(
            lambda x=array, f=total: f(x).block_until_ready(), size_bytes, repeats
        )
        rates[name] = rate_of(
            lambda x=array: shard_sums.Summing({0: x}).dispatch({0: x})(), size_bytes, repeats
        )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="size of the array")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    size_bytes = arguments.mb << 20
    result = {**environment(), "host": host_rates(size_bytes, arguments.repeats)}
    if jax.default_backend() != "cpu":
        result["device"] = device_rates(size_bytes, arguments.repeats)
        result["device_kind"] = jax.devices()[0].device_kind
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
