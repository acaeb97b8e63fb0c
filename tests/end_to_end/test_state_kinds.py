"""Each kind of optimizer and of leaf comes back to the bit, from bases and either kind of delta."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Encoding
from adacheck_jax.store.steps import lookup, manifest_file, roots
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools.audit import verify_root
from adacheck_jax.tools.handover.export import export
from adacheck_jax.tools.handover.formats import Format
from tests import support
from tests.support import Run, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

SAVING = (4, 2)
OTHER = (8, 1)
STEPS = 5


def delta_of(root: Path, step: int) -> DeltaManifest:
    found = manifest_file.read(root / str(step) / "default")
    assert isinstance(found, DeltaManifest)
    return found


def base_of(root: Path, step: int) -> BaseManifest:
    return lookup.resolve(root / str(step) / "default").base


def kinds(root: Path) -> str:
    """A letter a step: Base, Replayed update, No update, or Differences of bits."""
    letters, counts = "", ()
    for step in roots.steps_of(root):
        found = step.manifest
        if isinstance(found, BaseManifest):
            letters += "B"
        elif found.has_update:
            letters += "R"
        else:
            letters += "N" if found.counts and found.counts == counts else "D"
        counts = found.counts
    return letters


def stored_letters(root: Path, step: int) -> dict[str, str]:
    """How a delta of one process stores each of its leaves, by leaf path."""
    leaves, delta = base_of(root, step).leaves, delta_of(root, step)
    pairs = zip(delta.stored, delta.packs[0].encodings, strict=True)
    return {leaves[i].path: letter for i, letter in pairs}


def stored_paths(root: Path, step: int) -> set[str]:
    return set(stored_letters(root, step))


def assert_only_changes_are_stored(root: Path, saved: dict[int, list[np.ndarray]]) -> None:
    """A delta holds the record, and of what no update computes exactly what changed."""
    for letter, step in zip(kinds(root), saved, strict=True):
        if letter == "B":
            continue
        delta, update = delta_of(root, step), base_of(root, step).update
        assert delta.problem == ""
        computed, consumed = frozenset[int](), frozenset[int]()
        if update is not None and letter in "RN":
            computed = update.explained.difference(update.passed, delta.unreplayed)
            consumed = frozenset(update.consumed)
        stored = frozenset(delta.stored)
        assert not stored & computed
        assert (stored & consumed) == (consumed if letter == "R" else frozenset())
        for i, (new, old) in enumerate(zip(saved[step], saved[step - 1], strict=True)):
            if i not in computed | consumed:
                changed = new.tobytes() != old.tobytes()
                assert (i in stored) == changed, base_of(root, step).leaves[i].path


def target_of(state: Any, mesh: jax.sharding.Mesh) -> Any:
    """The abstract state on a mesh; what lies on the host stays as it is."""

    def abstract(leaf: Any) -> Any:
        return support.abstract(leaf, mesh) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(abstract, state)


def assert_restores(
    root: Path,
    saved: dict[int, list[np.ndarray]],
    state: Any,
    wanted: dict[tuple[int, int], tuple[int, ...]] | None = None,
) -> None:
    """Restores without the recorder's code, by default onto the mesh of the run and another one."""
    handler = adacheck.AdaCheckHandler()
    with manager_of(root, handler) as manager:
        for shape, steps in (wanted or {SAVING: (1, STEPS), OTHER: (2, STEPS)}).items():
            target = target_of(state, mesh_of(shape))
            for step in steps:
                restored = manager.restore(
                    step, args=adacheck.RestoreArgs(target, require_exact=True)
                )
                assert differing_paths(root, restored, saved[step]) == [], (shape, step)
                assert handler.restored is not None
                assert handler.restored.exact
                assert jax.tree.structure(restored) == jax.tree.structure(state)
                pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True)
                for leaf, abstract in pairs:
                    if isinstance(abstract, jax.ShapeDtypeStruct):
                        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def differing_paths(root: Path, restored: Any, expected: list[np.ndarray]) -> list[str]:
    rows = zip(base_of(root, 1).leaves, host_copy(restored), expected, strict=True)
    described = lambda x: (x.shape, x.dtype, x.tobytes())  # noqa: E731
    return [leaf.path for leaf, a, b in rows if described(a) != described(b)]


