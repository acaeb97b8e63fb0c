"""Gradients that training compresses: stored in codes, and replayed to the very bits elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import roots
from tests import support
from tests.save.loop import Loop
from tests.support import abstract, manager_of, mesh_of, save_steps

STEPS = 4


def top_k(gradient, step):
    least = jax.lax.top_k(jnp.abs(gradient).reshape(-1), max(1, gradient.size // 50))[0][-1]
    return jnp.where(jnp.abs(gradient) >= least, gradient, 0)


def random_k(gradient, step):
    is_kept = jax.random.bernoulli(jax.random.key(step), 0.02, gradient.shape)
    return jnp.where(is_kept, gradient * 50, 0)


def int8(gradient, step):
    scale = jnp.max(jnp.abs(gradient)) / 127 + 1e-30
    return jnp.round(gradient / scale).astype(jnp.int8) * scale


def float8(gradient, step):
    return gradient.astype(jnp.float8_e4m3fn).astype(gradient.dtype)


def sign(gradient, step):
    return jnp.sign(gradient) * jnp.mean(jnp.abs(gradient))


WAYS = {each.__name__: each for each in (top_k, random_k, int8, float8, sign)}


def compressing(way):
    """Compresses each gradient, as a transformation before the Recorder does."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: way(g, state), updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def run_of(way, mesh, dtype=None):
    recorder = adacheck.Recorder(optax.adamw(1e-2), dtype=dtype)
    chain = optax.chain(compressing(way), recorder)
    return support.program_of(mesh, recorder, chain).run()


def letters_of(root):
    """Encodings of the large leaves of the record, by step."""
    base, *deltas = [step.manifest for step in roots.steps_of(root)]
    assert isinstance(base, BaseManifest)
    large = {i for i, leaf in enumerate(base.leaves) if leaf.nbytes >= 2**14}
    return {
        each.step: {
            letter
            for pack in each.packs
            for i, letter in zip(each.stored, pack.encodings, strict=True)
            if i in large
        }
        for each in deltas
    }


@pytest.mark.covering(1, quick=0)
@pytest.mark.parametrize("compression", ["none", "fast", "small"])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["own", "bfloat16"])
@pytest.mark.parametrize("name", WAYS)
def test_every_step_is_coded_and_restored_on_other_meshes(tmp_path, name, dtype, compression):
    with Loop(
        tmp_path, run_of(WAYS[name], mesh_of((2, 2)), dtype), compression=compression
    ) as loop:
        loop.save(STEPS)
    assert letters_of(tmp_path) == {each: {Encoding.CODED} for each in range(2, STEPS + 1)}
    for shape in ((2, 2), (8,), (1,), (4, 2)):
        loop.verify(mesh_of(shape))
    for options in ([], ["--read-data"], ["--replay"]):
        found = CliRunner().invoke(app, ["verify", str(tmp_path), *options])
        assert found.exit_code == 0, found.output


@pytest.mark.slow
def test_coded_steps_are_deferred_compacted_and_built_on_and_take_few_bytes(tmp_path):
    run = run_of(top_k, mesh_of((2, 2)))
    with Loop(tmp_path, run) as loop:
        loop.save(2)
        assert loop.keep(2) == "rr"
        loop.save(2)
    (delta,) = [s.manifest for s in roots.steps_of(tmp_path) if s.step == 2]
    count = sum(np.size(x) for x in jax.tree.leaves(run.state["params"]))
    assert sum(pack.raw_bytes for pack in delta.packs) < 0.15 * count
    loop.verify(mesh_of((8,)))
    support.compact(tmp_path, 5)
    loop.forget(3, 4)
    loop.verify(mesh_of((8,)))


def test_a_dense_record_is_stored_as_it_is_and_a_change_in_a_code_is_found(tmp_path):
    for name, way, letters in (
        ("dense", lambda gradient, step: gradient + 1e-9, {Encoding.RAW}),
        ("coded", top_k, {Encoding.CODED}),
    ):
        run = run_of(way, mesh_of((2, 2)))
        with manager_of(tmp_path / name, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
        assert letters_of(tmp_path / name) == {2: letters}
    for path in support.pack_files(tmp_path / "coded" / "2" / "default"):
        path.write_bytes(support.with_flipped_data(path.read_bytes()))
    with pytest.raises(IntegrityError, match="Restore another step"):
        support.restored(tmp_path / "coded", 2, abstract(run.state, mesh_of((2,))))
