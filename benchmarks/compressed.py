"""What steps cost whose gradients training compresses, and how a restored run goes on.

    python -m benchmarks.compressed

A small language model learns the text of Python's standard library with adamw, each time with
another compression before its Recorder, which records bfloat16 (but for ``float8 record``, which
needs no other transformation). Every step is saved. Bytes a param are those that a delta adds,
manifest, pack and Orbax's own files included, in the mean over all deltas. With error feedback the
residual is ephemeral, but for ``residual stored``; ``in bases`` is what it adds to a step at the
given number of deltas a base.

Then the step in the middle is restored, and training goes on from it, beside the run that was not
interrupted. ``losses`` says in how many of the steps after it both losses have the same bits, and
how far they are apart at most, relative to the loss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import LanguageModel, environment, new_bytes, tokens_of, width_for

LINEAGE_DELTAS = 20
SHARE = 0.01
RATE = 1e-3
TARGET = 0.036
"""What the project set itself, in bytes a param, for the largest hundredth of a gradient."""

Way = Callable[[jax.Array, jax.Array], jax.Array]
"""Compresses one gradient, given the number of the step."""


class CompressState(NamedTuple):
    """State of :func:`compressed`."""

    number: jax.Array


class FeedbackState(NamedTuple):
    """State of :func:`with_feedback`."""

    residual: Any


def compressed(way: Way) -> optax.GradientTransformation:
    """Compresses each gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompressState]:
        del params
        return jax.tree.map(lambda g: way(g, state.number), updates), CompressState(
            state.number + 1
        )

    def init(params: Any) -> CompressState:
        del params
        return CompressState(jnp.int32(0))

    return optax.GradientTransformation(init, update)


def with_feedback(way: Way) -> optax.GradientTransformation:
    """Compresses each gradient, and adds what that leaves out to the next one."""

    def init(params: Any) -> FeedbackState:
        return FeedbackState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FeedbackState]:
        del params
        whole = jax.tree.map(jnp.add, updates, state.residual)
        passed = jax.tree.map(lambda g: way(g, jnp.int32(0)), whole)
        return passed, FeedbackState(jax.tree.map(jnp.subtract, whole, passed))

    return optax.GradientTransformation(init, update)


def dense(gradient: jax.Array, _: jax.Array) -> jax.Array:
    """The gradient."""
    return gradient


def top_k(gradient: jax.Array, _: jax.Array) -> jax.Array:
    """The largest hundredth of the elements."""
    size = jnp.abs(gradient)
    least = jax.lax.top_k(size.reshape(-1), max(1, round(gradient.size * SHARE)))[0][-1]
    return jnp.where(size >= least, gradient, 0)


def random_k(gradient: jax.Array, count: jax.Array) -> jax.Array:
    """A random hundredth of the elements, unbiased."""
    is_kept = jax.random.bernoulli(jax.random.key(count), SHARE, gradient.shape)
    return jnp.where(is_kept, gradient / SHARE, 0)


def int8(gradient: jax.Array, _: jax.Array) -> jax.Array:
    """Integers of 8 bits, times one scale a leaf."""
    scale = jnp.max(jnp.abs(gradient)) / 127 + 1e-30
    return jnp.round(gradient / scale) * scale


def float8(gradient: jax.Array, _: jax.Array) -> jax.Array:
    """Floats of 8 bits, times one scale a leaf."""
    scale = jnp.max(jnp.abs(gradient)) / 448 + 1e-30
    return (gradient / scale).astype(jnp.float8_e4m3fn).astype(gradient.dtype) * scale


