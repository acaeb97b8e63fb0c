"""Each kind of optimizer and of leaf comes back to the bit, from bases and either kind of delta."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format as JaxFormat
from jax.experimental.layout import Layout
from safetensors.numpy import load_file

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools.audit import verify_root
from adacheck_jax.tools.handover.export import export
from adacheck_jax.tools.handover.formats import Format
from tests import support
from tests.end_to_end.kept import assert_only_changes_are_stored, base_of, kinds, stored_letters
from tests.save.loop import Loop
from tests.strategies import any_bits
from tests.support import Run, assert_same_bits, host_copy, manager_of, mesh_of

SAVING = (4, 2)
OTHER = (8, 1)
STEPS = 5


def target_of(state: Any, mesh: jax.sharding.Mesh) -> Any:
    """The abstract state on a mesh; what lies on the host stays as it is."""

    def abstract(leaf: Any) -> Any:
        return support.abstract(leaf, mesh) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(abstract, state)


def assert_comes_back(loop: Loop, expected: Collection[str]) -> None:
    """Restores without the recorder's code, onto the mesh of the run and another one."""
    loop.manager.wait_until_finished()
    state, saved, handler = loop.run.state, loop.states, adacheck.AdaCheckHandler()
    assert kinds(loop.root) in expected
    assert_only_changes_are_stored(loop.root, saved)
    paths = [leaf.path for leaf in base_of(loop.root, 1).leaves]
    described = lambda x: (x.shape, x.dtype, x.tobytes())  # noqa: E731
    with manager_of(loop.root, handler) as manager:
        for shape, first in ((SAVING, 1), (OTHER, 2)):
            target = target_of(state, mesh_of(shape))
            for step in range(first, max(saved) + 1, max(saved) - first):
                args = adacheck.RestoreArgs(target, require_exact=True)
                restored = manager.restore(step, args=args)
                rows = zip(paths, host_copy(restored), saved[step], strict=True)
                wrong = [path for path, a, b in rows if described(a) != described(b)]
                assert wrong == [], (shape, step)
                assert handler.restored.exact
                assert jax.tree.structure(restored) == jax.tree.structure(state)
                pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True)
                for leaf, abstract in pairs:
                    if isinstance(abstract, jax.ShapeDtypeStruct):
                        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def run_of(tx: optax.GradientTransformation, record: Any = None, **options: Any) -> Run:
    return support.program_of(mesh_of(SAVING), *support.recorded(tx, record), **options).run()


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def in_four_bits() -> optax.GradientTransformation:
    """Steps along a sum of gradients that is kept in four bits.

    Programs compiled ahead are called by layouts, which JAX tells wrong of such arrays.
    """

    def added(kept: jax.Array, gradient: jax.Array) -> jax.Array:
        wide = kept.astype(jnp.float32) + jnp.round(gradient * 100)
        return jnp.clip(wide, -7, 7).astype(jnp.int4)

    def update(gradients: Any, kept: Any, params: Any = None) -> Any:
        kept = jax.tree.map(added, kept, gradients)
        return jax.tree.map(lambda k: -1e-3 * k.astype(jnp.float32), kept), kept

    init = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int4), params)  # noqa: E731
    return optax.GradientTransformation(init, update)


def frozen_vectors() -> Run:
    transforms = {True: optax.adamw(1e-2), False: optax.set_to_zero()}
    return run_of(optax.multi_transform(transforms, matrices))


def on_plateau() -> Run:
    """Takes the loss."""
    tx = optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    recorder = adacheck.Recorder(tx, extra_args={"value": jnp.zeros(())})
    chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    return support.program_of(mesh_of(SAVING), recorder, chain, takes_value=True).run()


def poisoned() -> Run:
    """The third step is not finite, and is rejected."""
    run = run_of(optax.apply_if_finite(optax.adamw(1e-2), 3))
    train_step = run.train_step
    nan = lambda data: jax.tree.map(lambda x: x * np.nan, data)  # noqa: E731
    run.train_step = lambda state, data: train_step(state, nan(data) if run.count == 2 else data)
    return run


