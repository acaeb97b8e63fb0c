"""Several updates in one compiled call, as reinforcement learning has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import adacheck_jax as adacheck
from tests import support
from tests.save.loop import kinds

UPDATES, EPOCHS = 4, 3


def test_states_that_a_scan_returns_are_recorded_one_by_one(tmp_path):
    run = support.dict_run(support.mesh_of((4, 2)))
    data = jax.tree.map(lambda *each: jnp.stack(each), *map(support.batch, range(UPDATES)))

    @jax.jit
    def updates(state, data):
        return jax.lax.scan(lambda s, each: (run.train_step(s, each),) * 2, state, data)[1]

    saved = {}
    with (
        adacheck.checkpoint_manager(
            tmp_path / "records", run.recorder, max_to_keep=None
        ) as records,
        adacheck.checkpoint_manager(tmp_path / "bits", delta="bits", max_to_keep=None) as bits,
    ):
        for epoch in range(EPOCHS):
            states = updates(run.state, data)
            for update in range(UPDATES):
                step = UPDATES * epoch + update
                run.state = jax.tree.map(lambda leaf, at=update: leaf[at], states)
                saved[step] = support.host_copy(run.state)
                is_last = update == UPDATES - 1
                if is_last or not records.handler.record_step(run.state, step):
                    records.save(step, args=adacheck.SaveArgs(run.state), force=True)
                if is_last:
                    bits.save(step, args=adacheck.SaveArgs(run.state))
        records.wait_until_finished()
        bits.wait_until_finished()
        for mesh in (support.mesh_of((4, 2)), support.mesh_of((2, 2))):
            wanted = adacheck.RestoreArgs(support.abstract(run.state, mesh))
            for step, expected in saved.items():
                support.assert_same_bits(records.restore(step, args=wanted), expected)
    assert kinds(tmp_path / "records")[-2:] == ["R", "R"]
    assert kinds(tmp_path / "bits") == ["B", "D", "D"]
