"""How fast what is stored is split into planes and compressed, and to how much.

    python -m benchmarks.codecs

One core, float32 noise: its exponents as a delta stores them, and whole elements as a base does;
the fastest of several passes over one chunk. Compression is tensorstore's, with its own overhead.
Then codes of the same noise in bfloat16, compressed as gradients are: millions of elements that
are encoded and decoded in a second, and bytes an element. ``look`` is what a dense leaf costs.
"""

from __future__ import annotations

import argparse
import json

import ml_dtypes
import numpy as np
import tensorstore as ts

from adacheck_jax.format.encodings import codes
from adacheck_jax.format.encodings import planes as codecs
from adacheck_jax.store import zarr
from benchmarks.common import environment
from benchmarks.fingerprints import rate_of


def stored_bytes(data: np.ndarray, codecs: list[dict[str, object]]) -> int:
    """Size of uint8 elements that are stored as one chunk."""
    context = ts.Context()  # of its own: memory that is gone with it
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory", "path": "sample/"},
        "metadata": zarr.metadata("uint8", data.shape, data.shape, codecs),
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True, context=context).result().write(data).result()
    memory = ts.KvStore.open({"driver": "memory", "path": "sample/"}, context=context).result()
    return len(memory.read("c/0").result().value)


def compressed(data: np.ndarray, chain: list[dict[str, object]], repeats: int) -> dict[str, float]:
    """GB/s and ratio of one chain of codecs on one chunk."""
    ratio = data.size / stored_bytes(data, chain)
    rate = rate_of(lambda: stored_bytes(data, chain), data.size, repeats)
    return {"GB/s": round(rate, 2), "ratio": round(ratio, 3)}


def coded(block: np.ndarray, repeats: int) -> dict[str, float]:
    """Rates and size of the code of one block."""
    code, target = codes.encode(block), np.empty_like(block)
    stream = np.concatenate([code.body, code.rest])
    encode = rate_of(lambda: codes.encode(block), block.size, repeats)
    decode = rate_of(lambda: codes.decode(stream, target), block.size, repeats)
    return {
        "encode M/s": round(1e3 * encode),
        "decode M/s": round(1e3 * decode),
        "bytes": round(stream.size / block.size, 4),
    }


def all_coded(noise: np.ndarray, repeats: int) -> dict[str, dict[str, float]]:
    """Codes of noise that is compressed as gradients are."""
    scale = np.abs(noise).max() / 127
    largest = np.abs(noise) >= np.quantile(np.abs(noise), 0.99)
    ways = {
        "top-k 1 %": np.where(largest, noise, np.float32(0)),
        "int8": np.round(noise / scale) * scale,
        "sign": np.sign(noise) * scale,
    }
    narrow = {name: each.astype(ml_dtypes.bfloat16) for name, each in ways.items()}
    dense = noise.astype(ml_dtypes.bfloat16)
    look_us = 1e-3 / rate_of(lambda: codes.may_pay(dense), 1, repeats)
    found = {name: coded(each, repeats) for name, each in narrow.items()}
    return {**found, "look": {"us": round(look_us, 1)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=4, help="size of the chunk")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    count, repeats = (arguments.mb << 20) // 4, arguments.repeats
    noise = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    planes = np.empty((4, count), np.uint8)
    low, high = planes[:3], planes[3:]
    rate = rate_of(lambda: codecs.EXPONENTS.encode(noise, None, low, high), noise.nbytes, repeats)
    whole = noise.view(np.uint8)
    result = {
        **environment(),
        "planes GB/s": round(rate, 2),
        "exponents": {
            str(codec): compressed(high[0], zarr.chain(codec), repeats)
            for codec in zarr.CODECS.values()
        },
        "elements": {
            **{
                str(codec): compressed(whole, zarr.chain(codec, 4), repeats)
                for codec in zarr.CODECS.values()
            },
            "zstd of unshuffled bytes": compressed(whole, zarr.chain("zstd"), repeats),
        },
        "codes": all_coded(noise, repeats),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
