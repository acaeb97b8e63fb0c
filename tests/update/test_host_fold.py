"""The host's copy of a state moves on by the bits that training computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.update.binding import recorders_of
from adacheck_jax.update.elements import host_fold
from adacheck_jax.update.elements.host_fold import HostFold, UnfitError

ARITHMETIC = Arithmetic.current()
SHAPES = {"a": (37, 11), "b": (64,), "c": (37, 11), "d": (), "e": (3, 5, 7), "empty": (0, 4)}

CLIP = optax.clip_by_global_norm(0.1)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)),
    "clip": lambda: optax.apply_if_finite(optax.chain(CLIP, optax.amsgrad(1e-2)), 3),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": lambda: optax.lamb(1e-2),
    "accumulated": lambda: optax.MultiSteps(optax.lion(1e-2), 2).gradient_transformation(),
}


def trained(tx, dtype, steps):
    """States of a run, one after another, and its exported update."""
    recorder = adacheck.Recorder(tx)
    keys = jax.random.split(jax.random.key(1), len(SHAPES))
    params = {
        name: jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    state = {"params": params, "opt": recorder.init(params)}

    @jax.jit
    def step(state, key):
        noise = lambda p: jnp.tanh(p + jax.random.normal(key, p.shape, p.dtype)) * 1e-2  # noqa: E731
        grads = jax.tree.map(noise, state["params"])
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    snapshots = Snapshots(recorders_of(recorder), None)
    states = [snapshots.take(state)]
    for number in range(steps):
        state = step(state, jax.random.key(number))
        states.append(snapshots.take(state))
    return states, ExportedUpdates("sample").of(states[0].structure)


def blocks_of(array, cuts=None):
    whole = np.asarray(array)
    boxes = grid(cuts) if cuts else [Box.full(whole.shape)]
    return {box: whole[box.slices] for box in boxes}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.first(0, slow=2)
def test_every_step_has_the_bits_of_training(name, dtype, monkeypatch):
    monkeypatch.setattr(host_fold, "CHUNK_ELEMENTS", 256)  # several chunks, and some with padding
    states, update = trained(OPTIMIZERS[name](), dtype, 5)
    structure = states[0].structure
    params, inner, record, extra = structure.arguments
    touched = [i for each in structure.arguments for i in each]
    whole = {i: [Box.full(structure.leaves[i].shape)] for i in touched}
    kept = HostFold(update.pieces, whole, 1, ARITHMETIC)
    passing = HostFold(update.pieces, whole, 1, ARITHMETIC, record)
    record_bytes = sum(structure.leaves[i].nbytes for i in record if structure.leaves[i].shape)
    assert kept.size_bytes() - passing.size_bytes() >= record_bytes
    assert kept.copy_bytes == passing.copy_bytes
    for fold in (kept, passing):
        fold.allocate()
        fold.compile()
        for i in filter(fold.holds, touched):
            fold.put(i, blocks_of(states[0].arrays[i]))
        for number, state in enumerate(states[1:]):
            for i in (*record, *extra):
                shape = state.arrays[i].shape
                halves = tuple((0, n // 2, n) if n > 1 else (0, n) for n in shape)
                fold.put(i, blocks_of(state.arrays[i], halves if number % 2 else None))
            fold.advance((0,))
            for i in (*params, *inner):
                ((_, found),) = fold.blocks(i).items()
                assert found.tobytes() == np.asarray(state.arrays[i]).tobytes(), i


@pytest.mark.slow
def test_boxes_that_do_not_meet_cannot_be_computed():
    states, update = trained(optax.adamw(1e-2), jnp.float32, 0)
    structure = states[0].structure
    touched = [i for each in structure.arguments for i in each]
    boxes = {i: [Box.full(structure.leaves[i].shape)] for i in touched}
    other = structure.arguments[2][0]  # another process holds a part of the record
    with pytest.raises(UnfitError, match="cut otherwise"):
        HostFold(update.pieces, {**boxes, other: [Box((0, 0), (8, 11))]}, 1, ARITHMETIC)
    fold = HostFold(update.pieces, boxes, 1, ARITHMETIC)
    fold.allocate()
    part = np.asarray(states[0].arrays[other])[:8]
    with pytest.raises(UnfitError, match="not all elements"):
        fold.put(other, {Box((0, 0), (8, 11)): part})
