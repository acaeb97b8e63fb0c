"""A state with leaves of every kind, for restores in several processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck


def saved_run() -> tuple[Any, Any]:
    """A recorder and the first state of a run with it."""
    recorder = adacheck.Recorder(optax.adamw(1e-2), dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "large": jax.random.normal(keys[0], (1536, 1024)),  # several chunks
        "odd": jax.random.normal(keys[1], (7, 5)),
        "small": jax.random.normal(keys[2], (64, 32)),
        "scale": jnp.ones(()),
    }
    nans = np.array([0x7F800001, 0xFFC00123, 0x7FC00000, 0x80000000], np.uint32)
    others = {
        "nan": jnp.asarray(nans.view(np.float32)),
        "bool": jnp.arange(12) % 3 == 0,
        "int4": jnp.arange(-8, 8).astype(jnp.int4),
        "uint4": jnp.arange(16).astype(jnp.uint4),
        "fp8": jnp.linspace(-1, 1, 24).astype(jnp.float8_e4m3fn),
        "complex": jnp.arange(6.0) + 1j,
        "key": jax.random.key(5),
        "host": np.arange(10, dtype=np.int16),
        "number": 3,
    }
    state = {"params": params, "opt_state": recorder.init(params), "others": others}
    return recorder, state


def advance(recorder: Any, state: Any, step: int) -> Any:
    """The state after one update."""
    gradient = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(step), x.shape), state["params"]
    )

    @jax.jit
    def update(params: Any, opt_state: Any) -> Any:
        updates, opt_state = recorder.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = update(state["params"], state["opt_state"])
    return {**state, "params": params, "opt_state": opt_state}
