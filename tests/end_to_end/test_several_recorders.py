"""States of several optimizers, each with its own recorder: every saved step restores exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from adacheck_jax.errors import RecorderError
from adacheck_jax.tools import inspection
from tests import support
from tests.save.loop import Loop
from tests.support import WIDTH, kinds_of, mesh_of, place, recorded

OPTIMIZERS = optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9)
SCHEDULES: dict[str, Callable[[int], tuple[bool, bool]]] = {
    "discriminator every second step": lambda n: (True, n % 2 == 0),
    "alternating": lambda n: (n % 2 == 1, n % 2 == 0),
    "both": lambda n: (True, True),
    "neither at times": lambda n: (n % 3 == 1, n % 3 == 2),
}
"""Whether the generator, and the discriminator, is updated in a step."""


def network(seed: int, width: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "first": jax.random.normal(keys[0], (WIDTH, width)) * 0.2,
        "last": jax.random.normal(keys[1], (width, WIDTH)) * 0.2,
    }


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def updated(chain: Any, model: Any, grads: Any) -> dict[str, Any]:
    updates, opt_state = chain.update(grads, model["opt_state"], model["params"])
    return {"params": optax.apply_updates(model["params"], updates), "opt_state": opt_state}


class Gan:
    """A generator and a discriminator, either updated or not in a step; a run of a loop.

    Args:
        mesh: on which both lie.
        schedule: name of the schedule.
        width: of the discriminator's hidden layer; ``2 * WIDTH`` gives both models the same shapes.
        optimizers: of both; with one of them both share a recorder.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        schedule: str,
        width: int = WIDTH,
        optimizers: Any = OPTIMIZERS,
    ) -> None:
        pairs = [*map(recorded, optimizers)]
        self.recorder: Any = [recorder for recorder, _ in pairs]
        self.chains = [chain for _, chain in pairs] * (3 - len(pairs))
        params = network(1, 2 * WIDTH), network(2, width)
        models = {
            name: {"params": own, "opt_state": chain.init(own)}
            for name, own, chain in zip(("gen", "disc"), params, self.chains, strict=False)
        }
        self.state: Any = place({**models, "step": jnp.int32(0)}, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self._step = jax.jit(
            self._stepped, donate_argnums=0, static_argnums=(2, 3), out_shardings=shardings
        )
        self.schedule, self.count = schedule, 0

    def _stepped(self, state: Any, z: jax.Array, is_g: bool, is_d: bool) -> Any:
        def judged(params: Any) -> jax.Array:
            return jnp.mean((apply(state["disc"]["params"], apply(params, z)) - 1) ** 2)

        def told_apart(params: Any) -> jax.Array:
            fake = apply(params, apply(state["gen"]["params"], z))
            return jnp.mean((apply(params, z) - 1) ** 2) + jnp.mean(fake**2)

        gen, disc = state["gen"], state["disc"]
        if is_g:
            gen = updated(self.chains[0], gen, jax.grad(judged)(gen["params"]))
        if is_d:
            disc = updated(self.chains[1], disc, jax.grad(told_apart)(disc["params"]))
        return {"gen": gen, "disc": disc, "step": state["step"] + 1}

    def advance(self) -> Any:
        self.count += 1
        z = jax.random.normal(jax.random.key(100 + self.count), (16, WIDTH))
        self.state = self._step(self.state, z, *SCHEDULES[self.schedule](self.count))
        return self.state


def assert_exact(loop: Loop, kinds: str) -> None:
    assert loop.check(mesh_of((1, 1))) == kinds
    loop.verify(mesh_of((4, 2)))


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize("shape", [(4, 2), (1, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_of_a_gan_is_a_delta_and_restores_exactly(tmp_path, name, shape):
    """And what an update computes is replayed, not stored."""
    with Loop(tmp_path, Gan(mesh_of(shape), name)) as loop:
        loop.save(6)
    assert support.kinds_of(tmp_path) == "BDDDDD"
    loop.verify(mesh_of((1, 1)))
    loop.verify(mesh_of((4, 2)))
    for step in range(2, 7):
        details = inspection.describe_step(tmp_path, step)
        assert details.problem is None
        sources = {leaf.path: leaf.source for leaf in details.leaves}
        done = [SCHEDULES[name](each) for each in range(2, step + 1)]
        for model, is_updated in zip(("gen", "disc"), zip(*done, strict=True), strict=True):
            expected = "replayed" if any(is_updated) else "stored"
            assert sources[f"{model}/params/first"] == expected


@pytest.mark.slow
def test_two_updates_of_one_model_between_two_saves_make_a_base(tmp_path):
    """And a restored run goes on with deltas, whichever order its recorders are given in."""
    gan = Gan(mesh_of((4, 2)), "both")
    with Loop(tmp_path, gan) as loop:
        loop.save(2)
        loop.train()  # not saved
        loop.save(2)
        gan.schedule, gan.recorder = "alternating", gan.chains[::-1]
        loop.reopen()
        loop.save(2)
    assert_exact(loop, "BRBRRR")


@pytest.mark.slow
def test_recorded_steps_of_a_gan_restore(tmp_path):
    with Loop(tmp_path, Gan(mesh_of((1, 1)), "alternating")) as loop:
        loop.save(4)
        assert "r" in loop.keep(5)
        loop.save()
    loop.check()


TWINS = {"width": 2 * WIDTH, "optimizers": (optax.adamw(1e-2), optax.adamw(1e-3))}
"""Two models of the same shapes, whose optimizers differ in nothing that is saved."""


def test_twins_ask_for_a_mapping_before_anything_is_written(tmp_path):
    loop = Loop(tmp_path, Gan(mesh_of((1, 1)), "both", **TWINS))
    with loop, pytest.raises(RecorderError, match="2 that fit equally"):
        loop.save()
    assert kinds_of(tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("is_one", [True, False], ids=["one recorder", "a mapping"])
def test_twins_are_told_apart_by_a_mapping_or_share_a_recorder(tmp_path, is_one):
    given = TWINS | ({"optimizers": TWINS["optimizers"][:1]} if is_one else {})
    gan = Gan(mesh_of((1, 1)), "alternating", **given)
    if is_one:
        (gan.recorder,) = gan.recorder
    else:
        gan.recorder = {"gen/opt_state": gan.recorder[0], "disc": gan.chains[1]}
    with Loop(tmp_path, gan) as loop:
        loop.save(4)
    assert_exact(loop, "BRRR")


def test_a_handler_given_a_whole_chain_records_with_the_recorder_in_it(tmp_path):
    run = support.dict_run(mesh_of((1, 1)))
    run.recorder = optax.chain(optax.clip_by_global_norm(1.0), run.recorder)
    with Loop(tmp_path, run) as loop:
        loop.save(3)
    assert loop.check() == "BRR"
