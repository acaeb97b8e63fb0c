"""Updates cut into parts, of which equal ones are compiled once: the same bits, or whole."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.restore import compiled_update
from adacheck_jax.update import program as update_program
from adacheck_jax.update.compiling import cut_program, parts
from adacheck_jax.update.program import Kept
from tests import support
from tests.support import assert_same_bits

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def cuts(monkeypatch):
    """The plans of the programs that are compiled, None for one that is compiled whole."""
    made, cut = [], parts.cut
    monkeypatch.setattr(parts, "cut", lambda *given: made.append(cut(*given)) or made[-1])
    monkeypatch.setattr(compiled_update, "_kept", Kept(1))
    return made


def exported(function, *lists):
    """A function of four lists of leaves and a number, exported; and its leaves."""
    leaves = [[jax.ShapeDtypeStruct(*x, sharding=DEVICE) for x in each] for each in lists]
    zero = jax.ShapeDtypeStruct((), "uint32")
    return jax.export.export(jax.jit(function), platforms=(update_program.platform(),))(
        *leaves, zero
    ), leaves


def compiled_alike(program, leaves):
    """The program in parts, after its results were compared with those of the whole program."""
    switches = update_program.switches(1)
    run = cut_program.compiled(program, leaves, switches)
    if run is not None:
        rng = np.random.default_rng(0)
        drawn = [[rng.standard_normal(x.shape) * 9 for x in each] for each in leaves]
        arrays = [
            [jnp.asarray(a.astype(x.dtype)) for a, x in zip(*pair, strict=True)]
            for pair in zip(drawn, leaves, strict=True)
        ]
        expected = support.host_copy(program.call(*arrays, switches))
        assert_same_bits(run(*arrays, switches), expected)
    return run


LEAF = (32, 8), "int32"
SMALL = (3,), "int32"


def scaled(p, i, r, _, zero):
    scale = zero.astype("int32") + 2
    return [a - scale * b for a, b in zip(p, r, strict=True)], [a * scale for a in i]


def shifted(p, i, r, e, _):
    return [a - b * e[0][n % 3] for n, (a, b) in enumerate(zip(p, r, strict=True))], [i[0] + e[0]]


@pytest.mark.parametrize(
    ("function", "lists", "parts", "kinds", "shared"),
    [
        (scaled, ([LEAF] * 5, [LEAF] * 4, [LEAF] * 5, []), 9, 2, 1),
        (shifted, ([LEAF] * 4, [SMALL], [LEAF] * 4, [SMALL]), 5, 2, 3),
    ],
    ids=["scalars", "a small argument"],
)
def test_equal_leaves_are_equal_parts_that_share(cuts, function, lists, parts, kinds, shared):
    assert compiled_alike(*exported(function, *lists))
    (cut,) = cuts
    assert len(cut.parts) == parts
    assert len({each.text for each in cut.parts}) == kinds
    assert len(cut.shared.given) == shared


@pytest.mark.parametrize(
    "function",
    [
        lambda p, i, r, e, z: ([a + sum(b.sum() for b in r) for a in p], i),  # sums over all leaves
        lambda p, i, r, e, z: ([a + p[0] for a in p], [x + p[0] for x in i]),  # all take a leaf
        lambda p, i, r, e, z: (r, [x * 2 for x in i]),  # returned as it was taken
        lambda p, i, r, e, z: ([p[0] * 2] * 4, [x * 2 for x in i]),  # returned four times
        lambda p, i, r, e, z: ([a[:1] for a in p], [x * 2 for x in i]),  # of other shapes
        lambda p, i, r, e, z: ([jax.lax.fori_loop(0, 3, lambda _, x: x * 2, a) for a in p], i),
    ],
)
def test_what_does_not_fall_into_equal_parts_is_compiled_whole(function):
    assert compiled_alike(*exported(function, [LEAF] * 4, [LEAF] * 4, [LEAF] * 4, [])) is None


def test_parts_that_copy_too_much_are_compiled_whole(monkeypatch, caplog):
    monkeypatch.setattr(parts, "_TEXT_BYTES", 1000)
    with caplog.at_level("INFO"):
        assert compiled_alike(*exported(scaled, [LEAF] * 5, [LEAF] * 4, [LEAF] * 5, [])) is None
    assert "its parts copy too much" in caplog.text


def test_leaves_that_are_not_the_programs_are_refused_by_the_whole_program(caplog):
    program, _ = exported(scaled, [LEAF] * 4, [LEAF] * 4, [LEAF] * 4, [])
    other = [[jax.ShapeDtypeStruct((3, 3), "float32", sharding=DEVICE)] * 4] * 3 + [[]]
    with caplog.at_level("INFO"):
        assert cut_program.compiled(program, other, update_program.switches(1)) is None
    assert "it takes other leaves" in caplog.text


@given(st.data())
def test_whatever_the_operations_parts_compute_the_bits_of_the_whole(data):
    """Random programs of integers, whose operations may join leaves, share values or copy them."""
    shapes = [((2, 2), "int32"), ((64,), "int32"), ((), "int32")]
    kinds = data.draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=6))
    lists = [kinds, kinds[: data.draw(st.integers(0, 3))], kinds]
    recipe = data.draw(
        st.lists(st.tuples(*[st.integers(0, 30)] * 3), min_size=1, max_size=8), label="recipe"
    )

    def run(p, i, r, _, zero):
        values = [*p, *i, *r, zero.astype("int32")]
        for kind, a, b in recipe:
            x, y = values[a % len(values)], values[b % len(values)]
            if kind % 3 == 0:
                values.append(x * 3 + y if x.shape == y.shape else x * 7)
            elif kind % 3 == 1:
                values.append(x + (y if not y.shape else 5))
            else:
                values.append(jnp.full(x.shape, 3, x.dtype) ^ x)
        used = values[::-1]

        def new(leaf):
            return leaf + next((v for v in used if v.shape == leaf.shape), 1)

        return [new(x) if n % 2 else x ^ 5 for n, x in enumerate(p)], [x - 1 for x in i]

    compiled_alike(*exported(run, *lists, []))


TX = {
    "adamw": lambda: [optax.adamw(1e-2)],
    "lion": lambda: [optax.lion(1e-3)],
    "schedule": lambda: [optax.sgd(optax.cosine_decay_schedule(0.1, 50), momentum=0.9)],
    "chain": lambda: [optax.chain(optax.clip(0.1), optax.nadam(1e-3))],
    "two": lambda: [optax.adam(1e-2), optax.adam(1e-2)],
}


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", TX)
def test_a_restore_computes_the_parts_bits(tmp_path, name, devices, dtype, cuts):
    """Twelve leaves of two shapes, on two shardings; two recorders each step their own half."""
    mesh, record = support.mesh_of((devices,)), jnp.bfloat16 if dtype == "float32" else None
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    recorders = [adacheck.Recorder(tx, dtype=record) for tx in TX[name]()]

    def begin(k, recorder):
        params = {
            f"{i:02}": jax.device_put(
                jnp.full((8, 16 + 8 * k + i % 2), 1.0 + i, dtype), (split, whole)[i % 4 == 0]
            )
            for i in range(12)
        }
        return {"params": params, "opt_state": recorder.init(params)}

    def stepped(recorder, own):
        gradients = jax.tree.map(lambda p: jnp.sin(p * 1e3), own["params"])
        updates, opt_state = recorder.update(gradients, own["opt_state"], own["params"])
        return {"params": optax.apply_updates(own["params"], updates), "opt_state": opt_state}

    @jax.jit
    def step(state, number):
        pairs = enumerate(zip(recorders, state, strict=True))
        return [
            jax.lax.cond(
                number % len(state) == k, functools.partial(stepped, recorder), lambda x: x, own
            )
            for k, (recorder, own) in pairs
        ]

    state = [begin(*each) for each in enumerate(recorders)]
    saved = {}
    handler = adacheck.AdaCheckHandler(recorders[0] if len(recorders) == 1 else recorders)
    with support.manager_of(tmp_path, handler) as manager:
        for number in range(5):
            saved[number] = support.host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
            state = step(state, number)
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, handler) as manager:
        args = adacheck.RestoreArgs(support.abstract(state))
        assert_same_bits(manager.restore(4, args=args), saved[4])
    assert handler.restored is not None
    assert handler.restored.replayed_count
    assert cuts[0] is not None
    assert len({each.text for each in cuts[0].parts}) * 3 <= len(cuts[0].parts)