def accumulating() -> Run:
    """Gradients are added up over two steps around the recorder."""
    recorder, chain = support.recorded()
    chain = optax.MultiSteps(chain, 2).gradient_transformation()
    return support.program_of(mesh_of(SAVING), recorder, chain).run()


def masked() -> Run:
    """The recorder does not see all params."""
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    vectors = lambda params: jax.tree.map(lambda x: x.ndim < 2, params)  # noqa: E731
    others = optax.masked(optax.sgd(1e-2), vectors)
    chain = optax.chain(optax.clip_by_global_norm(1.0), others, optax.masked(recorder, matrices))
    return support.program_of(mesh_of(SAVING), recorder, chain).run()


def beside() -> Run:
    """An average that is not declared, and leaves that stay as they are."""
    frozen = {"kernel": jnp.ones((64, 32)), "table": jnp.arange(7), "key": jax.random.key(0)}
    more = {"ema": support.initial_params(), "frozen": frozen}
    average = lambda old, new: optax.incremental_update(new["params"], old["ema"], 0.1)  # noqa: E731
    return run_of(optax.adamw(1e-2), more=more, follow=lambda a, b: {"ema": average(a, b)})


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Computes in float32 whatever the params' type: moments are float32."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: tx.init(cast(params)), update)


def of_types(record: str | None, params: str, moments: str) -> Run:
    first = jax.tree.map(lambda p: p.astype(params), support.initial_params())
    tx = optax.adam(1e-2, eps=1e-3)
    tx = in_float32(tx) if moments != params else tx
    inside = jnp.dtype(params) if params in ("bfloat16", "float64") else jnp.float32
    return run_of(tx, record, params=first, computed_in=inside)


TYPES = [
    *(("float8_e5m2", "bfloat16", "bfloat16"), (None, "float64", "float64")),
    *((None, "bfloat16", "bfloat16"), ("float8_e4m3fn", "float16", "float16")),
    *((None, "bfloat16", "float32"), (None, "float16", "float16")),
    *((each, "float32", "float32") for each in ("float8_e4m3fn", "float8_e5m2", "float16")),
]
"""Types of the record (None: that of the gradients), the params and the moments."""
RUNS: dict[str, Callable[[], Run]] = {
    "adamw": lambda: run_of(optax.adamw(1e-2)),
    "four bits": lambda: run_of(in_four_bits()),
    "four bits, sampled": lambda: run_of(in_four_bits()),
    "clipped inside": lambda: run_of(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))),
    "muon": lambda: run_of(optax.contrib.muon(1e-2)),
    "frozen": frozen_vectors,
    "plateau": on_plateau,
    "not finite": poisoned,
    "accumulating": accumulating,
    "masked": masked,
    "beside": beside,
    "nnx": lambda: support.nnx_run(mesh_of(SAVING)),
} | {" ".join(map(str, each)): functools.partial(of_types, *each) for each in TYPES}
"""A run of each kind. ``tests.campaigns.rows`` has all optimizers of optax."""
OPTIONS: dict[str, dict[str, Any]] = {
    "four bits, sampled": {"shadow": support.SHADOWS["sample"]},
    **{name: {"params_path": "params"} for name in ("accumulating", "beside")},
}
QUICK = {("adamw", "auto")}
SLOW = {(name, "auto") for name in [*RUNS][: -len(TYPES) + 3]}


def marked(name: str, delta: str) -> Any:
    case = name, delta
    marks = () if case in QUICK else pytest.mark.slow if case in SLOW else pytest.mark.campaign
    return pytest.param(*case, marks=marks)


