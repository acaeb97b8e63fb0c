"""Save every training step of a JAX program through Orbax, and restore it bit-exact on any mesh.

See README.md for a first use and BUILD.md for the architecture.

Importing this package makes its handler known to Orbax, which finds it by the name that every saved
step holds. The ``adacheck`` command alone starts without JAX and Orbax: a public name imports its
module when it is first used.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; must name what _MODULES names
    from adacheck_jax.adapter.handler import (
        AdaCheckHandler,
        RecoveredStep,
        RestoreArgs,
        RestoreInfo,
        SaveArgs,
        SaveReport,
    )
    from adacheck_jax.adapter.processes import wait_for_processes
    from adacheck_jax.device.replicas import Divergence, ReplicaReport, replica_report
    from adacheck_jax.errors import (
        AdaCheckError,
        FormatError,
        IntegrityError,
        LineageError,
        MismatchError,
        RecorderError,
        ReplayError,
        ReplicaError,
        StepDeletedError,
        StorageError,
    )
    from adacheck_jax.publish.follower import Follower, follow
    from adacheck_jax.publish.publisher import Publisher
    from adacheck_jax.schedule.adaptive import AdaptivePolicy
    from adacheck_jax.store.retention import KeepLineage
    from adacheck_jax.tools.handover.importing import import_checkpoint
    from adacheck_jax.tools.history.what_if import replay
    from adacheck_jax.tools.plan import RedundancyReport, redundancy_report
    from adacheck_jax.tools.restorable import RestorableStep, latest_restorable
    from adacheck_jax.update.recorder import Recorder
    from adacheck_jax.update.recorder_state import RecorderState
    from adacheck_jax.update.separate import SeparateUpdate, separate_update

__version__ = "0.1.0"

__all__ = [
    "AdaCheckError",
    "AdaCheckHandler",
    "AdaptivePolicy",
    "Divergence",
    "Follower",
    "FormatError",
    "IntegrityError",
    "KeepLineage",
    "LineageError",
    "MismatchError",
    "Publisher",
    "Recorder",
    "RecorderError",
    "RecorderState",
    "RecoveredStep",
    "RedundancyReport",
    "ReplayError",
    "ReplicaError",
    "ReplicaReport",
    "RestorableStep",
    "RestoreArgs",
    "RestoreInfo",
    "SaveArgs",
    "SaveReport",
    "SeparateUpdate",
    "StepDeletedError",
    "StorageError",
    "follow",
    "import_checkpoint",
    "latest_restorable",
    "redundancy_report",
    "replay",
    "replica_report",
    "separate_update",
    "wait_for_processes",
]

_MODULES = {
    # The arguments too: importing the handler makes both known to Orbax.
    "AdaCheckHandler": "adapter.handler",
    "RecoveredStep": "adapter.handler",
    "RestoreArgs": "adapter.handler",
    "RestoreInfo": "adapter.handler",
    "SaveArgs": "adapter.handler",
    "SaveReport": "adapter.handler",
    "wait_for_processes": "adapter.processes",
    "Divergence": "device.replicas",
    "ReplicaReport": "device.replicas",
    "replica_report": "device.replicas",
    "Follower": "publish.follower",
    "follow": "publish.follower",
    "Publisher": "publish.publisher",
    "AdaptivePolicy": "schedule.adaptive",
    "KeepLineage": "store.retention",
    "import_checkpoint": "tools.handover.importing",
    "replay": "tools.history.what_if",
    "RestorableStep": "tools.restorable",
    "latest_restorable": "tools.restorable",
    "RedundancyReport": "tools.plan",
    "redundancy_report": "tools.plan",
    "Recorder": "update.recorder",
    "RecorderState": "update.recorder_state",
    "SeparateUpdate": "update.separate",
    "separate_update": "update.separate",
}
"""Module of each public name; of those left out :mod:`~adacheck_jax.errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not sys.argv or Path(sys.argv[0]).stem != "adacheck":
    importlib.import_module(f"{__name__}.adapter.handler")
