"""Sends elements of all data types to the next process, and compares what comes from the last."""

from __future__ import annotations

from tests.one_process import own  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import jax_settings, sending

DTYPES = (
    *("bool", "uint8", "float8_e4m3fn", "bfloat16", "float16"),
    *("float32", "int32", "float64", "complex64", "complex128"),
)
SHAPES = ((7, 6), (0,), (), (3,))
CUT = ((2, 5), (1, 6))
"""Of what is two-dimensional."""


def elements_of(process: int, lane: int) -> list[np.ndarray]:
    """Arrays of random bits, among them those of all kinds of NaN."""
    rng, found = np.random.default_rng([process, lane]), []
    for dtype in map(jnp.dtype, DTYPES):
        for shape in SHAPES:
            size = int(np.prod(shape)) * dtype.itemsize
            most = 2 if dtype.kind == "b" else 256
            data = rng.integers(0, most, size).astype(np.uint8)
            found.append(data.view(dtype).reshape(shape))
    return found


def main() -> None:
    """Sends, in two rounds, and compares."""
    count, me = own.processes, own.process
    words: dict[int, int] = {}
    for x in elements_of(0, 0):
        part = x[2:5, 1:6] if x.ndim == 2 else x
        width = min(x.itemsize, 4)
        words[width] = words.get(width, 0) + part.nbytes // width
    lengths = sending.lengths_of(words)
    rounds = [(tuple((p, (p + n) % count) for p in range(count)), lengths) for n in (1, 2)]
    rounds[1] = (rounds[1][0][:-1], lengths)  # the last process sends nothing, in this one
    sender = sending.Sender("cpu", rounds)
    devices = jax.local_devices()
    rows = []
    for n in range(2):
        lanes = []
        for lane, device in enumerate(devices):
            arrays = [jax.device_put(x, device) for x in elements_of(me, lane)]
            parts = [(x, CUT if x.ndim == 2 else tuple((0, n) for n in x.shape)) for x in arrays]
            lanes.append(sender.row(n, lane, parts if n == 0 or me != count - 1 else []))
        rows.append(lanes)
    received = sender.send(rows)
    for n, lanes in enumerate(received):
        giver = (me - n - 1) % count
        for lane, found in enumerate(lanes):
            flat = {x.dtype.itemsize: np.asarray(x).reshape(-1) for x in found}
            ends = dict.fromkeys(flat, 0)
            for x in elements_of(giver, lane):
                part = np.ascontiguousarray(x[2:5, 1:6] if x.ndim == 2 else x)
                width = min(x.itemsize, 4)
                start, ends[width] = ends[width], ends[width] + part.nbytes // width
                expected = part.tobytes()
                if n and giver == count - 1:
                    expected = bytes(part.nbytes)
                assert flat[width][start : ends[width]].tobytes() == expected, (n, x.dtype, x.shape)


with jax_settings.own(x64=True):
    main()