@pytest.mark.parametrize(
    ("name", "delta"), [marked(name, delta) for delta in ("auto", "bits") for name in RUNS]
)
def test_a_run_of_each_kind_comes_back(tmp_path, name, delta):
    with jax.enable_x64("float64" in name):
        run = RUNS[name]()
        first = host_copy(run.state["params"]["in"]["bias"]) if name == "frozen" else []
        with Loop(tmp_path, run, delta=delta, **OPTIONS.get(name, {})) as loop:
            loop.save(STEPS + (name == "accumulating"))
            expected = {"B" + ("R" if delta == "auto" else "D") * (loop.number - 1)}
            if name == "accumulating":
                # The compiler fuses the mean of the gradients into this update: the second tells.
                expected = {"BRNRND", "BRNRNR", "BRNDND"} if delta == "auto" else {"BDDDDD"}
            assert_comes_back(loop, expected)
    if delta == "bits":
        return
    state, steps = run.state, range(2, STEPS + 1)
    unreplayed = [loop.deltas[step].unreplayed for step in steps]
    assert bool(unreplayed[0]) == (name == "muon")  # products as large as the params
    assert name == "accumulating" or unreplayed[1:] == unreplayed[:1] * (STEPS - 2)
    every = [loop.stored(step) for step in steps]
    stored, some = set.intersection(*every), set.union(*every)
    assert not {path for path in some if path.startswith("frozen/")}
    params = {path for path in some if path.startswith("params/")}
    assert name == "accumulating" or bool(params) == (name in ("masked", "muon"))
    if name == "frozen":
        assert_same_bits(state["params"]["in"]["bias"], first)
    if name == "plateau":
        assert state["opt_state"][1].adacheck_inner[1].scale < 1
    if name == "not finite":
        assert state["opt_state"][1].adacheck_inner.total_notfinite == 1
    if name == "masked":
        assert params == {"params/in/bias", "params/scale"}
    if name == "beside":
        assert "ema/in/kernel" in stored
    if name == "nnx":
        assert {p.split("/")[-2] for p in stored if "/norm/" in p} >= {"mean", "var"}
    for types in TYPES:
        if name == " ".join(map(str, types)):
            found = state["opt_state"][1]
            assert found.adacheck_record["scale"].dtype == jnp.dtype(types[0] or types[1])
            moments = jax.tree.leaves(found.adacheck_inner[0].mu)
            assert {leaf.dtype for leaf in moments} == {jnp.dtype(types[2])}
            assert any(np.asarray(leaf, np.float32).any() for leaf in moments)


@pytest.mark.slow
def test_a_learning_rate_set_by_hand_is_stored_by_a_replayed_delta(tmp_path):
    rate = "opt_state/1/adacheck_inner/hyperparams/learning_rate"
    with Loop(tmp_path, run_of(optax.inject_hyperparams(optax.adamw)(1e-2))) as loop:
        loop.save(3)
        loop.edit(rate, lambda _: jnp.float32(5e-3))
        loop.save(2)
        assert_comes_back(loop, {"BRRRR"})
    assert [rate in loop.stored(step) for step in (2, 3, 4, 5)] == [0, 0, 1, 0]


def test_params_and_optimizer_state_without_elements_come_back(tmp_path):
    """Also from a base that was compacted, and without a word by who verifies or exports it."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)[:0]
    noise = optax.GradientTransformation(
        lambda _: keys, lambda updates, state, _=None: (updates, state)
    )
    params = support.initial_params() | {
        "none": jnp.zeros((0, 4)),
        "tall": jnp.zeros((8, 0)),
        "half": jnp.zeros(0, jnp.bfloat16),
    }
    run = run_of(optax.chain(noise, optax.adamw(1e-2)), params=params)
    with Loop(tmp_path / "root", run) as loop:
        loop.save(STEPS)
        assert_comes_back(loop, {"BRRRR"})
    root, state = located(str(tmp_path / "root")), run.state
    assert not verify_root(root, read_data=True).damaged_count
    support.compact(root, STEPS)
    for step in (1, STEPS):
        out = tmp_path / f"out{step}"
        report = export(root, step, str(out), Format.ORBAX, params_only=False)
        assert {"params/none", "params/tall", "params/half"} <= {*report.empty}
    for target in (None, target_of(state, mesh_of(SAVING))):
        found = support.restored(tmp_path / "root", STEPS, target)
        assert_same_bits(found["params"], host_copy(state["params"]))
        found_keys = [x for x in jax.tree.leaves(found) if str(x.dtype) == "key<rbg>"]
        assert {key.shape for key in found_keys} == {(0,)}


def bits_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits: numbers, infinities, and NaN of every payload."""
    if dtype in ("int4", "uint4"):
        return (rng.integers(0, 16, shape) - 8 * (dtype == "int4")).astype(jnp.dtype(dtype))
    values = any_bits(rng, shape, dtype)
    if dtype == "float8_e5m2":  # XLA:CPU of jax 0.12 copies every NaN of this type as 0x7f
        values.view(np.uint8)[np.isnan(values)] = 0x7F
    return values


