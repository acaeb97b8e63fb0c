"""Programs that read one state are dispatched as one, and give what each of them gives."""

import gc
import math
import weakref
from concurrent.futures import CancelledError, Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.device.loops import programs, xla_call
from adacheck_jax.device.loops.copier import Copying
from adacheck_jax.device.shard_sums import Summing
from adacheck_jax.update.elements.sample_sites import Sites
from adacheck_jax.update.elements.sampling import Taker
from tests.support import compiled_programs, mesh_of


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Compiles in the calling thread."""

    def done(work):
        future = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        return future

    monkeypatch.setattr(programs, "in_background", done)
    programs._Joint.of.cache_clear()
    yield
    programs._Joint.of.cache_clear()


def reading(arrays):
    """What starts fingerprints, two samples and copies of a state, and what waits for them."""
    xla_call.wait()
    sites, role = Sites(range(len(arrays)), arrays), tuple(range(len(arrays)))
    summing, takers = Summing(dict(enumerate(arrays))), []
    copying = Copying(dict(enumerate(arrays)))
    for roles in ([role], [role[1:]]):
        takers.append(Taker(sites, roles, arrays))
        takers[-1].compile()

    def start():
        sums = summing.dispatch(dict(enumerate(arrays)))
        samples = [taker.take(arrays, sites.starts_at(n)) for n, taker in enumerate(takers)]
        copied = copying.copies(dict(enumerate(arrays)))
        roles = [role], [role[1:]]

        def results():
            pairs = zip(samples, roles, strict=True)
            vectors = [x for each, own in pairs for x in each.vectors(own).values()]
            copies = [np.asarray(programs.now(copied[i])).tobytes() for i in sorted(copied)]
            return sums(), [np.asarray(x).tobytes() for x in vectors], copies

        return results

    return start


def state_on(mesh):
    values = [np.arange(n, dtype=np.float32).reshape(8, -1) for n in (8, 5000, 80_000)]
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))


@pytest.mark.parametrize("shape", [(1,), (4, 2)], ids=str)
def test_one_program_gives_what_each_gives_and_arrays_may_be_donated_behind_it(shape):
    arrays = state_on(mesh_of(shape))
    start = reading(arrays)
    alone = start()()
    names = []
    for _ in range(3):
        gathering = programs.Gathering()
        with compiled_programs() as compiled:
            with gathering.open():
                results = start()
            gathering.dispatch()
        names.append(compiled)
        if len(names) < 3:
            assert results() == alone
    assert names == [[], ["jit(with_effort)"], []]  # what is called once is not worth it
    donating = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    jax.block_until_ready(donating(arrays))
    assert results() == alone


def test_a_result_is_given_where_others_are_still_called_and_keeps_no_array():
    arrays = state_on(mesh_of((1,)))
    start = reading(arrays)
    with programs.Gathering().open():
        results = start()
        first = results()
        again = start()
    assert first == again() == results()
    held = weakref.ref(arrays[0])
    copies = Copying(dict(enumerate(arrays))).copies(dict(enumerate(arrays)))
    one = weakref.ref(programs.now(copies.pop(1)))
    gc.collect()
    assert one() is None  # who has taken one copy does not keep the others
    assert np.array_equal(programs.now(copies[0]), arrays[0])
    del arrays, start
    gc.collect()
    assert held() is None, (results, again)


def test_whoever_waits_for_a_result_learns_that_there_is_none():
    arrays = [jnp.arange(8.0), jnp.arange(9000.0)]
    start = reading(arrays)
    results = []

    def fail():
        gathering = programs.Gathering()
        with gathering.open():
            results.append(start())
        arrays[1].delete()
        gathering.dispatch()

    with pytest.raises(RuntimeError, match="deleted"):
        fail()
    with pytest.raises(RuntimeError, match="deleted"):
        results[0]()


def test_what_is_dropped_is_not_dispatched():
    arrays = state_on(mesh_of((1,)))
    start = reading(arrays)
    gathering = programs.Gathering()
    with compiled_programs() as names, gathering.open():
        dropped = start()
    gathering.drop()
    with gathering.open():
        results = start()
    with pytest.raises(CancelledError):
        dropped()
    assert not names
    assert results() == start()()


@pytest.mark.parametrize("calls_loops", [True, False])
def test_copies_that_are_dispatched_alone_have_work_for_which_xla_takes_a_thread(
    calls_loops, monkeypatch
):
    xla_call.wait()
    monkeypatch.setattr(xla_call, "is_ready", lambda: calls_loops)
    array = jnp.arange(12, dtype=jnp.int32)
    program = Copying({0: array})._groups[0][1]._program
    program.compile()
    text = program._compiled.as_text()
    assert " dot(" in text
    assert ("adacheck_copies" in text) == calls_loops


KINDS = [np.bool_, np.int8, jnp.bfloat16, np.float32, np.complex64, np.float64]


@pytest.mark.parametrize("shape", [(1,), (4, 2)], ids=str)
def test_loops_copy_arrays_of_all_widths_and_sizes(shape):
    xla_call.wait()
    mesh = mesh_of(shape)
    with jax.enable_x64(True):
        values = [
            np.arange(math.prod(each)).reshape(each).astype(dtype)
            for dtype in KINDS
            for each in [(), (8, 0), (8, 1), (8, 3), (16, 1, 1001)]
        ]
        spec = PartitionSpec(mesh.axis_names[0])
        where = [NamedSharding(mesh, spec if x.ndim else PartitionSpec()) for x in values]
        given = dict(enumerate(jax.device_put(values, where)))
        copying = Copying(given)
        copies = {i: programs.now(x) for i, x in copying.copies(given).items()}
    for i, copied in copies.items():
        assert (copied.dtype, copied.sharding) == (given[i].dtype, given[i].sharding)
        assert np.asarray(copied).tobytes() == np.asarray(given[i]).tobytes()
        for a, b in zip(copied.addressable_shards, given[i].addressable_shards, strict=True):
            is_apart = a.data.unsafe_buffer_pointer() != b.data.unsafe_buffer_pointer()
            assert is_apart or not a.data.size