def run_of(
    chain: optax.GradientTransformation,
    recorder: adacheck.Recorder,
    *,
    params: Any = None,
    rest: Any = None,
    gives_value: bool = False,
    separate: bool = False,
    data_type: Any = jnp.float32,
) -> Run:
    """A run on the saving mesh.

    Args:
        params: else those of ``support.initial_params``.
        rest: more of the state: name to initial value and a function of it and the new params.
        gives_value: whether the optimizer takes the loss.
        separate: whether the update is a program of its own.
        data_type: of the batches, in which the model computes.
    """
    params = support.initial_params() if params is None else params
    rest = rest or {}
    state = {"params": params, "opt_state": chain.init(params), "step": jnp.int32(0)}
    state |= {name: value for name, (value, _) in rest.items()}
    state = support.place(state, mesh_of(SAVING))
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def gradients(state: Any, data: Any) -> Any:
        x, y = (each.astype(data_type) for each in data)
        wide = lambda p: jax.tree.map(lambda leaf: leaf.astype(data_type), p)  # noqa: E731
        loss = lambda p: jnp.mean((support.forward(wide(p), x) - y) ** 2)  # noqa: E731
        return jax.value_and_grad(loss)(state["params"])

    def finished(state: Any, params: Any, opt_state: Any) -> Any:
        new = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return new | {name: follow(state[name], params) for name, (_, follow) in rest.items()}

    def fused(state: Any, data: Any) -> Any:
        loss, grads = gradients(state, data)
        extra = {"value": loss + state["step"]} if gives_value else {}
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"], **extra)
        return finished(state, optax.apply_updates(state["params"], updates), opt_state)

    if not separate:
        return Run(recorder, state, jax.jit(fused, donate_argnums=0, out_shardings=shardings))
    update = adacheck.separate_update(chain)
    compiled: Any = jax.jit(gradients, out_shardings=(None, shardings["params"]))

    def in_two_programs(state: Any, data: Any) -> Any:
        _, grads = compiled(state, data)
        params, opt_state = update(grads, state["opt_state"], state["params"])
        return finished(state, params, opt_state)

    return Run(recorder, state, in_two_programs)


def recorded_run(tx: optax.GradientTransformation, record: Any = None, **options: Any) -> Run:
    recorder, chain = support.recorded(tx, record)
    return run_of(chain, recorder, **options)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "trained" if x.ndim > 1 else "frozen", params)


class AverageState(NamedTuple):
    average: Any


def average_of_params(decay: float) -> optax.GradientTransformation:
    """A transformation that keeps an average of the params, for evaluation."""

    def update(updates: Any, state: AverageState, params: Any = None) -> Any:
        after = optax.apply_updates(params, updates)
        return updates, AverageState(optax.incremental_update(after, state.average, 1 - decay))

    init = lambda params: AverageState(jax.tree.map(jnp.copy, params))  # noqa: E731
    return optax.GradientTransformation(init, update)


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


ELEMENT_WISE = {
    "adamw": lambda: optax.adamw(1e-2),
    "four bits": in_four_bits,
    "adam, schedule": lambda: optax.adam(
        optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50), nesterov=True
    ),
    "adamw, bfloat16 mu": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adamw, decay of matrices": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "sgd, momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "masked": lambda: optax.chain(optax.masked(optax.scale_by_adam(), matrices), optax.scale(-0.1)),
    "ema, bfloat16": lambda: optax.chain(
        optax.ema(0.9, accumulator_dtype=jnp.bfloat16), optax.sgd(1e-2)
    ),
    "average of params": lambda: optax.chain(optax.adamw(1e-2), average_of_params(0.9)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "add_noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.55, jax.random.key(3)), optax.sgd(1e-2)
    ),
}
REDUCING = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def save_and_check(root: Path, run: Run, expected: str, **options: Any) -> None:
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder, **options)) as manager:
        saved = save_steps(manager, run, STEPS)
    assert kinds(root) == expected
    assert_only_changes_are_stored(root, saved)
    assert_restores(root, saved, run.state)