def numbers(dtypes: tuple[str, ...], seed: int) -> Any:
    """Arrays of some types on the mesh, that differ from those of any other seed."""
    made = {}
    for dtype in dtypes:
        rng, constant = np.random.default_rng(seed), np.random.default_rng(0)
        few = np.array(bits_of(constant, (64, 64), dtype))
        few[::8, ::32] = np.array(seed % 2 if dtype == "bool" else seed, few.dtype)
        arrays = {"all": bits_of(rng, (64, 64), dtype), "row": bits_of(rng, (64,), dtype)}
        made[dtype] = {**arrays, "few": few, "one": few[0, 0]}
    return support.place(made, mesh_of(SAVING))


class Pair(NamedTuple):
    first: Any
    second: Any


def on_host(seed: int) -> Any:
    odd, rows = bool(seed % 2), np.arange(24.0).reshape(4, 6)
    return {
        **{"int": seed, "large": 2**40 + seed, "float": -seed / 3, "bool": odd, "sign": -seed},
        "float32": np.float32(seed / 3),
        "float64": np.float64(seed / 3),
        "int8": np.int8(-seed),
        "uint64": np.uint64(2**63 + seed),
        "bool_": np.bool_(odd),
        "complex64": np.complex64(seed * 1j),
        "zero_d": np.array(seed / 7),
        "int64_array": np.arange(seed, seed + 200, dtype=np.int64),
        "bool_array": np.arange(5) == seed,
        "bfloat16_array": np.full(5, seed, jnp.bfloat16),
        "int4_array": np.full(5, seed, jnp.int4),
        "strided": rows[:, ::2] + seed,
        "fortran": np.asfortranarray(rows + seed),
    }


def keys(seed: int) -> Any:
    tree = {
        "scalar": jax.random.key(seed),
        "vector": jax.random.split(jax.random.key(seed), 3),
        "matrix": jax.random.split(jax.random.key(seed), (8, 4)),
        "rbg": jax.random.key(seed, impl="rbg"),
        "unsafe_rbg": jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 2),
        "raw": jax.random.PRNGKey(seed),
        "many raw": jax.random.split(jax.random.PRNGKey(seed), 8),
    }
    return support.place(tree, mesh_of(SAVING))


def containers(seed: int) -> Any:
    leaf = support.place(jnp.float32(seed), mesh_of(SAVING))
    return {
        **{"none": None, "dict": {}, "tuple": (), "list": []},
        "nested": {"a": [None, (), {"b": leaf, "c": {}}], "d": ((leaf + 1, None), [])},
        "named": Pair(leaf + 2, Pair(None, ())),
    }


def without_elements(seed: int) -> Any:
    sub_byte = ("int2", "uint2", "uint4", "float4_e2m1fn")
    every = {name: np.zeros((0, 64), name) for name in (*NARROW, *sub_byte, *USUAL)}
    keys = {
        impl: jax.random.split(jax.random.key(0, impl=impl), 4)[:0]
        for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    }
    keys["cut"] = jax.random.split(jax.random.key(0), (8, 4))[:, :0]
    tree = {"row": np.zeros(0, np.int32), "one": np.asarray(seed), "arrays": every, "keys": keys}
    host = {name: np.zeros((3, 0), name) for name in (*every, *WIDE)}
    return {"on mesh": support.place(tree, mesh_of(SAVING)), "on host": host}


