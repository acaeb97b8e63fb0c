"""Train steps of many forms, and what people do to a state by hand between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import adacheck_jax as adacheck
from tests.campaigns.flax_models import ALL
from tests.campaigns.layouts import mesh_of, shardings_of
from tests.campaigns.models import EXAMPLES
from tests.campaigns.optimizers import TAKE_VALUE, all_of
from tests.campaigns.plans import Plan

RATE = 3e-3
SKIPPED_STEP = 7
"""The step whose loss is not finite, where runs skip such."""
_LOSS_SCALE = 1024.0


def _partly_frozen(params: Any) -> optax.GradientTransformation:
    leaves, treedef = jax.tree.flatten(params)
    labels = ["frozen" if i == 0 else "trained" for i in range(len(leaves))]
    each = {"trained": optax.adamw(RATE), "frozen": optax.set_to_zero()}
    return optax.multi_transform(each, jax.tree.unflatten(treedef, labels))


_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda _: optax.adamw(RATE),
    "lion": lambda _: optax.lion(RATE / 10),
    "momentum": lambda _: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "scheduled": lambda _: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 4, 40)),
    "injected": lambda _: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "schedule_free": lambda _: optax.contrib.schedule_free_adamw(RATE, warmup_steps=3),
    "multisteps": lambda _: optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
    "partly_frozen": _partly_frozen,
    "half_moment": lambda _: optax.adamw(RATE, mu_dtype=jnp.bfloat16),
    "rmsprop": lambda _: optax.rmsprop(RATE, momentum=0.9),
    "if_finite": lambda _: optax.apply_if_finite(optax.adamw(RATE), 3),
    "adabelief": lambda _: optax.adabelief(RATE),
    "adafactor": lambda _: optax.adafactor(RATE, min_dim_size_to_factor=16),
    "lamb": lambda _: optax.lamb(RATE),
    "clipped": lambda _: _clipped(optax.adamw(RATE)),
    "clipped, half moment": lambda _: _clipped(optax.adamw(RATE, mu_dtype=jnp.bfloat16)),
    "clipped lion": lambda _: _clipped(optax.lion(RATE / 10)),
    "clipped, multisteps": lambda _: optax.MultiSteps(
        _clipped(optax.adamw(RATE)), 2
    ).gradient_transformation(),
}


def _clipped(inner: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def takes_value(plan: Plan) -> bool:
    """True if the optimizer looks at the loss."""
    return plan.optimizer not in _OPTIMIZERS and plan.optimizer in TAKE_VALUE


def optimizer_of(
    plan: Plan, params: Any, recording: dict[str, Any]
) -> tuple[adacheck.Recorder, Any]:
    """The recorder, and the optimizer that it is part of."""
    dtype = None if plan.record_dtype is None else jnp.dtype(plan.record_dtype)
    made = _OPTIMIZERS.get(plan.optimizer) or (lambda _: all_of()[plan.optimizer]())
    if takes_value(plan):
        recording = {**recording, "extra_args": {"value": jnp.zeros(())}}
    recorder = adacheck.Recorder(made(params), dtype=dtype, **recording)
    parts: list[Any] = [optax.clip_by_global_norm(1.0)] if plan.clips else []
    parts.append(recorder)
    if plan.behind == "scale":
        parts.append(optax.scale(0.5))
    elif plan.behind == "decay":
        parts.append(optax.add_decayed_weights(-1e-3))
    chain: Any = optax.chain(*parts)
    if plan.lookahead:
        chain = optax.lookahead(chain, sync_period=2, slow_step_size=0.5)
    if plan.accumulates:
        chain = optax.MultiSteps(chain, 2).gradient_transformation()
    return recorder, chain


def initial_state(plan: Plan, recording: dict[str, Any]) -> tuple[adacheck.Recorder, Any, Any]:
    """The recorder, the optimizer, and the first state."""
    params, carried = ALL[plan.model].initial(
        np.random.default_rng(plan.seed), jnp.dtype(plan.param_dtype)
    )
    if plan.integers:
        params = {"model": params, "ids": jnp.arange(48, dtype=jnp.int32)}
    recorder, tx = optimizer_of(plan, params, recording)
    if plan.lookahead:
        params = optax.LookaheadParams.init_synced(params)
    state = {"params": params, "opt": tx.init(params), "carried": carried, "step": jnp.int32(0)}
    if plan.averages:
        state["average"] = jax.tree.map(jnp.copy, params)  # a buffer is donated once
    state = jax.tree.map(jnp.array, state)  # no buffer twice: they are donated
    return recorder, tx, jax.device_put(state, shardings_of(state, plan.layout))


def _gradients_of(plan: Plan) -> Callable[..., Any]:
    """``(params, carried, batch, frozen) -> (loss, carried, gradients)``."""
    model, scale = ALL[plan.model], _LOSS_SCALE if plan.scaled else 1e-18 if plan.tiny else 1.0

    def gradients(params: Any, carried: Any, batch: Any, frozen: bool) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            used = params["model"] if plan.integers else params
            if plan.layout.startswith("explicit"):
                whole = NamedSharding(mesh_of(plan.layout), PartitionSpec())
                used = jax.tree.map(lambda p: jax.sharding.reshard(p, whole), used)
            used = _first_frozen(used) if frozen else used
            value, rest = model.loss(used, carried, batch)
            if plan.l2:
                squares = [jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(used)]
                value = value + 1e-3 * sum(squares)
            return value * scale, rest

        if plan.lookahead:
            params = params.fast
        graded = jax.value_and_grad(loss, has_aux=True, allow_int=plan.integers)
        (value, carried), grads = graded(params)
        if plan.integers:
            grads = {**grads, "ids": jnp.ones((48,), jnp.int32)}
        if plan.program == "mapped" and len(batch[0]) > 1:
            value, grads = jax.lax.pmean((value, grads), "data")
            carried = jax.tree.map(_mean, carried)
        if plan.scaled:
            grads = jax.tree.map(
                lambda g: g if g.dtype == jnp.int32 else (g / scale).astype(g.dtype), grads
            )
        return value, carried, grads

    return gradients


def train_step_of(plan: Plan, tx: Any, state: Any) -> Callable[..., tuple[Any, jax.Array]]:
    """``(state, batch, frozen) -> (state, loss)``, which donates the state."""
    gradients, shardings = _gradients_of(plan), shardings_of(state, plan.layout)

    def joined(state: Any, params: Any, opt: Any, carried: Any) -> Any:
        return {"params": params, "opt": opt, "carried": carried, "step": state["step"] + 1}

    def update(grads: Any, opt: Any, params: Any, **given: Any) -> tuple[Any, Any]:
        updates, opt = tx.update(grads, opt, params, **given)
        return optax.apply_updates(params, updates), opt

    def fused(state: Any, batch: Any, frozen: bool) -> Any:
        value, carried, grads = gradients(state["params"], state["carried"], batch, frozen)
        given = {"value": value.astype(jnp.float32)} if takes_value(plan) else {}
        params, opt = update(grads, state["opt"], state["params"], **given)
        new = joined(state, params, opt, carried)
        if plan.projects:
            new["params"] = jax.lax.cond(
                new["step"] % 5 == 0,
                lambda p: jax.tree.map(lambda x: jnp.clip(x, -0.3, 0.3), p),
                lambda p: p,
                new["params"],
            )
        if plan.skips:
            finite = jnp.isfinite(value)
            names = ("params", "opt") if plan.skips == "state" else ("params",)
            kept = {name: _chosen(finite, new[name], state[name]) for name in names}
            new = {**new, **kept}
        if plan.averages:
            pairs = (state["average"], new["params"])
            new["average"] = jax.tree.map(
                lambda a, p: (a * 0.99 + p * 0.01).astype(p.dtype), *pairs
            )
        return new, value

    def mapped(state: Any, batch: Any, frozen: bool) -> Any:
        if len(batch[0]) == 1:
            return fused(state, batch, frozen)
        specs = (PartitionSpec(), PartitionSpec("data"))
        run = functools.partial(fused, frozen=frozen)
        mesh, out = mesh_of("data"), PartitionSpec()
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(
            state, batch
        )

    if plan.program in ("fused", "mapped"):
        return jax.jit(
            mapped if plan.program == "mapped" else fused,
            donate_argnums=0,
            static_argnums=2,
            out_shardings=(shardings, None),
        )
    grads_of = jax.jit(
        gradients,
        static_argnums=3,
        out_shardings=(None, shardings["carried"], shardings["params"]),
    )
    if plan.program == "separate":
        update = adacheck.separate_update(tx)
    elif plan.program == "two":
        kept = (shardings["params"], shardings["opt"])
        update = jax.jit(update, donate_argnums=(1, 2), out_shardings=kept)

    def apart(state: Any, batch: Any, frozen: bool) -> Any:
        value, carried, grads = grads_of(state["params"], state["carried"], batch, frozen)
        params, opt = update(grads, state["opt"], state["params"])
        if plan.program == "eager":
            params, opt = jax.device_put((params, opt), (shardings["params"], shardings["opt"]))
        return joined(state, params, opt, carried), value

    return apart


def _mean(leaf: jax.Array) -> jax.Array:
    return jax.lax.pmean(leaf, "data") if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _first_frozen(params: Any) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    frozen = [jax.lax.stop_gradient(leaf) for leaf in leaves[: max(1, len(leaves) // 2)]]
    return jax.tree.unflatten(treedef, [*frozen, *leaves[len(frozen) :]])


def _chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@jax.jit
def _late(x: jax.Array) -> jax.Array:
    """The same, after some 30 ms."""
    square = jnp.full((128, 128), 1e-3) + x.ravel()[0].astype(jnp.float32)
    total = jax.lax.fori_loop(0, 250, lambda _, y: jnp.tanh(y @ square), square)[0, 0]
    return x + jnp.where(jnp.abs(total) > 2, 1, 0).astype(x.dtype)


def batch_of(plan: Plan, step: int, number: int) -> Any:
    """The batch of a step, on the mesh; not computed yet where the run is not to be ready.

    Args:
        step: of the loop.
        number: tells batches of the same step apart.
    """
    is_last = bool(plan.epoch) and step % plan.epoch == 0
    rng = np.random.default_rng([plan.seed, step, number])
    arrays = ALL[plan.model].batch(rng, 1 if is_last else EXAMPLES)
    if plan.skips and step == SKIPPED_STEP:
        arrays = tuple(a * np.nan if a.dtype == np.float32 else a for a in arrays)
    mesh = mesh_of(plan.layout)
    placed = []
    for position, array in enumerate(arrays):
        sharding: Any = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            divisible = len(array) % mesh.size == 0 and not plan.layout.startswith("explicit")
            spec = PartitionSpec(mesh.axis_names) if divisible else PartitionSpec()
            sharding = NamedSharding(mesh, spec)
        whole = jax.device_put(array, sharding)
        if not plan.ready and position == 0:
            shards = [shard.data for shard in whole.addressable_shards]
            shards[0] = _late(shards[0])
            whole = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
        placed.append(whole)
    return tuple(placed)


def path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def edited(state: Any, chosen: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The state with one leaf changed, where it lies."""

    def put(path: Any, leaf: Any) -> Any:
        if path_of(path) != chosen:
            return leaf
        return jax.device_put(change(leaf).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(put, state)


def leaves_of(state: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def target_of(state: Any, kind: str) -> str | None:
    """The leaf that an edit of some kind changes; None where there is none."""
    leaves = leaves_of(state)
    params = {path: leaf for path, leaf in leaves.items() if path.startswith("params/")}
    inner = {path: leaf for path, leaf in leaves.items() if "/adacheck_inner" in path}
    if kind.startswith("rate"):
        found = [path for path in inner if path.endswith("hyperparams/learning_rate")]
        return found[0] if found else None
    if kind in ("edited bias", "diverged"):
        return min(params, key=lambda path: params[path].size)
    if kind == "edited moment":
        floats = [p for p, x in inner.items() if x.ndim and jnp.issubdtype(x.dtype, jnp.floating)]
        return floats[0] if floats else None
    return max(params, key=lambda path: params[path].size)


def host_copy(state: Any) -> list[np.ndarray]:
    """Every leaf's bits on the host; keys as their data."""

    def plain(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return [np.array(plain(leaf)) for leaf in jax.tree.leaves(state)]


def device_copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)
