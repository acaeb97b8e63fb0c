"""One of several processes that restore from memory, and do not all do alike.

Usage: restores_worker.py train|restore PROCESS PROCESSES PORT ROOT OUT DEVICES

Each process is a host with a directory of its own. ``train`` saves three steps. ``restore`` asks
for another state in process 1 alone, then for the same in all, then for a type that does not have
an integer of process 1, and then restores in process 1 another step than in the others. Writes to
OUT-told the error of each, or where the state was.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tests.one_process import own, write  # isort: skip

import jax
import numpy as np

import adacheck_jax as adacheck
from tests import support

said: list[str] = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("adacheck_jax").addHandler(handler)
run = support.dict_run(support.mesh_of((jax.device_count(), 1)))
places = jax.sharding.NamedSharding(support.mesh_of((jax.device_count(),)), jax.P("data"))
signs = jax.make_array_from_callback((2,), places, lambda index: np.array([3, -5], np.int32)[index])
target = support.abstract({**run.state, "signs": signs})
shadow = adacheck.Shadow(directory=f"{own.out}-memory{own.process}", domain=f"host {own.process}")


def told(call: Any) -> str:
    """The error of a call, or where the state was that it restored."""
    try:
        call()
        assert manager.handler.restored is not None
        return manager.handler.restored.source
    except adacheck.AdaCheckError as error:
        return f"{type(error).__name__}: {error}"


def newest(target: Any) -> None:
    """Restores the newest state."""
    found = manager.restore_newest(target)
    assert found is not None
    write(found[1], "recovered")


with adacheck.checkpoint_manager(own.root, run.recorder, shadow=shadow) as manager:
    if own.mode == "train":
        for step in range(1, 4):
            run.advance()
            state = {**run.state, "signs": signs}
            manager.save(step, args=adacheck.SaveArgs(state))
        write(state, "trained")
    else:
        other = {**target, "more": target["step"]} if own.process == 1 else target
        unsigned = target | {"signs": target["signs"].update(dtype=np.uint8)}
        step, args = 3 - (own.process == 1), adacheck.RestoreArgs(target)
        results = [
            told(lambda: newest(other)),
            told(lambda: newest(target)),
            told(lambda: manager.restore(3, args=adacheck.RestoreArgs(unsigned))),
            told(lambda: manager.restore(step, args=args)),
        ]
        Path(f"{own.out}-told{own.process}").write_text(
            json.dumps({"results": results, "said": said})
        )