NARROW = ("bool", "int4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
USUAL = ("int16", "uint16", "bfloat16", "float16", "int32", "uint32", "float32", "complex64")
WIDE = ("int64", "uint64", "float64", "complex128")


def many(seed: int) -> Any:
    """Leaves of many kinds in one state."""
    of_numbers = {"narrow": numbers(NARROW, seed), "usual": numbers(USUAL, seed)}
    others = {"on_host": on_host(seed), "keys": keys(seed), "containers": containers(seed)}
    return of_numbers | others


KINDS: dict[str, Callable[[int], Any]] = {
    "many": many,
    "64 bits": functools.partial(numbers, WIDE),
    "uint4": functools.partial(numbers, ("uint4",)),
    "without elements": without_elements,
}


class Changing:
    """A small training run, if it has a recorder, beside leaves of a kind that change each step."""

    def __init__(self, make: Callable[[int], Any], has_recorder: bool) -> None:
        self.recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9)) if has_recorder else None
        self.count, self._make, self._trained = 0, make, {}
        if self.recorder is not None:
            params = {"kernel": jnp.linspace(0.0, 1.0, 4096, dtype=jnp.float32).reshape(64, 64)}
            state = {"params": params, "opt_state": self.recorder.init(params)}
            self._trained = support.place(state, mesh_of(SAVING))
            shardings = jax.tree.map(lambda x: x.sharding, self._trained)
            self._train_step = jax.jit(self._stepped, out_shardings=shardings)

    def _stepped(self, state: Any) -> Any:
        grads = jax.tree.map(lambda p: jnp.sin(p * 10), state["params"])
        updates, opt_state = self.recorder.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    def advance(self) -> Any:
        self.count += 1
        if self.recorder is not None:
            self._trained = self._train_step(self._trained)
        changing = self._make(self.count)
        self.state = {**self._trained, "changing": changing, "constant": self._make(0)}
        return self.state


