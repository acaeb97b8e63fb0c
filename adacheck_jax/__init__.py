"""Save every training step of a JAX program through Orbax, and restore it bit-exact on any mesh.

See README.md for a first use and BUILD.md for the architecture.
"""

from adacheck_jax.adapter.handler import AdaCheckHandler, RestoreArgs, RestoreInfo, SaveArgs
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
    StorageError,
)
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.tools.plan import RedundancyReport, redundancy_report
from adacheck_jax.tools.restorable import RestorableStep, latest_restorable
from adacheck_jax.update.recorder import Recorder
from adacheck_jax.update.recorder_state import RecorderState
from adacheck_jax.update.separate import SeparateUpdate, separate_update

__all__ = [
    "AdaCheckError",
    "AdaCheckHandler",
    "Divergence",
    "FormatError",
    "IntegrityError",
    "KeepLineage",
    "LineageError",
    "MismatchError",
    "Recorder",
    "RecorderError",
    "RecorderState",
    "RedundancyReport",
    "ReplayError",
    "ReplicaError",
    "ReplicaReport",
    "RestorableStep",
    "RestoreArgs",
    "RestoreInfo",
    "SaveArgs",
    "SeparateUpdate",
    "StorageError",
    "latest_restorable",
    "redundancy_report",
    "replica_report",
    "separate_update",
]
