"""Programs that read one state are dispatched as one, and give what each of them gives."""

import gc
import weakref
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.device.loops import programs, xla_call
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
    programs._joined.cache_clear()
    yield
    programs._joined.cache_clear()


def reading(arrays):
    """What starts fingerprints and two samples of a state, and gives what waits for them."""
    xla_call.wait()
    sites, role = Sites(range(len(arrays)), arrays), tuple(range(len(arrays)))
    summing, takers = Summing(dict(enumerate(arrays))), []
    for roles in ([role], [role[1:]]):
        takers.append(Taker(sites, roles, arrays))
        takers[-1].compile()

    def start():
        sums = summing.dispatch(dict(enumerate(arrays)))
        samples = [taker.take(arrays, sites.starts_at(n)) for n, taker in enumerate(takers)]
        roles = [role], [role[1:]]

        def results():
            pairs = zip(samples, roles, strict=True)
            vectors = [x for each, own in pairs for x in each.vectors(own).values()]
            return sums.sums(), [np.asarray(x).tobytes() for x in vectors]

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
    with compiled_programs() as names, programs.together():
        results = start()
    assert names == ["jit(joined)"]
    donating = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    jax.block_until_ready(donating(arrays))
    assert results() == alone


def test_until_they_are_compiled_as_one_each_is_dispatched_by_itself(monkeypatch):
    monkeypatch.setattr(programs, "in_background", lambda work: Future())
    start = reading(state_on(mesh_of((1,))))
    alone = start()()
    with programs.together():
        results = start()
    assert results() == alone


def test_a_result_is_given_where_others_are_still_called_and_keeps_no_array():
    arrays = state_on(mesh_of((1,)))
    start = reading(arrays)
    with programs.together():
        results = start()
        first = results()
        again = start()
    assert first == again() == results()
    held = weakref.ref(arrays[0])
    del arrays, start
    gc.collect()
    assert held() is None, (results, again)


def test_whoever_waits_for_a_result_learns_that_there_is_none():
    arrays = [jnp.arange(8.0), jnp.arange(9000.0)]
    start = reading(arrays)
    results = []

    def fail():
        with programs.together():
            results.append(start())
            arrays[1].delete()

    with pytest.raises(RuntimeError, match="deleted"):
        fail()
    with pytest.raises(RuntimeError, match="deleted"):
        results[0]()