MODES = [("auto", True), ("bits", True), ("bits", False)]
"""Options of deltas, and True where the handler has a recorder."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "delta", "has_recorder"),
    [
        *(("many", *mode) for mode in MODES),
        *((kind, *MODES[0]) for kind in KINDS if kind != "many"),
    ],
)
def test_leaves_of_each_kind_come_back_as_they_were(tmp_path, kind, delta, has_recorder):
    make = KINDS[kind]
    with jax.enable_x64(True) if kind == "64 bits" else contextlib.nullcontext():
        with Loop(tmp_path, Changing(make, has_recorder), delta=delta) as loop:
            loop.save(STEPS)
            assert_comes_back(loop, {"BRRRR" if delta == "auto" else "BDDDD"})
        first, second = (trees.flatten(make(step))[0] for step in (1, 2))
        bits = lambda leaf: host_copy(leaf)[0].tobytes()  # noqa: E731
        changing = {f"changing/{x}" for x in first if bits(first[x]) != bits(second[x])}
        for step in range(2, STEPS + 1):
            letters = stored_letters(tmp_path, step)
            assert not {path for path in letters if path.startswith("constant/")}
            assert {path for path in letters if path.startswith("changing/")} == changing
            few = {letters[path] for path in letters if path.endswith("/few")}
            assert few <= {Encoding.XOR, Encoding.SUBTRACT}
        assert_types_without_a_target(tmp_path, loop.run.state, kind)
        support.compact(tmp_path, STEPS)
        assert_types_without_a_target(tmp_path, loop.run.state, kind)


def assert_types_without_a_target(root: Path, state: Any, kind: str) -> None:
    """A delta gives the containers and types that the base gives to stock Orbax."""
    expected = ocp.StandardCheckpointer().restore(root / "1" / "default")
    if kind == "without elements":  # stock Orbax has none of them, and no base says where they were
        expected = state
    found = support.restored(root, STEPS)
    described = lambda tree: [(trees.dtype_of(x), np.shape(x)) for x in jax.tree.leaves(tree)]  # noqa: E731
    types = lambda tree: [type(x) for x in jax.tree.leaves(tree) if np.size(x)]  # noqa: E731
    for name in ("changing", "constant"):
        assert jax.tree.structure(found[name]) == jax.tree.structure(expected[name])
        assert_same_bits(found[name], host_copy(state[name]))
        assert described(found[name]) == described(state[name])
        assert types(found[name]) == types(expected[name])


@pytest.mark.parametrize("delta", ["auto", "bits"])
def test_matrices_that_lie_column_by_column_on_their_devices_come_back(tmp_path, delta):
    """Also recorded, donated, and after a restore onto an abstract state in such layouts."""
    run, columns = support.dict_run(mesh_of(SAVING)), Layout((1, 0))
    formats = jax.tree.map(
        lambda x: JaxFormat(columns if x.ndim == 2 else None, x.sharding), run.state
    )
    run.train_step = jax.jit(run.train_step, out_shardings=formats, donate_argnums=0)
    with Loop(tmp_path, run, delta=delta) as loop:
        loop.save(2)
        support.wait_for_compilers()  # jax refuses to call what is compiled for other layouts
        assert loop.keep(2) == ("rr" if delta == "auto" else "ss")
        loop.save(2)
        assert run.state["params"]["in"]["kernel"].format.layout.major_to_minor == (1, 0)
        target = jax.tree.map(
            lambda x, f: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=f), run.state, formats
        )
        args = adacheck.RestoreArgs(target, support_layout=True)
        run.state = loop.manager.restore(loop.number, args=args)
        assert_same_bits(run.state, loop.states[loop.number])
        assert run.state["params"]["in"]["kernel"].format.layout.major_to_minor == (1, 0)
        loop.save(2)
    assert loop.check(mesh_of(OTHER)) == ("BRRRRR" if delta == "auto" else "BDDDDDDD")


def swapped(seed: int) -> Any:
    """Arrays whose bytes are in the other order."""
    dtypes = (">f4", ">i2", ">f8", ">c8", ">u8")
    return {dtype[1:]: np.arange(seed, seed + 6).astype(dtype).reshape(2, 3) for dtype in dtypes}


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "has_recorder"), MODES[:2])
def test_numbers_in_another_byte_order_are_stored_in_this_machines(tmp_path, delta, has_recorder):
    root, out = tmp_path / "root", tmp_path / "step"
    native = lambda n: [x.astype(x.dtype.newbyteorder("=")) for x in host_copy(swapped(n))]  # noqa: E731
    with Loop(root, Changing(swapped, has_recorder), delta=delta) as loop:
        loop.save(2)
        kept = loop.keep()
        loop.save()
        for step in range(1, 5):
            place = 4 if step == 3 and kept == "r" else step
            for target in (None, loop.run.state):
                found = support.restored(root, place, target, step=step)
                assert_same_bits(found["changing"], native(step))
    assert kinds(root) == ("BRR" if delta == "auto" else "BDDD")
    stock = ocp.StandardCheckpointer().restore(root / "1" / "default")
    assert_same_bits(stock["changing"], native(1))
    export(root, 3, str(out), Format.SAFETENSORS, params_only=False)
    found = load_file(out / "model.safetensors")
    for name, elements in swapped(3).items():
        np.testing.assert_array_equal(found[f"changing.{name}"], elements)


def test_a_cast_to_another_byte_order_is_one_to_this_machines(tmp_path):
    state = {"x": np.arange(3.0), "y": jnp.arange(3.0)}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype(">f2")), state)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        manager.save(1, args=adacheck.SaveArgs(state, save_args=save_args))
        manager.wait_until_finished()
        assert_same_bits(manager.restore(1), [np.arange(3, dtype=np.float16)] * 2)
