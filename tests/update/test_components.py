"""Updates cut into components, so that equal ones are compiled once: the same bits, or not cut."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.update import program as update_program
from adacheck_jax.update.compiling import components, cut_program
from adacheck_jax.update.compiling.components import Graph, Node
from tests import support


def graph(nodes, returned, *, arguments, shared=(), counts=None):
    found = [
        Node(key, tuple(operands), (arguments + n,)) for n, (key, *operands) in enumerate(nodes)
    ]
    total = arguments + len(nodes)
    return Graph(
        arguments,
        frozenset(shared),
        ["t"] * total,
        counts or [100] * total,
        found,
        tuple(returned),
    )


def test_equal_components_have_one_kind():
    cut = components.plan(graph([("neg", 0), ("neg", 1), ("neg", 2)], [3, 4, 5], arguments=3))
    assert cut is not None
    assert [each.inputs for each in cut.components] == [(0,), (1,), (2,)]
    assert len({each.kind for each in cut.components}) == 1


def test_components_share_small_values_and_copy_large_ones():
    counts = [100, 100, 1, 1, 100, 100, 100]
    nodes = [("exp", 2), ("broadcast", 3), ("add", 0, 4), ("add", 1, 4)]
    cut = components.plan(graph(nodes, [5, 6], arguments=3, shared=[2], counts=counts))
    assert cut is not None
    assert cut.shared.nodes == (0,)
    assert cut.shared.outputs == (3,)
    assert [each.nodes for each in cut.components] == [(1, 2), (1, 3)]
    assert [each.scalars for each in cut.components] == [(3,), (3,)]


@pytest.mark.parametrize(
    ("nodes", "returned"),
    [
        ([("dot", 0, 1), ("mul", 0, 2), ("mul", 1, 2)], [3, 4]),  # a sum over all leaves
        ([("neg", 0), ("exp", 1)], [2, 3]),  # none are equal
        ([("neg", 0), ("neg", 1)], [2, 2]),  # returned twice: it cannot be donated twice
        ([("neg", 0)], [2, 1]),  # returned as it was taken
        ([("neg", 0), ("zeros",)], [2, 3]),  # a constant
    ],
)
def test_what_does_not_fall_into_equal_components_is_not_cut(nodes, returned):
    assert components.plan(graph(nodes, returned, arguments=2)) is None


TX = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 50), momentum=0.9),
    "clipped": lambda: optax.chain(optax.clip(0.1), optax.nadam(1e-3)),
}


def state_of(tx, mesh):
    """Twelve leaves of two shapes, on two shardings."""
    recorder = adacheck.Recorder(tx, dtype=jnp.bfloat16)
    params = {f"{i}": jnp.full((8, 16 + i % 2), 1.0 + i) for i in range(12)}
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    params = {k: jax.device_put(v, cut if int(k) % 4 else whole) for k, v in params.items()}
    return recorder, {"params": params, "opt_state": recorder.init(params)}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", TX)
def test_a_restore_computes_the_components_bits(tmp_path, name, monkeypatch):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    recorder, state = state_of(TX[name](), mesh)

    @jax.jit
    def step(state):
        gradients = jax.tree.map(lambda p: jnp.sin(p * 1e3), state["params"])
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    saved = {}
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(5):
            saved[number] = support.host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
            state = step(state)
    programs = []
    cut_up = cut_program.cut_up
    monkeypatch.setattr(cut_program, "cut_up", lambda x: programs.append(cut_up(x)) or programs[-1])
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(state))
        support.assert_same_bits(manager.restore(4, args=args), saved[4])
    assert handler.restored is not None
    assert handler.restored.replayed_count == 3
    assert programs[0] is not None
    kinds = {each.kind for each in programs[0].cut.components}
    assert len(programs[0].cut.components) == 12
    assert len(kinds) == 2


def exported(function, count=4):
    specs = [[jax.ShapeDtypeStruct((4, 4), "float32")] * count] * 3
    program = jax.export.export(jax.jit(function), platforms=(update_program.platform(),))
    return program(*specs, [], jax.ShapeDtypeStruct((), "uint32")), specs


def test_components_may_loop_but_not_take_what_is_around_them():
    def alone(params, inner, record, extra, zero):
        loop = [jax.lax.fori_loop(0, 3, lambda _, x: x * 0.5, p) for p in params]
        return loop, [i + r for i, r in zip(inner, record, strict=True)]

    program, specs = exported(alone)
    cut = cut_program.cut_up(program)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = [
        [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in each] for each in specs
    ]
    arrays = [[jnp.full((4, 4), 1.0 + n) for n in range(4)] for _ in specs]
    expected = program.call(*arrays, [], np.uint32(0))
    if cut is not None:
        switches = update_program.switches(1)
        found = cut_program.compiled(cut, [*leaves, []], switches)(*arrays, [], switches)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_another_update_than_the_manifests_is_not_compiled_in_components():
    program, specs = exported(lambda p, i, r, e, z: ([x + 1 for x in p], [x * 2 for x in i]))
    cut = cut_program.cut_up(program)
    assert cut is not None
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wrong = [[jax.ShapeDtypeStruct((3, 3), "float32", sharding=device)] * 4 for _ in specs]
    with pytest.raises(ValueError, match="takes other leaves"):
        cut_program.compiled(cut, [*wrong, []], update_program.switches(1))
