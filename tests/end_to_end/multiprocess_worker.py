"""One process of a multi-process run: trains and saves, or restores and writes what it got.

Usage: multiprocess_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is save, resume, restore or restore-once; or evaluate, which restores each step that it saved;
or record, which records steps and saves the others, and restore-recorded; or bits, which saves
bit-pattern differences; or projected, which
saves a run that changes params after the update; or no-scalars, which saves one without a scalar;
or schedule, which saves by a schedule for which each process measures other costs.
or edited, in which an element is changed by hand before the fourth step is saved;
or derived, which keeps an average of its params and a target network, and derived-edited, in which
the average is set by hand before the third step;
or feedback, which keeps the residual of error feedback, saved with bases alone, and records step 3;
or bases, in which every fourth delta becomes a base in the background, and each step waits for it;
or bases-lost, in which one process cannot write its part of the first of them;
or bases-refused, in which one process was told to make none;
or hyperparams, in which arrays are computed from a learning rate that is changed by hand;
or edited-small and edited-small-sample, in which single elements of a vector that all processes
have are changed by hand while the state is there, before some steps are saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.one_process import own, write  # isort: skip

import logging

import jax
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

import adacheck_jax as adacheck
from adacheck_jax.schedule.stopwatch import Stopwatch
from adacheck_jax.schedule.waste import Schedule
from tests import support

mode = own.mode
STEPS = {"schedule": 12, "bases": 12, "derived": 4, "feedback": 6}.get(mode.partition("-")[0], 3)
mesh = support.mesh_of((jax.device_count() // 2, 2))
max_deltas: Any = "auto"
if mode == "schedule":
    from adacheck_jax.schedule import line
    from tests.save import test_schedule as schedules

    line.BEGINNING = Schedule(base_every=1, save_every=1)
    costs = schedules.FIVE | ({"replay_s": 2.5, "open_s": 0.0} if own.process else {})
    measured = tuple((name, seconds, 1) for name, seconds in costs.items())
    Stopwatch.take = lambda _: measured
    max_deltas = adacheck.AdaptivePolicy(**schedules.RARELY)
    chosen = logging.FileHandler(f"{own.out}-chosen{own.process}")
    chosen.addFilter(lambda record: record.getMessage().startswith("schedule: "))
    logging.getLogger("adacheck_jax").addHandler(chosen)
    logging.getLogger("adacheck_jax").setLevel(logging.INFO)
if mode.startswith("bases"):
    from adacheck_jax.schedule import line

    line.BEGINNING = Schedule(base_every=4, save_every=1)
    max_deltas = adacheck.AdaptivePolicy(most_deltas=4)
if mode == "bases-lost" and own.process == 1:
    from adacheck_jax.store.compaction import new_base

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    new_base._write_part = refused
if mode == "no-scalars":  # then most processes own no scalar of the update at all

    def no_scalar() -> dict[str, Any]:
        params = initial_params()
        del params["scale"]
        return params

    def forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
        hidden = jax.numpy.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
        return hidden @ params["out"]["kernel"]

    initial_params, support.initial_params, support.forward = (
        support.initial_params,
        no_scalar,
        forward,
    )
run = support.dict_run(
    mesh, optax.inject_hyperparams(optax.adamw)(1e-2) if mode == "hyperparams" else None
)
if mode.startswith("derived"):
    from tests.end_to_end import test_derived as derived

    functions = {"ema": derived.average, "target": derived.hard_copy}
    run = derived.dict_program(mesh, functions).run()
keep, options = None, {}
if "://" in own.root:  # an object store
    keep = adacheck.KeepLineage(LatestN(10))
    in_place = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    options = {"preservation_policy": keep, "atomicity_options": in_place}
makes_bases = mode != "schedule" and not (mode == "bases-refused" and own.process == 1)
handler = adacheck.AdaCheckHandler(
    run.recorder,
    delta="bits" if mode == "bits" else "auto",
    keep_lineage=keep,
    max_deltas=max_deltas,
    shadow=None if mode.endswith("-sample") else adacheck.Shadow(background_bases=makes_bases),
)
if mode == "feedback":
    from tests.end_to_end.test_ephemeral_leaves import run_of

    run, handler = run_of(mesh, max_deltas=4)
if mode == "projected":
    train_step = run.train_step

    def projected(state: Any, data: Any) -> Any:
        state = train_step(state, data)
        kernel = jax.numpy.clip(state["params"]["in"]["kernel"], -0.1, 0.1)
        state["params"]["in"]["kernel"] = kernel
        return state

    run.train_step = projected
with support.manager_of(own.root, handler, **options) as manager:
    if mode in ("restore", "restore-once"):
        for step in manager.all_steps():
            once = mode == "restore-once"
            target = adacheck.RestoreArgs(support.abstract(run.state), read_once=once or None)
            write(manager.restore(step, args=target), f"restored{step}")
    if mode == "restore-recorded":
        for saved, step in ((6, 4), (9, 8)):
            target = adacheck.RestoreArgs(support.abstract(run.state), step=step)
            write(manager.restore(saved, args=target), f"restored{step}")
    if mode == "record":
        while run.count < 9:
            run.advance()
            write(run.state, f"saved{run.count}")
            if not handler.record_step(run.state, run.count) or run.count in (6, 9):
                manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
    if mode == "resume":
        target = adacheck.RestoreArgs(support.abstract(run.state))
        newest = manager.latest_step()
        run.state, run.count = manager.restore(newest, args=target), newest
    if mode.startswith("edited"):
        is_small = mode != "edited"
        name, value = ("bias", 0.5) if is_small else ("kernel", 1e-3)
        edits: dict[int, Any] = {4: 0, 6: 2, 8: 0, 9: 2} if is_small else {4: (5, 17)}
        edit_at = jax.jit(lambda x, i: x.at[i].add(value), donate_argnums=0, static_argnums=1)
        for _ in range(10 if is_small else 6):
            run.advance()
            if run.count in edits:
                layer = run.state["params"]["in"]
                layer[name] = edit_at(layer[name], edits[run.count])
            write(run.state, f"saved{run.count}")
            if is_small:
                jax.block_until_ready(run.state)
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            try:
                manager.wait_until_finished()
            except adacheck.AdaCheckError as error:
                Path(f"{own.out}-refused{own.process}").write_text(f"{run.count}: {error}")
    if not mode.startswith(("restore", "record", "edited")):
        for _ in range(STEPS):
            if mode == "hyperparams" and run.count == 1:
                inject = run.state["opt_state"][1].adacheck_inner
                rate = inject.hyperparams["learning_rate"]
                inject.hyperparams["learning_rate"] = jax.device_put(0.5 * rate, rate.sharding)
            run.advance()
            if mode == "derived-edited" and run.count == 3:
                run.state["ema"] = jax.tree.map(lambda x: x + 1, run.state["ema"])
            write(run.state, f"saved{run.count}")
            if mode == "feedback" and run.count == 3 and handler.record_step(run.state, 3):
                continue
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
            if mode.startswith(("bases", "feedback")):
                manager.wait_until_finished()
            if mode == "evaluate":
                target = adacheck.RestoreArgs(support.abstract(run.state))
                manager.restore(run.count, args=target)
            if mode.startswith("bases"):
                (saver,) = handler.run.lines._savers.values()
                pending = saver._bases._pending
                if pending is not None and pending.written is not None:
                    pending.written.exception()
        manager.wait_until_finished()
