"""Several updates in one compiled call, as reinforcement learning has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests import support
from tests.save.loop import Loop

UPDATES, EPOCHS = 4, 3


def test_states_that_a_scan_returns_are_recorded_one_by_one(tmp_path):
    run = support.dict_run(support.mesh_of((4, 2)))
    data = jax.tree.map(lambda *each: jnp.stack(each), *map(support.batch, range(UPDATES)))

    @jax.jit
    def updates(state, data):
        return jax.lax.scan(lambda s, each: (run.train_step(s, each),) * 2, state, data)[1]

    with Loop(tmp_path, run) as loop:
        for _ in range(EPOCHS):
            states = updates(run.state, data)
            for update in range(UPDATES):
                loop.number += 1
                run.state = jax.tree.map(lambda leaf, at=update: leaf[at], states)
                if update == UPDATES - 1 or not loop.record():
                    loop.put()
    assert loop.check().endswith("RR")
    loop.verify(support.mesh_of((2, 2)))
