"""Every optimizer of optax that can be made without being told much, and some that are composed.

    python -m tests.campaigns.optimizers

prints how the steps of each are kept if it runs inside the train step's program. Params are two
matrices of 256 x 1,024 and two vectors.

* sample: all leaves replayed, and checked by a sample of any state. * full: replayed, and compared
in full, of a state of at most 64 MiB or with ``Shadow(on_devices=True)``. * some: the leaves that
come out of the named operations are stored. * bits: all are.
"""

from __future__ import annotations

import collections
import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import adacheck_jax as adacheck
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update.binding import recorders_of

RATE = 3e-3
TAKE_VALUE = {
    *("polyak_sgd", "scale_by_polyak", "contrib.momo", "contrib.momo_adam"),
    "contrib.reduce_on_plateau",
}
"""Optimizers that look at the loss."""
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


def _clipped(inner: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), inner)


SUMMING: dict[str, Callable[[], Any]] = {
    "adamw, clipped by norm": lambda: _clipped(optax.adamw(_warm())),
    "adamw, masked decay, clipped by norm": lambda: _clipped(optax.adamw(RATE, mask=_by_rank)),
    "adam, clipped by block": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.adam(RATE)),
    "adam, clipped adaptively": lambda: optax.chain(
        optax.adaptive_grad_clip(1e-2), optax.adam(RATE)
    ),
    "adam, centralized": lambda: optax.chain(optax.centralize(), optax.adam(RATE)),
    "momentum, normalized": lambda: optax.chain(
        optax.normalize_by_update_norm(), optax.sgd(RATE, momentum=0.9)
    ),
    "adamw, clipped by norm, MultiSteps": lambda: optax.MultiSteps(
        _clipped(optax.adamw(RATE)), 2
    ).gradient_transformation(),
    "adamw, clipped by norm, if finite": lambda: optax.apply_if_finite(
        _clipped(optax.adamw(RATE)), 3
    ),
    "adamw, clipped by norm, injected": lambda: optax.inject_hyperparams(
        lambda learning_rate: _clipped(optax.adamw(learning_rate))
    )(learning_rate=RATE),
    "adafactor, factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "mechanize": lambda: optax.contrib.mechanize(_clipped(optax.adamw(RATE))),
    **{
        name: lambda name=name: found()[name]()
        for name in (
            *("adafactor", "fromage", "lamb", "lars", "novograd", "sm3"),
            *("normalize_by_update_norm", "scale_by_factored_rms", "scale_by_param_block_norm"),
            *("scale_by_param_block_rms", "scale_by_trust_ratio", "contrib.dadapt_adamw"),
            *("contrib.cocob", "contrib.dog", "contrib.dowg", "contrib.prodigy"),
            *("contrib.reduce_on_plateau", "polyak_sgd", "contrib.momo"),
        )
    },
}
"""Optimizers that add up elements, where the results are few."""


def all_of() -> dict[str, Callable[[], Any]]:
    """Found and composed ones, by name."""
    return {**found(), **COMPOSED, **SUMMING}


def kept(made: Callable[[], Any], *, takes_value: bool) -> tuple[str, str]:
    """How steps are kept, and the operations that stand in the way."""
    params = {
        **{"embedding": jnp.ones((256, 1024)), "kernel": jnp.ones((1024, 256)) * 0.5},
        **{"bias": jnp.ones(256), "scale": jnp.ones(1024)},
    }
    extra: dict[str, Any] = {"extra_args": {"value": jnp.zeros(())}} if takes_value else {}
    try:
        recorder = adacheck.Recorder(made(), **extra)
        state = {"params": params, "opt": recorder.init(params)}
        structure = Snapshots(recorders_of(recorder), None).take(state).structure
        found = ExportedUpdates("auto").of(structure)
    except Exception as error:
        return "bits", f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
    said = " ".join((found.problem, *found.warnings))
    why = said.partition("come out of ")[2].partition(", whose")[0] or found.problem[:80]
    if found.problem:
        return "bits", why
    return ("some", why) if found.unreplayed else (found.engine, "")


def main() -> None:
    """Print a line for each optimizer, and the shares."""
    logging.disable(logging.WARNING)
    rows = dict[str, str]()
    for name, made in (all_of()).items():
        rows[name], why = kept(made, takes_value=name in TAKE_VALUE)
        print(f"{name}: {rows[name]} {why}", flush=True)
    for title, names in {"optax's own": [*found()], "composed": [*COMPOSED, *SUMMING]}.items():
        counts = collections.Counter(rows[name] for name in names)
        print(f"{title}: {len(names)}, {dict(counts)}")


if __name__ == "__main__":
    main()
