"""One of several processes, of which one calls otherwise than the others.

Usage: calls_worker.py HERE.OTHER[.away|.apart|.alone] PROCESS PROCESSES PORT ROOT OUT DEVICES

Two steps are saved and one is recorded. Then process 0 calls HERE and all others OTHER, which are
``save4``, ``record4`` or the like, and all save and record steps behind that. With ``away`` storage
does not take the second step before the manager is closed; with ``apart`` each process keeps its
memory in another way, and with ``alone`` process 0 alone keeps any. Writes the states, and the
errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.one_process import own, write  # isort: skip

import jax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage
from adacheck_jax.processes import service
from adacheck_jax.processes.service import Patience
from tests import support
from tests.faults.test_storage_away import Storage

here, other, *options = own.mode.split(".")
patch = pytest.MonkeyPatch()
# Other programs may use this machine too.
patch.setattr(service, "Patience", lambda: Patience(silence_s=120.0))
outage.PATIENCE_S = 120.0
run = support.dict_run(support.mesh_of((jax.device_count(), 1)))
storage = Storage(patch, "pack", "hang")
errors: list[str] = []


def call(name: str) -> None:
    kind, step = name[:-1], int(name[-1])
    try:
        if kind == "record":
            assert manager.handler.record_step(run.state, step) or errors
        else:
            assert manager.save(step, args=adacheck.SaveArgs(run.state))
    except adacheck.AdaCheckError as error:
        errors.append(f"{name}: {error}")


shadow: adacheck.Shadow | None = adacheck.Shadow()
if "apart" in options:
    shadow = adacheck.Shadow(directory=f"{own.out}-memory{own.process}", copies=own.process)
if "alone" in options and own.process == 0:
    shadow = adacheck.Shadow(directory=f"{own.out}-memory")
try:
    manager = adacheck.checkpoint_manager(own.root, run.recorder, max_to_keep=None, shadow=shadow)
except adacheck.AdaCheckError as error:
    Path(f"{own.out}-errors{own.process}").write_text(f"open: {error}")
    sys.exit()
with manager:
    for name in ("save1", "save2", "record3", ""):
        run.advance()
        write(run.state, f"saved{run.count}")
        if name == "save2" and "away" in options:
            manager.wait_until_finished()
            storage.leave()
            outage.PATIENCE_S = 0.0
        if name:
            call(name)
    assert not errors, errors
    for name in (other if own.process else here, "save6", "record7"):
        call(name)
    storage.come_back()
    outage.PATIENCE_S = 120.0
Path(f"{own.out}-errors{own.process}").write_text("\n".join(errors))
