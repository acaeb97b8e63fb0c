"""One of several processes of which one alone fails: all are told, and go on.

Usage: alone_worker.py WHAT-FAILING[.WHAT-FAILING ...] PROCESS PROCESSES PORT ROOT OUT DEVICES

WHAT is what fails in the process FAILING, or what it does alone: to make the root, or to open it
for other items; in a restore of step 3 what is named below; in a save its arguments, its metrics, a
leaf of its state, or its look at the step before; to wait while two steps are in memory. Writes to
OUT-told the error of each call. What comes after that has to succeed in all.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.one_process import own  # isort: skip

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax import SaveArgs
from adacheck_jax.adapter import reports
from adacheck_jax.adapter.stock import descriptions
from adacheck_jax.errors import IntegrityError
from adacheck_jax.restore import base_reader
from adacheck_jax.restore.deltas.delta_reader import DeltaReader
from adacheck_jax.save.resuming import Resumer
from adacheck_jax.store.steps import lookup
from adacheck_jax.store.steps.lineage import Lineage
from tests import support

modes = [(each, each[:-2], own.process == int(each[-1])) for each in own.mode.split(".")]
is_failing = False  # in what is tried now
is_collective = own.mode.startswith("collective")
optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4) if is_collective else None
run = support.dict_run(support.mesh_of((jax.device_count(), 1)), optimizer)
told: dict[str, str] = {}


class Failing:
    """Has something fail here alone, once it was called some times."""

    def __init__(self, where: Any, name: str, error: Exception, after: int = 0) -> None:
        self._place, self._left, self._error = (where, name), after, error
        self._own = getattr(where, name)

    def __enter__(self) -> None:
        def failing(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise self._error
            return self._own(*args, **options)

        if is_failing:
            setattr(*self._place, failing)

    def __exit__(self, *_: object) -> None:
        setattr(*self._place, self._own)


def tell(name: str, call: Callable[[], Any]) -> Any:
    """Calls, and notes the error."""
    told[name] = ""
    try:
        return call()
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"


def save(name: str, state: Any, args: Any = None, metrics: Any = None) -> None:
    args = args or SaveArgs(state)
    tell(f"{name}: save", lambda: manager.save(run.count, args=args, metrics=metrics))
    tell(f"{name}: wait", manager.wait_until_finished)


def restore(name: str, **options: Any) -> None:
    args = adacheck.RestoreArgs(support.abstract(run.state), **options)
    if (restored := tell(name, lambda: manager.restore(3, args=args))) is not None:
        assert manager.handler.restored is not None
        told[name] = f"step {manager.handler.restored.step}"
        if manager.handler.restored.step == 3:
            for one, other in zip(*map(jax.tree.leaves, (restored, run.state)), strict=True):
                assert np.array_equal(*(x.addressable_data(0) for x in (one, other)))


damaged, refused = IntegrityError("it is damaged here"), PermissionError(13, "not here")
RESTORES = {
    "manifest": (lookup, "resolve", damaged),
    "base": (base_reader, "read", refused),
    "delta": (DeltaReader, "read", damaged, 1),
    "collective": (DeltaReader, "read", damaged, 1),
    "once": (descriptions, "damaged_descriptions", damaged),
    "bits": (reports, "info_of", damaged),
    "followed": (Resumer, "follow", MemoryError("too little here")),
    "skipped": (DeltaReader, "read", damaged, 1),
}


def save_alone(mode: str, what: str) -> None:
    """Saves two steps; the first is refused in one process, or given metrics by it alone."""
    run.advance()
    is_kept = what == "parent" and manager.handler.record_step(run.state, run.count)
    told[f"{mode}: recorded"] = str(is_kept)
    if is_kept:
        run.advance()
    jax.block_until_ready(run.state)
    more = {"more": object()} if is_failing and what == "leaf" else {}
    args = ocp.args.StandardSave(run.state) if is_failing and what == "args" else None
    with Failing(Lineage, "exists", refused, after=0 if what == "parent" else 1000):
        metrics = {"loss": 1.0} if is_failing and what == "metrics" else None
        save(mode, run.state | more, args, metrics)
    run.advance()
    save(f"after {mode}", run.state)


def wait_alone(mode: str) -> None:
    """Waits in one process where the others save, with two steps in memory."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most[1]))
    for _ in range(2):  # the first one fails in the background, and both are kept in memory
        run.advance()
        tell(f"save {run.count}", lambda: manager.save(run.count, args=SaveArgs(run.state)))
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    run.advance()
    if is_failing:
        tell(mode, manager.wait_until_finished)
    else:
        tell(mode, lambda: manager.save(run.count, args=SaveArgs(run.state)))


def open_alone(mode: str, what: str) -> None:
    """Opens another root, which one process cannot make, or opens for other items."""
    root = f"{own.root}-{what}"
    items = {"more": ocp.JsonCheckpointHandler()} if is_failing and what == "options" else None
    with Failing(type(epath.Path(root)), "mkdir", refused, after=0 if what == "root" else 1000):
        tell(mode, lambda: adacheck.checkpoint_manager(root, run.recorder, items=items))


for mode, what, fails in modes:
    is_failing = fails
    if what in ("root", "options"):
        open_alone(mode, what)
with adacheck.checkpoint_manager(own.root, run.recorder, max_to_keep=None) as manager:
    for _ in range(3):
        run.advance()
        save(f"{run.count}", run.state)
    for mode, what, fails in modes:
        is_failing = fails
        if what in RESTORES:
            once = {"read_once": True} if what == "once" else {}
            with Failing(*RESTORES[what]):
                restore(mode, skip_damaged=what == "skipped", **once)
            restore(f"again {mode}", **once)
        elif what == "waits":
            wait_alone(mode)
        elif what not in ("root", "options"):
            save_alone(mode, what)
Path(f"{own.out}-told{own.process}").write_text(json.dumps(told))
