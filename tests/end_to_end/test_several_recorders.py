"""States of several optimizers, each with its own recorder: every saved step restores exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import RecorderError
from adacheck_jax.tools import inspection
from tests import support
from tests.support import (
    WIDTH,
    abstract,
    assert_same_bits,
    host_copy,
    kinds_of,
    manager_of,
    mesh_of,
    place,
    recorded,
)

STEP_COUNT = 6
SCHEDULES = {
    "discriminator every second step": lambda n: (True, n % 2 == 0),
    "alternating": lambda n: (n % 2 == 1, n % 2 == 0),
    "both": lambda n: (True, True),
    "neither at times": lambda n: (n % 3 == 1, n % 3 == 2),
}


def network(seed: int, width: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "first": jax.random.normal(keys[0], (WIDTH, width)) * 0.2,
        "last": jax.random.normal(keys[1], (width, WIDTH)) * 0.2,
    }


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def inputs(number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + number), (16, WIDTH))


def updated(chain: Any, model: Any, grads: Any) -> dict[str, Any]:
    updates, opt_state = chain.update(grads, model["opt_state"], model["params"])
    return {"params": optax.apply_updates(model["params"], updates), "opt_state": opt_state}


class Gan:
    """A generator and a discriminator, either updated or not in a step.

    Args:
        mesh: on which both lie.
        width: of the discriminator's hidden layer; ``2 * WIDTH`` gives both models the same shapes.
        optimizers: of both.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        width: int = WIDTH,
        optimizers: tuple[Any, Any] | None = None,
    ) -> None:
        optimizers = optimizers or (optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9))
        (self.rec_g, self.chain_g), (self.rec_d, self.chain_d) = map(recorded, optimizers)
        params = network(1, 2 * WIDTH), network(2, width)
        self.state: Any = place(
            {
                "gen": {"params": params[0], "opt_state": self.chain_g.init(params[0])},
                "disc": {"params": params[1], "opt_state": self.chain_d.init(params[1])},
                "step": jnp.int32(0),
            },
            mesh,
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self.step = jax.jit(
            self._step, donate_argnums=0, static_argnums=(2, 3), out_shardings=shardings
        )
        self.count = 0

    def _step(self, state: Any, z: jax.Array, is_g: bool, is_d: bool) -> Any:
        def judged(params: Any) -> jax.Array:
            return jnp.mean((apply(state["disc"]["params"], apply(params, z)) - 1) ** 2)

        def told_apart(params: Any) -> jax.Array:
            fake = apply(params, apply(state["gen"]["params"], z))
            return jnp.mean((apply(params, z) - 1) ** 2) + jnp.mean(fake**2)

        gen, disc = state["gen"], state["disc"]
        if is_g:
            gen = updated(self.chain_g, gen, jax.grad(judged)(gen["params"]))
        if is_d:
            disc = updated(self.chain_d, disc, jax.grad(told_apart)(disc["params"]))
        return {"gen": gen, "disc": disc, "step": state["step"] + 1}

    def advance(self, is_g: bool, is_d: bool) -> Any:
        self.count += 1
        self.state = self.step(self.state, inputs(self.count), is_g, is_d)
        return self.state


def save_steps(manager: Any, gan: Gan, schedule: Any, steps: int) -> dict[int, list[Any]]:
    saved = {}
    for _ in range(steps):
        gan.advance(*schedule(gan.count + 1))
        saved[gan.count] = host_copy(gan.state)
        manager.save(gan.count, args=adacheck.SaveArgs(gan.state))
    manager.wait_until_finished()
    return saved


def assert_steps(root: Path, gan: Gan, saved: Any, kinds: str, *meshes: tuple[int, ...]) -> None:
    assert kinds_of(root) == kinds
    support.assert_steps(root, saved, gan.state, *(meshes or [(1, 1)]))


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize("shape", [(4, 2), (1, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_of_a_gan_is_a_delta_and_restores_exactly(tmp_path, name, shape):
    """And what an update computes is replayed, not stored."""
    gan, schedule = Gan(mesh_of(shape)), SCHEDULES[name]
    with manager_of(tmp_path, adacheck.AdaCheckHandler([gan.rec_g, gan.rec_d])) as manager:
        saved = save_steps(manager, gan, schedule, STEP_COUNT)
    assert_steps(tmp_path, gan, saved, "BDDDDD", (1, 1), (4, 2))
    for step in range(2, STEP_COUNT + 1):
        details = inspection.describe_step(tmp_path, step)
        assert details.problem is None
        sources = {leaf.path: leaf.source for leaf in details.leaves}
        done = [schedule(each) for each in range(2, step + 1)]
        updated = map(any, zip(*done, strict=True))
        for model, was_updated in zip(("gen", "disc"), updated, strict=True):
            expected = "replayed" if was_updated else "stored"
            assert sources[f"{model}/params/first"] == expected


@pytest.mark.slow
def test_two_updates_of_one_model_between_two_saves_make_a_base(tmp_path):
    """And a restored run goes on with deltas, whichever order its recorders are given in."""
    gan, schedule = Gan(mesh_of((4, 2))), SCHEDULES["both"]
    with manager_of(tmp_path, adacheck.AdaCheckHandler([gan.rec_g, gan.rec_d])) as manager:
        saved = save_steps(manager, gan, schedule, 2)
        gan.advance(False, True)  # not saved
        saved |= save_steps(manager, gan, schedule, 2)
    handler = adacheck.AdaCheckHandler([gan.chain_d, gan.chain_g])
    with manager_of(tmp_path, handler) as manager:
        gan.state = manager.restore(5, args=adacheck.RestoreArgs(abstract(gan.state)))
        saved |= save_steps(manager, gan, SCHEDULES["alternating"], 2)
    assert_steps(tmp_path, gan, saved, "BDBDDD", (4, 2), (1, 1))


def twins(mesh: jax.sharding.Mesh) -> Gan:
    """Two models of the same shapes, whose optimizers differ in nothing that is saved."""
    return Gan(mesh, 2 * WIDTH, (optax.adamw(1e-2), optax.adamw(1e-3)))


def test_twins_ask_for_a_mapping_before_anything_is_written(tmp_path):
    gan = twins(mesh_of((1, 1)))
    with (
        manager_of(tmp_path, adacheck.AdaCheckHandler([gan.rec_g, gan.rec_d])) as manager,
        pytest.raises(RecorderError, match="2 that fit equally"),
    ):
        save_steps(manager, gan, SCHEDULES["both"], 1)
    assert kinds_of(tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("is_one", [True, False], ids=["one recorder", "a mapping"])
def test_twins_are_told_apart_by_a_mapping_or_share_a_recorder(tmp_path, is_one):
    gan = twins(mesh_of((1, 1)))
    known: Any = {"gen/opt_state": gan.rec_g, "disc": gan.chain_d}
    if is_one:
        gan.rec_d, gan.chain_d = gan.rec_g, gan.chain_g
        known = gan.rec_g
    with manager_of(tmp_path, adacheck.AdaCheckHandler(known)) as manager:
        saved = save_steps(manager, gan, SCHEDULES["alternating"], 4)
    assert_steps(tmp_path, gan, saved, "BDDD", (1, 1), (4, 2))


@pytest.mark.slow
def test_recorded_steps_of_a_gan_restore(tmp_path):
    gan = Gan(mesh_of((1, 1)))
    schedule = SCHEDULES["alternating"]
    handler = adacheck.AdaCheckHandler([gan.rec_g, gan.rec_d])
    bits, recorded_steps = {}, {}
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, gan, schedule, 4)
        waiting = []
        for _ in range(6):
            gan.advance(*schedule(gan.count + 1))
            bits[gan.count] = host_copy(gan.state)
            if gan.count < 10 and handler.record_step(gan.state, gan.count):
                waiting.append(gan.count)
            else:
                manager.save(gan.count, args=adacheck.SaveArgs(gan.state))
                saved[gan.count] = bits[gan.count]
                recorded_steps |= dict.fromkeys(waiting, gan.count)
                waiting = []
        manager.wait_until_finished()
        assert recorded_steps
    support.assert_steps(tmp_path, saved, gan.state)
    for step, holder in recorded_steps.items():
        found = support.restored(tmp_path, holder, abstract(gan.state), step=step)
        assert_same_bits(found, bits[step])


def test_a_handler_given_a_whole_chain_records_with_the_recorder_in_it(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    chain = optax.chain(optax.clip_by_global_norm(1.0), run.recorder)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(chain)) as manager:
        saved = support.save_steps(manager, run, 3)
    assert kinds_of(tmp_path) == "BDD"
    support.assert_steps(tmp_path, saved, run.state)
