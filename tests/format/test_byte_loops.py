"""The compiled loop and numpy give the same sums, and nobody waits for the compiler."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format import byte_loops, compiled_loops, fingerprint

seeds = st.integers(0, 2**32)
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from(
        [[1024], [1025], [5000], [70_000], [140_000], [3, 70_000], [2049, 3], [70_000, 2]]
    ),
    st.sampled_from([[300, 257], [1, 1030, 2], [2, 3, 4, 5, 6], [1, 1, 200_000]]),
)


def sum_of(words, starts):
    found = np.empty(1, np.uint64)
    numbers = [words.ctypes.data, words.itemsize, words.ndim, *words.shape, *starts]
    compiled_loops.sums()(np.array([numbers], np.int64), found)
    return int(found[0])


@given(st.data(), seeds, shapes, st.sampled_from([1, 2, 4]))
def test_sums_are_equal(data, seed, shape, width_bytes):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2 ** (8 * width_bytes), shape, np.dtype(f"u{width_bytes}"))
    words = np.asarray(words, f"u{width_bytes}")
    positions = st.integers(0, 5000)
    starts = data.draw(st.lists(positions, min_size=len(shape), max_size=len(shape)))
    assert sum_of(words, starts) == fingerprint.multilinear(words, starts)


@given(st.lists(st.tuples(seeds, shapes, st.sampled_from(["u1", "u2", "u4", "f8"])), max_size=5))
def test_many_blocks_are_summed_up_in_one_call(given_blocks):
    blocks = [
        (np.random.default_rng(seed).integers(0, 255, shape).astype(dtype), (seed % 3000,))
        for seed, shape, dtype in given_blocks
    ]
    found = byte_loops.Fingerprints(blocks)
    for _ in range(2):  # numpy may do the first
        starts = [(*start, *[0] * (block.ndim - 1)) for block, start in blocks]
        pairs = zip((block for block, _ in blocks), starts, strict=True)
        assert found.sums() == [byte_loops.fingerprint_of(x, s) for x, s in pairs]
        byte_loops.wait_until_compiled()
        for block, _ in blocks:
            np.add(block, 1, out=block)


def test_calls_compile_nothing_further():
    array = np.arange(4096, dtype=np.uint32)
    sum_of(array, (0,))
    before = len(compiled_loops._sums.signatures)
    sum_of(np.frombuffer(array.tobytes(), np.uint32), (0,))  # of other flags
    assert len(compiled_loops._sums.signatures) == before


FIRST_USE = """
import sys, threading
import numpy as np
from adacheck_jax.format import byte_loops
from adacheck_jax.device import fingerprint
assert "numba" not in sys.modules
small = byte_loops.fingerprint_of(np.arange(5000, dtype=np.float32))
assert threading.active_count() == 1  # a compiler is not worth it yet
array = np.arange(40_000_000, dtype=np.float32)
started = threading.Event()
byte_loops.lower_priority = started.wait  # keeps the compiler from beginning
sums = [byte_loops.fingerprint_of(array)]
assert threading.active_count() == 2
assert "numba" not in sys.modules
started.set()
byte_loops.wait_until_compiled()
assert "numba" in sys.modules
sums.append(byte_loops.fingerprint_of(array))
assert sums[0] == sums[1], sums
assert byte_loops._compiler.loop(0) is not None
"""


@pytest.mark.slow
def test_the_first_call_does_not_wait_for_the_compiler():
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=300)


NO_COMPILER = """
import sys
sys.modules["numba"] = None
import numpy as np
from adacheck_jax.format import byte_loops
words = np.arange(5000, dtype=np.uint32)
found = []
for _ in range(2):
    found.append(byte_loops.fingerprint_of(words))
    byte_loops.wait_until_compiled()
assert found[0] == found[1]
"""


@pytest.mark.slow
def test_without_a_compiler_numpy_goes_on():
    subprocess.run([sys.executable, "-c", NO_COMPILER], check=True, timeout=300, env={**os.environ})


COLORAMA = """
import sys
__version__ = "0.4.6"
class Fore:
    RESET = RED = GREEN = YELLOW = BLUE = MAGENTA = CYAN = WHITE = BLACK = ""
class Style:
    RESET_ALL = BRIGHT = NORMAL = DIM = ""
def init():
    sys.stdout.write("swapped\\n")
reinit = deinit = init
"""
COMPILED = """
from adacheck_jax.device.loops import xla_handler
from adacheck_jax.format import compiled_loops
compiled_loops.sums()
print("compiled")
"""


@pytest.mark.slow
def test_the_programs_streams_are_left_alone(tmp_path):
    (tmp_path / "colorama.py").write_text(COLORAMA)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "numba")},
    )
    assert run.stdout == "compiled\n"
