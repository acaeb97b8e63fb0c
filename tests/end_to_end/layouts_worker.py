"""One process of several that save steps and restore them into other layouts, and back.

Usage: layouts_worker.py layouts PROCESS PROCESSES PORT ROOT OUT DEVICES; the kinds of
steps and the names of the rules stand beside ROOT, in the files ``kinds`` and ``names``.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests.one_process import own, write  # isort: skip

import jax
import numpy as np

import adacheck_jax as adacheck
from tests import support
from tests.end_to_end import test_layouts as layouts

CHOSEN, NAMES = (
    (Path(own.root).parent / each).read_text().splitlines() for each in ("kinds", "names")
)
mesh = layouts.mesh_of(jax.device_count())

for kind in CHOSEN:
    number, options = layouts.KINDS[kind]
    recorder = layouts.optimizer()
    step = layouts.train_step_of(recorder)
    made = functools.partial(layouts.train_state, recorder, layouts.initial_params())
    abstract = layouts.sharded_abstractly(jax.eval_shape(made), mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state = jax.jit(made, out_shardings=shardings)()
    chosen = options or {"recorder": recorder, **layouts.OF_PARAMS}
    with support.manager_of(Path(own.root) / kind, adacheck.AdaCheckHandler(**chosen)) as manager:
        for count in range(number + 1):
            state = jax.jit(step, out_shardings=shardings, donate_argnums=0)(state)
            manager.save(count, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        for name in NAMES:
            rules, back = layouts.TABLE[name]
            shapes = manager.restore(number, args=adacheck.RestoreArgs(rules=rules))
            target = layouts.sharded_abstractly(shapes, mesh)
            args = adacheck.RestoreArgs(target, rules=rules)
            found = manager.restore(number, args=args)
            write(found, f"{kind}-{name}")
            root = Path(own.root).parent / f"{kind}-{name}"
            with support.manager_of(root, adacheck.AdaCheckHandler(delta="bits")) as other:
                other.save(0, args=adacheck.SaveArgs(found))
                other.wait_until_finished()
                args = adacheck.RestoreArgs(abstract, rules=back)
                again = other.restore(0, args=args)
            for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
                for old_shard, new_shard in zip(
                    old.addressable_shards, new.addressable_shards, strict=True
                ):
                    assert old_shard.index == new_shard.index
                    assert np.array(old_shard.data).tobytes() == np.array(new_shard.data).tobytes()