def sign(gradient: jax.Array, _: jax.Array) -> jax.Array:
    """Signs, times the mean size."""
    return jnp.sign(gradient) * jnp.mean(jnp.abs(gradient))


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: name of the compression.
        before: the transformation before the Recorder.
        dtype: data type of the record.
        ephemeral: leaves that are saved with bases alone.
        has_feedback: True if there is a residual.
    """

    name: str
    before: optax.GradientTransformation
    dtype: Any = jnp.bfloat16
    ephemeral: tuple[str, ...] = ()
    has_feedback: bool = False


CASES = (
    Case("dense", compressed(dense)),
    Case("top-k 1 %", compressed(top_k)),
    Case("top-k 1 %, feedback", with_feedback(top_k), ephemeral=("*/residual",), has_feedback=True),
    Case("top-k 1 %, residual stored", with_feedback(top_k), has_feedback=True),
    Case("random-k 1 %", compressed(random_k)),
    Case("int8", compressed(int8)),
    Case("float8", compressed(float8)),
    Case("float8 record", compressed(dense), dtype=jnp.float8_e4m3fn),
    Case("sign", compressed(sign)),
)


@dataclass(frozen=True)
class Row:
    """Measurements of one case.

    Attributes:
        name: name of the compression.
        params: number of params.
        bytes_a_param: what a delta adds.
        in_bases: what the residual adds to a step in the mean, as part of the bases.
        stale: number of leaves of the restored step with an earlier step's bits.
        exact: True if all other leaves of the restored step have the bits that were trained.
        same_losses, losses: of the steps after it, those whose loss has the same bits, and all.
        largest: largest difference of two losses, relative to the loss.
    """

    name: str
    params: int
    bytes_a_param: float
    in_bases: float
    stale: int
    exact: bool
    same_losses: int
    losses: int
    largest: float


def measure(case: Case, root: Path, *, params_count: int, steps: int, compression: Any) -> Row:
    """Trains, saves, restores and goes on."""
    model = LanguageModel(width_for(params_count))
    recorder = adacheck.Recorder(optax.adamw(RATE), dtype=case.dtype)
    tx = optax.chain(case.before, recorder)
    params = model.initial()
    state = {"params": params, "opt_state": tx.init(params)}
    count = sum(x.size for x in jax.tree.leaves(params))

    @jax.jit
    def train_step(state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(model.loss)(state["params"], tokens)
        updates, opt_state = tx.update(gradients, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    handler = adacheck.AdaCheckHandler(
        recorder,
        max_deltas=steps,
        params_path="params",
        compression=compression,
        ephemeral=case.ephemeral,
    )
    middle, losses, kept = steps // 2, [], state
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        for step in range(steps):
            state, loss = train_step(state, tokens_of(step, 2))
            losses.append(loss)
            kept = state if step == middle else kept
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        found = manager.restore(middle, args=adacheck.RestoreArgs(state))
    info = handler.restored
    assert info is not None
    again = []
    is_exact = _same_but_for(found, kept, {*info.stale})
    for step in range(middle + 1, steps):
        found, loss = train_step(found, tokens_of(step, 2))
        again.append(loss)
    pairs = [(float(a), float(b)) for a, b in zip(losses[middle + 1 :], again, strict=True)]
    added = [new_bytes(root / str(step)) for step in range(1, steps)]
    return Row(
        name=case.name,
        params=count,
        bytes_a_param=float(np.mean(added)) / count,
        in_bases=4 / (LINEAGE_DELTAS + 1) if case.has_feedback else 0.0,
        stale=len(info.stale),
        exact=is_exact,
        same_losses=sum(a == b for a, b in pairs),
        losses=len(pairs),
        largest=max(abs(a - b) / a for a, b in pairs),
    )


def _same_but_for(found: Any, expected: Any, stale: set[str]) -> bool:
    """True if all leaves have the same bits, but for some."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(expected)
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, (path, b) in zip(jax.tree.leaves(found), pairs, strict=True)
        if jax.tree_util.keystr(path, simple=True, separator="/") not in stale
    )


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown."""
    lines = [
        "| gradient | bytes a param | in bases | other leaves exact | equal losses | farthest |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        in_bases = f"{row.in_bases:.3f}" if row.in_bases else "-"
        apart = f"{row.largest:.1e}" if row.largest else "0"
        lines.append(
            f"| {row.name} | {row.bytes_a_param:.4f} | {in_bases} | "
            f"{'yes' if row.exact else 'NO'} | {row.same_losses} of {row.losses} | {apart} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=3_000_000)
    parser.add_argument("--steps", type=int, default=LINEAGE_DELTAS + 1)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--compression", default="none", choices=["none", "fast", "small"])
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if case.name in arguments.only:
            with tempfile.TemporaryDirectory() as directory:
                rows.append(
                    measure(
                        case,
                        Path(directory),
                        params_count=arguments.params,
                        steps=arguments.steps,
                        compression=arguments.compression,
                    )
                )
            print(json.dumps(asdict(rows[-1])), flush=True)
    print(json.dumps(environment()))
    print(table(rows))


if __name__ == "__main__":
    main()