def unreplayed(root: Path) -> list[tuple[int, ...]]:
    """The leaves of each delta that its update computes, but not exactly."""
    return [delta_of(root, step).unreplayed for step in range(2, STEPS + 1)]


@pytest.mark.first(1, slow=3)
@pytest.mark.parametrize(
    ("name", "shadow"),
    [("adamw", "auto"), ("four bits", "auto"), ("four bits", "sample")]
    + [(name, "auto") for name in ELEMENT_WISE if name not in ("adamw", "four bits")],
)
def test_an_element_wise_optimizer_in_a_fused_step_is_replayed(tmp_path, name, shadow):
    run = recorded_run(ELEMENT_WISE[name]())
    save_and_check(tmp_path, run, "BRRRR", shadow=support.SHADOWS[shadow])
    assert unreplayed(tmp_path) == [()] * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.first(2)
@pytest.mark.parametrize("name", REDUCING)
def test_what_comes_out_of_sums_in_a_fused_step_is_replayed_with_their_results(tmp_path, name):
    save_and_check(tmp_path, recorded_run(REDUCING[name]()), "BRRRR")
    first, *others = unreplayed(tmp_path)
    assert bool(first) == (name == "muon")  # products as large as the params
    assert others == [first] * (STEPS - 2)


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize("name", REDUCING)
def test_an_optimizer_with_sums_in_a_program_of_its_own_is_replayed(tmp_path, name):
    save_and_check(tmp_path, recorded_run(REDUCING[name](), separate=True), "BRRRR")
    assert unreplayed(tmp_path) == [()] * (STEPS - 1)


