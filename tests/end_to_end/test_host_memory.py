"""What saves and restores leave in host memory, and what they take of it on their way."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.store import host_memory
from tests import support

FREED = """
import threading
import numpy as np
from pathlib import Path
from adacheck_jax.store import host_memory

def held_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def take():
    for _ in range(3):  # what was freed once is not mapped alone again
        blocks = [np.ones(1 << 20, np.uint8) for _ in range(40)]
        together.wait()
    kept.append(blocks[-1].copy())  # above all that is freed, so that no heap shrinks by itself

first, kept, together = held_bytes(), [], threading.Barrier(8)
threads = [threading.Thread(target=take) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
before = held_bytes() - first
host_memory.return_freed(SIZE)
print(before, held_bytes() - first)
"""


def live_bytes() -> int:
    return sum(each.nbytes for each in jax.live_arrays())


def left_by_a_save(directory: Path) -> float:
    """Share of a state that lives longer with a base that was saved than without it."""
    run = support.dict_run(support.mesh_of((2, 2)))
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=None)
    with support.manager_of(directory, handler) as manager:
        run.advance()
        jax.block_until_ready(run.state)
        gc.collect()
        before = live_bytes()
        gc.disable()
        try:
            manager.save(1, args=adacheck.SaveArgs(run.state))
            manager.wait_until_finished()
            support.finish_in_background(handler)
            run.advance()  # which donates the state that was saved
            jax.block_until_ready(run.state)
            return (live_bytes() - before) / sum(x.nbytes for x in jax.tree.leaves(run.state))
        finally:
            gc.enable()


def test_a_saved_base_holds_nothing_of_its_state_until_python_looks_for_cycles(tmp_path):
    left_by_a_save(tmp_path / "first")  # compiles
    assert left_by_a_save(tmp_path / "second") < 0.5


@pytest.mark.parametrize("spec", [None, jax.sharding.PartitionSpec("data")], ids=["one", "cut"])
def test_an_update_is_given_the_memory_of_what_was_read_for_it(spec):
    """Else the first update of a restore would take a state more."""
    block = host_memory.empty(1 << 16).view(np.float32).reshape(128, 128)
    block[...] = 1
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if spec is not None:
        where = jax.sharding.NamedSharding(support.mesh_of((2, 2)), spec)
    wanted = [jax.ShapeDtypeStruct(block.shape, block.dtype, sharding=where)]

    def is_given(*, is_donated: bool) -> bool:
        read = lambda _, box: block[box.slices]  # noqa: E731
        (array,) = transfer.place_all(wanted, read, is_donated=is_donated)
        places = [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
        result = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        np.testing.assert_array_equal(result, jnp.full(block.shape, 2, block.dtype))
        return places == [x.data.unsafe_buffer_pointer() for x in result.addressable_shards]

    assert is_given(is_donated=True)
    assert not is_given(is_donated=False)
    assert np.all(block == 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("size_bytes", [1 << 28, 1 << 20])
def test_memory_that_threads_have_freed_goes_back_at_gigabytes(size_bytes):
    code = FREED.replace("SIZE", str(size_bytes))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    if before < 100 << 20:
        pytest.skip("this C library keeps nothing")
    assert (after < before // 2) == (size_bytes >= 1 << 28)
