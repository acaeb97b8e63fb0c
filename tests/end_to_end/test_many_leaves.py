"""The work of a save and of a restore grows as the number of leaves, and no faster."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.device.loops import xla_call
from adacheck_jax.update.elements.sample_sites import Sites
from adacheck_jax.update.elements.sampling import Taker, from_host
from tests.support import abstract, compiled_programs, manager_of, mesh_of

PACKAGE = str(Path(adacheck.__file__).parent)


@contextmanager
def counted_lines() -> Iterator[list[str]]:
    """The lines of the package that all threads execute meanwhile: the function of each."""
    found: list[str] = []

    def line(frame, event, argument):
        del argument
        if event == "line":
            found.append(frame.f_code.co_qualname)
        return line

    def call(frame, event, argument):
        del event, argument
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before)  # pyright: ignore[reportArgumentType]


def assert_linear(work_on: Callable[[int], Callable[[], object]], few: int) -> None:
    """Work on twice as many leaves executes no more than about twice as many lines."""
    counts = []
    for count in (few, 2 * few, 4 * few):
        work = work_on(count)
        with counted_lines() as lines:
            work()
        counts.append(len(lines))
    first, second, third = counts
    assert 0 < third - second <= 2.4 * (second - first), counts


@pytest.mark.parametrize("is_cut", [False, True])
def test_staging_looks_at_each_array_once(is_cut):
    sharding = NamedSharding(mesh_of((4, 2)), PartitionSpec("data" if is_cut else None))

    def staging(count):
        array = jax.device_put(jnp.arange(8.0), sharding)
        boxes = transfer.boxes_here(array.shape, array.sharding)
        picks = dict.fromkeys(range(count), transfer.picks_of(array, boxes))
        return transfer.Staged(dict.fromkeys(range(count), array), picks).wait

    assert_linear(staging, 50)


def sampled(count, mesh=None):
    """Leaves of four kinds, and how many programs sample them."""
    shapes, dtypes = [(8, 16), (90, 80), (3,), (5000,)], [np.float32, jnp.bfloat16]
    arrays = [np.full(shapes[i % 4], i, dtypes[i % 2]) for i in range(count)]
    arrays = jax.device_put(arrays, mesh and NamedSharding(mesh, PartitionSpec()))
    sites = Sites(range(count), arrays)
    roles = [(i,) for i in range(count)]
    taker = Taker(sites, roles, arrays)
    xla_call.wait()  # the loops are tried in programs of their own
    with compiled_programs(own=True) as programs:
        taker.compile()
    return arrays, sites, roles, taker, programs


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("shape", [None, (4, 2)], ids=str)
def test_leaves_of_a_kind_are_sampled_by_one_program_and_each_has_its_own_elements(shape):
    mesh = shape and mesh_of(shape)
    arrays, sites, roles, taker, programs = sampled(4 * 70, mesh)
    fewer = sampled(4 * 38, mesh)[-1]
    assert len(programs) == len(fewer) <= 6, "one a kind, one a data type for what is left over"
    starts = sites.starts_at(3)
    host = from_host(arrays, sites, starts, roles).vectors(roles)
    found = taker.take(arrays, starts).vectors(roles)
    assert all(np.asarray(found[role]).tobytes() == host[role].tobytes() for role in host)
    for i, array in enumerate(arrays):
        assert {*found[i,].reshape(-1).tolist()} == {float(array.reshape(-1)[0])}


@pytest.mark.parametrize("has_loops", [True, False])
def test_no_program_slices_more_than_a_few_leaves(monkeypatch, has_loops):
    """XLA takes many seconds for one that slices all leaves of a large state."""
    if not has_loops:
        monkeypatch.setattr(xla_call, "wait", lambda: False)
    arrays = jax.device_put([np.zeros(n, np.float32) for n in range(1, 101)])
    sites = Sites(range(100), arrays)
    role = tuple(range(100))
    taker = Taker(sites, [role], arrays)
    assert xla_call.wait() == has_loops  # the loops are tried in programs of their own
    with compiled_programs(own=True) as programs:
        taker.compile()
    assert len(programs) == (1 if has_loops else 4)  # compiled loops take no slices
    starts = sites.starts_at(0)
    found = taker.take(arrays, starts).vectors([role])[role]
    assert found.shape == (1, sum(range(1, 101)))


def run_of(count):
    """A recorder, a state of so many params, and a step that gives the next one."""
    recorder = adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)
    params = {f"layer_{i:03}": jnp.full([(8, 16), (16,)][i % 2], 1.0 + i) for i in range(count)}

    @jax.jit
    def step(state):
        updates, opt = recorder.update(state["params"], state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return recorder, step({"params": params, "opt": recorder.init(params)})


@pytest.mark.slow
def test_a_restore_takes_as_many_lines_for_each_leaf(tmp_path):
    def restoring(count):
        recorder, state = run_of(count)
        root = tmp_path / f"of-{count}"
        with manager_of(root, adacheck.AdaCheckHandler(recorder)) as manager:
            manager.save(0, args=adacheck.SaveArgs(state))
        manager = manager_of(root, adacheck.AdaCheckHandler(recorder))

        def restore():
            with manager:
                manager.restore(0, args=adacheck.RestoreArgs(abstract(state)))

        return restore

    assert_linear(restoring, 20)
