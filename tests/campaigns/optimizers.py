"""Every optimizer of optax that can be made without being told much, and some that are composed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

RATE = 3e-3
_ARGUMENTS: dict[str, Any] = {
    **{"learning_rate": RATE, "decay": 0.9, "weight_decay": 1e-3, "step_size": RATE, "eta": 1e-3},
    **{"max_delta": 1.0, "min_delta": 0.0, "power": 2, "b1": 0.9, "b2": 0.99, "gamma": 0.9},
    **{"scaling_factor": 0.5, "step_size_fn": lambda count: RATE / (count + 1.0)},
    **{"schedule": optax.cosine_decay_schedule(RATE, 30), "accumulator_type": None},
}
"""What arguments without a default are given."""
_LEFT_OUT = {
    *("adaptive_grad_clip", "chain", "named_chain", "set_to_zero", "snapshot", "monitor"),
    *("identity", "lookahead", "microbatch", "scale_by_zoom_linesearch", "lbfgs", "scale_by_lbfgs"),
}


def _made(module: ModuleType, name: str) -> Callable[[], Any] | None:
    """Makes the transformation of a name; None where it is none, or wants to be told more."""
    function = getattr(module, name)
    if name[0] == "_" or name[0].isupper() or name in _LEFT_OUT or not callable(function):
        return None
    try:
        wanted = inspect.signature(function).parameters.values()
        known = {
            each.name: _ARGUMENTS[each.name]
            for each in wanted
            if each.default is inspect.Parameter.empty or each.name == "learning_rate"
        }
        made = functools.partial(function, **known)
        is_one = isinstance(made(), optax.GradientTransformation)
    except Exception:  # whatever it was not told; it is no optimizer by itself
        return None
    return made if is_one else None


@functools.cache
def found() -> dict[str, Callable[[], Any]]:
    """What makes each of optax's own, by name."""
    modules = (("", optax), ("contrib.", optax.contrib))
    names = [
        (prefix + name, _made(module, name)) for prefix, module in modules for name in dir(module)
    ]
    return {
        name: functools.partial(_rated, made) if ".scale_by_" in f".{name}" else made
        for name, made in names
        if made is not None
    }


def _rated(made: Callable[[], Any]) -> Any:
    return optax.chain(made(), optax.scale(-RATE))


def _warm() -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, RATE, 3, 40)


def _decayed(inner: Any) -> Any:
    return optax.chain(optax.add_decayed_weights(1e-3), inner)


def _by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _parts(params: Any) -> Any:
    return jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)


COMPOSED: dict[str, Callable[[], Any]] = {
    "adamw, bfloat16 mu": lambda: optax.adamw(RATE, mu_dtype=jnp.bfloat16),
    "adamw, nesterov": lambda: optax.adamw(RATE, nesterov=True),
    "adamw, warmup from zero": lambda: optax.adamw(_warm()),
    "adamw, masked decay": lambda: optax.adamw(RATE, mask=_by_rank),
    "adamw, injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "adamw, injected schedule": lambda: optax.inject_hyperparams(optax.adamw)(_warm()),
    "adam, MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "adamw, if finite": lambda: optax.apply_if_finite(optax.adamw(RATE), 3),
    "adam, decayed": lambda: _decayed(optax.adam(RATE)),
    "adam, clipped by value": lambda: optax.chain(optax.clip(0.05), optax.adam(RATE)),
    "adam, no NaNs": lambda: optax.chain(optax.zero_nans(), optax.adam(RATE)),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "momentum, nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "momentum, bfloat16": lambda: optax.sgd(RATE, 0.9, accumulator_dtype=jnp.bfloat16),
    "momentum, decayed": lambda: _decayed(optax.sgd(_warm(), momentum=0.9)),
    "rmsprop, centered": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "schedule_free momentum": lambda: optax.contrib.schedule_free(
        optax.sgd(RATE, momentum=0.9), RATE
    ),
    "schedule_free adamw": lambda: optax.contrib.schedule_free_adamw(RATE, warmup_steps=2),
    "ema of adam": lambda: optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "adam, parts": lambda: optax.partition({"a": optax.adam(RATE), "b": optax.sgd(RATE)}, _parts),
    "adam, conditional": lambda: optax.conditionally_transform(
        optax.scale_by_adam(), lambda count: count % 2 == 0
    ),
    "lion, warmup from zero": lambda: optax.lion(_warm()),
    "adafactor, unfactored": lambda: optax.adafactor(
        RATE,
        min_dim_size_to_factor=10**6,
        clipping_threshold=None,
        multiply_by_parameter_scale=False,
    ),
}


def all_of() -> dict[str, Callable[[], Any]]:
    """Found and composed ones, by name."""
    return {**found(), **COMPOSED}
