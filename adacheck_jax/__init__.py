"""Save every training step of a JAX program through Orbax, and restore it bit-exact on any mesh.

See README.md for a first use and BUILD.md for the architecture. What fewer programs need is in
:mod:`~adacheck_jax.errors`, :mod:`~adacheck_jax.layout`, :mod:`~adacheck_jax.publish`,
:mod:`~adacheck_jax.tools`, :mod:`~adacheck_jax.update` and :mod:`~adacheck_jax.v1`.

Importing this package makes its handler known to Orbax, which finds it by the name that every saved
step holds. The ``adacheck`` command alone starts without JAX and Orbax: a public name imports its
module when it is first used.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacheck_jax import lazy

if TYPE_CHECKING:  # for type checkers and editors; must name what _names names
    from adacheck_jax import errors as errors
    from adacheck_jax import layout as layout
    from adacheck_jax import publish as publish
    from adacheck_jax import tools as tools
    from adacheck_jax import update as update
    from adacheck_jax import v1 as v1
    from adacheck_jax.adapter.handler import (
        AdaCheckHandler,
        RestoreArgs,
        RestoreInfo,
        SaveArgs,
        SaveReport,
    )
    from adacheck_jax.adapter.manager import AdaCheckManager, checkpoint_manager
    from adacheck_jax.adapter.plug_in import plug_in
    from adacheck_jax.errors import AdaCheckError
    from adacheck_jax.plan.options import Shadow
    from adacheck_jax.processes.run import wait_for_processes
    from adacheck_jax.schedule.adaptive import AdaptivePolicy
    from adacheck_jax.store.retention import KeepLineage
    from adacheck_jax.tools.verification import latest_restorable
    from adacheck_jax.update.recorder import Recorder
    from adacheck_jax.update.separate import separate_update

__version__ = "0.1.0"

__all__ = [
    "AdaCheckError",
    "AdaCheckHandler",
    "AdaCheckManager",
    "AdaptivePolicy",
    "KeepLineage",
    "Recorder",
    "RestoreArgs",
    "RestoreInfo",
    "SaveArgs",
    "SaveReport",
    "Shadow",
    "checkpoint_manager",
    "latest_restorable",
    "plug_in",
    "separate_update",
    "wait_for_processes",
]

_SUBMODULES = ("errors", "layout", "publish", "tools", "update", "v1")
_name, __dir__ = lazy.names_of(
    __name__,
    {
        # The arguments too: importing the handler makes both known to Orbax.
        "adapter.handler": "AdaCheckHandler RestoreArgs RestoreInfo SaveArgs SaveReport",
        "adapter.manager": "AdaCheckManager checkpoint_manager",
        "adapter.plug_in": "plug_in",
        "errors": "AdaCheckError",
        "plan.options": "Shadow",
        "processes.run": "wait_for_processes",
        "schedule.adaptive": "AdaptivePolicy",
        "store.retention": "KeepLineage",
        "tools.verification": "latest_restorable",
        "update.recorder": "Recorder",
        "update.separate": "separate_update",
    },
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        return _name(name)
    except AttributeError as error:
        for module in _SUBMODULES[:-1]:  # all but the one that needs Orbax
            if name in importlib.import_module(f"{__name__}.{module}").__all__:
                raise AttributeError(f"{error}: it is {__name__}.{module}.{name}") from None
        raise


if not sys.argv or Path(sys.argv[0]).stem != "adacheck":
    importlib.import_module(f"{__name__}.adapter.handler")