@pytest.mark.slow
def test_frozen_params_of_a_multi_transform_keep_their_bits_and_are_not_stored(tmp_path):
    transforms = {"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}
    run = recorded_run(optax.multi_transform(transforms, labels))
    frozen = host_copy(run.state["params"]["in"]["bias"])
    save_and_check(tmp_path, run, "BRRRR")
    assert_same_bits(run.state["params"]["in"]["bias"], frozen)
    assert not {p for p in stored_paths(tmp_path, STEPS) if p.startswith("params/")}


@pytest.mark.slow
def test_a_learning_rate_set_by_hand_is_stored_by_a_replayed_delta(tmp_path):
    run = recorded_run(optax.inject_hyperparams(optax.adamw)(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        hyper = run.state["opt_state"][1].adacheck_inner.hyperparams
        hyper["learning_rate"] = jax.device_put(jnp.float32(5e-3), hyper["learning_rate"].sharding)
        saved |= save_steps(manager, run, 2)
    assert kinds(tmp_path) == "BRRRR"
    assert_only_changes_are_stored(tmp_path, saved)
    rate = "opt_state/1/adacheck_inner/hyperparams/learning_rate"
    assert [rate in stored_paths(tmp_path, step) for step in (2, 3, 4, 5)] == [0, 0, 1, 0]
    assert_restores(tmp_path, saved, run.state, {SAVING: (3, 4), OTHER: (1, 4, 5)})


@pytest.mark.slow
def test_a_reduction_on_plateau_replays_from_the_recorded_loss(tmp_path):
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    recorder = adacheck.Recorder(
        optax.chain(optax.adamw(1e-2), plateau), extra_args={"value": jnp.zeros(())}
    )
    chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    run = run_of(chain, recorder, gives_value=True)
    save_and_check(tmp_path, run, "BRRRR")
    assert run.state["opt_state"][1].adacheck_inner[1].scale < 1


@pytest.mark.slow
def test_steps_that_only_accumulate_gradients_are_deltas_without_an_update(tmp_path):
    """The compiler fuses the mean of the gradients into this update: that shows at the second."""
    recorder, chain = support.recorded()
    run = run_of(optax.MultiSteps(chain, 2).gradient_transformation(), recorder)
    handler = adacheck.AdaCheckHandler(recorder, params_path="params")
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 6)
    assert kinds(tmp_path) in {"BRNRND", "BRNRNR", "BRNDND"}
    assert_restores(tmp_path, saved, run.state, {SAVING: (1, 2, 3, 4, 5, 6), OTHER: (3, 4, 6)})


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_replayed_as_it_was_rejected(tmp_path):
    run = recorded_run(optax.apply_if_finite(optax.adamw(1e-2), 3))
    train_step = run.train_step

    def poisoned(state: Any, data: Any) -> Any:
        return train_step(
            state, jax.tree.map(lambda x: x * np.nan, data) if run.count == 2 else data
        )

    run.train_step = poisoned
    save_and_check(tmp_path, run, "BRRRR")
    assert run.state["opt_state"][1].adacheck_inner.total_notfinite == 1


@pytest.mark.slow
def test_params_that_a_masked_recorder_does_not_see_are_stored_as_they_change(tmp_path):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    others = optax.masked(optax.sgd(1e-2), lambda p: jax.tree.map(lambda x: x.ndim < 2, p))
    chain = optax.chain(optax.clip_by_global_norm(1.0), others, optax.masked(recorder, matrices))
    run = run_of(chain, recorder)
    save_and_check(tmp_path, run, "BRRRR")
    stored = {p for p in stored_paths(tmp_path, 5) if p.startswith("params/")}
    assert stored == {"params/in/bias", "params/scale"}


def test_params_and_optimizer_state_without_elements_come_back(tmp_path):
    """Also from a base that was compacted, and without a word by who verifies or exports it."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)[:0]
    noise = optax.GradientTransformation(
        lambda _: keys, lambda updates, state, _=None: (updates, state)
    )
    params = support.initial_params() | {
        "none": jnp.zeros((0, 4)),
        "half": jnp.zeros(0, jnp.bfloat16),
    }
    run = recorded_run(optax.chain(noise, optax.adamw(1e-2)), params=params)
    save_and_check(tmp_path / "root", run, "BRRRR")
    root = located(str(tmp_path / "root"))
    assert not verify_root(root, read_data=True).damaged_count
    support.compact(root, STEPS)
    for step in (1, STEPS):
        out = tmp_path / f"out{step}"
        report = export(root, step, str(out), Format.ORBAX, params_only=False)
        assert {"params/none", "params/half"} <= {*report.empty}
    with manager_of(tmp_path / "root", adacheck.AdaCheckHandler()) as manager:
        for target in (None, target_of(run.state, mesh_of(SAVING))):
            found = manager.restore(STEPS, args=adacheck.RestoreArgs(target))
            assert_same_bits(found["params"], host_copy(run.state["params"]))
            found_keys = [x for x in jax.tree.leaves(found) if str(x.dtype) == "key<rbg>"]
            assert {key.shape for key in found_keys} == {(0,)}


BESIDE = ("average", "frozen", "statistics")


@pytest.mark.first(0, slow=3)
@pytest.mark.parametrize(
    ("delta", "name"), [(delta, name) for delta in ("auto", "bits") for name in BESIDE]
)
def test_leaves_that_no_update_explains_are_stored_as_they_change(tmp_path, name, delta):
    expected = {"auto": "BRRRR", "bits": "BDDDD"}[delta]
    frozen = {"kernel": jnp.ones((64, 32)), "table": jnp.arange(7), "key": jax.random.key(0)}
    follow = lambda old, params: optax.incremental_update(params, old, 0.1)  # noqa: E731
    rest = {
        "average": {"ema": (support.initial_params(), follow)},
        "frozen": {"frozen": (frozen, lambda old, _: old)},
    }
    if name == "statistics":
        run = support.nnx_run(mesh_of(SAVING))
    else:
        run = recorded_run(optax.adamw(1e-2), rest=rest[name])
    options = {"params_path": "params"} if name == "average" else {}
    save_and_check(tmp_path, run, expected, delta=delta, **options)
    for step in range(2, STEPS + 1):
        stored = stored_paths(tmp_path, step)
        assert not {p for p in stored if p.startswith("frozen/")}
        assert name != "average" or "ema/in/kernel" in stored
        norms = {p.split("/")[-2] for p in stored if "/norm/" in p}
        assert name != "statistics" or {"mean", "var"} <= norms


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Computes in float32 whatever the params' type: moments are float32."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: tx.init(cast(params)), update)


TYPES = [
    *(("float8_e5m2", "bfloat16", "bfloat16"), (None, "float64", "float64")),
    *((None, "bfloat16", "bfloat16"), ("float8_e4m3fn", "float16", "float16")),
    *((None, "bfloat16", "float32"), (None, "float16", "float16")),
    *((each, "float32", "float32") for each in ("float8_e4m3fn", "float8_e5m2", "float16")),
]
"""Types of the record (None: that of the gradients), the params and the moments."""


@pytest.mark.first(0, slow=3)
@pytest.mark.parametrize(
    ("delta", "record", "params", "moments"),
    [(delta, *types) for delta in ("auto", "bits") for types in TYPES],
)
def test_records_params_and_moments_of_each_type(tmp_path, record, params, moments, delta):
    with jax.enable_x64(params == "float64"):
        first = jax.tree.map(lambda p: p.astype(params), support.initial_params())
        tx = optax.adam(1e-2, eps=1e-3)
        tx = in_float32(tx) if moments != params else tx
        inside = jnp.dtype(params) if params in ("bfloat16", "float64") else jnp.float32
        run = recorded_run(tx, record, params=first, data_type=inside)
        save_and_check(tmp_path, run, {"auto": "BRRRR", "bits": "BDDDD"}[delta], delta=delta)
    state = run.state["opt_state"][1]
    assert state.adacheck_record["scale"].dtype == jnp.dtype(record or params)
    found = jax.tree.leaves(state.adacheck_inner[0].mu)
    assert {leaf.dtype for leaf in found} == {jnp.dtype(moments)}
    assert any(np.asarray(leaf, np.float32).any() for leaf in found)


def bits_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits: numbers, infinities, and NaN of every payload."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_ or dtype.name in {"int4", "uint4"}:
        return rng.integers(
            *{"bool": (0, 2), "int4": (-8, 8), "uint4": (0, 16)}[dtype.name], shape
        ).astype(dtype)
    data = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    values = np.array(np.frombuffer(data, dtype)).reshape(shape)
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
        made[dtype] = {
            "all": bits_of(rng, (64, 64), dtype),
            "few": few,
            "row": bits_of(rng, (64,), dtype),
            "one": few[0, 0],
        }
    return support.place(made, mesh_of(SAVING))


class Pair(NamedTuple):
    first: Any
    second: Any


def python_scalars(seed: int) -> Any:
    odd = bool(seed % 2)
    return {"int": seed, "large": 2**40 + seed, "float": -seed / 3, "bool": odd, "sign": -seed}


def numpy_values(seed: int) -> Any:
    return {
        "float32": np.float32(seed / 3),
        "float64": np.float64(seed / 3),
        "int8": np.int8(-seed),
        "uint64": np.uint64(2**63 + seed),
        "bool": np.bool_(seed % 2),
        "complex64": np.complex64(seed * 1j),
        "zero_d": np.array(seed / 7),
        "int64_array": np.arange(seed, seed + 200, dtype=np.int64),
        "bool_array": np.arange(5) == seed,
        "bfloat16_array": np.full(5, seed, jnp.bfloat16),
        "int4_array": np.full(5, seed, jnp.int4),
        "strided": np.arange(24.0).reshape(4, 6)[:, ::2] + seed,
        "fortran": np.asfortranarray(np.arange(24.0).reshape(4, 6) + seed),
    }


def typed_keys(seed: int) -> Any:
    tree = {
        "scalar": jax.random.key(seed),
        "vector": jax.random.split(jax.random.key(seed), 3),
        "matrix": jax.random.split(jax.random.key(seed), (8, 4)),
        "rbg": jax.random.key(seed, impl="rbg"),
        "unsafe_rbg": jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 2),
    }
    return support.place(tree, mesh_of(SAVING))


def raw_keys(seed: int) -> Any:
    key = jax.random.PRNGKey(seed)
    return support.place({"one": key, "many": jax.random.split(key, 8)}, mesh_of(SAVING))


def containers(seed: int) -> Any:
    leaf = support.place(jnp.float32(seed), mesh_of(SAVING))
    return {
        "none": None,
        "dict": {},
        "tuple": (),
        "list": [],
        "nested": {"a": [None, (), {"b": leaf, "c": {}}], "d": ((leaf + 1, None), [])},
        "named": Pair(leaf + 2, Pair(None, ())),
    }


def zero_size(seed: int) -> Any:
    every = {name: np.zeros((0, 64), name) for name in (*NARROW, *SUB_BYTE, *USUAL)}
    keys = {impl: jax.random.split(jax.random.key(0, impl=impl), 4)[:0] for impl in IMPLEMENTATIONS}
    keys["cut"] = jax.random.split(jax.random.key(0), (8, 4))[:, :0]
    tree = {"row": np.zeros(0, np.int32), "one": np.asarray(seed), "arrays": every, "keys": keys}
    host = {name: np.zeros((3, 0), name) for name in (*every, *WIDE)}
    return {"on mesh": support.place(tree, mesh_of(SAVING)), "on host": host}


SUB_BYTE = ("int2", "uint2", "uint4", "float4_e2m1fn")
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
NARROW = ("bool", "int4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
USUAL = ("int16", "uint16", "bfloat16", "float16", "int32", "uint32", "float32", "complex64")
WIDE = ("int64", "uint64", "float64", "complex128")
NUMBERS = {"narrow": NARROW, "usual": USUAL, "64 bits": WIDE, "uint4": ("uint4",)}
KINDS = {name: functools.partial(numbers, dtypes) for name, dtypes in NUMBERS.items()} | {
    "Python scalars": python_scalars,
    "numpy": numpy_values,
    "typed keys": typed_keys,
    "raw keys": raw_keys,
    "containers": containers,
    "zero-size": zero_size,
}


@functools.cache
def trained(x64: bool) -> tuple[adacheck.Recorder, list[Any]]:
    """A recorder and the states of a small run after each step."""
    del x64  # part of the cache's key: it is the caller's jax setting
    recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9))
    params = {"kernel": jnp.linspace(0.0, 1.0, 64 * 64, dtype=jnp.float32).reshape(64, 64)}
    state = {"params": params, "opt_state": recorder.init(params)}
    states = [support.place(state, mesh_of(SAVING))]
    shardings = jax.tree.map(lambda x: x.sharding, states[0])

    def train_step(state: Any) -> Any:
        grads = jax.tree.map(lambda p: jnp.sin(p * 10), state["params"])
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    jitted: Any = jax.jit(train_step, out_shardings=shardings)
    for _ in range(STEPS):
        states.append(jitted(states[-1]))
    return recorder, states


def mixed(seed: int) -> Any:
    """Leaves of many kinds in one state."""
    return {name.replace(" ", "_"): KINDS[name](seed) for name in KINDS if name not in RARE}


MODES = [("auto", True), ("bits", True), ("bits", False)]
"""Options of deltas, and True where the handler has a recorder."""
IN_DELTAS = pytest.mark.parametrize(("delta", "has_recorder"), MODES)
RARE = ("64 bits", "uint4", "zero-size")
CASES = [
    *(("many", *mode) for mode in MODES),
    *((kind, *MODES[0]) for kind in RARE),
    *((kind, *mode) for kind in KINDS for mode in MODES if kind not in RARE or mode != MODES[0]),
]


@pytest.mark.first(0, slow=len(MODES) + len(RARE))
@pytest.mark.parametrize(("kind", "delta", "has_recorder"), CASES)
def test_leaves_of_each_kind_come_back_as_they_were(tmp_path, kind, delta, has_recorder):
    """Alone, and many kinds in one state."""
    make = mixed if kind == "many" else KINDS[kind]
    with jax.enable_x64(True) if kind == "64 bits" else contextlib.nullcontext():
        assert_comes_back(tmp_path, kind, make, delta, has_recorder)


def assert_comes_back(
    root: Path, kind: str, make: Callable[[int], Any], delta: Any, has_recorder: bool
) -> None:
    states = [{}] * (STEPS + 1)
    recorder = None
    if has_recorder:
        recorder, states = trained(kind == "64 bits")
    state, saved = {}, {}
    handler = adacheck.AdaCheckHandler(recorder, delta=delta)
    with manager_of(root, handler) as manager:
        for step in range(1, STEPS + 1):
            state = {**states[step], "changing": make(step), "constant": make(0)}
            saved[step] = host_copy(state)
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
    assert kinds(root) == ("BRRRR" if delta == "auto" else "BDDDD")
    assert_only_changes_are_stored(root, saved)
    for step in range(2, STEPS + 1):
        letters = stored_letters(root, step)
        assert not {path for path in letters if path.startswith("constant/")}
        expected = {f"changing/{path}" for path in changing_paths(make)}
        assert {path for path in letters if path.startswith("changing/")} == expected
        few = {letters[path] for path in letters if path.endswith("/few")}
        assert few <= {Encoding.XOR, Encoding.SUBTRACT}
    assert_restores(root, saved, state)
    assert_types_without_a_target(root, state, kind)


def changing_paths(make: Any) -> set[str]:
    """Leaf paths of a kind of state that change with every step."""
    first, _ = trees.flatten(make(1))
    second, _ = trees.flatten(make(2))
    bits = lambda leaf: host_copy(leaf)[0].tobytes()  # noqa: E731
    return {path for path in first if bits(first[path]) != bits(second[path])}


def assert_types_without_a_target(root: Path, state: Any, kind: str) -> None:
    """A delta gives the containers and types that the base gives to stock Orbax."""
    expected = ocp.StandardCheckpointer().restore(root / "1" / "default")
    if kind == "zero-size":  # stock Orbax has none of them, and no base says where they were
        expected = state
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        found = manager.restore(STEPS, args=adacheck.RestoreArgs())
    for name in ("changing", "constant"):
        assert jax.tree.structure(found[name]) == jax.tree.structure(expected[name])
        assert_same_bits(found[name], host_copy(state[name]))
        described = lambda tree: [(trees.dtype_of(x), np.shape(x)) for x in jax.tree.leaves(tree)]  # noqa: E731
        assert described(found[name]) == described(state[name])
        types = lambda tree: [type(x) for x in jax.tree.leaves(tree) if np.size(x)]  # noqa: E731
        assert types(found[name]) == types(expected[name])


def swapped(seed: int) -> Any:
    """Arrays whose bytes are in the other order."""
    dtypes = (">f4", ">i2", ">f8", ">c8", ">u8")
    return {dtype[1:]: np.arange(seed, seed + 6).astype(dtype).reshape(2, 3) for dtype in dtypes}


@pytest.mark.slow
@pytest.mark.first(1, slow=2)
@IN_DELTAS
def test_numbers_in_another_byte_order_are_stored_in_this_machines(tmp_path, delta, has_recorder):
    root, out = tmp_path / "root", tmp_path / "step"
    recorder, states = trained(False) if has_recorder else (None, [{}] * (STEPS + 1))
    handler = adacheck.AdaCheckHandler(recorder, delta=delta)
    state, expected = {}, {}
    with manager_of(root, handler) as manager:
        for step in range(1, 5):
            state = {**states[step], "swapped": swapped(step)}
            native = jax.tree.map(lambda x: x.astype(x.dtype.newbyteorder("=")), state["swapped"])
            expected[step] = host_copy(native)
            if step != 3 or not handler.record_step(state, step):
                manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        places = {step: step if step in manager.all_steps() else step + 1 for step in expected}
        for step, place in places.items():
            for target in (None, state):
                args = adacheck.RestoreArgs(target, step=step)
                found = manager.restore(place, args=args)
                assert_same_bits(found["swapped"], expected[step])
    assert kinds(root) == ("BRR" if delta == "auto" else "BDDD")
    stock = ocp.StandardCheckpointer().restore(root / "1" / "default")
    assert_same_bits(stock["swapped"], expected[1])
    export(root, 3, str(out), Format.SAFETENSORS, params_only=False)
    found = load_file(out / "model.safetensors")
    for name, elements in swapped(3).items():
        np.testing.assert_array_equal(found[f"swapped.{name}"], elements)


def test_a_cast_to_another_byte_order_is_one_to_this_machines(tmp_path):
    state = {"x": np.arange(3.0), "y": jnp.arange(3.0)}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype(">f2")), state)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        manager.save(1, args=adacheck.SaveArgs(state, save_args=save_args))
        manager.wait_until_finished()
        assert_same_bits(manager.restore(1), [np.arange(3, dtype=np.float16)] * 2)
